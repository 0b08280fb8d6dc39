package api

import "time"

// Guard is what Redis stores of a guard: its spec, members, queue and counters.
type Guard struct {
	Name     string           `json:"name"` // KIND/NAME
	Rev      int64            `json:"rev"`
	Spec     GuardSpec        `json:"spec"`
	Members  []GuardMember    `json:"members"`
	Queue    GuardQueue       `json:"queue"`
	Counters map[string]int64 `json:"counters"` // granted, denied, queued, expired, stale, lost
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

// GuardAction is the answer to an action of an operator on a member of a guard.
type GuardAction struct {
	Guard  string `json:"guard"` // KIND/NAME
	Member string `json:"member"`
	Action string `json:"action"` // disable, enable, open, close or take-back
}
