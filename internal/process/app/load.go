package app

import (
	"encoding"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
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
// the caller should log them. processors becomes [Config.Processors].
func Load(environ []string, processors any) (Config, []Unknown, error) {
	set := variablesIn(environ)
	c := Config{Processors: processors}
	variables := c.variables()
	bad, mistakes := parse(variables, set)
	mistakes = append(mistakes, c.relations(variables, bad)...)
	mistakes = append(mistakes, c.Redis.mistakes(bad)...)
	mistakes = append(mistakes, c.validate(bad)...)
	return c, unknown(set), errors.Join(mistakes...)
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
	for _, v := range Variables(nil) {
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

// validate calls the method Validate of each processor's section, and returns the errors. It skips a
// section with an invalid variable. A section's error begins with the variable's name inside the
// section; validate adds the prefix.
func (c *Config) validate(bad map[string]bool) []error {
	var mistakes []error
	for _, s := range c.sections() {
		section, ok := s.value.Interface().(interface{ Validate() error })
		inSection := func(name string) bool { return strings.HasPrefix(name, s.prefix) }
		if !ok || slices.ContainsFunc(slices.Collect(maps.Keys(bad)), inSection) {
			continue
		}
		for _, err := range split(section.Validate()) {
			mistakes = append(mistakes, fmt.Errorf("%s%w", s.prefix, err))
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

// LogValue returns, for the log, the variables whose values differ from their defaults; secrets are
// redacted.
func (c Config) LogValue() slog.Value {
	var attrs []slog.Attr
	for _, v := range c.variables() {
		unset := v
		unset.value = reflect.New(v.field.Type).Elem()
		_ = unset.parse(map[string]string{}) // gives it its default, which is valid; nil would be os.Environ
		if value := v.show(); value != unset.show() {
			attrs = append(attrs, slog.String(strings.ToLower(strings.TrimPrefix(v.Name, envPrefix)), value))
		}
	}
	return slog.GroupValue(attrs...)
}

const envPrefix = "BULKACTION_"

// Variable describes one environment variable, as docs/configuration.md shows it.
type Variable struct {
	Section string
	Name    string // with the prefix BULKACTION_
	Default string // "" for none
	Rule    string // the rule for valid values, in words
	File    string // the variable that may name a file with the value instead; "" for none

	Owner reflect.Type // the struct that has the field
	Field string       // the field's name there; its comment describes the variable

	prefix string
	field  reflect.StructField
	value  reflect.Value
}

// Variables returns every variable, in the order of docs/configuration.md: those of the sections of
// Config, and of processors (see [Config.Processors]).
func Variables(processors any) []Variable { return (&Config{Processors: processors}).variables() }

type section struct {
	name, prefix string
	value        reflect.Value
}

func (c *Config) sections() []section {
	var all []section
	var add func(reflect.Value)
	add = func(parts reflect.Value) {
		for field, value := range parts.Fields() {
			switch {
			case value.Kind() != reflect.Interface:
				all = append(all, section{field.Tag.Get("section"), envPrefix + field.Tag.Get("envPrefix"), value})
			case !value.IsNil(): // Processors
				add(value.Elem().Elem())
			}
		}
	}
	add(reflect.ValueOf(c).Elem())
	return all
}

// variables returns every variable, bound to its field in c.
func (c *Config) variables() []Variable {
	var all []Variable
	for _, s := range c.sections() {
		all = append(all, Variable{Section: s.name, prefix: s.prefix}.fields(s.value)...)
	}
	for i, v := range all {
		file := v.Name + "_FILE"
		own := slices.ContainsFunc(all, func(v Variable) bool { return v.Name == file })
		if v.isSecret() && !own {
			all[i].File = file
		}
	}
	return all
}

// isSecret reports whether the variable's value is or contains a secret, by its tag or its name.
func (v Variable) isSecret() bool {
	return v.field.Tag.Get("secret") != "" || secretNames.MatchString(v.Name)
}

// maxSecretFile is the largest size of a file with a secret, in bytes.
const maxSecretFile = 64 << 10

// readFile handles the variable NAME_FILE, which only a secret has: if it names a file, readFile
// sets NAME in environ to the file's content without the line breaks at the end. It is an error if
// NAME is set, too, or if nothing remains.
func (v Variable) readFile(environ map[string]string) error {
	name := environ[v.File]
	if v.File == "" || name == "" {
		return nil
	}
	if environ[v.Name] != "" {
		return fmt.Errorf("%s: set either it or %s, not both", v.Name, v.File)
	}
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("%s: %w", v.File, err)
	}
	defer func() { _ = file.Close() }() // it was only read
	content, err := io.ReadAll(io.LimitReader(file, maxSecretFile+1))
	if err != nil {
		return fmt.Errorf("%s: %w", v.File, err)
	}
	value := strings.TrimRight(string(content), "\r\n")
	switch {
	case value == "":
		return fmt.Errorf("%s: %s is empty", v.File, name)
	case len(content) > maxSecretFile:
		return fmt.Errorf("%s: %s has more than %d bytes", v.File, name, maxSecretFile)
	}
	environ[v.Name] = value
	return nil
}

// fields returns the variables of a struct and of its embedded structs, with the section and the
// prefix of v.
func (v Variable) fields(owner reflect.Value) []Variable {
	var all []Variable
	for f, value := range owner.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("env"), ",")
		switch {
		case name != "":
			all = append(all, Variable{
				Section: v.Section,
				Name:    v.prefix + name,
				Default: f.Tag.Get("envDefault"),
				Rule:    ruleOf(f).text,
				Owner:   owner.Type(),
				Field:   f.Name,
				prefix:  v.prefix,
				field:   f,
				value:   value,
			})
		case f.Anonymous:
			all = append(all, v.fields(value)...)
		}
	}
	return all
}

// parse sets the field from the environment. It returns an error if the value breaks the variable's
// rule. The errors of the env library name only the field, and field names are not unique; so each
// variable is parsed as a struct of its own.
func (v Variable) parse(environ map[string]string) error {
	alone := reflect.New(reflect.StructOf([]reflect.StructField{v.field}))
	if err := env.ParseWithOptions(alone.Interface(), env.Options{Environment: environ, Prefix: v.prefix}); err != nil {
		problem := "must be " + v.Rule
		if _, err := strconv.ParseFloat(environ[v.Name], 64); err == nil && v.field.Type == durationType {
			problem += ": give the unit, such as " + environ[v.Name] + "s"
		}
		return v.mistake(environ[v.Name], problem)
	}
	v.value.Set(alone.Elem().Field(0))
	problem := "must be " + v.Rule
	if twice := v.repeated(environ[v.Name]); twice != "" {
		return v.mistake(environ[v.Name], problem+": "+twice+" is there twice")
	}
	if ruleOf(v.field).holds(v.value) {
		return nil
	}
	if v.field.Tag.Get("check") == "redis" {
		problem += ": " + redisx.URLMistake(v.value.String())
	}
	return v.mistake(environ[v.Name], problem)
}

// repeated returns the first name that is twice in the value of a list or map of names; "" if none is
// or the variable has no such value. The parsed value does not show it: the last one has won.
func (v Variable) repeated(value string) string {
	if !slices.Contains([]string{"ids", "timeouts", "serve"}, v.field.Tag.Get("check")) {
		return ""
	}
	seen := map[string]bool{}
	for item := range strings.SplitSeq(value, ",") {
		name, _, _ := strings.Cut(item, "=")
		if seen[name] {
			return name
		}
		seen[name] = true
	}
	return ""
}

func (v Variable) mistake(value, problem string) error {
	return fmt.Errorf("%s=%q: %s", v.Name, v.redact(value), problem)
}

// secretNames matches variables whose values are secrets, by the ends of their names.
var secretNames = regexp.MustCompile(`(PASSWORD|SECRET|TOKEN|API_KEY|HEADERS)$`)

const redacted = "[redacted]"

// redact returns the value with its secret parts replaced.
func (v Variable) redact(value string) string {
	switch {
	case value == "" || !v.isSecret():
		return value
	case v.field.Tag.Get("secret") == "url" && !strings.Contains(value, "?"):
		// Redact a URL up to its last @: the password before it may contain an @ itself. If the URL
		// has parameters after ?, redact it whole: they may contain a password, too.
		if at := strings.LastIndexByte(value, '@'); at >= 0 {
			return redacted + value[at:]
		}
		return value
	}
	return redacted
}

// show returns the value as it would be written in the environment; secrets are redacted.
func (v Variable) show() string {
	if timeouts, ok := v.value.Interface().(map[string]time.Duration); ok {
		parts := make([]string, 0, len(timeouts))
		for _, typ := range slices.Sorted(maps.Keys(timeouts)) {
			parts = append(parts, typ+"="+timeouts[typ].String())
		}
		return strings.Join(parts, ",")
	}
	if text, ok := v.value.Interface().(encoding.TextMarshaler); ok {
		b, _ := text.MarshalText() // never fails for the types of variables
		return v.redact(string(b))
	}
	if v.value.Kind() != reflect.Slice {
		return v.redact(fmt.Sprint(v.value.Interface()))
	}
	parts := make([]string, v.value.Len())
	for i := range parts {
		parts[i] = fmt.Sprint(v.value.Index(i).Interface())
	}
	return v.redact(strings.Join(parts, ","))
}

// others are variables with the prefix BULKACTION_ that no section reads: the command line and the
// tests do. They are not reported as unknown.
var others = []string{
	"BULKACTION_API", "BULKACTION_API_KEY", "BULKACTION_API_KEY_FILE",
	"BULKACTION_CA_FILE", "BULKACTION_CERT_FILE", "BULKACTION_KEY_FILE",
	"BULKACTION_REDIS_SERVER", "BULKACTION_TEST_BIN",
}

// known returns the names of all variables in the help: also of those whose sections this program
// does not have.
var known = sync.OnceValue(func() []string {
	return regexp.MustCompile(envPrefix+`[A-Z0-9_]+`).FindAllString(variablesHelp, -1)
})

// unknown returns the variables that are set but that no section of any process reads, without
// others, ordered by name.
func unknown(set map[string]string) []Unknown {
	var found []Unknown
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if !slices.Contains(known(), name) && !slices.Contains(others, name) {
			found = append(found, Unknown{Name: name, DidYouMean: Nearest(name, known())})
		}
	}
	return found
}

// Nearest returns the known name that is most similar to an unknown name. Two names are similar if
// they differ in at most a quarter of the letters and one, or if the unknown name only lacks the
// first words, such as the prefix of a section. Nearest returns "" if no known name is similar.
func Nearest(name string, names []string) string {
	own := strings.TrimPrefix(name, envPrefix)
	best, least := "", len(own)/4+1
	for _, candidate := range names {
		other := strings.TrimPrefix(candidate, envPrefix)
		d := distance(own, other)
		if own != "" && strings.HasSuffix(other, "_"+own) {
			d = 1
		}
		if d < least || d == least && best == "" {
			best, least = candidate, d
		}
	}
	return best
}

// distance returns the Levenshtein distance: the smallest number of letters to insert, delete or
// replace to change a into b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
