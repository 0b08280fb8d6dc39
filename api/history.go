package api

import "time"

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
