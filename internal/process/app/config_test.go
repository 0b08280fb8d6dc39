package app

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/httpcall"
	"github.com/bulkaction/bulkaction/processor/push"
)

// TestDefaults: without any variable, Load returns these defaults, which are a contract.
// processors are the sections of the built-in processors, as in package builtin.
type processors struct {
	SMTP email.Config    `section:"Processor SEND_EMAIL" envPrefix:"SMTP_"`
	HTTP httpcall.Config `section:"Processor HTTP" envPrefix:"HTTP_PROCESSOR_"`
	Push push.Config     `section:"Processor PUSH_NOTIFICATION" envPrefix:"PUSH_"`
}

func load(environ []string) (Config, []Unknown, error) { return Load(environ, new(processors)) }

func TestDefaults(t *testing.T) {
	c, unknown, err := load(nil)
	require.NoError(t, err)
	require.Empty(t, unknown)

	require.Equal(t, RedisConfig{
		URL: "redis://127.0.0.1:6379/0", PoolMinIdle: 10, PoolMaxIdle: 20, PoolMaxActive: 50, DialTimeout: 5 * time.Second, CommandTimeout: 3 * time.Second,
		KeyPrefix: "bulk-action:", Partitions: 1,
	}, c.Redis)
	require.Equal(t, FairQueueConfig{Alpha: 10000, Policy: "fair", LaneWeights: []int{6, 3, 1}}, c.FairQueue)
	require.Equal(t, BackpressureConfig{
		GlobalRPS: 10000, Share: "elastic", Limiter: "fixed", RateLimitWindow: time.Second, ReadyQueueMaxSize: 10000,
		DispatchInterval: 100 * time.Millisecond, DispatchBatchSize: 100, DefaultBackoff: time.Second, MaxBackoff: time.Minute,
	}, c.Backpressure)
	require.Equal(t, CongestionConfig{Enabled: true, BaseBackoff: time.Second, MaxBackoff: 2 * time.Minute, StatsRetention: time.Hour}, c.Congestion)
	require.Equal(t, WorkerConfig{
		Count: 10, Timeout: time.Second, JobTimeout: 30 * time.Second, MaxRetryCount: 3, MaxThrottles: 100, MaxDeliveries: 5, Lease: 30 * time.Second,
		ShutdownGracePeriod: 30 * time.Second, FetchInterval: 200 * time.Millisecond, FetchBatchSize: 50,
	}, c.Worker)
	require.Equal(t, IngestConfig{APIAddr: "127.0.0.1:8080", Serve: []string{"api", "ui"}, MaxConnections: 4096, MaxBacklog: 10_000_000, MaxMemoryRatio: 0.9}, c.Ingest)
	require.Equal(t, RetentionConfig{
		Groups: 168 * time.Hour, Results: 168 * time.Hour, MessageIDs: 24 * time.Hour, IdempotencyKeys: 24 * time.Hour,
		DeadLetters: 720 * time.Hour, Events: 168 * time.Hour, Callbacks: 7 * 24 * time.Hour, Activity: 2160 * time.Hour,
	}, c.Retention)
	require.Equal(t, TelemetryConfig{AdminAddr: "127.0.0.1:0", LogLevel: "info", LogFormat: "json"}, c.Telemetry)
	limits := credential.Limits{
		Rate: credential.Rate{Permits: 80, Window: 10 * time.Minute}, Limiter: credential.Sliding,
		Breaker: credential.Breaker{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}, Concurrency: 1,
	}
	processors := c.Processors.(*processors)
	require.Equal(t, "127.0.0.1", processors.SMTP.Host)
	require.Equal(t, httpcall.Config{
		Timeout: 30 * time.Second, MaxResponseBytes: 65536, MaxIdleConnsPerHost: 64,
		BatchSize: 100, BatchWait: 50 * time.Millisecond, Limits: limits,
	}, processors.HTTP)
	require.Equal(t, push.Config{Limits: limits, Timeout: 30 * time.Second}, processors.Push)
	require.Equal(t, limits, processors.SMTP.Limits)
	require.Equal(t, GuardConfig{Wait: 2 * time.Second, MaxWait: time.Minute}, c.Guard)
	require.Equal(t, BrokerConfig{
		Addr: "127.0.0.1:8090", TokenTTL: 5 * time.Minute, TokenLeeway: 10 * time.Second, MaxSession: 15 * time.Minute,
		Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait", MaxWaiting: 1_000_000,
		Retention: 24 * time.Hour, PositionInterval: time.Second, PromoteInterval: time.Second, Heartbeat: 15 * time.Second,
		WriteTimeout: 10 * time.Second, Drain: 10 * time.Second, MaxConnections: 50_000, MaxConnectionsPerIP: 1000,
		EnterRatePerIP: 10, Identity: "cookie", SeatsTimeout: 2 * time.Second,
	}, c.Broker)
}

// TestValuesOfTheDocument: the value 5s of WORKER_TIMEOUT, which is in the requirements document,
// is accepted.
func TestValuesOfTheDocument(t *testing.T) {
	c, _, err := load([]string{"BULKACTION_WORKER_TIMEOUT=5s"})
	require.NoError(t, err)
	require.Equal(t, 5*time.Second, c.Worker.Timeout)
}

