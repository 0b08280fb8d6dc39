// Package api holds the JSON documents that the HTTP API and the brokers answer with, and some that
// they read, the errors of a store, the rule for ids, and the parser of traceparents. The server,
// the client and the command line share them. Submissions and appends are in the server's package
// messages; a producer builds them with package client.
package api

import (
	"encoding/json"
	"time"
)

// Status is a group's state.
type Status string

// The states of a group, in the order in which they follow each other. The last three are final.
const (
	StatusCreated     Status = "CREATED"
	StatusDispatched  Status = "DISPATCHED"
	StatusRunning     Status = "RUNNING"
	StatusAggregating Status = "AGGREGATING"
	StatusCompleted   Status = "COMPLETED"
	StatusFailed      Status = "FAILED"
	StatusCancelled   Status = "CANCELLED"
)

// Statuses are all states of a group.
var Statuses = []Status{
	StatusCreated, StatusDispatched, StatusRunning, StatusAggregating, StatusCompleted, StatusFailed, StatusCancelled,
}

// Ended reports whether the group is in a final state. The command retry can open another round
// after it.
func (s Status) Ended() bool {
	return s == StatusCompleted || s == StatusFailed || s == StatusCancelled
}

// Counts are the numbers of a group's jobs by state. Accepted is always the sum of the others.
type Counts struct {
	Accepted  int64 `json:"accepted"`
	Waiting   int64 `json:"waiting"`
	NonReady  int64 `json:"non_ready"`
	Ready     int64 `json:"ready"`
	InFlight  int64 `json:"in_flight"`
	Done      int64 `json:"done"`
	Failed    int64 `json:"failed"`
	Cancelled int64 `json:"cancelled"`
}

// Ended returns how many jobs are in a final state.
func (c Counts) Ended() int64 { return c.Done + c.Failed + c.Cancelled }

// Group is a bulk action as GET /v1/groups/{id} shows it.
type Group struct {
	ID          string `json:"id"`
	Tenant      string `json:"tenant"`
	Name        string `json:"name,omitempty"`
	Tags        Tags   `json:"tags,omitempty"`
	CallbackURL string `json:"callback_url,omitempty"`
	SubmittedBy string `json:"submitted_by,omitempty"` // id of the API key; absent: not known
	// RunAt to UniqueKeys are as in the submission; absent: the default.
	RunAt            *time.Time       `json:"run_at,omitempty"`
	MaxRetries       *int             `json:"max_retries,omitempty"`
	JobTimeout       string           `json:"job_timeout,omitempty"` // such as 30s
	FailureThreshold *float64         `json:"failure_threshold,omitempty"`
	UniqueKeys       bool             `json:"unique_keys,omitempty"`
	Type             string           `json:"type"`
	Priority         string           `json:"priority"`
	Status           Status           `json:"status"`
	Paused           bool             `json:"paused"`
	Sealed           bool             `json:"sealed"`
	Total            *int64           `json:"total,omitempty"` // number of jobs, when the producer announced it
	Round            int              `json:"round"`           // 1 at first; each retry adds 1
	Counts           Counts           `json:"counts"`
	FailuresByCode   map[string]int64 `json:"failures_by_code"`
	// Throttles counts how often a job of the group became non-ready because its tenant had no
	// permit.
	Throttles int64                      `json:"throttles"`
	Retries   int64                      `json:"retries"`
	Aggregate map[string]json.RawMessage `json:"aggregate"`
	// AggregateErrors says, by the aggregate's name, why an aggregate is null for good: its reducer
	// could not encode its state, refused it, or is unknown to the process that answers.
	AggregateErrors map[string]string `json:"aggregate_errors,omitempty"`
	// Timestamps says when the group entered each state of this round. The keys are the states in
	// lower case.
	Timestamps map[string]time.Time `json:"timestamps"`
	ETASeconds *float64             `json:"eta_seconds"` // until the group ends; null: there is no estimate
}

