// Package messages holds the envelope and the bodies of everything that outsiders send: decoding,
// validation that names every bad field with its limit, and encoding. It imports nothing of ours.
package messages

import (
	"encoding/json"
	"time"
)

// Types of messages on the ingest stream.
const (
	TypeGroupSubmit = "group.submit"
	TypeJobsAppend  = "jobs.append"
	TypeGroupSeal   = "group.seal"
	TypeGroupCancel = "group.cancel"
)

// Limits of what is accepted.
const (
	MaxIDLength     = 128        // bytes of an id of a tenant, group, type or message
	MaxNameLength   = 256        // bytes of a group's display name
	MaxPayloadBytes = 256 << 10  // bytes of one job's payload
	MaxMessageBytes = 32 << 20   // bytes of one message's data, or of one request body that is not streamed
	MaxAggregates   = 32         // aggregates asked for by one group
	MaxTotal        = 10_000_000 // jobs of one group
	MaxRetriesLimit = 1000       // max_retries of a group
	MaxJobTimeout   = 24 * time.Hour
)

// Lane is a group's priority class.
type Lane string

// The three lanes, in order of precedence.
const (
	LaneHigh   Lane = "high"
	LaneNormal Lane = "normal"
	LaneLow    Lane = "low"
)

// Envelope is one flat stream entry: the fields `type`, `data`, and if wanted `id` and
// `traceparent`.
type Envelope struct {
	ID          string // the message id; defaults to the stream entry's id
	Type        string
	TraceParent string // W3C traceparent, "" when the producer is not traced
	Data        []byte // JSON

	decoded *AppendJobs // what the data says, where that was told on the way
}

// Job is one unit of work as its producer describes it.
type Job struct {
	Payload     json.RawMessage `json:"payload"`
	Type        string          `json:"type,omitempty"`        // the group's type when empty
	RunAt       *time.Time      `json:"run_at,omitempty"`      // not before; RFC 3339
	TraceParent string          `json:"traceparent,omitempty"` // continues the producer's trace
}

// Aggregate asks for one reduced value over the results of a group's done jobs.
type Aggregate struct {
	As    string `json:"as"`
	Op    string `json:"op"`
	Field string `json:"field,omitempty"` // path into {data, duration_ms} of a job's result
}

// SubmitGroup is the body of POST /v1/groups and of a group.submit message.
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
}

// AppendJobs is the data of a jobs.append message.
type AppendJobs struct {
	Group string `json:"group"`
	Jobs  []Job  `json:"jobs"`
}

// SealGroup is the data of a group.seal message: no more jobs come.
type SealGroup struct {
	Group string `json:"group"`
	Total *int64 `json:"total,omitempty"`
}

// CancelGroup is the data of a group.cancel message.
type CancelGroup struct {
	Group string `json:"group"`
}

// Duration is a time.Duration that reads JSON as Go's notation ("1m30s") or as a number of seconds,
// and writes the former.
type Duration time.Duration
