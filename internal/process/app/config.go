package app

import (
	"cmp"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/calls/egress"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

//go:generate go run ./gendocs ../../..

// Config is the configuration of a process, with a section for each part. [Load] reads it from the
// environment. The tags hold each variable's name, default and limits; the field's comment is the
// description in -help and docs/configuration.md (`go generate` copies it).
type Config struct {
	Redis        RedisConfig        `section:"Redis"`
	FairQueue    FairQueueConfig    `section:"Fair queue" envPrefix:"FAIR_QUEUE_"`
	Backpressure BackpressureConfig `section:"Backpressure" envPrefix:"BACKPRESSURE_"`
	Congestion   CongestionConfig   `section:"Congestion" envPrefix:"CONGESTION_"`
	Worker       WorkerConfig       `section:"Worker pool"`
	Guard        GuardConfig        `section:"Guards of accounts" envPrefix:"GUARD_"`
	Ingest       IngestConfig       `section:"Ingest"`
	Auth         AuthConfig         `section:"Authentication"`
	// Processors are the sections of the built-in processors: a pointer to a struct whose fields are
	// tagged like these. nil: the program has none, and knows only the names of their variables.
	Processors any
	Callback   CallbackConfig  `section:"Callbacks" envPrefix:"CALLBACK_"`
	Retention  RetentionConfig `section:"Retention" envPrefix:"RETENTION_"`
	Audit      AuditConfig     `section:"Audit" envPrefix:"AUDIT_"`
	Broker     BrokerConfig    `section:"Waiting room" envPrefix:"BROKER_"`
	Telemetry  TelemetryConfig `section:"Telemetry"`
}

// RedisConfig is the address of Redis and the settings of its connections.
type RedisConfig struct {
	// Address of Redis. A list of hosts, with commas between them, is a cluster. With rediss and
	// rediss-sentinel all connections use TLS 1.2 or 1.3.
	URL string `env:"REDIS_URL" envDefault:"redis://127.0.0.1:6379/0" secret:"url" check:"redis"`
	// User, if REDIS_URL has none.
	Username string `env:"REDIS_USERNAME" check:"user"`
	// Password, if REDIS_URL has none.
	Password string `env:"REDIS_PASSWORD" check:"password"`
	// File with the password. It is read again for each new connection, so the password can be
	// changed without a restart. Line breaks at its end are ignored.
	PasswordFile string `env:"REDIS_PASSWORD_FILE" check:"file"`
	// File in PEM with the authorities that may sign the certificates of Redis. Empty: those of the
	// system. Like the two files below, it is read again for each new connection.
	TLSCAFile string `env:"REDIS_TLS_CA_FILE" check:"file"`
	// File in PEM with the certificate of this process, if Redis demands one.
	TLSCertFile string `env:"REDIS_TLS_CERT_FILE" check:"file"`
	// Key of REDIS_TLS_CERT_FILE.
	TLSKeyFile string `env:"REDIS_TLS_KEY_FILE" check:"file"`
	// Name that the certificates of Redis must have. Empty: the host of each address.
	TLSServerName string `env:"REDIS_TLS_SERVER_NAME" check:"host"`
	// Idle connections that are kept open.
	PoolMinIdle int `env:"REDIS_POOL_MIN_IDLE" envDefault:"10" min:"0" max:"10000" unit:"connections"`
	// Most idle connections that are kept; further ones are closed when they are not needed any
	// more.
	PoolMaxIdle int `env:"REDIS_POOL_MAX_IDLE" envDefault:"20" min:"1" max:"10000" unit:"connections"`
	// Most connections that the process opens, without those of blocking reads.
	PoolMaxActive int `env:"REDIS_POOL_MAX_ACTIVE" envDefault:"50" min:"1" max:"10000" unit:"connections"`
	// Longest time to connect.
	DialTimeout time.Duration `env:"REDIS_DIAL_TIMEOUT" envDefault:"5s" min:"1ms" max:"5m"`
	// Longest time to wait for a reply.
	CommandTimeout time.Duration `env:"REDIS_COMMAND_TIMEOUT" envDefault:"3s" min:"1ms" max:"5m"`
	// Replicas that must have a write before its producer gets the answer "accepted". While fewer
	// have it, producers get 503 and may repeat the request.
	WaitReplicas int `env:"REDIS_WAIT_REPLICAS" envDefault:"0" min:"0" max:"16" unit:"replicas"`
	// Prefix of all keys. Installations that share one Redis need different prefixes.
	KeyPrefix string `env:"KEY_PREFIX" envDefault:"bulk-action:" check:"prefix"`
	// Number of partitions, among which tenants are divided; on a cluster at least 16. The first
	// process stores it in Redis; a process with another number refuses to start.
	Partitions int `env:"PARTITIONS" envDefault:"1" min:"1" max:"4096" unit:"partitions"`
}

// Connection returns the settings of a connection to Redis.
func (c RedisConfig) Connection() redisx.Config {
	return redisx.Config{
		URL: c.URL,
		Access: redisx.Access{
			Username: c.Username, Password: c.Password, PasswordFile: c.PasswordFile,
			CAFile: c.TLSCAFile, CertFile: c.TLSCertFile, KeyFile: c.TLSKeyFile, ServerName: c.TLSServerName,
		},
		PoolMinIdle: c.PoolMinIdle, PoolMaxIdle: c.PoolMaxIdle, PoolMaxActive: c.PoolMaxActive,
		DialTimeout: c.DialTimeout, CommandTimeout: c.CommandTimeout,
	}
}

// FairQueueConfig sets the order in which waiting jobs are admitted.
type FairQueueConfig struct {
	// Weight of a group's progress in the priority formula.
	Alpha float64 `env:"ALPHA" envDefault:"10000" min:"0" max:"1e15"`
	// How the next jobs of a lane are chosen: fair shares of the tenants, or the priority formula
	// over all groups.
	Policy string `env:"POLICY" envDefault:"fair" oneof:"fair,priority"`
	// Shares of the lanes high, normal and low while all three have waiting jobs.
	LaneWeights []int `env:"LANE_WEIGHTS" envDefault:"6,3,1" check:"weights"`
}

// BackpressureConfig sets the rate limit and the bounds of the ready streams.
type BackpressureConfig struct {
	// Global rate limit, in permits per second for all tenants together; 0: no limit. `bulkaction
	// limit set` changes it, SHARE and the two backoffs while processes run.
	GlobalRPS int `env:"GLOBAL_RPS" envDefault:"10000" min:"0" max:"1000000000" unit:"jobs a second"`
	// How active tenants share the global limit, by their weights. elastic: other tenants may
	// borrow the unused part of a share; static: they may not.
	Share string `env:"SHARE" envDefault:"elastic" oneof:"elastic,static"`
	// How permits are counted. fixed: the limit holds in each aligned window; sliding: it holds in
	// every time span of a window's length; token: permits come at a steady rate, and at most those
	// of one window can be saved.
	Limiter string `env:"LIMITER" envDefault:"fixed" oneof:"fixed,sliding,token"`
	// Length of a window, in whole milliseconds. A window has the permits per second times its
	// length, at least 1.
	RateLimitWindow time.Duration `env:"RATE_LIMIT_WINDOW" envDefault:"1s" min:"10ms" max:"1h"`
	// Largest number of jobs in a ready stream, without started jobs.
	ReadyQueueMaxSize int `env:"READY_QUEUE_MAX_SIZE" envDefault:"10000" min:"1" max:"10000000" unit:"jobs"`
	// Longest pause of the dispatcher while jobs are non-ready.
	DispatchInterval time.Duration `env:"DISPATCH_INTERVAL" envDefault:"100ms" min:"1ms" max:"1m"`
	// Most jobs that one script call promotes; above 200 it counts as 200. While more jobs are due,
	// calls follow at once.
	DispatchBatchSize int `env:"DISPATCH_BATCH_SIZE" envDefault:"100" min:"1" max:"10000" unit:"jobs"`
	// Wait before the first retry; the wait doubles with each retry.
	DefaultBackoff time.Duration `env:"DEFAULT_BACKOFF" envDefault:"1s" min:"1ms" max:"24h"`
	// Longest wait before a retry.
	MaxBackoff time.Duration `env:"MAX_BACKOFF" envDefault:"60s" min:"1ms" max:"24h"`
}

// CongestionConfig lets the wait after a failed or throttled attempt grow with the tenant's
// non-ready jobs. If it is not Enabled, DEFAULT_BACKOFF and MAX_BACKOFF set the wait.
type CongestionConfig struct {
	// Lets the wait after a failed or throttled attempt grow with the number of non-ready jobs of
	// the tenant.
	Enabled bool `env:"ENABLED" envDefault:"true"`
	// Shortest wait after such an attempt, unless the downstream API has named a time.
	BaseBackoff time.Duration `env:"BASE_BACKOFF" envDefault:"1s" min:"1ms" max:"24h"`
	// Longest wait after such an attempt, unless the downstream API has named a time.
	MaxBackoff time.Duration `env:"MAX_BACKOFF" envDefault:"120s" min:"1ms" max:"24h"`
	// How long a tenant's congestion statistics are kept.
	StatsRetention time.Duration `env:"STATS_RETENTION" envDefault:"1h" min:"1s" max:"720h"`
}

// WorkerConfig sets how jobs are fetched and run.
type WorkerConfig struct {
	// Jobs that one worker process runs at once: its slots. The number can be changed at run time.
	Count int `env:"WORKER_COUNT" envDefault:"10" min:"1" max:"10000" unit:"jobs"`
	// Job types that the worker serves; empty: all types for which it has a processor, except NOOP.
	Types []string `env:"WORKER_TYPES" check:"ids"`
	// Longest blocking read of workers and aggregators. One read blocks at most 1s, because a process
	// that stops has to wait for its end: a longer timeout has no effect, and the start warns.
	Timeout time.Duration `env:"WORKER_TIMEOUT" envDefault:"1s" min:"1ms" max:"1h"`
	// Longest run of an attempt, if neither the group nor JOB_TIMEOUTS sets a timeout.
	JobTimeout time.Duration `env:"JOB_TIMEOUT" envDefault:"30s" min:"1ms" max:"24h"`
	// Longest run of an attempt by job type, such as SEND_EMAIL=10s,HTTP=2m, if the group sets no
	// timeout.
	JobTimeouts map[string]time.Duration `env:"JOB_TIMEOUTS" envKeyValSeparator:"=" check:"timeouts"`
	// Retries after the first attempt, if the group sets no number.
	MaxRetryCount int `env:"MAX_RETRY_COUNT" envDefault:"3" min:"0" max:"1000" unit:"retries"`
	// Throttles of a job by downstream APIs before it fails; they use no retry.
	MaxThrottles int `env:"MAX_THROTTLES" envDefault:"100" min:"0" max:"1000000" unit:"throttles"`
	// Workers that may die while they run a job alone before the job fails; these deaths use no
	// retry.
	MaxDeliveries int `env:"MAX_DELIVERIES" envDefault:"5" min:"1" max:"1000" unit:"workers"`
	// Length of a job lease: a worker that is silent for so long loses its jobs.
	Lease time.Duration `env:"LEASE" envDefault:"30s" min:"100ms" max:"1h"`
	// How long running jobs, and the requests and messages of ingest, may continue after the
	// process was told to stop.
	ShutdownGracePeriod time.Duration `env:"SHUTDOWN_GRACE_PERIOD" envDefault:"30s" min:"0s" max:"1h"`
	// Longest pause of the fetcher while no jobs wait.
	FetchInterval time.Duration `env:"FETCH_INTERVAL" envDefault:"200ms" min:"1ms" max:"1m"`
	// Jobs that one script call admits, at first; the number grows under load, to 200 at most. As
	// many jobs are made ready while no worker is alive.
	FetchBatchSize int `env:"FETCH_BATCH_SIZE" envDefault:"50" min:"1" max:"10000" unit:"jobs"`
	// How long jobs wait for a worker of their type before they fail with NO_PROCESSOR. 0: they wait for ever.
	NoProcessorTimeout time.Duration `env:"NO_PROCESSOR_TIMEOUT" envDefault:"0s" min:"0s" max:"720h"`
}

// GuardConfig sets how long calls wait for accounts and hosts that workers share.
type GuardConfig struct {
	// Longest time that a job waits for a free account before it is deferred. It takes no slot of
	// the worker meanwhile. 0: jobs don't wait.
	Wait time.Duration `env:"WAIT" envDefault:"2s" min:"0s" max:"1m"`
	// Longest time that a program waits that uses the same guards and sets no time of its own.
	MaxWait time.Duration `env:"MAX_WAIT" envDefault:"60s" min:"10ms" max:"1h"`
}

// IngestConfig sets the HTTP API's address and the bounds of backpressure.
type IngestConfig struct {
	// Address of the HTTP API. Port 0 chooses a free port.
	APIAddr string `env:"API_ADDR" envDefault:"127.0.0.1:8080" check:"addr"`
	// What is served at API_ADDR: the API, the web console at /ui/, or both.
	Serve []string `env:"API_SERVE" envDefault:"api,ui" check:"serve"`
	// Path under which a reverse proxy shows the web console, such as /bulk: the console is at
	// /bulk/ui/ then. The proxy may remove it from requests, or leave it in them.
	ConsolePrefix string `env:"CONSOLE_PREFIX" check:"path prefix"`
	// URL of the traces of a group or a job, to which the web console links, such as
	// https://traces.example/trace/{trace_id}. It replaces {trace_id}, {group} and {ordinal}.
	TraceURLTemplate string `env:"TRACE_URL_TEMPLATE" check:"trace url"`
	// Allows AUTH=off with an API_ADDR that is not loopback: everyone who reaches it may do
	// everything but use the waiting room's calls.
	AllowUnauthenticated bool `env:"API_ALLOW_UNAUTHENTICATED" envDefault:"false"`
	// File in PEM with the certificate chain of the API, which then speaks https alone. When it
	// changes, new connections use the new one within 10s.
	TLSCertFile string `env:"API_TLS_CERT_FILE" check:"file"`
	// Key of API_TLS_CERT_FILE.
	TLSKeyFile string `env:"API_TLS_KEY_FILE" check:"file"`
	// File in PEM with the authorities that sign the certificates of clients. With it, the API
	// refuses clients without such a certificate.
	TLSClientCAFile string `env:"API_TLS_CLIENT_CA_FILE" check:"file"`
	// Most open connections of the API. Further ones wait until one is closed.
	MaxConnections int `env:"API_MAX_CONNECTIONS" envDefault:"4096" min:"1" max:"1000000" unit:"connections"`
	// How long the API accepts connections after the process was told to stop and /readyz answers
	// 503: the time that load balancers need to notice.
	DrainDelay time.Duration `env:"API_DRAIN_DELAY" envDefault:"0s" min:"0s" max:"5m"`
	// Further ingest streams, such as acme=bulk-action:ingest:acme. The messages of each belong to
	// its tenant. All ingest processes need the same.
	Streams []string `env:"INGEST_STREAMS" check:"ingest streams"`
	// Refuses submissions that name no tenant, with 422 or as rejected messages. Otherwise such a group
	// is its own tenant, and no customer's limit applies to it.
	RequireTenant bool `env:"REQUIRE_TENANT" envDefault:"false"`
	// Number of unfinished jobs from which on submissions are refused with 429.
	MaxBacklog int `env:"INGEST_MAX_BACKLOG" envDefault:"10000000" min:"1" max:"2000000000" unit:"jobs"`
	// Part of Redis's maxmemory from which on submissions are refused with 429.
	MaxMemoryRatio float64 `env:"INGEST_MAX_MEMORY_RATIO" envDefault:"0.9" min:"0.01" max:"1"`
}

// AuthConfig sets how the API tells its callers apart.
type AuthConfig struct {
	// Whether the API asks for keys. Empty: off if API_ADDR is loopback, keys otherwise.
	Mode string `env:"AUTH" check:"auth"`
	// File of API keys that are valid besides those in Redis. It is read again when it changes.
	KeysFile string `env:"AUTH_KEYS_FILE" check:"file"`
	// File with the secret that makes the hashes of keys in Redis useless to others, at least 32
	// bytes. All processes need the same.
	PepperFile string `env:"AUTH_PEPPER_FILE" check:"file"`
	// Allows API keys to be sent without TLS to an API_ADDR that is not loopback, behind a proxy
	// that ends TLS.
	AllowPlaintext bool `env:"API_ALLOW_PLAINTEXT" envDefault:"false"`
	// Most requests that an API key may make in a second at one process; further ones get 429.
	// 0: no limit.
	KeyRPS int `env:"API_KEY_RPS" envDefault:"0" min:"0" max:"1000000" unit:"requests a second"`
	// Proxies in front of the API whose X-Forwarded-For is believed. It says whose failed
	// authentications are limited, and is part of the activity log.
	TrustedProxies []string `env:"API_TRUSTED_PROXIES" check:"networks"`
}

// CallbackConfig sets how tenants' endpoints are told of the ends of groups.
type CallbackConfig struct {
	// File with the key, at least 32 bytes, from which the secrets of tenants are derived that sign
	// callbacks. ingest and watcher need the same. Without it there are no callbacks.
	MasterKeyFile string `env:"MASTER_KEY_FILE" check:"file"`
	// Allows URLs with http://. Everybody on the way can read and replay what is sent to them.
	AllowHTTP bool `env:"ALLOW_HTTP" envDefault:"false"`
	// Lets callbacks go to every address, also private and loopback addresses.
	AllowPrivate bool `env:"ALLOW_PRIVATE" envDefault:"false"`
	// Networks to which callbacks may go although they are not public, such as 10.1.0.0/16.
	AllowedCIDRs []string `env:"ALLOWED_CIDRS" check:"networks"`
	// Calls that a watcher makes at once, of these at most 2 to one endpoint.
	Concurrency int `env:"CONCURRENCY" envDefault:"10" min:"1" max:"1000" unit:"calls"`
}

// Policy says which URLs callbacks may have.
func (c CallbackConfig) Policy() webhook.Policy {
	return webhook.Policy{
		Policy:    egress.Policy{AllowPrivate: c.AllowPrivate, AllowedCIDRs: networks(c.AllowedCIDRs)},
		AllowHTTP: c.AllowHTTP,
	}
}

// RetentionConfig sets how long data of ended groups and messages is kept.
type RetentionConfig struct {
	// How long ended groups are kept, with their counts, aggregates and failures. If message ids or
	// idempotency keys are kept for longer, a repeated submission of a deleted group runs again,
	// perhaps without some of its jobs.
	Groups time.Duration `env:"GROUPS" envDefault:"168h" min:"1s" max:"87600h"`
	// How long the results of an ended group's jobs are kept.
	Results time.Duration `env:"RESULTS" envDefault:"168h" min:"1s" max:"87600h"`
	// How long message ids are kept, by which repeated messages are recognized.
	MessageIDs time.Duration `env:"MESSAGE_IDS" envDefault:"24h" min:"1s" max:"87600h"`
	// How long answers are kept, to be given again to a request with the same Idempotency-Key.
	IdempotencyKeys time.Duration `env:"IDEMPOTENCY_KEYS" envDefault:"24h" min:"1s" max:"87600h"`
	// How long dead letters are kept.
	DeadLetters time.Duration `env:"DEAD_LETTERS" envDefault:"720h" min:"1s" max:"87600h"`
	// How long the events on the stream events are kept.
	Events time.Duration `env:"EVENTS" envDefault:"168h" min:"1s" max:"87600h"`
	// How long callbacks are kept that could not be delivered.
	Callbacks time.Duration `env:"CALLBACKS" envDefault:"168h" min:"1s" max:"87600h"`
	// How long entries of the activity log are kept; there are at most about 100,000.
	Activity time.Duration `env:"ACTIVITY" envDefault:"2160h" min:"1s" max:"87600h"`
}

// AuditConfig sets how often watchers check the data by the laws of the audit.
type AuditConfig struct {
	// Time between incremental checks of open groups; it is longer if a check takes so long that
	// Redis would be busy with checks for more than 1% of its time. A job that stays missing for a
	// LEASE ends as LOST. 0: no audits at all.
	Interval time.Duration `env:"INTERVAL" envDefault:"15s" check:"seldom"`
	// Time between full audits, which read at most 4 MB/s. 0: no full audits.
	DeepInterval time.Duration `env:"DEEP_INTERVAL" envDefault:"1h" check:"seldom"`
}

// TelemetryConfig sets the admin address and the logs. The standard OTEL_* variables set traces and
// pushed metrics.
type TelemetryConfig struct {
	// Address of /healthz, /readyz and /metrics. Port 0 chooses a free port and logs it, so that
	// several roles can run on one host.
	AdminAddr string `env:"ADMIN_ADDR" envDefault:"127.0.0.1:0" check:"addr"`
	// Bearer token that /metrics and /pool of the admin address demand. Without it, both show
	// themselves to everyone who reaches the address, and only this host may change the pool.
	AdminToken string `env:"ADMIN_TOKEN" check:"token"`
	// Lowest level of log lines that are written.
	LogLevel string `env:"LOG_LEVEL" envDefault:"info" oneof:"debug,info,warn,error"`
	// Format of log lines on standard error.
	LogFormat string `env:"LOG_FORMAT" envDefault:"json" oneof:"json,text"`
}

// The values of AUTH.
const (
	AuthOff  = "off"  // the API asks for no key, and every caller may do everything
	AuthKeys = "keys" // the API asks for keys
)

// AuthMode returns AuthOff or AuthKeys. If the variable AUTH is empty, it is AuthOff for an API on
// loopback, AuthKeys otherwise.
func (c Config) AuthMode() string {
	if isLoopback(c.Ingest.APIAddr) {
		return cmp.Or(c.Auth.Mode, AuthOff)
	}
	return cmp.Or(c.Auth.Mode, AuthKeys)
}

// SecureUI reports whether the cookie of the console may be marked Secure (https only): the API
// speaks TLS, or its address is not loopback, so that a proxy in front of it has to end TLS.
func (c Config) SecureUI() bool { return c.Ingest.TLSCertFile != "" || !isLoopback(c.Ingest.APIAddr) }

// OpenToAll reports whether callers on other hosts may use the API without a key.
func (c Config) OpenToAll() bool { return c.AuthMode() == AuthOff && !isLoopback(c.Ingest.APIAddr) }

// Proxies returns the trusted proxies in front of the API as networks.
func (c AuthConfig) Proxies() []netip.Prefix { return networks(c.TrustedProxies) }

// authentication calls check once for each rule that relates the address of the API to its
// protection by keys and TLS.
func (c Config) authentication(check func(holds bool, name, other, problem string)) {
	check(!c.OpenToAll() || c.Ingest.AllowUnauthenticated, "API_ADDR", "API_ALLOW_UNAUTHENTICATED",
		"must be on 127.0.0.1 with BULKACTION_AUTH=off; OTHER=true opens it to everyone all the same")
	private := isLoopback(c.Ingest.APIAddr) || c.Ingest.TLSCertFile != ""
	check(private || c.AuthMode() == AuthOff || c.Auth.AllowPlaintext, "API_ADDR", "API_ALLOW_PLAINTEXT",
		"must be on 127.0.0.1, unless BULKACTION_API_TLS_CERT_FILE is set, so that API keys don't cross a network "+
			"unencrypted; OTHER=true allows it behind a proxy that ends TLS")
}

// BrokerConfig sets how a broker serves visitors of the waiting room, and the defaults of events.
type BrokerConfig struct {
	// Address for visitors. Port 0 chooses a free port.
	Addr string `env:"ADDR" envDefault:"127.0.0.1:8090" check:"addr"`
	// Address under which visitors reach the brokers: the issuer of tokens, and the base of the
	// addresses in answers. Empty: BROKER_ADDR. With https, cookies are for https only.
	PublicURL string `env:"PUBLIC_URL" check:"public url"`
	// Files in PEM with the certificate chain and its key. When they change, new connections use
	// the new ones within 10s.
	TLSCertFile string `env:"TLS_CERT_FILE" check:"file"`
	// Key of TLS_CERT_FILE.
	TLSKeyFile string `env:"TLS_KEY_FILE" check:"file"`
	// Allows a BROKER_ADDR that is not loopback without TLS files, because a proxy ends TLS.
	AllowPlaintext bool `env:"ALLOW_PLAINTEXT" envDefault:"false"`
	// File in PEM with the Ed25519 keys of tokens: the first signs, all verify. A broker needs it,
	// and ingest to renew tokens.
	TokenKeysFile string `env:"TOKEN_KEYS_FILE" check:"file"`
	// Audience of tokens. Empty: the event.
	TokenAudience string `env:"TOKEN_AUDIENCE" check:"audience"`

	// Default of the setting token_ttl: life of a token.
	TokenTTL time.Duration `env:"TOKEN_TTL" envDefault:"5m" min:"1s" max:"24h"`
	// Default of the setting leeway: how long the slot is held after the token's expiry.
	TokenLeeway time.Duration `env:"TOKEN_LEEWAY" envDefault:"10s" min:"0s" max:"5m"`
	// Default of the setting max_session: the latest expiry that renewals reach, counted from the
	// first token. 0: no limit.
	MaxSession time.Duration `env:"MAX_SESSION" envDefault:"15m" min:"0s" max:"720h"`
	// Default of the setting ready: time to fetch the token after the promotion.
	Ready time.Duration `env:"READY" envDefault:"30s" min:"100ms" max:"24h"`
	// Default of the setting grace: how long an away user keeps the place. 0: the place ends with
	// the stream.
	Grace time.Duration `env:"GRACE" envDefault:"60s" min:"0s" max:"24h"`
	// Default of the setting on_close: whether a user with a token keeps the slot when the stream
	// ends.
	OnClose string `env:"ON_CLOSE" envDefault:"keep" oneof:"keep,release"`
	// Default of the setting no_show: whether a promoted user who is not connected keeps the slot
	// for the time READY.
	NoShow string `env:"NO_SHOW" envDefault:"wait" oneof:"wait,release"`
	// Default of the setting max_waiting: longest queue of an event.
	MaxWaiting int `env:"MAX_WAITING" envDefault:"1000000" min:"1" max:"100000000" unit:"users"`
	// Default of the setting retention: how long a closed event is kept.
	Retention time.Duration `env:"RETENTION" envDefault:"24h" min:"0s" max:"8760h"`

	// Time between two positions on a stream.
	PositionInterval time.Duration `env:"POSITION_INTERVAL" envDefault:"1s" min:"10ms" max:"1m"`
	// Longest pause of the promoter while nothing wakes it.
	PromoteInterval time.Duration `env:"PROMOTE_INTERVAL" envDefault:"1s" min:"10ms" max:"1m"`
	// Silence on a stream after which a comment is sent.
	Heartbeat time.Duration `env:"HEARTBEAT" envDefault:"15s" min:"10ms" max:"5m"`
	// Longest time to write one frame (server-sent event) of a stream; then the connection is
	// closed.
	WriteTimeout time.Duration `env:"WRITE_TIMEOUT" envDefault:"10s" min:"10ms" max:"5m"`
	// Time over which a broker that stops hands its streams to other brokers.
	Drain time.Duration `env:"DRAIN" envDefault:"10s" min:"0s" max:"5m"`
	// Most open streams of a process.
	MaxConnections int `env:"MAX_CONNECTIONS" envDefault:"50000" min:"1" max:"1000000" unit:"streams"`
	// Most open streams of one IP address, or of one /64 network of IPv6.
	MaxConnectionsPerIP int `env:"MAX_CONNECTIONS_PER_IP" envDefault:"1000" min:"1" max:"1000000" unit:"streams"`
	// New visitors of one IP address. Visitors with a valid cookie don't count.
	EnterRatePerIP int `env:"ENTER_RATE_PER_IP" envDefault:"10" min:"1" max:"1000000" unit:"visitors a second"`

	// How users are told apart: by a signed cookie, or by a header that a proxy sets.
	Identity string `env:"IDENTITY" envDefault:"cookie" oneof:"cookie,header"`
	// Header with the user's id, with IDENTITY=header.
	IdentityHeader string `env:"IDENTITY_HEADER" check:"header"`
	// Proxies whose identity header and X-Forwarded-For are believed. The limits per IP don't hold
	// for requests of such a proxy without X-Forwarded-For.
	TrustedProxies []string `env:"TRUSTED_PROXIES" check:"networks"`
	// Hosts that a return_url may name, beside loopback addresses.
	ReturnHosts []string `env:"RETURN_HOSTS" check:"hosts"`
	// Folder with texts of the waiting page, in one file for each language, such as fr.json or
	// pt-BR.json. Texts that a file lacks are the built-in ones, or English.
	PageTextsDir string `env:"PAGE_TEXTS_DIR" check:"file"`
	// Logo of the waiting page: a file (SVG, PNG, JPEG, WebP or GIF, at most 1 MiB), or an address
	// with https://.
	PageLogo string `env:"PAGE_LOGO" check:"logo"`
	// Colour of the waiting page's buttons and of the line above it, such as #1c54c4.
	PageColor string `env:"PAGE_COLOR" check:"color"`
	// Address of the seat service; {event} stands for the event. Empty: events must be declared.
	SeatsURL string `env:"SEATS_URL" secret:"url" check:"seats url"`
	// Longest time to wait for the seat service.
	SeatsTimeout time.Duration `env:"SEATS_TIMEOUT" envDefault:"2s" min:"10ms" max:"1m"`
}

// HasTLS reports whether the broker itself serves https.
func (c BrokerConfig) HasTLS() bool { return c.TLSCertFile != "" }

// PublicURLOf returns the public URL of a broker that listens on addr, without a slash at its end:
// PublicURL or, if that is empty, a URL of addr.
func (c BrokerConfig) PublicURLOf(addr net.Addr) string {
	switch {
	case c.PublicURL != "":
		return strings.TrimSuffix(c.PublicURL, "/")
	case c.HasTLS():
		return "https://" + addr.String()
	}
	return "http://" + addr.String()
}

// Proxies returns the trusted proxies as networks.
func (c BrokerConfig) Proxies() []netip.Prefix { return networks(c.TrustedProxies) }

// relations calls check once for each rule that relates two variables of the section.
func (c BrokerConfig) relations(check func(holds bool, name, other, problem string)) {
	check((c.TLSCertFile == "") == (c.TLSKeyFile == ""), "BROKER_TLS_CERT_FILE", "BROKER_TLS_KEY_FILE",
		"must be set together with OTHER, or not at all")
	check(isLoopback(c.Addr) || c.HasTLS() || c.AllowPlaintext, "BROKER_ADDR", "BROKER_ALLOW_PLAINTEXT",
		"must be on 127.0.0.1, unless BULKACTION_BROKER_TLS_CERT_FILE is set; "+
			"OTHER=true allows it behind a proxy that ends TLS")
	check(isLoopback(c.Addr) || c.PublicURL != "", "BROKER_ADDR", "BROKER_PUBLIC_URL",
		"must be on 127.0.0.1, unless OTHER tells the address for visitors")
	check(c.Identity != "header" || c.IdentityHeader != "", "BROKER_IDENTITY", "BROKER_IDENTITY_HEADER",
		"must be cookie, unless OTHER is set")
	check(c.Identity != "header" || len(c.TrustedProxies) > 0, "BROKER_IDENTITY", "BROKER_TRUSTED_PROXIES",
		"must be cookie, unless OTHER is set")
}