// GroupList is a page of groups, newest first.
type GroupList struct {
	Groups []Group `json:"groups"`
	Cursor string  `json:"cursor,omitempty"` // asks for the next page; empty on the last page
	// Scanned is how many groups this call has looked at. A call looks at 5,000 at most, so that a
	// filtered page may be short, or empty, although it has a cursor.
	Scanned int `json:"scanned"`
}

// Accepted is the answer to a submission, and to a command on a group.
type Accepted struct {
	ID     string `json:"id"`
	Status Status `json:"status"`
	// Counts are those of the submission's own jobs when they were accepted, or those of the group
	// right after a command.
	Counts Counts            `json:"counts"`
	Links  map[string]string `json:"links,omitempty"` // self (the group) and events
	// Only the answer to a submission has the next two fields.
	Tenant   string   `json:"tenant,omitempty"`   // the group's own id if no tenant was named
	Warnings []string `json:"warnings,omitempty"` // for people, such as why the group may not end
}

// LineError is a rejected line of a streamed append.
type LineError struct {
	Line  int64  `json:"line"`
	Error string `json:"error"`
}

// Appended is the answer to a streamed append.
type Appended struct {
	Accepted int64       `json:"accepted"`
	Rejected []LineError `json:"rejected"`
	// RejectedTotal counts all rejected lines. Rejected lists the first 1,000 of them.
	RejectedTotal int64 `json:"rejected_total"`
}

// Job is a job as GET /v1/groups/{id}/jobs/{ordinal} shows it.
type Job struct {
	ID      string `json:"id"`
	Group   string `json:"group"`
	Ordinal int64  `json:"ordinal"`
	// Key is the producer's own name of the job. It is present only if the job was requested by its
	// key, has failed, has a Result, or has Why with a Key.
	Key       string    `json:"key,omitempty"`
	Type      string    `json:"type,omitempty"` // absent where it is not known, as in a list
	State     string    `json:"state"`          // waiting, non_ready, ready, in_flight, done, failed, cancelled
	Attempts  int       `json:"attempts"`
	LastError *JobError `json:"last_error,omitempty"`
	// Errors are the errors of the latest attempts in this round, at most three, newest first:
	// LastError and those before it. Of a done job, only the last one is kept; a job of a list has
	// only LastError, and none if it is done.
	Errors []JobError      `json:"errors,omitempty"`
	Result json.RawMessage `json:"result,omitempty"` // of a done job; absent for a key that may not see it
	// StartedAt is when the last attempt started, RunSeconds how long it ran or has run, and Worker
	// the process: of a done job, and of a running one if its worker reports it.
	StartedAt  *time.Time `json:"started_at,omitempty"`
	RunSeconds *float64   `json:"run_seconds,omitempty"`
	Worker     string     `json:"worker,omitempty"`
	// AcceptedAt is when the job was accepted: of one that has failed or waits. Waits is what it has
	// waited for since, if it waits. EndedAt is when it ended, of one that is done or has failed.
	AcceptedAt *time.Time `json:"accepted_at,omitempty"`
	EndedAt    *time.Time `json:"ended_at,omitempty"`
	Waits      *JobWaits  `json:"waits,omitempty"`
	// Payload is that of a job that has failed or waits. PayloadHint says why it is absent.
	Payload     json.RawMessage `json:"payload,omitempty"`
	PayloadHint string          `json:"payload_hint,omitempty"`
	// ResultHint says where the result of a done job is, if Result and the fields that come with it
	// are absent.
	ResultHint string `json:"result_hint,omitempty"`
	// TraceID is the job's trace, 32 hex digits. It is present only if the job has failed and the
	// trace is recorded.
	TraceID string `json:"trace_id,omitempty"`
	// Waiting says why a job that may still run is not running: one of the constants Why….
	Waiting string     `json:"waiting,omitempty"`
	Until   *time.Time `json:"until,omitempty"` // the job does not start before this time
	Why     *Why       `json:"why,omitempty"`   // the same as Waiting and Until, with details
}

// JobWaits says for how long a job has waited before its attempts, by the reason: its turn among
// the jobs of all tenants, permits of rate limits, and delays after errors or busy services.
type JobWaits struct {
	TurnMS       int64 `json:"turn_ms"`
	RateMS       int64 `json:"rate_ms"`
	CongestionMS int64 `json:"congestion_ms"`
}