func TestEveryVariableIsRead(t *testing.T) {
	samples := map[reflect.Kind]string{reflect.Bool: "true", reflect.Float64: "0.5"}
	names := map[string]bool{}
	for _, v := range Variables(new(processors)) {
		require.False(t, names[v.Name], "%s twice", v.Name)
		names[v.Name] = true
		value := samples[v.field.Type.Kind()]
		if low := v.field.Tag.Get("max"); low != "" {
			value = low
		}
		if value == "" {
			continue
		}
		c, unknown, _ := load([]string{v.Name + "=" + value})
		require.Empty(t, unknown)
		got := bound(&c, v.Name)
		require.Equal(t, number(v.field.Type, strings.NewReplacer("true", "1").Replace(value)), asNumber(got.value), v.Name)
	}
	require.Len(t, names, 160)
	for _, name := range []string{"REDIS_URL", "SMTP_PASSWORD", "HTTP_PROCESSOR_ALLOW_PRIVATE", "PUSH_ACCOUNTS_FILE", "SMTP_ACCOUNTS_FILE", "SMTP_ACCOUNT_RATE", "RETENTION_EVENTS", "WORKER_TYPES"} {
		require.True(t, names[envPrefix+name], name)
	}
}

func bound(c *Config, name string) Variable {
	all := c.variables()
	return all[slices.IndexFunc(all, func(v Variable) bool { return v.Name == name })]
}

func asNumber(v reflect.Value) float64 {
	switch {
	case v.CanInt():
		return float64(v.Int())
	case v.CanFloat():
		return v.Float()
	case v.Bool():
		return 1
	}
	return 0
}

func TestEveryLimitHolds(t *testing.T) {
	refused := func(v Variable, value string) {
		t.Helper()
		_, _, err := load([]string{v.Name + "=" + value})
		require.ErrorContains(t, err, fmt.Sprintf("%s=%q: must be %s", v.Name, value, v.Rule))
	}
	accepted := func(v Variable, value string) {
		t.Helper()
		if _, _, err := load([]string{v.Name + "=" + value}); err != nil {
			require.NotContains(t, err.Error(), "must be "+v.Rule, "%s=%s", v.Name, value) // an error may be about two variables together, but not about this variable's own rule
		}
	}
	for _, v := range Variables(new(processors)) {
		tag := v.field.Tag
		if v.Owner.PkgPath() != reflect.TypeFor[Config]().PkgPath() {
			continue // belongs to a processor's section
		}
		switch kind := v.field.Type.Kind(); {
		case v.field.Type == durationType:
			low, high := number(v.field.Type, tag.Get("min")), number(v.field.Type, tag.Get("max"))
			accepted(v, tag.Get("min"))
			accepted(v, tag.Get("max"))
			refused(v, (time.Duration(low) - 1).String())
			refused(v, (time.Duration(high) + time.Millisecond).String())
			refused(v, "soon")
			refused(v, "10")
		case kind == reflect.Int || kind == reflect.Float64:
			low, high := number(v.field.Type, tag.Get("min")), number(v.field.Type, tag.Get("max"))
			accepted(v, tag.Get("min"))
			accepted(v, tag.Get("max"))
			refused(v, fmt.Sprint(low-1))
			refused(v, fmt.Sprintf("%.0f", high*1.1+1))
			refused(v, "many")
			refused(v, "NaN")
		case kind == reflect.Bool:
			refused(v, "perhaps")
		case tag.Get("oneof") != "":
			for option := range strings.SplitSeq(tag.Get("oneof"), ",") {
				accepted(v, option)
			}
			refused(v, "nonsense")
			refused(v, tag.Get("oneof")+"x")
		default:
			require.NotNil(t, checks[tag.Get("check")].holds, "%s has no limit", v.Name)
		}
	}
}

