package app

// meanings describes each variable of the structs in config.go, for docs/configuration.md and
// -help. The key is the variable's name without BULKACTION_.
var meanings = map[string]string{
	"REDIS_URL":           "Where Redis is. A comma list is a cluster.",
	"REDIS_POOL_MIN_IDLE": "Connections kept open while nothing happens.",
	"REDIS_POOL_MAX_ACTIVE": "Connections that the process opens at most; blocking reads have their own beside " +
		"them.",
	"REDIS_DIAL_TIMEOUT":    "Longest time to connect.",
	"REDIS_COMMAND_TIMEOUT": "Longest time to wait for a reply.",
	"REDIS_WAIT_REPLICAS": "Replicas that must have a write before a producer is told that it was accepted. " +
		"While fewer have it, producers get 503 and may repeat.",
	"KEY_PREFIX": "What every key begins with; each installation on one Redis has its own.",
	"PARTITIONS": "Shards that tenants are spread over; on a cluster 16 and more. Stored in Redis at the first " +
		"start; a process that is configured otherwise refuses to start.",

	"FAIR_QUEUE_ALPHA": "Weight of a group's progress in the priority formula.",
	"FAIR_QUEUE_POLICY": "How the next jobs are chosen: fair turns among tenants, or the priority formula over " +
		"all groups.",
	"FAIR_QUEUE_LANE_WEIGHTS": "Shares of the lanes high, normal and low while all have work.",

	"BACKPRESSURE_GLOBAL_RPS": "Permits a second, for all tenants together; 0: no limit.",
	"BACKPRESSURE_SHARE": "Each active tenant gets an equal part of the permits, or one by its weight. elastic: " +
		"what a tenant leaves is lent to others; static: it is not.",
	"BACKPRESSURE_LIMITER": "How permits are counted. fixed: at most so many in each aligned window; sliding: in " +
		"any span of that length; token: steadily, and at most a window's at once.",
	"BACKPRESSURE_RATE_LIMIT_WINDOW": "Length of a window, in whole milliseconds. It gets its part of the " +
		"permits a second, at least 1.",
	"BACKPRESSURE_READY_QUEUE_MAX_SIZE": "Jobs that a ready stream holds at most, started ones not counted.",
	"BACKPRESSURE_DISPATCH_INTERVAL":    "Pause of the dispatcher when nothing is due.",
	"BACKPRESSURE_DISPATCH_BATCH_SIZE": "Jobs that a dispatch cycle begins with; it grows under load. One script " +
		"moves 200 at most.",
	"BACKPRESSURE_DEFAULT_BACKOFF": "Wait before the first retry; it doubles with each attempt.",
	"BACKPRESSURE_MAX_BACKOFF":     "Longest wait before a retry.",

	"CONGESTION_ENABLED":         "Lets a tenant's waits grow with its own non-ready jobs.",
	"CONGESTION_BASE_BACKOFF":    "Shortest wait.",
	"CONGESTION_MAX_BACKOFF":     "Longest wait, unless the downstream API's Retry-After asks for more.",
	"CONGESTION_STATS_RETENTION": "How long a tenant's congestion statistics are kept.",

	"WORKER_COUNT": "Jobs that one worker process runs at once; it can be changed at run time.",
	"WORKER_TYPES": "Types of jobs that the worker takes; empty: all that it has a processor for, except " +
		"NOOP.",
	"WORKER_TIMEOUT":        "Longest blocking read, which a process that stops may have to wait for.",
	"JOB_TIMEOUT":           "Longest run of a job, where its group asks for none.",
	"MAX_RETRY_COUNT":       "Retries after the first run, where the group asks for none.",
	"MAX_THROTTLES":         "Refusals by a downstream API's rate limit before a job fails; they use no retry.",
	"MAX_DELIVERIES":        "Workers that may die while they run a job alone before it fails; they use no retry.",
	"LEASE":                 "How long a job stays with a worker that gives no sign of life.",
	"SHUTDOWN_GRACE_PERIOD": "How long running jobs may go on when the process is told to stop.",
	"FETCH_INTERVAL":        "Pause of the fetcher when nothing waits.",
	"FETCH_BATCH_SIZE":      "Jobs that a fetch begins with; it grows under load. One script moves 200 at most.",
	"NO_PROCESSOR_TIMEOUT":  "How long jobs wait for a worker of their type before they fail with NO_PROCESSOR.",

	"API_ADDR": "Address of the HTTP API. Port 0 picks a free one.",
	"API_ALLOW_UNAUTHENTICATED": "Lets API_ADDR be beyond loopback although the API knows no authentication yet, " +
		"and the admin address take changes from other hosts.",
	"INGEST_MAX_BACKLOG":      "Unfinished jobs from which on producers are told to come back later.",
	"INGEST_MAX_MEMORY_RATIO": "Share of Redis's maxmemory from which on producers are told to come back later.",

	"RETENTION_GROUPS":           "Ended groups, with their counts and aggregates.",
	"RETENTION_RESULTS":          "Results and failures of an ended group's jobs.",
	"RETENTION_MESSAGE_IDS":      "Ids of messages, by which a repeated one is known.",
	"RETENTION_IDEMPOTENCY_KEYS": "Answers that an Idempotency-Key replays.",
	"RETENTION_DEAD_LETTERS":     "Dead letters.",
	"RETENTION_EVENTS":           "Announcements on the events stream.",

	"AUDIT_INTERVAL": "Time between looks at the ledgers of open groups, and closer ones where something is " +
		"suspicious. What they miss ends as LOST. 0: never.",
	"AUDIT_DEEP_INTERVAL": "Time between looks at everything, at 4 MB/s at most. 0: never.",

	"ADMIN_ADDR": "Address of /healthz, /readyz and /metrics. Port 0 picks a free one and logs it, so that " +
		"several roles can share a host.",
	"LOG_LEVEL":  "Least severe lines that are logged.",
	"LOG_FORMAT": "How lines are logged, to standard error.",
}