// JobList is a page of a group's jobs, in the order of their ordinals. Errors, Waiting, Until and
// Why are absent.
type JobList struct {
	Jobs   []Job  `json:"jobs"`
	Cursor string `json:"cursor,omitempty"` // of the next page; "": there is none
}

// JobStates are the states of a job.
var JobStates = []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"}

// JobError is the error with which an attempt of a job has ended, or why the attempt was deferred.
type JobError struct {
	Code    string    `json:"code"`
	Error   string    `json:"error"`
	Attempt int       `json:"attempt"`
	At      time.Time `json:"at"`
}

// Result is a line of GET /v1/groups/{id}/results: what the processor returned for one job.
type Result struct {
	Ordinal    int64           `json:"ordinal"`
	Key        string          `json:"key,omitempty"` // the producer's own name of the job
	DurationMS float64         `json:"duration_ms"`
	Attempts   int             `json:"attempts"`
	StartedMS  int64           `json:"started_ms,omitempty"` // start of the last attempt, ms since 1970; 0: not known
	Worker     string          `json:"worker,omitempty"`     // id of the process that ran it
	LastError  *JobError       `json:"last_error,omitempty"` // of the attempt before; nil: there was none
	Data       json.RawMessage `json:"data"`
}

// Failure is a line of GET /v1/groups/{id}/failures: why one job failed.
type Failure struct {
	Ordinal  int64     `json:"ordinal"`
	Key      string    `json:"key,omitempty"` // the producer's own name of the job
	Code     string    `json:"code"`
	Error    string    `json:"error"`
	Attempts int       `json:"attempts"`
	At       time.Time `json:"at"`
	// Payload and Type, that of the job, are present if payloads were asked for. A payload that is lost
	// is null, with PayloadLost.
	Payload     json.RawMessage `json:"payload,omitempty"`
	PayloadLost bool            `json:"payload_lost,omitempty"`
	Type        string          `json:"type,omitempty"`
}

// RetryChoice says which failed jobs of a group run again: those with one of the codes and those
// with one of the ordinals. The zero value stands for all failed jobs.
type RetryChoice struct {
	Codes []string `json:"codes,omitempty"` // at most 100 error codes
	Jobs  []int64  `json:"jobs,omitempty"`  // at most 1,000 ordinals
}

// DeadLetter is a job that failed, for example because it had no retry left or its error was
// permanent.
type DeadLetter struct {
	EntryID  string          `json:"entry_id"`
	Job      string          `json:"job"`
	Tenant   string          `json:"tenant"`
	Group    string          `json:"group"`
	Ordinal  int64           `json:"ordinal"`
	Key      string          `json:"key,omitempty"` // the producer's own name of the job
	Type     string          `json:"type"`
	Code     string          `json:"code"`
	Error    string          `json:"error"`
	Attempts int             `json:"attempts"`
	At       time.Time       `json:"at"`
	Payload  json.RawMessage `json:"payload,omitempty"`
}

// DeadLetterList is a page of dead letters, newest first.
type DeadLetterList struct {
	DeadLetters []DeadLetter `json:"dead_letters"`
	Cursor      string       `json:"cursor,omitempty"`
	// Scanned is how many dead letters this call has looked at. A call looks at 10,000 at most, so
	// that a page with a filter may be short, or empty, although it has a cursor.
	Scanned int `json:"scanned"`
}

