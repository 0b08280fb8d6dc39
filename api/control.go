package api

import (
	"encoding/json"
	"time"
)

// The reasons why a job is not running, in the order in which the server checks them: the first
// that applies is the answer.
const (
	WhyPaused      = "paused"       // the job's group, tenant or type is paused
	WhyScheduled   = "scheduled"    // the job was submitted with a start time that has not come
	WhyNoProcessor = "no_processor" // no live worker process serves the job's type
	WhyMissingRole = "missing_role" // no live process has a role that the job or group needs next
	WhyRetry       = "retry"        // the job's last attempt failed; the job waits for its next attempt
	WhyCongestion  = "congestion"   // a downstream API asked to wait before it is called again
	WhyResource    = "resource"     // something that the job needs is busy, such as an account
	WhyRate        = "rate"         // the rate limit of the tenant, of the type or of all jobs has no permit left
	WhyCapacity    = "capacity"     // all slots of the workers that serve the job's type are busy
	WhyInFlight    = "in_flight"    // as many jobs of its type or tenant are ready or running as may be
	WhyFairness    = "fairness"     // nothing holds the job up: other jobs are to be served before it
)

// Why says why a job is not running. Asked for a group, it is about the group's next job.
type Why struct {
	// Job is the id of the job that the answer is about. It is absent when no job of the group
	// waits to run (waiting, non-ready or ready).
	Job string `json:"job,omitempty"`
	// Key is the producer's own name of that job. It is absent if the job has none, and may be if
	// the job is non-ready after an attempt, or its place among the waiting jobs was not found.
	Key      string     `json:"key,omitempty"`
	Reason   string     `json:"reason,omitempty"`    // one of the constants Why…; absent when the job waits for nothing
	Detail   string     `json:"detail"`              // the reason as a sentence, for people
	Until    *time.Time `json:"until,omitempty"`     // the job does not start before this time
	PausedBy []string   `json:"paused_by,omitempty"` // those of "group", "tenant" and "type" that are paused
	Position *int64     `json:"position,omitempty"`  // known number of jobs that are to start before it
	// EstimateSeconds estimates the time until the job starts. It is the time until a known start,
	// or else the time for this job and those before it, at the rate at which the tenant's jobs end
	// now or the group's have ended so far. It is absent when unknown.
	EstimateSeconds *float64  `json:"estimate_seconds,omitempty"`
	Limit           *WhyLimit `json:"limit,omitempty"` // the rate limit without a permit; only with WhyRate
}

// WhyLimit is a rate limit whose next permit a job waits for.
type WhyLimit struct {
	// Scope is "tenant" (the tenant's own limit), "share" (its part of the global
	// limit), "type" (the limit of the job's type) or "global".
	Scope    string  `json:"scope"`
	RPS      float64 `json:"rps"`       // permits per second; with Scope global, those of all partitions
	WindowMS int64   `json:"window_ms"` // length of the limit's window
	// PerWindow is in permits per window; with Scope global, it counts those of the
	// tenant's partition.
	PerWindow    int64      `json:"per_window"`
	Used         int64      `json:"used"` // permits spent in the current window, counted as PerWindow
	NextPermitAt *time.Time `json:"next_permit_at,omitempty"`
}

// Paused is the answer to pausing and resuming a tenant or a type.
type Paused struct {
	ID     string            `json:"id"`
	Paused bool              `json:"paused"`
	Links  map[string]string `json:"links"`
}

// TenantSettings are a tenant's settings, which an operator sets. A field that is nil has its
// default.
type TenantSettings struct {
	// RPS is the tenant's own rate limit in permits per second, above 0 to 1e9.
	RPS *float64 `json:"rps,omitempty"`
	// Weight is the tenant's weight in the fair queue and in its share of the global limit, 0.001
	// to 1000; default 1.
	Weight *float64 `json:"weight,omitempty"`
	// BasePriority is added to the base priority of the tenant's groups; from -1e15 to 1e15.
	BasePriority *int64 `json:"base_priority,omitempty"`
	// InFlight is how many of the tenant's jobs may be ready or running at once, from 1 to 1e6.
	InFlight *int64 `json:"in_flight,omitempty"`
}

// TenantPatch changes some of a tenant's settings. The zero value of a field leaves the setting as
// it is; the fields' values are made with [SetTo] and [ToDefault].
type TenantPatch struct {
	RPS          Change[float64] `json:"rps,omitzero"`
	Weight       Change[float64] `json:"weight,omitzero"`
	BasePriority Change[int64]   `json:"base_priority,omitzero"`
	InFlight     Change[int64]   `json:"in_flight,omitzero"`
}

