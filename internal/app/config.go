package app

import (
	"time"

	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

//go:generate go run ./gendocs

// Config is the configuration of a process, a section for each part. [Load] reads it from the
// environment; the tags hold each variable's name, default, meaning and limits, for the checks and
// for docs/configuration.md.
type Config struct {
	Redis        RedisConfig        `section:"Redis"`
	FairQueue    FairQueueConfig    `section:"Fair queue" envPrefix:"FAIR_QUEUE_"`
	Backpressure BackpressureConfig `section:"Backpressure" envPrefix:"BACKPRESSURE_"`
	Congestion   CongestionConfig   `section:"Congestion" envPrefix:"CONGESTION_"`
	Worker       WorkerConfig       `section:"Worker pool"`
	Ingest       IngestConfig       `section:"Ingest"`
	SMTP         email.Config       `section:"Processor SEND_EMAIL" envPrefix:"SMTP_"`
	HTTP         httpcall.Config    `section:"Processor HTTP" envPrefix:"HTTP_PROCESSOR_"`
	Retention    RetentionConfig    `section:"Retention" envPrefix:"RETENTION_"`
	Audit        AuditConfig        `section:"Audit" envPrefix:"AUDIT_"`
	Telemetry    TelemetryConfig    `section:"Telemetry"`
}

// RedisConfig says where Redis is, and how to talk to it.
type RedisConfig struct {
	URL            string        `env:"REDIS_URL" envDefault:"redis://127.0.0.1:6379/0" secret:"url" check:"redis" desc:"Where Redis is. A comma list is a cluster."`
	PoolMinIdle    int           `env:"REDIS_POOL_MIN_IDLE" envDefault:"10" min:"0" max:"10000" unit:"connections" desc:"Connections kept open while nothing happens."`
	PoolMaxActive  int           `env:"REDIS_POOL_MAX_ACTIVE" envDefault:"50" min:"1" max:"10000" unit:"connections" desc:"Connections that the process opens at most; blocking reads have their own beside them."`
	DialTimeout    time.Duration `env:"REDIS_DIAL_TIMEOUT" envDefault:"5s" min:"1ms" max:"5m" desc:"Longest time to connect."`
	CommandTimeout time.Duration `env:"REDIS_COMMAND_TIMEOUT" envDefault:"3s" min:"1ms" max:"5m" desc:"Longest time to wait for a reply."`
	WaitReplicas   int           `env:"REDIS_WAIT_REPLICAS" envDefault:"0" min:"0" max:"16" unit:"replicas" desc:"Replicas that must have a write before a producer is told that it was accepted. While fewer have it, producers get 503 and may repeat."`
	KeyPrefix      string        `env:"KEY_PREFIX" envDefault:"bulk-action:" check:"prefix" desc:"What every key begins with; each installation on one Redis has its own."`
	Partitions     int           `env:"PARTITIONS" envDefault:"1" min:"1" max:"4096" unit:"partitions" desc:"Shards that tenants are spread over; on a cluster 16 and more. Stored in Redis at the first start; a process that is configured otherwise refuses to start."`
}

// FairQueueConfig says who comes next.
type FairQueueConfig struct {
	Alpha       float64 `env:"ALPHA" envDefault:"10000" min:"0" max:"1e15" desc:"Weight of a group's progress in the priority formula."`
	Policy      string  `env:"POLICY" envDefault:"fair" oneof:"fair,priority" desc:"How the next jobs are chosen: fair turns among tenants, or the priority formula over all groups."`
	LaneWeights []int   `env:"LANE_WEIGHTS" envDefault:"6,3,1" check:"weights" desc:"Shares of the lanes high, normal and low while all have work."`
}

// BackpressureConfig bounds what is handed out.
type BackpressureConfig struct {
	GlobalRPS         int           `env:"GLOBAL_RPS" envDefault:"10000" min:"0" max:"1000000000" unit:"jobs a second" desc:"Permits a second, for all tenants together; 0: no limit."`
	Share             string        `env:"SHARE" envDefault:"elastic" oneof:"elastic,static" desc:"Each active tenant gets an equal part of the permits, or one by its weight. elastic: what a tenant leaves is lent to others; static: it is not."`
	Limiter           string        `env:"LIMITER" envDefault:"fixed" oneof:"fixed,sliding,token" desc:"How permits are counted. fixed: at most so many in each aligned window; sliding: in any span of that length; token: steadily, and at most a window's at once."`
	RateLimitWindow   time.Duration `env:"RATE_LIMIT_WINDOW" envDefault:"1s" min:"10ms" max:"1h" desc:"Length of a window, in whole milliseconds. It gets its part of the permits a second, at least 1."`
	ReadyQueueMaxSize int           `env:"READY_QUEUE_MAX_SIZE" envDefault:"10000" min:"1" max:"10000000" unit:"jobs" desc:"Jobs that a ready stream holds at most, started ones not counted."`
	DispatchInterval  time.Duration `env:"DISPATCH_INTERVAL" envDefault:"100ms" min:"1ms" max:"1m" desc:"Pause of the dispatcher when nothing is due."`
	DispatchBatchSize int           `env:"DISPATCH_BATCH_SIZE" envDefault:"100" min:"1" max:"10000" unit:"jobs" desc:"Jobs that a dispatch cycle begins with; it grows under load. One script moves 200 at most."`
	DefaultBackoff    time.Duration `env:"DEFAULT_BACKOFF" envDefault:"1s" min:"1ms" max:"24h" desc:"Wait before the first retry; it doubles with each attempt."`
	MaxBackoff        time.Duration `env:"MAX_BACKOFF" envDefault:"60s" min:"1ms" max:"24h" desc:"Longest wait before a retry."`
}

// CongestionConfig says how long jobs wait that a partner's API has refused.
type CongestionConfig struct {
	Enabled        bool          `env:"ENABLED" envDefault:"true" desc:"Lets a tenant's waits grow with its own non-ready jobs."`
	BaseBackoff    time.Duration `env:"BASE_BACKOFF" envDefault:"1s" min:"1ms" max:"24h" desc:"Shortest wait."`
	MaxBackoff     time.Duration `env:"MAX_BACKOFF" envDefault:"120s" min:"1ms" max:"24h" desc:"Longest wait, unless the partner's Retry-After asks for more."`
	StatsRetention time.Duration `env:"STATS_RETENTION" envDefault:"1h" min:"1s" max:"720h" desc:"How long a tenant's congestion statistics are kept."`
}

// WorkerConfig says how jobs are fetched and run.
type WorkerConfig struct {
	Count               int           `env:"WORKER_COUNT" envDefault:"10" min:"1" max:"10000" unit:"jobs" desc:"Jobs that one worker process runs at once; it can be changed at run time."`
	Types               []string      `env:"WORKER_TYPES" check:"ids" desc:"Types of jobs that the worker takes; empty: all that it has a processor for, except NOOP."`
	Timeout             time.Duration `env:"WORKER_TIMEOUT" envDefault:"1s" min:"1ms" max:"1s" desc:"Longest blocking read, which a process that stops may have to wait for."`
	JobTimeout          time.Duration `env:"JOB_TIMEOUT" envDefault:"30s" min:"1ms" max:"24h" desc:"Longest run of a job, where its group asks for none."`
	MaxRetryCount       int           `env:"MAX_RETRY_COUNT" envDefault:"3" min:"0" max:"1000" unit:"retries" desc:"Retries after the first run, where the group asks for none."`
	MaxThrottles        int           `env:"MAX_THROTTLES" envDefault:"100" min:"0" max:"1000000" unit:"throttles" desc:"Refusals by a partner's rate limit before a job fails; they use no retry."`
	MaxDeliveries       int           `env:"MAX_DELIVERIES" envDefault:"5" min:"1" max:"1000" unit:"workers" desc:"Workers that may die while they run a job alone before it fails; they use no retry."`
	Lease               time.Duration `env:"LEASE" envDefault:"30s" min:"100ms" max:"1h" desc:"How long a job stays with a worker that gives no sign of life."`
	ShutdownGracePeriod time.Duration `env:"SHUTDOWN_GRACE_PERIOD" envDefault:"30s" min:"0s" max:"1h" desc:"How long running jobs may go on when the process is told to stop."`
	FetchInterval       time.Duration `env:"FETCH_INTERVAL" envDefault:"200ms" min:"1ms" max:"1m" desc:"Pause of the fetcher when nothing waits."`
	FetchBatchSize      int           `env:"FETCH_BATCH_SIZE" envDefault:"50" min:"1" max:"10000" unit:"jobs" desc:"Jobs that a fetch begins with; it grows under load. One script moves 200 at most."`
	NoProcessorTimeout  time.Duration `env:"NO_PROCESSOR_TIMEOUT" envDefault:"15m" min:"1s" max:"720h" desc:"How long jobs wait for a worker of their type before they fail with NO_PROCESSOR."`
}

// IngestConfig is about the HTTP API, and how much is taken in.
type IngestConfig struct {
	APIAddr              string  `env:"API_ADDR" envDefault:"127.0.0.1:8080" check:"addr" desc:"Address of the HTTP API. Port 0 picks a free one."`
	AllowUnauthenticated bool    `env:"API_ALLOW_UNAUTHENTICATED" envDefault:"false" desc:"Lets API_ADDR be beyond loopback although the API knows no authentication yet, and the admin address take changes from other hosts."`
	MaxBacklog           int     `env:"INGEST_MAX_BACKLOG" envDefault:"10000000" min:"1" max:"2000000000" unit:"jobs" desc:"Unfinished jobs from which on producers are told to come back later."`
	MaxMemoryRatio       float64 `env:"INGEST_MAX_MEMORY_RATIO" envDefault:"0.9" min:"0.01" max:"1" desc:"Share of Redis's maxmemory from which on producers are told to come back later."`
}

// RetentionConfig says how long things are kept.
type RetentionConfig struct {
	Groups          time.Duration `env:"GROUPS" envDefault:"168h" min:"1s" max:"87600h" desc:"Ended groups, with their counts and aggregates."`
	Results         time.Duration `env:"RESULTS" envDefault:"168h" min:"1s" max:"87600h" desc:"Results and failures of an ended group's jobs."`
	MessageIDs      time.Duration `env:"MESSAGE_IDS" envDefault:"24h" min:"1s" max:"87600h" desc:"Ids of messages, by which a repeated one is known."`
	IdempotencyKeys time.Duration `env:"IDEMPOTENCY_KEYS" envDefault:"24h" min:"1s" max:"87600h" desc:"Answers that an Idempotency-Key replays."`
	DeadLetters     time.Duration `env:"DEAD_LETTERS" envDefault:"720h" min:"1s" max:"87600h" desc:"Dead letters."`
	Events          time.Duration `env:"EVENTS" envDefault:"168h" min:"1s" max:"87600h" desc:"Announcements on the events stream."`
}

// AuditConfig says how often watchers hold the data against the laws of the audit.
type AuditConfig struct {
	Interval     time.Duration `env:"INTERVAL" envDefault:"1m" check:"seldom" desc:"Time between looks at the ledgers of open groups, and closer ones where something is suspicious. What they miss ends as LOST. 0: never."`
	DeepInterval time.Duration `env:"DEEP_INTERVAL" envDefault:"1h" check:"seldom" desc:"Time between looks at everything, at 4 MB/s at most. 0: never."`
}

// TelemetryConfig is about the admin address and logs; traces follow the standard OTEL_* variables.
type TelemetryConfig struct {
	AdminAddr string `env:"ADMIN_ADDR" envDefault:"127.0.0.1:0" check:"addr" desc:"Address of /healthz, /readyz and /metrics. Port 0 picks a free one and logs it, so that several roles can share a host."`
	LogLevel  string `env:"LOG_LEVEL" envDefault:"info" oneof:"debug,info,warn,error" desc:"Least severe lines that are logged."`
	LogFormat string `env:"LOG_FORMAT" envDefault:"json" oneof:"json,text" desc:"How lines are logged, to standard error."`
}