// TypeStats are the numbers of jobs of one type by state, over all partitions.
type TypeStats struct {
	Type    string `json:"type"`
	Backlog int64  `json:"backlog"` // waiting + non-ready + ready
	// Runnable counts those of the backlog that may run now: ready ones, and waiting ones except those
	// of scheduled groups, of paused groups, tenants and types, and of tenants without a permit. Of a type
	// with more than 200 tenants in a partition, or a tenant with more than 200 groups, all waiting jobs count.
	Runnable int64 `json:"runnable"`
	Waiting  int64 `json:"waiting"`
	NonReady int64 `json:"non_ready"`
	Ready    int64 `json:"ready"`
	InFlight int64 `json:"in_flight"`
	Workers  int   `json:"workers"` // live worker processes that serve the type
	Paused   bool  `json:"paused"`
	// Totals count since the type's first job; they begin again if the type was idle for so long
	// that it was deleted.
	Totals JobTotals `json:"totals"`

	// StaleOutcomes counts reports of attempts that were not the job's current attempt. Such a
	// report changed nothing.
	StaleOutcomes int64 `json:"stale_outcomes"`
	// LeasesLost counts job leases that the worker renewed too late.
	LeasesLost int64 `json:"leases_lost"`
}

// Scale says how many slots a type's jobs could use, for autoscalers of workers.
type Scale struct {
	Type    string `json:"type"`    // of several types: their names with commas between them
	Backlog int64  `json:"backlog"` // as in TypeStats
	// Runnable is as in TypeStats: it leaves out jobs of tenants that have no permit now. Of many tenants
	// it looks at the busiest, and at a random sample.
	Runnable  int64   `json:"runnable"`
	MeanRunMS float64 `json:"mean_run_ms"` // 0: no job has run yet, or none may start
	// RateBound says that rates, or bounds of jobs in flight, let fewer jobs start within the drain time
	// than wait.
	RateBound bool  `json:"rate_bound"`
	SlotsNow  int64 `json:"slots_now"` // of live workers that serve the type
	// SlotsWanted is the jobs that may start within the drain time, with permits that come until then,
	// × mean run time / drain time, rounded up; at least the slots in use, and 1 while a job waits that is
	// not paused or scheduled. Non-ready jobs count when they are due. While RateBound, slots in use count
	// for the part of the drain time that a mean run takes.
	SlotsWanted int64 `json:"slots_wanted"`
	// Sample is nil if all tenants with waiting jobs were looked at.
	Sample *ScaleSample `json:"sample,omitempty"`
}

// ScaleSample says how exact a Scale is that looked at some of the tenants only. A tenant with jobs
// in several lanes counts in each.
type ScaleSample struct {
	Tenants  int64 `json:"tenants"`
	LookedAt int64 `json:"looked_at"`
	// Error is the half width of the 95% confidence interval of the jobs that may start, as part of them,
	// and at least the waiting jobs that those looked at don't explain.
	Error float64 `json:"error"`
}

// Drain times of Scale.
const (
	DefaultDrain = time.Minute
	MinDrain     = time.Second
	MaxDrain     = 24 * time.Hour
)

// MaxScaleTypes is the most types of one Scale.
const MaxScaleTypes = 100

// WorkerStatus describes one live worker process. Workers is its number of slots: Active of them
// run a job, Idle do not. CurrentJobs has the ids of up to 20 of these jobs.
type WorkerStatus struct {
	ID      string `json:"id"`
	Version string `json:"version,omitempty"` // of the program; absent: it does not report one
	// Layouts has, by the part of the data, the newest layout that the process reads.
	Layouts map[string]int `json:"layouts,omitempty"`
	// Limits are the global limits of its environment.
	Limits       *ConfiguredLimits `json:"limits,omitempty"`
	Types        []string          `json:"types"`
	Workers      int               `json:"workers"`
	Active       int               `json:"active"`
	Idle         int               `json:"idle"`
	CurrentJobs  []string          `json:"current_jobs"`
	ShuttingDown bool              `json:"shutting_down"`
	SeenAt       time.Time         `json:"seen_at"`
}

// MaxWorkers is the largest number of slots of a worker process.
const MaxWorkers = 10_000

// PoolSize is the number of slots that a worker process is to have, from 0 to MaxWorkers.
type PoolSize struct {
	ID      string `json:"id"`
	Workers int    `json:"workers"`
}