// Change is a change of one setting. Its JSON is the new value, or null for the default. The zero
// value means no change, but its JSON is null too: a struct field needs the option omitzero.
type Change[T any] struct {
	Given bool // false: the setting stays as it is
	Value *T   // nil: the setting gets its default
}

// SetTo returns the change that gives a setting this value.
func SetTo[T any](value T) Change[T] { return Change[T]{Given: true, Value: &value} }

// ToDefault returns the change that gives a setting its default.
func ToDefault[T any]() Change[T] { return Change[T]{Given: true} }

// MarshalJSON returns the value, or null.
func (c Change[T]) MarshalJSON() ([]byte, error) { return json.Marshal(c.Value) }

// UnmarshalJSON reads a value, or null.
func (c *Change[T]) UnmarshalJSON(b []byte) error {
	c.Given = true
	return json.Unmarshal(b, &c.Value)
}

// Tenant is a tenant's settings, and its queue and limits at the time of the request.
type Tenant struct {
	ID string `json:"id"`
	// RPS is null when the tenant has no limit of its own, only a share of the global one.
	RPS          *float64 `json:"rps"`
	Weight       float64  `json:"weight"`
	BasePriority *int64   `json:"base_priority"`
	Paused       bool     `json:"paused"`
	Active       bool     `json:"active"`     // the tenant is not paused and has jobs that want a permit
	Unfinished   int64    `json:"unfinished"` // jobs that have not ended
	NonReady     int64    `json:"non_ready"`  // jobs of these that are non-ready or suspended
	// InFlight is the bound of TenantSettings, null without one; InFlightNow is then how many of its
	// jobs count now, otherwise 0.
	InFlight      *int64       `json:"in_flight"`
	InFlightNow   int64        `json:"in_flight_now"`
	JobsPerSecond float64      `json:"jobs_per_second"` // how many of its jobs end per second now
	Window        TenantWindow `json:"window"`
	// ActiveTenants counts the active tenants in the tenant's partition, among which the
	// partition's part of the global limit is divided.
	ActiveTenants int64            `json:"active_tenants"`
	Congestion    TenantCongestion `json:"congestion"`
}

// TenantWindow is the current window of a tenant's rate limit and of the global one. In an
// installation with several partitions the global figures are those of the tenant's partition.
type TenantWindow struct {
	Limiter      string     `json:"limiter"`
	Share        string     `json:"share"`
	WindowMS     int64      `json:"window_ms"`
	Used         int64      `json:"used"`         // permits that the tenant has spent
	Limit        int64      `json:"limit"`        // permits of its own limit or its share; 0: no limit
	GlobalUsed   int64      `json:"global_used"`  // permits that all tenants of the partition have spent
	GlobalLimit  int64      `json:"global_limit"` // permits per window that these tenants may spend; 0: no limit
	NextPermitAt *time.Time `json:"next_permit_at,omitempty"`
}

// TenantCongestion counts why a tenant's jobs were delayed in recent time.
type TenantCongestion struct {
	Throttles int64 `json:"throttles"` // times a job became non-ready because the tenant had no permit
	// Returns counts the attempts after which a job became non-ready, because a downstream API
	// asked to wait or a transient error came. MeanWaitMS and LongestWaitMS are about the waits
	// after them.
	Returns       int64      `json:"returns"`
	MeanWaitMS    float64    `json:"mean_wait_ms"`
	LongestWaitMS int64      `json:"longest_wait_ms"`
	LastAt        *time.Time `json:"last_at,omitempty"`
}

// TenantList is a page of tenants, ordered by id, or the busiest tenants.
type TenantList struct {
	Tenants []Tenant `json:"tenants"`
	Cursor  string   `json:"cursor,omitempty"` // asks for the next page; empty on the last page
	// AsOf is the time of the oldest figure of the busiest tenants. It is nil in other lists, and
	// if no watcher has looked yet.
	AsOf *time.Time `json:"as_of,omitempty"`
}

// Guard is what Redis stores of a guard: its spec, members, queue and counters.
type Guard struct {
	Name     string           `json:"name"` // KIND/NAME
	Rev      int64            `json:"rev"`
	Spec     GuardSpec        `json:"spec"`
	Members  []GuardMember    `json:"members"` // none of a limiter
	Queue    GuardQueue       `json:"queue"`
	Counters map[string]int64 `json:"counters"` // granted, denied, queued, expired, stale, lost
	// Keys are keys of a limiter, at most 100, if they were asked for. MoreKeys: there may be others.
	Keys     []string `json:"keys,omitempty"`
	MoreKeys bool     `json:"more_keys,omitempty"`
}

