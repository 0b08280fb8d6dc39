package api

import "time"

// The reasons why a job is not running, in the order in which they are looked for.
const (
	WhyPaused      = "paused"       // its group, tenant or type is
	WhyScheduled   = "scheduled"    // its time has not come
	WhyNoProcessor = "no_processor" // no live worker serves its type
	WhyRetry       = "retry"        // it failed and waits for its next attempt
	WhyCongestion  = "congestion"   // a partner has asked for patience
	WhyRate        = "rate"         // its tenant, or everybody, has used up the limit
	WhyFairness    = "fairness"     // others come first
)

// Why is why a job, or the next job of a group, is not running.
type Why struct {
	// whose answer it is; absent when a group has no job that waits
	Job             string     `json:"job,omitempty"`
	Reason          string     `json:"reason,omitempty"`    // absent when nothing is waited for
	Detail          string     `json:"detail"`              // the same as a sentence
	Until           *time.Time `json:"until,omitempty"`     // not before
	PausedBy        []string   `json:"paused_by,omitempty"` // group, tenant, type: those that are paused
	Position        *int64     `json:"position,omitempty"`
	EstimateSeconds *float64   `json:"estimate_seconds,omitempty"` // until it starts, at its tenant's present rate
	Limit           *WhyLimit  `json:"limit,omitempty"`            // that it waits for
}

// WhyLimit is the rate limit that a job waits for.
type WhyLimit struct {
	Scope        string     `json:"scope"` // tenant (its own), share or global
	RPS          float64    `json:"rps"`   // permits a second
	WindowMS     int64      `json:"window_ms"`
	PerWindow    int64      `json:"per_window"`
	Used         int64      `json:"used"`
	NextPermitAt *time.Time `json:"next_permit_at,omitempty"`
}

// Paused is the answer to pausing and resuming a tenant or a type.
type Paused struct {
	ID     string            `json:"id"`
	Paused bool              `json:"paused"`
	Links  map[string]string `json:"links"`
}

// TenantSettings are what an operator sets for a tenant; nil is the default.
type TenantSettings struct {
	RPS          *float64 `json:"rps,omitempty"`           // permits a second of its own, above 0 and up to 1e9
	Weight       *float64 `json:"weight,omitempty"`        // 0.001 to 1000; 1 by default
	BasePriority *int64   `json:"base_priority,omitempty"` // within ±1e15, added to that of its groups
}

// Tenant is a customer's part in the flow right now.
type Tenant struct {
	ID            string           `json:"id"`
	RPS           *float64         `json:"rps"` // null: its share of the global limit
	Weight        float64          `json:"weight"`
	BasePriority  *int64           `json:"base_priority"`
	Paused        bool             `json:"paused"`
	Active        bool             `json:"active"`     // it has jobs that could run now
	Unfinished    int64            `json:"unfinished"` // jobs that have not ended
	NonReady      int64            `json:"non_ready"`  // of these, parked until a time
	JobsPerSecond float64          `json:"jobs_per_second"`
	Window        TenantWindow     `json:"window"`
	ActiveTenants int64            `json:"active_tenants"` // that share the limits with it
	Congestion    TenantCongestion `json:"congestion"`
}

// TenantWindow is the current window of the rate limit. A limit of 0 is none.
type TenantWindow struct {
	Limiter      string     `json:"limiter"`
	Share        string     `json:"share"`
	WindowMS     int64      `json:"window_ms"`
	Used         int64      `json:"used"`         // permits that the tenant has spent
	Limit        int64      `json:"limit"`        // its own
	GlobalUsed   int64      `json:"global_used"`  // by all tenants that share it
	GlobalLimit  int64      `json:"global_limit"` // of all of these
	NextPermitAt *time.Time `json:"next_permit_at,omitempty"`
}

// TenantCongestion is what a tenant's jobs have lately waited for.
type TenantCongestion struct {
	Throttles     int64      `json:"throttles"` // times one was sent to non-ready for want of a permit
	Returns       int64      `json:"returns"`   // times one came back from a partner's refusal or a transient error
	MeanWaitMS    float64    `json:"mean_wait_ms"`
	LongestWaitMS int64      `json:"longest_wait_ms"`
	LastAt        *time.Time `json:"last_at,omitempty"`
}

// TenantList is a page of tenants by id.
type TenantList struct {
	Tenants []Tenant `json:"tenants"`
	Cursor  string   `json:"cursor,omitempty"` // pass it on for the next page; empty on the last
}