// StageStatus describes one live process of another role than worker. Counts has what the process
// has counted since it started. For a broker it has the number of streams now, and position_age_ms:
// how old the oldest positions are that it has shown last.
type StageStatus struct {
	ID      string            `json:"id"`
	Version string            `json:"version,omitempty"` // as in WorkerStatus
	Layouts map[string]int    `json:"layouts,omitempty"` // as in WorkerStatus
	Limits  *ConfiguredLimits `json:"limits,omitempty"`  // as in WorkerStatus
	Role    string            `json:"role"`
	Running bool              `json:"running"`
	Counts  map[string]int64  `json:"counts"`
	// Reducers are the names of the reducers that an aggregator or watcher has.
	Reducers []string  `json:"reducers,omitempty"`
	SeenAt   time.Time `json:"seen_at"`
}

// Roles are the names of the roles that every installation needs, in the order of the pipeline.
var Roles = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

// RoleBroker is the role that only an installation with a waiting room needs.
const RoleBroker = "broker"

// RoleStatus says how many processes of a role are alive.
type RoleStatus struct {
	Role      string `json:"role"`
	Processes int    `json:"processes"` // 0: none is alive
}

// Stats is the answer of GET /v1/stats.
type Stats struct {
	Partitions int `json:"partitions"`
	// Layouts has the number of the layout of each part of the data: jobs, rooms and guards.
	// A plus or minus behind it says that a migration is under way.
	Layouts       map[string]string `json:"layouts"`
	Groups        int64             `json:"groups"`
	ActiveTenants int64             `json:"active_tenants"`
	Types         []TypeStats       `json:"types"`
	Workers       []WorkerStatus    `json:"workers"`
	Stages        []StageStatus     `json:"stages"`
	// Roles has each of the six roles, also those without a live process, and the role broker if a
	// broker is alive.
	Roles     []RoleStatus `json:"roles"`
	RateLimit RateLimit    `json:"rate_limit"`
	// StartedPerSec is how many jobs the workers started per second, over the last seconds.
	StartedPerSec float64 `json:"started_per_second"`
	Rejected      int64   `json:"rejected_messages"` // entries of the stream ingest:rejected
	DeadLetters   int64   `json:"dead_letters"`
	// OldestWaiting is since when the next job of a busy tenant waits; absent: no job waits. It is at most
	// 30 s old.
	OldestWaiting *time.Time `json:"oldest_waiting,omitempty"`
	// Memory is the use of Redis's memory.
	Memory RedisMemory `json:"redis_memory"`
	// Totals are the sums over all types, also those that were deleted.
	Totals JobTotals `json:"totals"`
}

// RedisMemory is the memory that Redis uses, of the most that it may use; Max 0: no limit is set.
type RedisMemory struct {
	Used int64 `json:"used_bytes"`
	Max  int64 `json:"max_bytes"`
}

// RateLimit is the global rate limit and its use in the current window.
type RateLimit struct {
	Limiter  string `json:"limiter"`
	Share    string `json:"share"`
	RPS      int64  `json:"rps"` // permits per second; 0: no limit
	WindowMS int64  `json:"window_ms"`
	Used     int64  `json:"used"` // permits spent in the current window
}

// Event is an event of a group, on the stream events and on the SSE endpoint.
type Event struct {
	ID    string    `json:"id"`   // stays the same when the event is repeated
	Type  string    `json:"type"` // group.created, group.dispatched, …
	At    time.Time `json:"at"`
	Group *Group    `json:"group,omitempty"`
	// ReadAt is when the SSE endpoint read Group. In an event of a past status, only the status is
	// as it was at the time At; the counts are as of ReadAt. Events on the Redis stream "events"
	// have no ReadAt: their groups are as of At, except for error codes and aggregates, which may
	// be newer.
	ReadAt *time.Time `json:"read_at,omitempty"`
	// Omitted names the fields of the group that an event of GET /v1/groups/{id}/events leaves out
	// because they are large. GET /v1/groups/{id} has them.
	Omitted []string `json:"omitted,omitempty"`
}

// AuditEvent is the event audit.violation. Only the Redis stream "events" has it, not the SSE
// endpoint.
type AuditEvent struct {
	Event
	Violation Violation `json:"violation"`
}

