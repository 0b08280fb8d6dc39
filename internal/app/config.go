package app

import (
	"time"

	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

//go:generate go run ./gendocs

// Config is the configuration of a process, with a section for each part. [Load] reads it from the
// environment. The tags hold each variable's name, default and limits; the map meanings holds the
// description that -help and docs/configuration.md show.
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

// RedisConfig is the address of Redis and the settings of its connections.
type RedisConfig struct {
	URL            string        `env:"REDIS_URL" envDefault:"redis://127.0.0.1:6379/0" secret:"url" check:"redis"`
	PoolMinIdle    int           `env:"REDIS_POOL_MIN_IDLE" envDefault:"10" min:"0" max:"10000" unit:"connections"`
	PoolMaxActive  int           `env:"REDIS_POOL_MAX_ACTIVE" envDefault:"50" min:"1" max:"10000" unit:"connections"`
	DialTimeout    time.Duration `env:"REDIS_DIAL_TIMEOUT" envDefault:"5s" min:"1ms" max:"5m"`
	CommandTimeout time.Duration `env:"REDIS_COMMAND_TIMEOUT" envDefault:"3s" min:"1ms" max:"5m"`
	WaitReplicas   int           `env:"REDIS_WAIT_REPLICAS" envDefault:"0" min:"0" max:"16" unit:"replicas"`
	KeyPrefix      string        `env:"KEY_PREFIX" envDefault:"bulk-action:" check:"prefix"`
	Partitions     int           `env:"PARTITIONS" envDefault:"1" min:"1" max:"4096" unit:"partitions"`
}

// FairQueueConfig sets the order in which waiting jobs are admitted.
type FairQueueConfig struct {
	Alpha       float64 `env:"ALPHA" envDefault:"10000" min:"0" max:"1e15"`
	Policy      string  `env:"POLICY" envDefault:"fair" oneof:"fair,priority"`
	LaneWeights []int   `env:"LANE_WEIGHTS" envDefault:"6,3,1" check:"weights"`
}

// BackpressureConfig sets the rate limit and the bounds of the ready streams.
type BackpressureConfig struct {
	GlobalRPS         int           `env:"GLOBAL_RPS" envDefault:"10000" min:"0" max:"1000000000" unit:"jobs a second"`
	Share             string        `env:"SHARE" envDefault:"elastic" oneof:"elastic,static"`
	Limiter           string        `env:"LIMITER" envDefault:"fixed" oneof:"fixed,sliding,token"`
	RateLimitWindow   time.Duration `env:"RATE_LIMIT_WINDOW" envDefault:"1s" min:"10ms" max:"1h"`
	ReadyQueueMaxSize int           `env:"READY_QUEUE_MAX_SIZE" envDefault:"10000" min:"1" max:"10000000" unit:"jobs"`
	DispatchInterval  time.Duration `env:"DISPATCH_INTERVAL" envDefault:"100ms" min:"1ms" max:"1m"`
	DispatchBatchSize int           `env:"DISPATCH_BATCH_SIZE" envDefault:"100" min:"1" max:"10000" unit:"jobs"`
	DefaultBackoff    time.Duration `env:"DEFAULT_BACKOFF" envDefault:"1s" min:"1ms" max:"24h"`
	MaxBackoff        time.Duration `env:"MAX_BACKOFF" envDefault:"60s" min:"1ms" max:"24h"`
}

// CongestionConfig sets how long a job waits after a failed or throttled attempt.
type CongestionConfig struct {
	Enabled        bool          `env:"ENABLED" envDefault:"true"`
	BaseBackoff    time.Duration `env:"BASE_BACKOFF" envDefault:"1s" min:"1ms" max:"24h"`
	MaxBackoff     time.Duration `env:"MAX_BACKOFF" envDefault:"120s" min:"1ms" max:"24h"`
	StatsRetention time.Duration `env:"STATS_RETENTION" envDefault:"1h" min:"1s" max:"720h"`
}

// WorkerConfig sets how jobs are fetched and run.
type WorkerConfig struct {
	Count               int           `env:"WORKER_COUNT" envDefault:"10" min:"1" max:"10000" unit:"jobs"`
	Types               []string      `env:"WORKER_TYPES" check:"ids"`
	Timeout             time.Duration `env:"WORKER_TIMEOUT" envDefault:"1s" min:"1ms" max:"1s"`
	JobTimeout          time.Duration `env:"JOB_TIMEOUT" envDefault:"30s" min:"1ms" max:"24h"`
	MaxRetryCount       int           `env:"MAX_RETRY_COUNT" envDefault:"3" min:"0" max:"1000" unit:"retries"`
	MaxThrottles        int           `env:"MAX_THROTTLES" envDefault:"100" min:"0" max:"1000000" unit:"throttles"`
	MaxDeliveries       int           `env:"MAX_DELIVERIES" envDefault:"5" min:"1" max:"1000" unit:"workers"`
	Lease               time.Duration `env:"LEASE" envDefault:"30s" min:"100ms" max:"1h"`
	ShutdownGracePeriod time.Duration `env:"SHUTDOWN_GRACE_PERIOD" envDefault:"30s" min:"0s" max:"1h"`
	FetchInterval       time.Duration `env:"FETCH_INTERVAL" envDefault:"200ms" min:"1ms" max:"1m"`
	FetchBatchSize      int           `env:"FETCH_BATCH_SIZE" envDefault:"50" min:"1" max:"10000" unit:"jobs"`
	NoProcessorTimeout  time.Duration `env:"NO_PROCESSOR_TIMEOUT" envDefault:"15m" min:"1s" max:"720h"`
}

// IngestConfig sets the HTTP API's address and the bounds of backpressure.
type IngestConfig struct {
	APIAddr              string  `env:"API_ADDR" envDefault:"127.0.0.1:8080" check:"addr"`
	AllowUnauthenticated bool    `env:"API_ALLOW_UNAUTHENTICATED" envDefault:"false"`
	MaxBacklog           int     `env:"INGEST_MAX_BACKLOG" envDefault:"10000000" min:"1" max:"2000000000" unit:"jobs"`
	MaxMemoryRatio       float64 `env:"INGEST_MAX_MEMORY_RATIO" envDefault:"0.9" min:"0.01" max:"1"`
}

// RetentionConfig sets how long data of ended groups and messages is kept.
type RetentionConfig struct {
	Groups          time.Duration `env:"GROUPS" envDefault:"168h" min:"1s" max:"87600h"`
	Results         time.Duration `env:"RESULTS" envDefault:"168h" min:"1s" max:"87600h"`
	MessageIDs      time.Duration `env:"MESSAGE_IDS" envDefault:"24h" min:"1s" max:"87600h"`
	IdempotencyKeys time.Duration `env:"IDEMPOTENCY_KEYS" envDefault:"24h" min:"1s" max:"87600h"`
	DeadLetters     time.Duration `env:"DEAD_LETTERS" envDefault:"720h" min:"1s" max:"87600h"`
	Events          time.Duration `env:"EVENTS" envDefault:"168h" min:"1s" max:"87600h"`
}

// AuditConfig sets how often watchers check the data by the laws of the audit.
type AuditConfig struct {
	Interval     time.Duration `env:"INTERVAL" envDefault:"1m" check:"seldom"`
	DeepInterval time.Duration `env:"DEEP_INTERVAL" envDefault:"1h" check:"seldom"`
}

// TelemetryConfig sets the admin address and the logs. The standard OTEL_* variables set traces and
// pushed metrics.
type TelemetryConfig struct {
	AdminAddr string `env:"ADMIN_ADDR" envDefault:"127.0.0.1:0" check:"addr"`
	LogLevel  string `env:"LOG_LEVEL" envDefault:"info" oneof:"debug,info,warn,error"`
	LogFormat string `env:"LOG_FORMAT" envDefault:"json" oneof:"json,text"`
}
