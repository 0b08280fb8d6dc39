package api

import "time"

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
