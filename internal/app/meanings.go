package app

// meanings describes each variable of the structs in config.go, for docs/configuration.md and
// -help. The key is the variable's name without BULKACTION_.
var meanings = map[string]string{
	"REDIS_URL": "Address of Redis. A list of hosts, with commas between them, is a " +
		"cluster.",
	"REDIS_POOL_MIN_IDLE": "Idle connections that are kept open.",
	"REDIS_POOL_MAX_ACTIVE": "Most connections that the process opens, without those of blocking " +
		"reads.",
	"REDIS_DIAL_TIMEOUT":    "Longest time to connect.",
	"REDIS_COMMAND_TIMEOUT": "Longest time to wait for a reply.",
	"REDIS_WAIT_REPLICAS": "Replicas that must have a write before its producer gets the " +
		"answer \"accepted\". While fewer have it, producers get 503 and may repeat the request.",
	"KEY_PREFIX": "Prefix of all keys. Installations that share one Redis need " +
		"different prefixes.",
	"PARTITIONS": "Number of partitions, among which tenants are divided; on a " +
		"cluster at least 16. The first process stores it in Redis; a process with another number refuses to " +
		"start.",

	"FAIR_QUEUE_ALPHA": "Weight of a group's progress in the priority formula.",
	"FAIR_QUEUE_POLICY": "How the next jobs are chosen: fair shares of the tenants, or the " +
		"priority formula over all groups.",
	"FAIR_QUEUE_LANE_WEIGHTS": "Shares of the lanes high, normal and low while all three have " +
		"waiting jobs.",

	"BACKPRESSURE_GLOBAL_RPS": "Global rate limit, in permits per second for all tenants together; " +
		"0: no limit.",
	"BACKPRESSURE_SHARE": "How active tenants share the global limit, by their weights. " +
		"elastic: other tenants may borrow the unused part of a share; static: they may not.",
	"BACKPRESSURE_LIMITER": "How permits are counted. fixed: the limit holds in each aligned " +
		"window; sliding: it holds in every time span of a window's length; token: permits come at a steady rate, " +
		"and at most those of one window can be saved.",
	"BACKPRESSURE_RATE_LIMIT_WINDOW": "Length of a window, in whole milliseconds. A window has the " +
		"permits per second times its length, at least 1.",
	"BACKPRESSURE_READY_QUEUE_MAX_SIZE": "Largest number of jobs in a ready stream, without started jobs.",
	"BACKPRESSURE_DISPATCH_INTERVAL":    "Longest pause of the dispatcher while jobs are non-ready.",
	"BACKPRESSURE_DISPATCH_BATCH_SIZE": "Jobs that one script call promotes, at first; the number grows " +
		"under load, to 200 at most.",
	"BACKPRESSURE_DEFAULT_BACKOFF": "Wait before the first retry; the wait doubles with each retry.",
	"BACKPRESSURE_MAX_BACKOFF":     "Longest wait before a retry.",

	"CONGESTION_ENABLED": "Lets the wait after a failed or throttled attempt grow with the " +
		"number of non-ready jobs of the tenant.",
	"CONGESTION_BASE_BACKOFF": "Shortest wait after such an attempt, unless the downstream API has " +
		"named a time.",
	"CONGESTION_MAX_BACKOFF": "Longest wait after such an attempt, unless the downstream API has " +
		"named a time.",
	"CONGESTION_STATS_RETENTION": "How long a tenant's congestion statistics are kept.",

	"WORKER_COUNT": "Jobs that one worker process runs at once: its slots. The number " +
		"can be changed at run time.",
	"WORKER_TYPES": "Job types that the worker serves; empty: all types for which it " +
		"has a processor, except NOOP.",
	"WORKER_TIMEOUT": "Longest blocking read. A process that stops may have to wait for " +
		"its end.",
	"JOB_TIMEOUT":     "Longest run of an attempt, if the group sets no timeout.",
	"MAX_RETRY_COUNT": "Retries after the first attempt, if the group sets no number.",
	"MAX_THROTTLES": "Throttles of a job by downstream APIs before it fails; they use no " +
		"retry.",
	"MAX_DELIVERIES": "Workers that may die while they run a job alone before the job " +
		"fails; these deaths use no retry.",
	"LEASE": "Length of a job lease: a worker that is silent for so long loses " +
		"its jobs.",
	"SHUTDOWN_GRACE_PERIOD": "How long running jobs may continue after the process was told to " +
		"stop.",
	"FETCH_INTERVAL": "Longest pause of the fetcher while no jobs wait.",
	"FETCH_BATCH_SIZE": "Jobs that one script call admits, at first; the number grows under " +
		"load, to 200 at most.",
	"NO_PROCESSOR_TIMEOUT": "How long jobs wait for a worker of their type before they fail " +
		"with NO_PROCESSOR.",

	"API_ADDR": "Address of the HTTP API. Port 0 chooses a free port.",
	"API_ALLOW_UNAUTHENTICATED": "Allows an API_ADDR that is not loopback, although the API has no " +
		"authentication, and allows changes from other hosts on the admin address.",
	"INGEST_MAX_BACKLOG": "Number of unfinished jobs from which on submissions are refused " +
		"with 429.",
	"INGEST_MAX_MEMORY_RATIO": "Part of Redis's maxmemory from which on submissions are refused " +
		"with 429.",

	"RETENTION_GROUPS":      "Ended groups, with their counts and aggregates.",
	"RETENTION_RESULTS":     "Results and failures of an ended group's jobs.",
	"RETENTION_MESSAGE_IDS": "Message ids, by which repeated messages are recognized.",
	"RETENTION_IDEMPOTENCY_KEYS": "Answers that are given again to a request with the same " +
		"Idempotency-Key.",
	"RETENTION_DEAD_LETTERS": "Dead letters.",
	"RETENTION_EVENTS":       "Events on the stream events.",

	"AUDIT_INTERVAL": "Time between incremental checks of open groups; it is shorter " +
		"while a job seems to be missing. A job that stays missing ends as LOST. 0: no audits at all.",
	"AUDIT_DEEP_INTERVAL": "Time between full audits, which read at most 4 MB/s. 0: no full " +
		"audits.",

	"ADMIN_ADDR": "Address of /healthz, /readyz and /metrics. Port 0 chooses a free " +
		"port and logs it, so that several roles can run on one host.",
	"LOG_LEVEL":  "Lowest level of log lines that are written.",
	"LOG_FORMAT": "Format of log lines on standard error.",
}