// GuardSpec is a stored spec. Permits 0 means that there is no limit, Failures 0 that there is no
// breaker, and Concurrency 0 that the number of leases is unbounded.
type GuardSpec struct {
	Limiter     string `json:"limiter"` // none, sliding or token
	Permits     int64  `json:"permits"`
	WindowMS    int64  `json:"window_ms"`
	Burst       int64  `json:"burst"`
	Failures    int64  `json:"failures"`
	OpenForMS   int64  `json:"open_for_ms"`
	Successes   int64  `json:"successes"`
	Concurrency int64  `json:"concurrency"`
	LeaseMS     int64  `json:"lease_ms,omitempty"`
	MaxWaitMS   int64  `json:"max_wait_ms,omitempty"`
	MaxQueue    int64  `json:"max_queue,omitempty"`
}

// GuardMember is the state of a member.
type GuardMember struct {
	ID         string     `json:"id"`
	State      string     `json:"state"`   // free, cooling, busy or off
	Breaker    string     `json:"breaker"` // closed, open or half_open
	Failures   int64      `json:"failures"`
	OpenUntil  *time.Time `json:"open_until,omitempty"`
	Held       int64      `json:"held"`           // leases
	Left       *int64     `json:"left,omitempty"` // permits; absent without a limit
	NextAt     *time.Time `json:"next_at,omitempty"`
	LastUsedAt *time.Time `json:"last_used_at,omitempty"`
	Uses       int64      `json:"uses"`
}

// GuardQueue is the queue of a guard.
type GuardQueue struct {
	Length   int64 `json:"length"`
	OldestMS int64 `json:"oldest_ms"` // ms since the first call came, if its longest wait is MaxWait
}

// GuardList is a page of guards.
type GuardList struct {
	Guards []GuardSummary `json:"guards"`
	Cursor string         `json:"cursor,omitempty"` // for the next page; "" on the last one
}

// GuardSummary is a guard in a GuardList. The numbers are counts. Members that are neither free nor
// cooling are busy or off.
type GuardSummary struct {
	Name     string           `json:"name"` // KIND/NAME
	Rev      int64            `json:"rev"`
	Members  int64            `json:"members"`
	Free     int64            `json:"free"`
	Cooling  int64            `json:"cooling"`
	Leases   int64            `json:"leases"`
	Queue    int64            `json:"queue"`    // calls that wait
	Counters map[string]int64 `json:"counters"` // granted, denied, queued, expired, stale, lost
}

// GuardHealth is the state of the access to guards of the process that answers.
type GuardHealth struct {
	Healthy bool               `json:"healthy"` // Redis answers, and it can hold guards
	Redis   GuardRedisHealth   `json:"redis"`
	Pool    GuardPoolHealth    `json:"pool"`
	Guards  []GuardNamedHealth `json:"guards"` // the last 10,000 that this process has used; no limiters
}

// GuardRedisHealth is what Redis answers to PING and INFO. On a Cluster it describes one master.
type GuardRedisHealth struct {
	Reachable   bool    `json:"reachable"`
	Error       string  `json:"error,omitempty"`
	PingMS      float64 `json:"ping_ms"`
	Role        string  `json:"role,omitempty"`
	Evicts      bool    `json:"evicts"`       // it forgets keys when its memory is full
	MemoryRatio float64 `json:"memory_ratio"` // used memory / maxmemory; 0 without a maxmemory
}

// GuardPoolHealth is the connection pool of the Redis client.
type GuardPoolHealth struct {
	Total    uint32 `json:"total"`
	Idle     uint32 `json:"idle"`
	Stale    uint32 `json:"stale"`
	Timeouts uint32 `json:"timeouts"`
}

// GuardNamedHealth is the state of one guard.
type GuardNamedHealth struct {
	Name          string `json:"name"` // KIND/NAME
	Outage        bool   `json:"outage"`
	MembersUsable int64  `json:"members_usable"` // that could be lent by the last reply; -1 = not known yet
}

// GuardAction is the answer to an action of an operator on a member of a guard.
type GuardAction struct {
	Guard  string `json:"guard"` // KIND/NAME
	Member string `json:"member"`
	Action string `json:"action"` // disable, enable, open, close or take-back
}
