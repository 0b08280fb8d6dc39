package messages

import (
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// JobQuery selects a page of a group's jobs. With Key it selects only the job with this key, if
// there is one. An empty State matches every job; an empty Cursor means the first page.
type JobQuery struct {
	State, Key, Cursor string
	Code               string // only jobs that have failed with this error code
	Limit              int    // 1 to 1,000
}

// DeadLetterQuery selects a page of dead letters. An empty Tenant, Group, Type or Code matches
// every dead letter. Older ones than Since are left out, unless Since is zero. An empty Cursor
// means the first page.
type DeadLetterQuery struct {
	Tenant, Group, Type, Code string
	Since                     time.Time
	Cursor                    string
	Limit                     int // 1 to 1,000
}

// ListQuery selects a page of the list of groups. An empty filter matches every group; an empty
// Cursor means the first page.
type ListQuery struct {
	Tenant string
	Status api.Status
	Type   string // the group's, or that of one of its jobs
	Paused *bool  // whether the group itself is paused
	// FailedJobs: true selects groups with at least one failed job, false those without, whatever
	// their status is.
	FailedJobs *bool
	Tags       api.Tags  // all of them
	Prefix     string    // the beginning of the id
	Brief      bool      // look at few groups, for a text that is being typed
	Name       string    // the whole name
	Since      time.Time // the group was created then or later
	Cursor     string
	Limit      int // 1 to 1,000
}

// FailureQuery selects failed jobs of a group: with Limit 0 all of them, otherwise a page.
type FailureQuery struct {
	Code     string // "": any
	Payloads bool   // with the payloads of the jobs
	Cursor   string // of a page: where the page before ended
	Limit    int    // 0: all; up to 1,000
}
