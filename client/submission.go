package client

import (
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/client/internal/submission"
)

// The lanes that Submission.Priority can name. A higher lane gets more capacity; a lower lane still
// gets some.
const (
	PriorityHigh   = "high"
	PriorityNormal = "normal"
	PriorityLow    = "low"
)

// Submission is a group to be created, with jobs or without. Only Type is required. The API shows
// the group as an api.Group.
type Submission struct {
	// ID matches ^[A-Za-z0-9._-]{1,128}$ and is neither . nor .. For an empty ID, the server or
	// the producer generates one.
	ID string `json:"id,omitempty"`
	// Tenant is the tenant whose share and limits the group uses. If it is empty, the group is its
	// own tenant.
	Tenant       string  `json:"tenant,omitempty"`
	Name         string  `json:"name,omitempty"`     // a name for people, up to 256 bytes
	Type         string  `json:"type"`               // job type: names the processor that runs the jobs
	Priority     string  `json:"priority,omitempty"` // PriorityHigh, PriorityNormal (when empty) or PriorityLow
	BasePriority float64 `json:"base_priority,omitempty"`
	MaxRetries   *int    `json:"max_retries,omitempty"` // number of retries; nil: the workers' default
	// JobTimeout is the timeout of one attempt; 0: the workers' default.
	JobTimeout time.Duration `json:"-"`
	RunAt      *time.Time    `json:"run_at,omitempty"` // the group's jobs do not start before this time
	// FailureThreshold is the part of the group's jobs, above 0 to 1, that must fail for the group
	// to end as FAILED; nil is 1.
	FailureThreshold *float64 `json:"failure_threshold,omitempty"`
	// Aggregate lists the values to compute from the jobs' results.
	Aggregate []Aggregate `json:"aggregate,omitempty"`
	// Total is the number of jobs of the whole group; the group is sealed when it has them.
	Total *int64   `json:"total,omitempty"`
	Jobs  []NewJob `json:"-"`
	Seal  bool     `json:"seal,omitempty"` // the group gets no jobs besides Jobs
	// UniqueKeys refuses a job whose key another job of the group has. Only in such a group can a
	// job be found by its key (see [JobFilter]).
	UniqueKeys bool `json:"unique_keys,omitempty"`
}

// Aggregate asks for one value that is computed from the results of the group's done jobs. With
// Over it is computed from the errors of its failed jobs, {code, error, attempts}, or from both.
type Aggregate struct {
	As    string `json:"as"`              // the value's name in api.Group.Aggregate
	Op    string `json:"op"`              // count, sum, min, max, mean, distribution, count_by or collect
	Field string `json:"field,omitempty"` // path into {data, duration_ms} of a result, such as data.cost
	Over  string `json:"over,omitempty"`  // done (when empty), failed or ended
}

// NewJob is a job to be added to a group. The API shows it as an api.Job; a worker's processor gets
// it as a processor.Job.
type NewJob struct {
	Payload     any        `json:"payload"`               // encodes to JSON of at most 256 KiB
	Type        string     `json:"type,omitempty"`        // the group's type when empty
	RunAt       *time.Time `json:"run_at,omitempty"`      // the job does not start before this time
	TraceParent string     `json:"traceparent,omitempty"` // W3C traceparent; the job continues this trace
	// Key is your own name for the job, such as the recipient's id: 1 to 128 bytes of UTF-8 without
	// control characters. Results, failures and dead letters show it.
	Key string `json:"key,omitempty"`
}

// MarshalJSON returns the body of POST /v1/groups.
func (g Submission) MarshalJSON() ([]byte, error) {
	jobs, err := submission.EncodeAll(g.Jobs)
	if err != nil {
		return nil, err
	}
	type withoutJobs Submission // it has no method MarshalJSON
	head := struct {
		withoutJobs
		JobTimeout string `json:"job_timeout,omitempty"`
	}{withoutJobs: withoutJobs(g)}
	if g.JobTimeout != 0 {
		head.JobTimeout = g.JobTimeout.String()
	}
	b, err := submission.Encode(head)
	if err != nil {
		return nil, fmt.Errorf("encode group %s: %w", g.ID, err)
	}
	return submission.WithJobs(b, jobs), nil
}
