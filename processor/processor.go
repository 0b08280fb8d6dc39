// Package processor defines the interface that the author of a job type implements, the job that it
// receives, and the errors with which it has the job retried, throttled, deferred or failed. The
// package hides how these errors become decisions of the system.
//
// A job is delivered at least once: it runs again when its worker dies or when the worker's report
// is lost. A processor must therefore be idempotent, or pass [Job.ID], which is the same in all
// attempts, to its downstream API as the idempotency key.
package processor

import (
	"context"
	"encoding/json"
	"strconv"
	"time"
)

// MaxResultBytes is the largest size of a job's result, encoded as JSON.
const MaxResultBytes = 64 << 10

// Job is one attempt that is handed to a processor.
type Job struct {
	Tenant  string          // the customer whose job it is
	Group   string          // the bulk action that the job is part of
	Ordinal int64           // the job's place in its group, from 0
	Type    string          // names the processor, such as SEND_EMAIL
	Payload json.RawMessage // as the producer sent it, at most 256 KiB; do not change it
	Key     string          // the producer's own name of the job; "": it gave none
	Attempt int             // from 1; grows each time the job becomes ready, also if no worker starts it
	Retries int             // retries after errors in this round; other deliveries don't count
	// RetriesLeft is how many retries the job has left; 0: an error that means "retry" now fails it
	// for good. Before the start, in Gated.Admit, it is not known, and 0.
	RetriesLeft int
	// LastError is the error with which an attempt of this round has ended last; nil: none has. A
	// deferral is no error. Before the start, in Gated.Admit, it is not known, and nil.
	LastError *AttemptError
	// AcceptedAt is when the job entered the fair queue in this round: when ingest accepted it or,
	// after the command retry, when it was requeued.
	AcceptedAt time.Time
}

// AttemptError is the error with which an attempt of a job has ended.
type AttemptError struct {
	Code    string    // as in [Retry]; TIMEOUT, PANIC and WORKER_LOST for example come from the system
	Text    string    // at most 1 KiB
	Attempt int       // the attempt that has ended with it
	At      time.Time // when Redis recorded it
}

// ID returns the job's id, "group.ordinal". It is unique and the same in every attempt: use it as
// the idempotency key.
func (j Job) ID() string {
	return j.Group + "." + strconv.FormatInt(j.Ordinal, 10)
}

// Processor runs the jobs of one type.
//
// Process is called concurrently. It must return soon after ctx ends, which happens when the job's
// timeout is over, its group is cancelled, its lease is lost or the worker shuts down. After the
// timeout the attempt has failed with [CodeTimeout], whatever Process returns. When the worker
// shuts down, a result still makes the job done; after an error the job runs again and has used no
// retry.
//
// The result is any value that [encoding/json] can marshal, at most [MaxResultBytes] when encoded.
// A [json.RawMessage] is passed on unchanged; nil is an empty result. An error decides what
// follows: see [Retry], [Throttled], [Deferred] and [Permanent]. Any other error means "retry".
type Processor interface {
	// Type is the job type that the processor serves: 1 to 128 characters of A-Z a-z 0-9 . _ -
	Type() string
	Process(ctx context.Context, job Job) (any, error)
}

// Func returns a processor that runs the jobs of type typ by calling fn; nil if fn is nil, which a
// worker refuses at its start.
func Func(typ string, fn func(context.Context, Job) (any, error)) Processor {
	if fn == nil {
		return nil
	}
	return funcProcessor{typ, fn}
}

type funcProcessor struct {
	typ string
	fn  func(context.Context, Job) (any, error)
}

func (p funcProcessor) Type() string { return p.typ }

func (p funcProcessor) Process(ctx context.Context, job Job) (any, error) { return p.fn(ctx, job) }