func TestChecks(t *testing.T) {
	cases := []struct {
		name      string
		good, bad []string
	}{
		{"REDIS_URL",
			[]string{"redis://h:1", "rediss://u:p@h/3", "redis://a:1,b:2", "redis://a:1,redis://b:2", "redis-sentinel://a:1,b:2/main", "rediss-sentinel://a:1/main"},
			[]string{"h:1", "http://h:1", "redis://", "redis://h:1/x", "redis://h:99999", "redis-sentinel://a:1"}},
		{"REDIS_USERNAME", nil, []string{"a b", strings.Repeat("x", 257)}},
		{"REDIS_PASSWORD", []string{"pass word"}, []string{"a\nb", strings.Repeat("x", 4097)}},
		{"REDIS_TLS_SERVER_NAME", nil, []string{"redis:6379", "[::1]", "a b", "-a", strings.Repeat("a", 254)}},
		{"ADMIN_TOKEN", []string{"0123456789abcdef", strings.Repeat("~", 512)}, []string{"0123456789abcde", "0123456789 abcdef", strings.Repeat("x", 513)}},
		{"KEY_PREFIX", []string{"a", "shop:bulk-action:", strings.Repeat("x", 64)}, []string{"a{b", "a}b", "a b", "ü", strings.Repeat("x", 65)}},
		{"API_ADDR", []string{"127.0.0.1:0", "[::1]:80", "localhost:65535"}, []string{"127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:http", "127.0.0.1:-1"}},
		{"ADMIN_ADDR", []string{"127.0.0.1:0", "0.0.0.0:9090", ":9090"}, []string{"9090", "[::1"}},
		{"WORKER_TYPES", []string{"A", "SEND_EMAIL,HTTP", strings.Repeat("x", 128)}, []string{"A, B", "A,,B", ",", "a{b}", strings.Repeat("x", 129), "A,B,A"}},
		{"JOB_TIMEOUTS", []string{"SEND_EMAIL=10s", "A=1ms,B=24h"}, []string{"A", "A=", "=1s", "A=0s", "A=25h", "a b=1s", "A=1s, B=1s", "A=1s;B=1s", "HTTP=5s,HTTP=9s", "A=1s,B=1s,A=1s"}},
		{"API_SERVE", []string{"ui,api"}, []string{"api,api", "ui,api,ui"}},
		{"AUDIT_INTERVAL", []string{"0", "0s", "1s", "24h"}, []string{"999ms", "-1s", "25h", "never"}},
		{"BROKER_PUBLIC_URL",
			[]string{"https://shop.example", "https://shop.example:8443/room/", "http://127.0.0.1:8090", "http://[::1]:8090", "http://localhost"},
			[]string{"shop.example", "http://shop.example", "ftp://127.0.0.1", "https://", "https://u:p@shop.example", "https://shop.example?a=b", "https://shop.example/#a", "https://shop.example:99999", "https://shop.example:"}},
		{"BROKER_TOKEN_AUDIENCE", []string{"shop", "https://shop.example/buy"}, []string{"a b", strings.Repeat("x", 129), "ü"}},
		{"BROKER_IDENTITY_HEADER", []string{"X-User", "user"}, []string{"X User", "X-User:", "cookie", "Authorization", "x-forwarded-for", strings.Repeat("x", 65)}},
		{"BROKER_TRUSTED_PROXIES", []string{"127.0.0.1", "10.0.0.0/8,::1,fd00::/8"}, []string{"10.0.0.0/33", "proxy", "10.0.0.0/8, ::1", ",", "fe80::1%eth0"}},
		{"BROKER_RETURN_HOSTS", []string{"shop.example", "shop.example:8443,other", "[2001:db8::1]:80", strings.Repeat("a", 253) + ":65535"}, []string{"https://shop.example", "shop.example/", "a b", "a,,b", "-a", strings.Repeat("a", 254)}},
		{"BROKER_SEATS_URL", []string{"http://127.0.0.1:1/events/{event}/seats", "https://u:p@seats.example/?e={event}"}, []string{"http://seats.example/", "http://{event}.example/", "http://{event}", "seats.example/{event}", "ftp://seats.example/{event}"}},
		{"BROKER_PAGE_COLOR", []string{"", "#1c54C4"}, []string{"red", "#fff", "#1c54c4;}", "1c54c4"}},
		{"BROKER_TOKEN_KEYS_FILE", []string{"/etc/keys.pem"}, []string{strings.Repeat("x", 4097)}},
		{"FAIR_QUEUE_LANE_WEIGHTS", []string{"1,1,1", "1000,1,1"}, []string{"1,1", "1,1,1,1", "0,1,1", "1001,1,1", "6, 3, 1", "a,b,c", "1.5,1,1"}},
	}
	for _, c := range cases {
		for _, value := range c.good {
			_, _, err := load([]string{envPrefix + c.name + "=" + value})
			require.NoError(t, err, "%s=%s", c.name, value)
		}
		for _, value := range c.bad {
			_, _, err := load([]string{envPrefix + c.name + "=" + value})
			require.ErrorContains(t, err, envPrefix+c.name+"=", value)
			require.ErrorContains(t, err, "must be "+checks[bound(&Config{}, envPrefix+c.name).field.Tag.Get("check")].text)
		}
	}
}

// TestAuthMode: for eight settings of API_ADDR and AUTH, whether callers need a key, whether the
// API is open to other hosts without one, and whether the console's cookie may be Secure.
func TestAuthMode(t *testing.T) {
	for environ, want := range map[string]string{
		"": AuthOff, "API_ADDR=[::1]:0": AuthOff, "API_ADDR=localhost:80": AuthOff, "AUTH=keys": AuthKeys,
		"API_ADDR=0.0.0.0:80 API_ALLOW_PLAINTEXT=true":                         AuthKeys,
		"API_ADDR=0.0.0.0:80 API_ALLOW_PLAINTEXT=true AUTH=":                   AuthKeys,
		"API_ADDR=:80 API_ALLOW_PLAINTEXT=true API_ALLOW_UNAUTHENTICATED=true": AuthKeys,
		"API_ADDR=:80 API_ALLOW_UNAUTHENTICATED=true AUTH=off":                 AuthOff,
	} {
		var set []string
		for _, v := range strings.Fields(environ) {
			set = append(set, envPrefix+v)
		}
		c, _, err := load(set)
		require.NoError(t, err, environ)
		require.Equal(t, want, c.AuthMode(), environ)
		require.Equal(t, want == AuthOff && strings.Contains(environ, "=:80"), c.OpenToAll(), environ)
		require.Equal(t, strings.Contains(environ, "=:80") || strings.Contains(environ, "0.0.0.0"), c.SecureUI(), environ)
	}
}

