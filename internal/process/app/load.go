package app

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caarlos0/env/v10"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Unknown is a variable in the environment that has the prefix BULKACTION_ but that neither a
// section nor the command line reads: most likely a spelling mistake.
type Unknown struct {
	Name       string
	DidYouMean string // the variable with the most similar name; "" if none is similar
}

// Load reads and checks the configuration in environ, a list of NAME=value; for a repeated name the
// last value counts. An empty value means the default. The error joins one error for each mistake,
// with the variable, mostly its value (unless it is a secret), and the rule that it breaks. The
// value of a secret may come from the file that NAME_FILE names. Unknown variables are not errors;
// the caller should log them.
func Load(environ []string) (Config, []Unknown, error) {
	set := variablesIn(environ)
	var c Config
	variables := c.variables()
	bad, mistakes := parse(variables, set)
	mistakes = append(mistakes, c.relations(variables, bad)...)
	mistakes = append(mistakes, c.Redis.mistakes(bad)...)
	mistakes = append(mistakes, c.processors(bad)...)
	return c, unknown(set, variables), errors.Join(mistakes...)
}

// LoadRedis reads and checks only the section Redis, for commands that use Redis and nothing else.
// url is used instead of the URL in environ, unless it is "".
func LoadRedis(environ []string, url string) (RedisConfig, error) {
	if url != "" {
		environ = WithRedisURL(environ, url)
	}
	var c Config
	variables := slices.DeleteFunc(c.variables(), func(v Variable) bool { return v.Section != redisSection })
	bad, mistakes := parse(variables, variablesIn(environ))
	return c.Redis, errors.Join(append(mistakes, c.Redis.mistakes(bad)...)...)
}

// RedisAccess returns the names of the variables, except the URL, for access to Redis: user name,
// password and its file, and TLS.
func RedisAccess() []string {
	var names []string
	for _, v := range Variables() {
		if strings.HasPrefix(v.Name, envPrefix+"REDIS_TLS_") || v.Name == envPrefix+"REDIS_USERNAME" ||
			strings.HasPrefix(v.Name, envPrefix+"REDIS_PASSWORD") {
			names = append(names, v.Name)
		}
	}
	return names
}

// WithoutRedisAccess returns environ with the variables of RedisAccess set to be empty.
func WithoutRedisAccess(environ []string) []string {
	environ = slices.Clone(environ)
	for _, name := range RedisAccess() {
		environ = append(environ, name+"=")
	}
	return environ
}

// WithRedisURL returns environ with another URL of Redis.
func WithRedisURL(environ []string, url string) []string {
	const name = envPrefix + "REDIS_URL"
	return slices.Concat(environ, []string{name + "=" + url, name + "_FILE="})
}

// redisSection is the name of the section of [RedisConfig].
const redisSection = "Redis"

// variablesIn returns the variables in environ that have the prefix of this program.
func variablesIn(environ []string) map[string]string {
	set := map[string]string{}
	for name, value := range env.ToMap(environ) {
		if strings.HasPrefix(name, envPrefix) {
			set[name] = value
		}
	}
	return set
}

// parse parses the values of the variables into the fields of Config. It returns the names of the
// variables with a wrong value, and their errors.
func parse(variables []Variable, set map[string]string) (bad map[string]bool, mistakes []error) {
	bad = map[string]bool{}
	for _, v := range variables {
		err := v.readFile(set)
		if err == nil {
			err = v.parse(set)
		}
		if err != nil {
			mistakes = append(mistakes, err)
			bad[v.Name] = true
		}
	}
	return bad, mistakes
}

// mistakes returns an error for each contradiction between the settings of Redis, and for each of
// their files that can't be used. If the URL or the password is wrong by itself, it checks nothing.
func (c RedisConfig) mistakes(bad map[string]bool) []error {
	const prefix = envPrefix + "REDIS_"
	if bad[prefix+"URL"] || bad[prefix+"PASSWORD"] {
		return nil
	}
	o, err := redisx.ParseURL(c.URL)
	if err != nil {
		return []error{err} // the rule of the variable has accepted it
	}
	var mistakes []error
	for _, err := range split(c.Connection().Check(o)) {
		mistakes = append(mistakes, fmt.Errorf("%s%w", prefix, err))
	}
	return mistakes
}

