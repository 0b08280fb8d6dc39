// Package processor defines what runs a job: the one interface that a job type's author implements,
// the job that is handed to it, and the errors it answers with to have the job retried, slowed down
// or given up. It hides how those answers become the engine's decisions.
//
// A job is delivered at least once: one whose worker dies is run again, and so is one whose answer
// was lost. A processor must therefore be idempotent, or pass [Job.ID], which stays the same over
// all attempts, to its partner as the key to be idempotent by.
package processor

import (
	"context"
	"encoding/json"
	"strconv"
	"time"
)

// MaxResultBytes is how large a job's result may be once it is encoded as JSON.
const MaxResultBytes = 64 << 10

// Job is one attempt that is handed to a processor.
type Job struct {
	Tenant     string          // the customer whose job it is
	Group      string          // the bulk action that the job is part of
	Ordinal    int64           // the job's place in its group, from 0
	Type       string          // names the processor, such as SEND_EMAIL
	Payload    json.RawMessage // as the producer gave it, at most 256 KiB; read it, do not change it
	Attempt    int             // 1 on the first delivery, and one more with each further one
	AcceptedAt time.Time       // when the job was taken in
}

// ID is the job's id, "group.ordinal": unique, and the same on every attempt. It is the key to be
// idempotent by.
func (j Job) ID() string {
	return j.Group + "." + strconv.FormatInt(j.Ordinal, 10)
}

// Processor runs the jobs of one type.
//
// Process is called concurrently. It must return soon after ctx ends, which happens when the job's
// time is up, its group is cancelled, its lease is lost or the worker shuts down; what it returns
// after that counts no more as done.
//
// The result is any value that [encoding/json] can marshal, at most [MaxResultBytes] once encoded;
// a [json.RawMessage] is passed on untouched, and nil is an empty result. The error says what
// becomes of a job that is not done: see [Retry], [Throttled] and [Permanent]. Any other error
// means "retry".
type Processor interface {
	// Type is the job type that the processor serves: 1 to 128 characters of A-Z a-z 0-9 . _ -
	Type() string
	Process(ctx context.Context, job Job) (any, error)
}

// Func makes a processor of a function that runs the jobs of type typ.
func Func(typ string, fn func(context.Context, Job) (any, error)) Processor {
	return funcProcessor{typ, fn}
}

type funcProcessor struct {
	typ string
	fn  func(context.Context, Job) (any, error)
}

func (p funcProcessor) Type() string { return p.typ }

func (p funcProcessor) Process(ctx context.Context, job Job) (any, error) { return p.fn(ctx, job) }