func TestRelations(t *testing.T) {
	cases := map[string]struct{ environ, want []string }{
		"pool": {
			[]string{"REDIS_POOL_MAX_ACTIVE=5"},
			[]string{`BULKACTION_REDIS_POOL_MIN_IDLE="10": must not be above BULKACTION_REDIS_POOL_MAX_ACTIVE`},
		},
		"backoff": {
			[]string{"BACKPRESSURE_DEFAULT_BACKOFF=2m", "CONGESTION_MAX_BACKOFF=10ms"},
			[]string{
				`BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF="2m0s": must not be above BULKACTION_BACKPRESSURE_MAX_BACKOFF`,
				`BULKACTION_CONGESTION_BASE_BACKOFF="1s": must not be above BULKACTION_CONGESTION_MAX_BACKOFF`,
			},
		},
		"window":                    {[]string{"BACKPRESSURE_RATE_LIMIT_WINDOW=10500us"}, []string{`BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW="10.5ms": must be whole milliseconds`}},
		"keys for all, unencrypted": {[]string{"API_ADDR=0.0.0.0:8080"}, []string{`BULKACTION_API_ADDR="0.0.0.0:8080": must be on 127.0.0.1, unless BULKACTION_API_TLS_CERT_FILE is set, so that API keys don't cross a network unencrypted; BULKACTION_API_ALLOW_PLAINTEXT=true allows it behind a proxy that ends TLS`}},
		"keys over TLS":             {[]string{"API_ADDR=0.0.0.0:8080", "API_TLS_CERT_FILE=c", "API_TLS_KEY_FILE=k"}, nil},
		"keys for all":              {[]string{"API_ADDR=0.0.0.0:8080", "API_ALLOW_PLAINTEXT=true"}, nil},
		"API for all": {
			[]string{"API_ADDR=0.0.0.0:8080", "AUTH=off", "API_ALLOW_PLAINTEXT=true"},
			[]string{`BULKACTION_API_ADDR="0.0.0.0:8080": must be on 127.0.0.1 with BULKACTION_AUTH=off; BULKACTION_API_ALLOW_UNAUTHENTICATED=true opens it to everyone all the same`},
		},
		"keys all the same":           {[]string{"API_ADDR=0.0.0.0:8080", "API_ALLOW_UNAUTHENTICATED=true"}, []string{"BULKACTION_API_ALLOW_PLAINTEXT"}},
		"API on no host":              {[]string{"API_ADDR=:8080"}, []string{"BULKACTION_API_ADDR"}},
		"API on a name":               {[]string{"API_ADDR=example.com:80"}, []string{"BULKACTION_API_ADDR"}},
		"API for all, wanted":         {[]string{"API_ADDR=0.0.0.0:8080", "AUTH=off", "API_ALLOW_UNAUTHENTICATED=true"}, nil},
		"unknown way to authenticate": {[]string{"AUTH=none"}, []string{`BULKACTION_AUTH="none": must be off or keys`}},
		"what is served":              {[]string{"API_SERVE=ui"}, nil},
		"another thing to serve":      {[]string{"API_SERVE=ui,web"}, []string{`BULKACTION_API_SERVE="ui,web": must be api, ui, or api,ui`}},
		"trace by id":                 {[]string{"TRACE_URL_TEMPLATE=https://traces.example:8443/trace/{trace_id}"}, nil},
		"traces by group and job":     {[]string{"TRACE_URL_TEMPLATE=http://jaeger:16686/search?service=bulkaction-worker&tags=%7B%22bulkaction.job%22%3A%22{group}.{ordinal}%22%7D#x"}, nil},
		"keys on loopback":            {[]string{"AUTH=keys", "API_TRUSTED_PROXIES=10.0.0.0/8,::1"}, nil},
		"proxy without a network":     {[]string{"API_TRUSTED_PROXIES=proxy"}, []string{`BULKACTION_API_TRUSTED_PROXIES`}},
		"API on loopback":             {[]string{"API_ADDR=[::1]:0"}, nil},
		"admin for all":               {[]string{"ADMIN_ADDR=0.0.0.0:9090"}, nil},
		"a mistake is not followed by another": {
			[]string{"REDIS_POOL_MAX_ACTIVE=0"}, []string{`BULKACTION_REDIS_POOL_MAX_ACTIVE="0": must be a whole number of connections from 1 to 10000`},
		},
		"flow":                           {[]string{"FAIR_QUEUE_POLICY=priority", "BACKPRESSURE_SHARE=static", "BACKPRESSURE_LIMITER=sliding"}, nil},
		"limiter":                        {[]string{"BACKPRESSURE_LIMITER=leaky"}, []string{`BULKACTION_BACKPRESSURE_LIMITER="leaky": must be fixed, sliding or token`}},
		"negative limit":                 {[]string{"BACKPRESSURE_GLOBAL_RPS=-1"}, []string{`BULKACTION_BACKPRESSURE_GLOBAL_RPS="-1": must be a whole number of jobs a second from 0`}},
		"short window":                   {[]string{"BACKPRESSURE_RATE_LIMIT_WINDOW=9ms"}, []string{`BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW="9ms": must be a duration from 10ms`}},
		"weight of nothing":              {[]string{"FAIR_QUEUE_LANE_WEIGHTS=6,0,1"}, []string{"BULKACTION_FAIR_QUEUE_LANE_WEIGHTS"}},
		"less than a permit a partition": {[]string{"BACKPRESSURE_GLOBAL_RPS=10", "PARTITIONS=16"}, nil},
		"processors": {
			[]string{"SMTP_PORT=0", "SMTP_TLS=maybe", "HTTP_PROCESSOR_TIMEOUT=-1s"},
			[]string{"BULKACTION_SMTP_PORT: 0 is not", `BULKACTION_SMTP_TLS: "maybe"`, "BULKACTION_HTTP_PROCESSOR_TIMEOUT: -1s"},
		},
		"broker for all":            {[]string{"BROKER_ADDR=0.0.0.0:8090", "BROKER_PUBLIC_URL=https://shop.example"}, []string{`BULKACTION_BROKER_ADDR="0.0.0.0:8090": must be on 127.0.0.1, unless BULKACTION_BROKER_TLS_CERT_FILE is set; BULKACTION_BROKER_ALLOW_PLAINTEXT=true allows it behind a proxy that ends TLS`}},
		"broker behind a proxy":     {[]string{"BROKER_ADDR=0.0.0.0:8090", "BROKER_PUBLIC_URL=https://shop.example", "BROKER_ALLOW_PLAINTEXT=true"}, nil},
		"broker with TLS":           {[]string{"BROKER_ADDR=:443", "BROKER_PUBLIC_URL=https://shop.example", "BROKER_TLS_CERT_FILE=c.pem", "BROKER_TLS_KEY_FILE=k.pem"}, nil},
		"broker without a name":     {[]string{"BROKER_ADDR=:8090", "BROKER_ALLOW_PLAINTEXT=true"}, []string{`BULKACTION_BROKER_ADDR=":8090": must be on 127.0.0.1, unless BULKACTION_BROKER_PUBLIC_URL tells`}},
		"certificate without key":   {[]string{"BROKER_TLS_CERT_FILE=c.pem"}, []string{`BULKACTION_BROKER_TLS_CERT_FILE="c.pem": must be set together with BULKACTION_BROKER_TLS_KEY_FILE`}},
		"key without certificate":   {[]string{"BROKER_TLS_KEY_FILE=k.pem"}, []string{`BULKACTION_BROKER_TLS_CERT_FILE="": must be set together with BULKACTION_BROKER_TLS_KEY_FILE`}},
		"identity without a header": {[]string{"BROKER_IDENTITY=header", "BROKER_TRUSTED_PROXIES=127.0.0.1"}, []string{`BULKACTION_BROKER_IDENTITY="header": must be cookie, unless BULKACTION_BROKER_IDENTITY_HEADER is set`}},
		"identity without a proxy":  {[]string{"BROKER_IDENTITY=header", "BROKER_IDENTITY_HEADER=X-User"}, []string{`BULKACTION_BROKER_IDENTITY="header": must be cookie, unless BULKACTION_BROKER_TRUSTED_PROXIES is set`}},
		"identity by a header":      {[]string{"BROKER_IDENTITY=header", "BROKER_IDENTITY_HEADER=X-User", "BROKER_TRUSTED_PROXIES=127.0.0.1"}, nil},
		"API certificate alone":     {[]string{"API_TLS_CERT_FILE=c.pem"}, []string{`BULKACTION_API_TLS_CERT_FILE="c.pem": must be set together with BULKACTION_API_TLS_KEY_FILE`}},
		"API clients without TLS":   {[]string{"API_TLS_CLIENT_CA_FILE=c.pem"}, []string{`BULKACTION_API_TLS_CLIENT_CA_FILE="c.pem": needs BULKACTION_API_TLS_CERT_FILE`}},
		"short token":               {[]string{"ADMIN_TOKEN=sesame"}, []string{`BULKACTION_ADMIN_TOKEN="[redacted]": must be 16 to 512 characters of visible ASCII`}},
		"no verification":           {[]string{"REDIS_URL=rediss://h?skip_verify=true"}, []string{`BULKACTION_REDIS_URL="[redacted]": must be redis://`}},
		"two passwords of Redis":    {[]string{"REDIS_URL=redis://:p@h", "REDIS_PASSWORD=q"}, []string{"BULKACTION_REDIS_PASSWORD: the URL has a user or a password, too"}},
		"files without TLS":         {[]string{"REDIS_TLS_CA_FILE=a", "REDIS_TLS_SERVER_NAME=b"}, []string{"BULKACTION_REDIS_TLS_CA_FILE: needs a URL that begins with rediss://", "BULKACTION_REDIS_TLS_SERVER_NAME: needs"}},
		"absent file of Redis":      {[]string{"REDIS_PASSWORD_FILE=/nowhere/password"}, []string{"BULKACTION_REDIS_PASSWORD_FILE: open /nowhere/password"}},
		"Redis with TLS":            {[]string{"REDIS_URL=rediss-sentinel://a,b/main", "REDIS_USERNAME=u", "REDIS_PASSWORD=p", "REDIS_TLS_SERVER_NAME=redis"}, nil},
		"processor's type":          {[]string{"SMTP_PORT=mail"}, []string{`BULKACTION_SMTP_PORT="mail": must be a whole number`}},
		"empty is default":          {[]string{"WORKER_COUNT=", "REDIS_URL=", "WORKER_TYPES="}, nil},
		"the last counts":           {[]string{"WORKER_COUNT=0", "WORKER_COUNT=7"}, nil},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			var environ []string
			for _, e := range c.environ {
				environ = append(environ, envPrefix+e)
			}
			_, _, err := load(environ)
			require.Len(t, split(err), len(c.want), "%v", err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestAllMistakesAreReportedAtOnce(t *testing.T) {
	_, _, err := load([]string{"BULKACTION_WORKER_COUNT=ten", "BULKACTION_PARTITIONS=0", "BULKACTION_LOG_LEVEL=loud", "BULKACTION_SMTP_PORT=0", "HOME=/"})
	require.Equal(t, []string{
		`BULKACTION_PARTITIONS="0": must be a whole number of partitions from 1 to 4096`,
		`BULKACTION_WORKER_COUNT="ten": must be a whole number of jobs from 1 to 10000`,
		`BULKACTION_LOG_LEVEL="loud": must be debug, info, warn or error`,
		`BULKACTION_SMTP_PORT: 0 is not between 1 and 65535`,
	}, strings.Split(err.Error(), "\n"))
}

func TestSecretsAreNeverShown(t *testing.T) {
	const secret = "hunter?/two@zebra,"
	for _, url := range []string{
		"redis://user:" + secret + "@h:1/0", "redis:user:" + secret + "@h:1", "redis://u:" + secret + "@a:1,u:" + secret + "@b:2",
		"redis-sentinel://a:1/main?sentinel_password=" + secret,
	} {
		c, _, err := load([]string{envPrefix + "REDIS_URL=" + url, envPrefix + "SMTP_PASSWORD=" + secret, envPrefix + "PARTITIONS=0"})
		require.Error(t, err)
		shown := err.Error() + c.String() + fmt.Sprintf("%v %+v %#v", c, c, c) + slog.AnyValue(c).Resolve().String()
		for _, part := range []string{"hunter", "two", "zebra"} {
			require.NotContains(t, shown, part, url)
		}
	}
}

// TestSecretsFromFiles: the four variables that have one of the name with _FILE get their value
// from a file, without a line end. Neither the printed settings nor four errors show the value.
func TestSecretsFromFiles(t *testing.T) {
	t.Parallel()
	file := func(content string) string {
		name := filepath.Join(t.TempDir(), "secret")
		require.NoError(t, os.WriteFile(name, []byte(content), 0o600))
		return name
	}
	samples := map[string]string{
		"BULKACTION_REDIS_URL": "redis://:sesame@h:1/0", "BULKACTION_BROKER_SEATS_URL": "https://u:sesame@h/{event}",
	}
	var found []string
	for _, v := range Variables(new(processors)) {
		if v.File == "" {
			continue
		}
		found = append(found, v.File)
		value := cmp.Or(samples[v.Name], "sesame-sesame-sesame")
		c, unknown, err := load([]string{v.File + "=" + file(value+"\r\n")})
		require.NoError(t, err, v.File)
		require.Empty(t, unknown, v.File)
		require.Equal(t, value, bound(&c, v.Name).value.String(), v.File)
		require.NotContains(t, c.String()+c.LogValue().String(), "sesame", v.File)

		for problem, environ := range map[string][]string{
			": set either it or " + v.File + ", not both": {v.File + "=" + file(value), v.Name + "=" + value},
			v.File + ": open /nowhere/secret":             {v.File + "=/nowhere/secret"},
			" is empty":                                   {v.File + "=" + file("\n")},
			" has more than 65536 bytes":                  {v.File + "=" + file(strings.Repeat("x", 65537))},
		} {
			_, _, err := load(environ)
			require.ErrorContains(t, err, problem)
			require.NotContains(t, err.Error(), "sesame", v.File)
		}
	}
	require.Equal(t, []string{
		"BULKACTION_REDIS_URL_FILE", "BULKACTION_SMTP_PASSWORD_FILE", "BULKACTION_BROKER_SEATS_URL_FILE", "BULKACTION_ADMIN_TOKEN_FILE",
	}, found, "besides BULKACTION_REDIS_PASSWORD_FILE, which is read again for each connection")
}

func TestRedisAlone(t *testing.T) {
	t.Parallel()
	environ := []string{"BULKACTION_REDIS_URL_FILE=/nowhere", "BULKACTION_WORKER_COUNT=many", "BULKACTION_REDIS_USERNAME=u", "BULKACTION_REDIS_PASSWORD=p"}
	c, err := LoadRedis(environ, "redis://h:1/2")
	require.NoError(t, err, "other sections don't count, and the given URL wins")
	require.Equal(t, "redis://h:1/2", c.URL)
	require.Equal(t, redisx.Access{Username: "u", Password: "p"}, c.Connection().Access)
	_, err = LoadRedis(environ, "redis://v:q@h:1/2")
	require.ErrorContains(t, err, "BULKACTION_REDIS_USERNAME: the URL has a user")
	_, err = LoadRedis(environ, "")
	require.ErrorContains(t, err, "BULKACTION_REDIS_URL_FILE: open /nowhere")
	c, err = LoadRedis(WithoutRedisAccess(environ), "redis://v:q@h:1/2")
	require.NoError(t, err)
	require.Equal(t, redisx.Access{}, c.Connection().Access)
}

func TestShownConfiguration(t *testing.T) {
	t.Setenv("BULKACTION_WORKER_COUNT", "7") // the environment of the process is not asked for defaults
	c, _, err := load([]string{
		"BULKACTION_WORKER_COUNT=7", "BULKACTION_WORKER_TYPES=A,B", "BULKACTION_LEASE=30s",
		"BULKACTION_REDIS_URL=redis://user:secret@h:1/0", "BULKACTION_SMTP_USERNAME=u", "BULKACTION_SMTP_PASSWORD=secret",
	})
	require.NoError(t, err)
	require.Equal(t, `[redis_url=[redacted]@h:1/0 worker_count=7 worker_types=A,B smtp_username=u smtp_password=[redacted]]`,
		c.LogValue().String(), "only what differs from the defaults")
	require.Contains(t, c.String(), "BULKACTION_FAIR_QUEUE_LANE_WEIGHTS=6,3,1\n")
	require.Contains(t, c.String(), "BULKACTION_BACKPRESSURE_MAX_BACKOFF=1m0s\n")
}

// TestProcessWithoutProcessors: a program without built-in processors knows the names of their
// variables, and neither checks nor logs the values.
func TestProcessWithoutProcessors(t *testing.T) {
	environ := []string{"BULKACTION_SMTP_PORT=mail", "BULKACTION_SMTP_PASWORD=x", "BULKACTION_SMTP_PASSWORD_FILE=/nowhere", "BULKACTION_SMTP_PASWORD=x"}
	c, unknown, err := Load(environ, nil)
	require.NoError(t, err)
	require.Equal(t, []Unknown{{"BULKACTION_SMTP_PASWORD", "BULKACTION_SMTP_PASSWORD"}}, unknown)
	require.Equal(t, "[]", c.LogValue().String())
}

// TestHelpNamesEveryVariable: the names that a process knows are those of all variables.
func TestHelpNamesEveryVariable(t *testing.T) {
	var names []string
	for _, v := range Variables(new(processors)) {
		names = append(names, v.Name)
		if v.File != "" {
			names = append(names, v.File)
		}
	}
	require.ElementsMatch(t, names, slices.Compact(slices.Sorted(slices.Values(known()))))
}

func TestUnknownVariables(t *testing.T) {
	_, unknown, err := load([]string{
		"BULKACTION_WORKERS_COUNT=7", "BULKACTION_GLOBAL_RPS=5", "BULKACTION_WORKER_COUNT=7", "BULKACTION_COMPLETELY_ELSE=1", "BULKACTION_=1", "WORKER_COUNT=1",
		"BULKACTION_SMTP_PASWORD=x",
	})
	require.NoError(t, err)
	require.Equal(t, []Unknown{
		{"BULKACTION_", ""},
		{"BULKACTION_COMPLETELY_ELSE", ""},
		{"BULKACTION_GLOBAL_RPS", "BULKACTION_BACKPRESSURE_GLOBAL_RPS"},
		{"BULKACTION_SMTP_PASWORD", "BULKACTION_SMTP_PASSWORD"},
		{"BULKACTION_WORKERS_COUNT", "BULKACTION_WORKER_COUNT"},
	}, unknown)
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "", 3}, {"", "abc", 3}, {"kitten", "sitting", 3}, {"abc", "abc", 0}, {"ab", "ba", 2}} {
		require.Equal(t, c.want, distance(c.a, c.b), "%s → %s", c.a, c.b)
	}
}

func TestTraceURL(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{
		"traces.example/{trace_id}", "//traces.example/{trace_id}", "ftp://traces.example/{trace_id}", "javascript:alert({group})",
		"https://traces.example/", "https:///{group}", "https://{group}/", "https://{group}.example/", "https://traces.example:{ordinal}/",
		"https://traces.example/{job}", "https://traces.example/{}", "https://traces.example/{group", "https://traces.example/{group}}",
		"https://traces.example/{{group}}", "https://u:p@traces.example/{group}", "https://{group}@traces.example/",
		"https://traces.example:99999/{group}", "https://traces.example:/{group}", "https://traces.example/ {group}",
		`https://traces.example/?q="{group}"`, "https://traces.example/<{group}>", "https://traces.example/%zz{group}",
		"https://traces.example/{group}" + strings.Repeat("x", 2048), "{group}", "{group}://traces.example",
	} {
		_, _, err := load([]string{envPrefix + "TRACE_URL_TEMPLATE=" + bad})
		require.ErrorContains(t, err, "BULKACTION_TRACE_URL_TEMPLATE=", bad)
		require.ErrorContains(t, err, "at least one of {trace_id}, {group} and {ordinal}", bad)
	}
}

func TestPublicURL(t *testing.T) {
	t.Parallel()
	addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8090}
	require.Equal(t, "http://127.0.0.1:8090", BrokerConfig{}.PublicURLOf(addr))
	require.Equal(t, "https://127.0.0.1:8090", BrokerConfig{TLSCertFile: "c.pem"}.PublicURLOf(addr))
	require.Equal(t, "https://shop.example/room", BrokerConfig{PublicURL: "https://shop.example/room/"}.PublicURLOf(addr))
}