// Violation is a group, job or key that breaks a law of the audit. It holds no payload.
type Violation struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`         // -1 when the violation is about a guard
	Group     string `json:"group"`             // "" when the violation is about a tenant, a type, a guard or an event
	Ordinal   *int64 `json:"ordinal,omitempty"` // nil when the violation is not about one job
	Detail    string `json:"detail"`
	// Count is the number of violations that this document stands for, when Detail summarizes many
	// ("and 900 more like these").
	Count int64 `json:"count,omitempty"`
	// Key identifies the violation: it stays the same while the counts in Detail change.
	Key string `json:"-"`
}

// AuditState is what the watchers have found when they last audited their partitions, as GET
// /v1/audit shows it.
type AuditState struct {
	// OK says that each partition has a leader and was looked at, and that no violation is open. It
	// says nothing about how long ago that was.
	OK         bool               `json:"ok"`
	Partitions []AuditedPartition `json:"partitions"`
	Violations []Violation        `json:"violations"` // open ones, at most 100
	ByLaw      map[string]int64   `json:"by_law"`     // open violations by law, also those that are not listed
}

// AuditedPartition says when a partition was last audited.
type AuditedPartition struct {
	Partition int    `json:"partition"`
	Leader    string `json:"leader,omitempty"` // the watcher process that leads it now; "": none
	// LookedAt is the time of the last incremental check, and DeepAt that of the last full audit;
	// nil: there was none.
	LookedAt *time.Time `json:"looked_at"`
	DeepAt   *time.Time `json:"deep_at"`
}

// RejectedMessage is a message of an ingest stream that ingest could not accept.
type RejectedMessage struct {
	ID        string     `json:"id"`                   // of its entry in the stream ingest:rejected
	At        *time.Time `json:"at,omitempty"`         // when it was rejected
	Reason    string     `json:"reason"`               // why ingest could not accept it
	Entry     string     `json:"entry,omitempty"`      // its entry in the stream ingest, which is deleted
	MessageID string     `json:"message_id,omitempty"` // the id that its producer gave it
	Type      string     `json:"type,omitempty"`       // such as group.submit
	Bytes     int64      `json:"bytes"`                // length of its data as it is stored
	Data      string     `json:"data,omitempty"`       // its body, only if asked for; the end of a long one is cut off
}

// RejectedList is a page of rejected messages, newest first.
type RejectedList struct {
	Rejected []RejectedMessage `json:"rejected"`
	Cursor   string            `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}

// Activity is one entry of the activity log: somebody changed something, or tried to.
type Activity struct {
	ID        string    `json:"id"` // of its entry in the stream activity
	At        time.Time `json:"at"`
	Actor     string    `json:"actor"`                // id of the API key, cli:USER, or anonymous: no authentication
	Role      string    `json:"role,omitempty"`       // of the key
	Via       string    `json:"via"`                  // one of the constants Via…
	IP        string    `json:"ip,omitempty"`         // of the client
	RequestID string    `json:"request_id,omitempty"` // X-Request-Id of the call
	Action    string    `json:"action"`               // such as group.cancel
	Object    string    `json:"object"`               // what was changed: its id, or user@event
	Tenant    string    `json:"tenant,omitempty"`     // the key's; absent: the key belongs to no tenant
	// Before and After are values of the changed object, such as its settings, before and after the
	// action, as far as they are known. Each is absent if it has more than 8 KiB.
	Before json.RawMessage `json:"before,omitempty"`
	After  json.RawMessage `json:"after,omitempty"`
	// Outcome is empty in the entry that is stored before the action. If the action fails, a second
	// entry has the error here, and the same request id if there is one. That entry can be lost.
	Outcome string `json:"outcome,omitempty"`
}

// Values of Activity.Via: how a change was asked for.
const (
	ViaAPI  = "api"
	ViaUI   = "ui"
	ViaCLI  = "cli" // a command that writes to Redis directly
	ViaFile = "file"
)

// ActivityList is a page of the activity log, newest first.
type ActivityList struct {
	Activity []Activity `json:"activity"`
	// Cursor asks for the next page; empty on the last page. One call looks at 10,000 entries at
	// most, so a filtered page may be short, or empty, although it has a cursor.
	Cursor  string `json:"cursor,omitempty"`
	Scanned int    `json:"scanned"` // entries that this call has looked at
}

