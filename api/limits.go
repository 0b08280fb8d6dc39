package api

import "time"

// Limits is what limits the start of jobs: the limits of all jobs together, and those of types. The
// settings of tenants are in [Tenant].
type Limits struct {
	Global GlobalLimits `json:"global"`
	// Types has each type with a limit of its own.
	Types    map[string]TypeLimits `json:"types"`
	Limiter  string                `json:"limiter"`   // fixed, sliding or token
	WindowMS int64                 `json:"window_ms"` // permits are counted in windows of this length
	// AppliedAt is when the last change took effect in all partitions; absent: there was none yet, or
	// it has not taken effect. PendingPartitions are those in which it has not.
	AppliedAt         *time.Time `json:"applied_at,omitempty"`
	PendingPartitions []int      `json:"pending_partitions,omitempty"`
	// ProcessesThatDiffer has all processes, if their environments have different values of the
	// global settings: rps and share of the leader among the fetchers then are in effect, as far as
	// the API has not set others, and each worker uses its own backoffs.
	ProcessesThatDiffer []ProcessLimits `json:"processes_that_differ"`
}

// GlobalLimits are the settings that can be changed while processes run, by their names in
// [GlobalPatch].
type GlobalLimits struct {
	RPS            LimitSetting[int64]  `json:"rps"`             // permits a second; 0: no limit
	Share          LimitSetting[string] `json:"share"`           // static or elastic
	DefaultBackoff LimitSetting[string] `json:"default_backoff"` // such as 1s
	MaxBackoff     LimitSetting[string] `json:"max_backoff"`
}

// LimitSetting is a setting's value in the environment of the process that answers, and the value
// in effect. Source is one of SourceEnvironment and SourceAPI.
type LimitSetting[T any] struct {
	Configured T      `json:"configured"`
	Effective  T      `json:"effective"`
	Source     string `json:"source"`
}

// Values of LimitSetting.Source: where the value in effect comes from.
const (
	SourceEnvironment = "environment"
	SourceAPI         = "api"
)

// ConfiguredLimits are the global settings in the environment of a process.
type ConfiguredLimits struct {
	RPS            int64  `json:"rps"`
	Share          string `json:"share"`
	DefaultBackoff string `json:"default_backoff"`
	MaxBackoff     string `json:"max_backoff"`
}

// ProcessLimits are the configured settings of one live process.
type ProcessLimits struct {
	ID   string `json:"id"`
	Role string `json:"role"`
	ConfiguredLimits
}

// TypeLimits are the limits of a type over all processes; a nil one does not exist. InFlightNow is
// how many of its jobs are ready or running: those that InFlight counts.
type TypeLimits struct {
	RPS         *int64 `json:"rps,omitempty"` // permits a second
	InFlight    *int64 `json:"in_flight,omitempty"`
	InFlightNow int64  `json:"in_flight_now"`
}

// LimitsPatch changes some of the global limits. With [ToDefault] the value of the environment
// holds again.
type LimitsPatch struct {
	Global GlobalPatch `json:"global"`
}

// GlobalPatch is the part of [LimitsPatch] about all jobs together. Backoffs are durations such as
// 500ms, from 1ms to 24h.
type GlobalPatch struct {
	RPS            Change[int64]  `json:"rps,omitzero"`   // 0 to 1e9; 0: no limit
	Share          Change[string] `json:"share,omitzero"` // static or elastic
	DefaultBackoff Change[string] `json:"default_backoff,omitzero"`
	MaxBackoff     Change[string] `json:"max_backoff,omitzero"`
}

// TypePatch changes limits of a type. With [ToDefault] a limit ends.
type TypePatch struct {
	RPS      Change[int64] `json:"rps,omitzero"`       // 1 to 1e9
	InFlight Change[int64] `json:"in_flight,omitzero"` // 1 to 1e6
}

// MaxLimitedTypes is how many types may have limits of their own.
const MaxLimitedTypes = 64