func TestProxies(t *testing.T) {
	t.Parallel()
	c := BrokerConfig{TrustedProxies: []string{"10.1.2.3/8", "127.0.0.1", "::1"}}
	require.Equal(t, []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("127.0.0.1/32"), netip.MustParsePrefix("::1/128"),
	}, c.Proxies())
}

func TestIngestStreams(t *testing.T) {
	many := make([]string, maxIngestStreams+1)
	for i := range many {
		many[i] = fmt.Sprintf("acme=bulk-action:ingest:s%d", i)
	}
	load := func(value, prefix string) ([]IngestStream, error) {
		c, _, err := load([]string{"BULKACTION_INGEST_STREAMS=" + value, "BULKACTION_KEY_PREFIX=" + prefix})
		return c.Ingest.IngestStreams(), err
	}
	const prefix = "bulk-action:"
	got, err := load("acme=bulk-action:ingest:a,globex=bulk-action:ingest:ingest,acme=bulk-action:ingest:b.2", prefix)
	require.NoError(t, err)
	require.Equal(t, []IngestStream{{"acme", prefix, "a"}, {"globex", prefix, "ingest"}, {"acme", prefix, "b.2"}}, got)
	got, err = load("acme=ingest:ingest:a", "ingest:")
	require.NoError(t, err)
	require.Equal(t, []IngestStream{{"acme", "ingest:", "a"}}, got)
	_, err = load(strings.Join(many[1:], ","), prefix)
	require.NoError(t, err)

	for name, value := range map[string]string{
		"no stream":               "acme",
		"an empty stream":         "acme=",
		"no tenant":               "=bulk-action:ingest:a",
		"a wrong tenant":          "a{b=bulk-action:ingest:a",
		"the main stream":         "acme=bulk-action:ingest",
		"no name":                 "acme=bulk-action:ingest:",
		"rejected messages":       "acme=bulk-action:ingest:rejected",
		"a brace":                 "acme=bulk-action:ingest:{0}",
		"a colon":                 "acme=bulk-action:ingest:a:b",
		"a long name":             "acme=bulk-action:ingest:" + strings.Repeat("a", keyspace.MaxIngestName+1),
		"another key":             "acme=bulk-action:events",
		"the same stream twice":   "acme=bulk-action:ingest:a,globex=bulk-action:ingest:a",
		"a space":                 "acme=bulk-action:ingest:a, globex=bulk-action:ingest:b",
		"an empty entry":          "acme=bulk-action:ingest:a,",
		"more streams than there": strings.Join(many, ","),
	} {
		_, err := load(value, prefix)
		require.ErrorContains(t, err, "BULKACTION_INGEST_STREAMS=", name)
		require.ErrorContains(t, err, "must be a comma list of tenant=stream", name)
	}
	_, err = load("acme=other:ingest:a", prefix)
	require.ErrorContains(t, err, "must have streams that begin with the value of BULKACTION_KEY_PREFIX")
}

// FuzzLoad: any value of any variable is either accepted, or refused with an error that names the
// variable and shows no long password; it never causes a panic.
func FuzzLoad(f *testing.F) {
	all := Variables(new(processors))
	for i, v := range all {
		f.Add(uint8(i), v.Default)
	}
	for _, value := range []string{"", "-1", "1e400", "NaN", "5m", "9223372036854775808", "a,b", "6,3,1", "redis://:secret@h", "::1", "\x00", "0x10", " 1 "} {
		f.Add(uint8(len(value)), value)
	}
	f.Fuzz(func(t *testing.T, which uint8, value string) {
		v := all[int(which)%len(all)]
		_, unknown, err := load([]string{v.Name + "=" + value})
		require.Empty(t, unknown)
		if err != nil {
			require.Contains(t, err.Error(), v.Name)
			if strings.Contains(strings.ToUpper(v.Name), "PASSWORD") && len(value) > 20 {
				require.NotContains(t, err.Error(), value)
			}
		}
	})
}
