package client

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// The lanes that Group.Priority names. A higher lane gets more, a lower one is never starved.
const (
	PriorityHigh   = "high"
	PriorityNormal = "normal"
	PriorityLow    = "low"
)

// Group is a bulk action to be submitted. Only Type is required.
type Group struct {
	ID           string // matches ^[A-Za-z0-9._-]{1,128}$; made up when empty
	Tenant       string // whose share and limits it uses; the group is its own tenant when empty
	Name         string // for people, up to 256 bytes
	Type         string // names the processor that runs the jobs
	Priority     string // PriorityHigh, PriorityNormal (when empty) or PriorityLow
	BasePriority float64
	MaxRetries   *int          // runs after the first one; the workers' default when nil
	JobTimeout   time.Duration // of one run; the workers' default when 0
	RunAt        *time.Time    // no job runs before it
	// FailureThreshold is the share of failed jobs, above 0 and up to 1, at which the group counts
	// as FAILED; 1 when nil.
	FailureThreshold *float64
	Aggregate        []Aggregate // what to reduce the results to
	Total            *int64      // number of jobs to come; the group is sealed when they are there
	Jobs             []Job
	Seal             bool // no jobs come after those in Jobs
}

// Aggregate asks for one value, reduced from the results of the group's done jobs.
type Aggregate struct {
	As    string `json:"as"`              // the value's name in api.Group.Aggregate
	Op    string `json:"op"`              // count, sum, min, max, mean, distribution, count_by or collect
	Field string `json:"field,omitempty"` // path into a result's {data, duration_ms}, such as data.cost
}

// Job is one unit of work.
type Job struct {
	Payload     any        `json:"payload"`               // marshals to JSON of at most 256 KiB
	Type        string     `json:"type,omitempty"`        // the group's when empty
	RunAt       *time.Time `json:"run_at,omitempty"`      // not before
	TraceParent string     `json:"traceparent,omitempty"` // W3C; the job continues this trace
}

// MarshalJSON writes the body of POST /v1/groups.
func (g Group) MarshalJSON() ([]byte, error) {
	jobs, err := marshalJobs(g.Jobs)
	if err != nil {
		return nil, err
	}
	return g.marshal(jobs)
}

// groupHead is a group on the wire, without its jobs.
type groupHead struct {
	ID               string      `json:"id,omitempty"`
	Tenant           string      `json:"tenant,omitempty"`
	Name             string      `json:"name,omitempty"`
	Type             string      `json:"type"`
	Priority         string      `json:"priority,omitempty"`
	BasePriority     float64     `json:"base_priority,omitempty"`
	MaxRetries       *int        `json:"max_retries,omitempty"`
	JobTimeout       string      `json:"job_timeout,omitempty"`
	RunAt            *time.Time  `json:"run_at,omitempty"`
	FailureThreshold *float64    `json:"failure_threshold,omitempty"`
	Aggregate        []Aggregate `json:"aggregate,omitempty"`
	Total            *int64      `json:"total,omitempty"`
	Seal             bool        `json:"seal,omitempty"`
}

// marshal writes the group with jobs that are JSON already, so that no job is encoded twice.
func (g Group) marshal(jobs [][]byte) ([]byte, error) {
	head := groupHead{
		ID: g.ID, Tenant: g.Tenant, Name: g.Name, Type: g.Type, Priority: g.Priority, BasePriority: g.BasePriority,
		MaxRetries: g.MaxRetries, RunAt: g.RunAt, FailureThreshold: g.FailureThreshold, Aggregate: g.Aggregate,
		Total: g.Total, Seal: g.Seal,
	}
	if g.JobTimeout != 0 {
		head.JobTimeout = g.JobTimeout.String()
	}
	b, err := marshal(head)
	if err != nil {
		return nil, fmt.Errorf("encode group %s: %w", g.ID, err)
	}
	if len(jobs) == 0 {
		return b, nil
	}
	return withJobs(b, jobs), nil
}

// withJobs adds "jobs" to a JSON object that has members already.
func withJobs(object []byte, jobs [][]byte) []byte {
	const open, end = `,"jobs":[`, `]}`
	size := len(object) + len(open) + len(end) + len(jobs)
	for _, j := range jobs {
		size += len(j)
	}
	b := make([]byte, 0, size)
	b = append(b, object[:len(object)-1]...)
	b = append(b, open...)
	for i, j := range jobs {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, j...)
	}
	return append(b, end...)
}

func marshalJobs(jobs []Job) ([][]byte, error) {
	all := make([][]byte, len(jobs))
	for i, j := range jobs {
		b, err := marshal(j)
		if err != nil {
			return nil, fmt.Errorf("encode job %d: %w", i, err)
		}
		all[i] = b
	}
	return all, nil
}

// marshal leaves <, > and & as they are: nothing here is shown as HTML, and escaping trebles them.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