// Key is an API key as GET /v1/keys shows it. It has no secret.
type Key struct {
	ID        string     `json:"id"`
	Role      string     `json:"role"`
	Tenant    string     `json:"tenant,omitempty"` // * for a producer of all tenants; "" for none
	Payloads  bool       `json:"payloads"`         // its holder sees payloads, results' data and error texts
	Name      string     `json:"name,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by,omitempty"` // the id of a key, or cli:USER
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // absent: never
	// LastUsedDay is the last day (UTC) on which the key was used, such as 2026-11-25; absent: it
	// was not used yet.
	LastUsedDay string `json:"last_used_day,omitempty"`
	ReplacedBy  string `json:"replaced_by,omitempty"` // id of the key that replaces it after a rotation
}

// KeyList is a page of API keys, the oldest first.
type KeyList struct {
	Keys   []Key  `json:"keys"`
	Cursor string `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}

// KeyRequest says which API key to create.
type KeyRequest struct {
	Role     string `json:"role"`
	Tenant   string `json:"tenant,omitempty"`
	Payloads *bool  `json:"payloads,omitempty"` // nil: as the role has it
	Name     string `json:"name,omitempty"`     // for people, at most 128 characters
	// ExpiresInSeconds is the lifetime of the key, at least a minute; 0: it does not expire.
	ExpiresInSeconds int64 `json:"expires_in_seconds,omitempty"`
}

// NewKey is the answer to the creation of an API key. It is the only one that has the secret.
type NewKey struct {
	Secret string `json:"key"`
	Key
}

// KeyRevoked is the answer to the revocation of an API key.
type KeyRevoked struct {
	ID      string `json:"id"`
	Revoked bool   `json:"revoked"`
}

// JobTotals count what has happened to jobs: to those of all types since the installation exists,
// or to those of one type (see TypeStats.Totals).
type JobTotals struct {
	Accepted  int64 `json:"accepted"`  // jobs that were accepted
	Started   int64 `json:"started"`   // times that a job was started
	Done      int64 `json:"done"`      // jobs that were done
	Failed    int64 `json:"failed"`    // times that a job failed
	Retried   int64 `json:"retried"`   // times that a job was retried after an error
	Throttled int64 `json:"throttled"` // times that a job became non-ready because its tenant had no permit
}

// Gauges are figures of the installation at one time.
type Gauges struct {
	Waiting       int64 `json:"waiting"` // jobs, as in the next three fields
	NonReady      int64 `json:"non_ready"`
	Ready         int64 `json:"ready"`
	InFlight      int64 `json:"in_flight"`
	ActiveTenants int64 `json:"active_tenants"`
	Pool          int64 `json:"pool"` // slots of all live workers
	Busy          int64 `json:"busy"` // slots that run a job
}

// HistoryPoint is a point of the history. Accepted to Throttled are per second, on average since
// the point before. The other figures are of the time T.
type HistoryPoint struct {
	T         time.Time `json:"t"`
	Accepted  float64   `json:"accepted"`
	Started   float64   `json:"started"`
	Done      float64   `json:"done"`
	Failed    float64   `json:"failed"`
	Retried   float64   `json:"retried"`
	Throttled float64   `json:"throttled"`
	Gauges
	// StartDelayP50MS and StartDelayP99MS are of the jobs that started in the time before T: from when
	// a job may start until it does. Absent: none started.
	StartDelayP50MS *float64 `json:"start_delay_p50_ms,omitempty"`
	StartDelayP99MS *float64 `json:"start_delay_p99_ms,omitempty"`
}

// TenantHistory is the answer of GET /v1/tenants/{id}/history. Only the busiest tenants have points,
// for the times at which they were among them.
type TenantHistory struct {
	StepSeconds int                  `json:"step_seconds"`
	Points      []TenantHistoryPoint `json:"points"` // the oldest first
}

// TenantHistoryPoint has the figures of a tenant at the time T.
type TenantHistoryPoint struct {
	T             time.Time `json:"t"`
	Unfinished    int64     `json:"unfinished"`
	NonReady      int64     `json:"non_ready"`
	JobsPerSecond float64   `json:"jobs_per_second"`
}

// History is the answer of GET /v1/history.
type History struct {
	// StepSeconds is the usual time between two points: 10, or a multiple of it where there would
	// be more than 1,500 points.
	StepSeconds int            `json:"step_seconds"`
	Points      []HistoryPoint `json:"points"` // the oldest first
}

// The shortest and the longest time, in minutes, for which GET /v1/history can be asked.
const (
	MinHistoryMinutes = 15
	MaxHistoryMinutes = 1440
)

// JobMap counts the jobs of a group by state, in ranges of their ordinals (GET
// /v1/groups/{id}/map).
type JobMap struct {
	Jobs    int64       `json:"jobs"` // the group's jobs
	Buckets []MapBucket `json:"buckets"`
}

// MapBucket counts the jobs of a range of ordinals by their state.
type MapBucket struct {
	From      int64 `json:"from"` // the first ordinal
	To        int64 `json:"to"`   // the last ordinal
	Waiting   int64 `json:"w"`
	NonReady  int64 `json:"n"`
	Ready     int64 `json:"r"`
	InFlight  int64 `json:"i"`
	Done      int64 `json:"d"`
	Failed    int64 `json:"f"`
	Cancelled int64 `json:"c"`
}

// FailureSummary counts the failed jobs of a group by error code, and by what their errors have in
// common (GET /v1/groups/{id}/failures/summary).
type FailureSummary struct {
	Total int64         `json:"total"` // failed jobs
	Seen  int64         `json:"seen"`  // how many of them were read, 5,000 at most
	Codes []FailureCode `json:"codes"` // the 100 most frequent, the most frequent first
}

// FailureCode counts the failed jobs with one error code. For an API key that may not see errors,
// Fingerprints is empty.
type FailureCode struct {
	Code         string               `json:"code"`
	Count        int64                `json:"count"`
	Fingerprints []FailureFingerprint `json:"fingerprints"` // the 20 most frequent, the most frequent first
}

// FailureFingerprint counts the failed jobs whose errors differ only in variable parts, such as
// digits, UUIDs and names of hosts.
type FailureFingerprint struct {
	Text string `json:"text"` // the error with these parts replaced
	// Count is the number of such jobs; an estimate if not all failed jobs were read.
	Count   int64           `json:"count"`
	Sampled int64           `json:"sampled"` // how many such jobs were read
	Samples []FailureSample `json:"samples"` // 5 at most
}

// FailureSample is one of the failed jobs with a fingerprint. Of an error of more than 500 bytes it
// has the beginning.
type FailureSample struct {
	Ordinal int64     `json:"ordinal"`
	At      time.Time `json:"at"`
	Error   string    `json:"error"`
}

// Deletion is the answer to the deletion of a group.
type Deletion struct {
	ID      string `json:"id"`
	Deleted bool   `json:"deleted"`
}

// Erasure says what a call has erased of the jobs with a key.
type Erasure struct {
	Tenant string `json:"tenant"`
	Groups int    `json:"groups"` // that the call has looked at
	Erased int    `json:"erased"` // jobs
	// Left are jobs that could not be erased yet: repeat the erasure when they have ended.
	Left []ErasureLeft `json:"left"`
	Next string        `json:"next,omitempty"` // cursor of the next call; "": all groups were looked at
}

// ErasureLeft is a job that was not erased, or a group in which jobs may be left.
type ErasureLeft struct {
	Group   string `json:"group"`
	Ordinal *int64 `json:"ordinal,omitempty"` // nil: it is not known which
	Reason  string `json:"reason"`            // one of the Left constants
}

// Reasons of an ErasureLeft.
const (
	LeftRunning = "running"  // a worker runs the job, or its result is being reduced
	LeftNoIndex = "no_index" // the group has not ended, and has no unique keys by which its jobs could be found
)