// relations returns an error for each violated rule between two variables that are valid by
// themselves, and for a rate limit window that is not whole milliseconds.
func (c *Config) relations(variables []Variable, bad map[string]bool) []error {
	var mistakes []error
	check := func(holds bool, name, other, problem string) {
		name, other = envPrefix+name, envPrefix+other
		if holds || bad[name] || bad[other] {
			return
		}
		v := variables[slices.IndexFunc(variables, func(v Variable) bool { return v.Name == name })]
		mistakes = append(mistakes, v.mistake(v.show(), strings.ReplaceAll(problem, "OTHER", other)))
	}
	check(c.Redis.PoolMinIdle <= c.Redis.PoolMaxActive, "REDIS_POOL_MIN_IDLE",
		"REDIS_POOL_MAX_ACTIVE", "must not be above OTHER")
	check(c.Backpressure.RateLimitWindow%time.Millisecond == 0,
		"BACKPRESSURE_RATE_LIMIT_WINDOW", "BACKPRESSURE_LIMITER", "must be whole milliseconds")
	check(c.Backpressure.DefaultBackoff <= c.Backpressure.MaxBackoff,
		"BACKPRESSURE_DEFAULT_BACKOFF", "BACKPRESSURE_MAX_BACKOFF", "must not be above OTHER")
	check(c.Congestion.BaseBackoff <= c.Congestion.MaxBackoff,
		"CONGESTION_BASE_BACKOFF", "CONGESTION_MAX_BACKOFF", "must not be above OTHER")
	c.authentication(check)
	check((c.Ingest.TLSCertFile == "") == (c.Ingest.TLSKeyFile == ""), "API_TLS_CERT_FILE", "API_TLS_KEY_FILE",
		"must be set together with OTHER, or not at all")
	check(c.Ingest.TLSClientCAFile == "" || c.Ingest.TLSCertFile != "", "API_TLS_CLIENT_CA_FILE", "API_TLS_CERT_FILE",
		"needs OTHER")
	check(c.streamsHavePrefix(), "INGEST_STREAMS", "KEY_PREFIX",
		"must have streams that begin with the value of OTHER")
	c.Broker.relations(check)
	return mistakes
}

// processors calls the method Validate of each processor's section, and returns the errors. It
// skips a section with an invalid variable. A section's error begins with the variable's name
// inside the section; processors adds the prefix.
func (c *Config) processors(bad map[string]bool) []error {
	var mistakes []error
	sections := reflect.ValueOf(c).Elem()
	for i := range sections.NumField() {
		section, ok := sections.Field(i).Interface().(interface{ Validate() error })
		prefix := envPrefix + sections.Type().Field(i).Tag.Get("envPrefix")
		inSection := func(name string) bool { return strings.HasPrefix(name, prefix) }
		if !ok || slices.ContainsFunc(slices.Collect(maps.Keys(bad)), inSection) {
			continue
		}
		for _, err := range split(section.Validate()) {
			mistakes = append(mistakes, fmt.Errorf("%s%w", prefix, err))
		}
	}
	return mistakes
}

// split returns the errors that errors.Join has joined.
func split(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// String returns every variable with its value; secrets are redacted.
func (c Config) String() string {
	var b strings.Builder
	for _, v := range c.variables() {
		fmt.Fprintf(&b, "%s=%s\n", v.Name, v.show())
	}
	return b.String()
}

// GoString returns String, so that no format verb shows a secret.
func (c Config) GoString() string { return c.String() }

var defaults = sync.OnceValue(func() map[string]string {
	c, _, _ := Load(nil)
	values := map[string]string{}
	for _, v := range c.variables() {
		values[v.Name] = v.show()
	}
	return values
})

// LogValue returns, for the log, the variables whose values differ from their defaults; secrets are
// redacted.
func (c Config) LogValue() slog.Value {
	var attrs []slog.Attr
	for _, v := range c.variables() {
		if value := v.show(); value != defaults()[v.Name] {
			attrs = append(attrs, slog.String(strings.ToLower(strings.TrimPrefix(v.Name, envPrefix)), value))
		}
	}
	return slog.GroupValue(attrs...)
}
