// Package messages decodes and validates what producers send: requests to the HTTP API and messages
// on the ingest stream. Its errors name the bad fields, the first 100, with the limit that each
// breaks. Of this module it imports only packages api and jsonscan.
package messages

import (
	"encoding/json"
	"time"
)

// The types of messages on the ingest stream.
const (
	TypeGroupSubmit = "group.submit"
	TypeJobsAppend  = "jobs.append"
	TypeGroupSeal   = "group.seal"
	TypeGroupCancel = "group.cancel"
)

// These limits bound what a submission may contain.
const (
	MaxNameLength   = 256        // bytes of a group's name
	MaxPayloadBytes = 256 << 10  // bytes of one job's payload
	MaxMessageBytes = 32 << 20   // bytes of one message's data, or of one request body that is not streamed
	MaxAggregates   = 32         // aggregates of one group
	MaxTotal        = 10_000_000 // jobs of one group
	MaxRetriesLimit = 1000       // max_retries of a group
	MaxJobTimeout   = 24 * time.Hour
)

// Lane names the queue of one priority.
type Lane string

// The lanes, from the highest priority to the lowest.
const (
	LaneHigh   Lane = "high"
	LaneNormal Lane = "normal"
	LaneLow    Lane = "low"
)

// Envelope is one entry of the ingest stream. Its fields are type and data, and optionally id and
// traceparent.
type Envelope struct {
	ID          string // the message id; the stream entry's id when the producer gave none
	Type        string
	TraceParent string // W3C traceparent; "" when the producer is not traced
	Data        []byte // JSON

	decoded *AppendJobs // the decoded Data, when the fast path could decode it
}

// Job is one unit of work, as its producer sends it. readJob and fastDecodeJob decode its JSON; the
// tags are only for other code that encodes or decodes it.
type Job struct {
	Payload     json.RawMessage `json:"payload"`
	Type        string          `json:"type,omitempty"`        // the group's type when empty
	RunAt       *time.Time      `json:"run_at,omitempty"`      // the job does not start before this time; RFC 3339
	TraceParent string          `json:"traceparent,omitempty"` // the job continues this trace
	Key         string          `json:"key,omitempty"`         // the producer's own name of the job
}

// Aggregate asks the system to compute one value from the results of the group's done jobs, from
// the errors of its failed jobs, or from both.
type Aggregate struct {
	As    string `json:"as"`
	Op    string `json:"op"`
	Field string `json:"field,omitempty"` // path into {data, duration_ms} of a job's result
	Over  string `json:"over,omitempty"`  // failed or ended; done when empty
}

// SubmitGroup is the body of POST /v1/groups and the data of a group.submit message.
type SubmitGroup struct {
	ID               string      `json:"id,omitempty"`
	Tenant           string      `json:"tenant,omitempty"` // the group's own id when empty
	Name             string      `json:"name,omitempty"`
	Type             string      `json:"type"`
	Priority         Lane        `json:"priority,omitempty"` // normal when empty
	BasePriority     float64     `json:"base_priority,omitempty"`
	MaxRetries       *int        `json:"max_retries,omitempty"` // the workers' default when nil
	JobTimeout       Duration    `json:"job_timeout,omitempty"` // the workers' default when 0
	RunAt            *time.Time  `json:"run_at,omitempty"`
	FailureThreshold *float64    `json:"failure_threshold,omitempty"` // above 0, to 1; 1 when nil
	Aggregate        []Aggregate `json:"aggregate,omitempty"`
	CallbackURL      string      `json:"callback_url,omitempty"`
	Total            *int64      `json:"total,omitempty"`
	Jobs             []Job       `json:"jobs,omitempty"`
	Seal             bool        `json:"seal,omitempty"`
	UniqueKeys       bool        `json:"unique_keys,omitempty"` // no two jobs of the group have the same key
}

// AppendJobs is the data of a jobs.append message.
type AppendJobs struct {
	Group string `json:"group"`
	Jobs  []Job  `json:"jobs"`
}

// SealGroup is the data of a group.seal message, by which a producer says that the group gets no
// more jobs: at once, or with Total as soon as it has so many.
type SealGroup struct {
	Group string `json:"group"`
	Total *int64 `json:"total,omitempty"`
}

// CancelGroup is the data of a group.cancel message.
type CancelGroup struct {
	Group string `json:"group"`
}

// Duration is a time.Duration. In JSON it is read from Go's notation ("1m30s") or a number of
// seconds, and written in Go's notation.
type Duration time.Duration
