package processor

import (
	"context"
	"fmt"
	"time"
)

// Runner serves the jobs of one type: a [Processor] runs them one by one, a [Batcher] many in one
// call. A worker refuses at its start what is neither.
type Runner interface{ Type() string }

// Batcher runs many jobs of one type in one call, for a downstream API that takes many items in one
// request. [Batch] makes one. All that holds for a job holds for each job of a call alone: its
// attempt, its retries, its timeout, and that it runs at least once and counts once. A call takes
// one slot.
//
// ProcessBatch is called concurrently, with 1 to Size jobs whose timeouts are equal. ctx ends at
// that timeout, when the worker shuts down, or when the call has no job left, because the group of
// each was cancelled or its lease was lost. The end of one job only ends its [Job.Context]; its
// outcome then does not count. A job that may have ended its worker is called alone.
//
// The outcomes are those of the jobs, in their order. An error of the call, by the rules of
// Processor, is that of every job whose outcome has no error of its own; the outcomes may then be
// nil. Outcomes of another number are an error of the call with the code [CodeBatchLength]. After an
// error with the code [CodeBatchRejected], the next attempt of each job is a call of its own, and if
// there were several jobs, none has used a retry: so one bad item can't fail its neighbours. After a
// panic or a wrong number of outcomes, the last attempt of each job is a call of its own.
type Batcher interface {
	Type() string
	Options() BatchOptions
	ProcessBatch(ctx context.Context, jobs []Job) ([]Outcome[any], error)
}

// GatedBatcher is a Batcher whose calls need a permission that processes share, as the jobs of
// [Gated] do. AdmitBatch is called once before the jobs of a call start, with these jobs, but without
// their Tenant. It returns a Pass for the first n of them; the others wait for another call. All
// else is as for Gated.Admit.
type GatedBatcher interface {
	Batcher
	AdmitBatch(ctx context.Context, jobs []Job) (pass Pass, n int, err error)
}

// BatchOptions say which jobs a call has, and for how long they are gathered. A call begins when it
// is full, when its oldest job has waited for Wait, or, if a slot is free, as soon as no further job
// is ready.
type BatchOptions struct {
	Size  int           // most jobs of a call, 1 to 1,000; 0: 100
	Bytes int           // most bytes of their payloads, 1 to 8,000,000; a larger payload has a call of its own; 0: 1,000,000
	Wait  time.Duration // at most 1 s, and a quarter of the worker's lease (LEASE); 0: 50 ms
	By    BatchBy       // which jobs may share a call
}

// BatchBy says which jobs may share a call.
type BatchBy int

// These are the values of BatchBy.
const (
	ByTenant BatchBy = iota // those of one tenant
	ByGroup                 // those of one group
	Any                     // all: the data of several customers are in one call
)

const (
	maxBatchSize  = 1000
	maxBatchBytes = 8_000_000
	maxBatchWait  = time.Second
)

// Defaults returns the options with their defaults in place of zeros. Its error names the field that
// is out of range.
func (o BatchOptions) Defaults() (BatchOptions, error) {
	if o.Size == 0 {
		o.Size = 100
	}
	if o.Bytes == 0 {
		o.Bytes = 1_000_000
	}
	if o.Wait == 0 {
		o.Wait = 50 * time.Millisecond
	}
	switch {
	case o.Size < 0 || o.Size > maxBatchSize:
		return o, fmt.Errorf("option Size %d: must be 1 to %d", o.Size, maxBatchSize)
	case o.Bytes < 0 || o.Bytes > maxBatchBytes:
		return o, fmt.Errorf("option Bytes %d: must be 1 to %d", o.Bytes, maxBatchBytes)
	case o.Wait < 0 || o.Wait > maxBatchWait:
		return o, fmt.Errorf("option Wait %s: must be at most %s", o.Wait, maxBatchWait)
	case o.By < ByTenant || o.By > Any:
		return o, fmt.Errorf("option By %d: must be ByTenant, ByGroup or Any", o.By)
	}
	return o, nil
}

// Outcome is what has become of one job of a call: its result, or an error, which decides as an
// error of Processor does.
type Outcome[R any] struct {
	Result R
	Err    error
}

// BatchJob is a job of a call, with its payload decoded; Job.Payload is the JSON.
type BatchJob[P any] struct {
	Job
	Payload P
}

// Codes of calls.
const (
	CodeBatchLength   = "BATCH_LENGTH"   // a call has returned outcomes of another number than its jobs
	CodeBatchRejected = "BATCH_REJECTED" // the downstream API refused all items of a call, perhaps because of one
)

// Batch returns a batcher of the jobs of type typ, whose payloads are the JSON of a P; fn returns an
// outcome for each job, or an error of the call. See [Batcher] for what both decide, and [Typed] for
// payloads: a job whose payload is not the JSON of a P fails alone, and fn does not get it. If fn is
// nil, Batch returns nil.
func Batch[P, R any](
	typ string, o BatchOptions, fn func(ctx context.Context, jobs []BatchJob[P]) ([]Outcome[R], error),
) Batcher {
	if fn == nil {
		return nil
	}
	return batch{typ, o, func(ctx context.Context, jobs []Job) ([]Outcome[any], error) {
		outcomes, valid, places := make([]Outcome[any], len(jobs)), make([]BatchJob[P], 0, len(jobs)), make([]int, 0, len(jobs))
		for i, job := range jobs {
			j := BatchJob[P]{Job: job}
			if err := decode(job.Payload, &j.Payload); err != nil {
				outcomes[i].Err = Permanent(CodeInvalidPayload, err)
				continue
			}
			valid, places = append(valid, j), append(places, i)
		}
		if len(valid) == 0 {
			return outcomes, nil
		}
		got, err := fn(ctx, valid)
		if len(got) != len(valid) {
			if err == nil {
				err = lengthError(len(got), len(valid))
			}
			return outcomes, err
		}
		for i, o := range got {
			outcomes[places[i]] = Outcome[any]{Err: o.Err}
			if o.Err == nil {
				outcomes[places[i]].Result = o.Result
			}
		}
		return outcomes, err
	}}
}

// lengthError is the error of a call that has returned a wrong number of outcomes: none of them can
// be attributed.
func lengthError(outcomes, jobs int) error {
	return Retry(CodeBatchLength, fmt.Errorf("the call returned %d outcomes for %d jobs", outcomes, jobs))
}

type batch struct {
	typ     string
	options BatchOptions
	handle  BatchHandler
}

func (b batch) Type() string          { return b.typ }
func (b batch) Options() BatchOptions { return b.options }
func (b batch) ProcessBatch(ctx context.Context, jobs []Job) ([]Outcome[any], error) {
	return b.handle(ctx, jobs)
}

// BatchHandler runs one call, as Batcher.ProcessBatch does.
type BatchHandler func(ctx context.Context, jobs []Job) ([]Outcome[any], error)

// BatchMiddleware adds something to all calls, as [Middleware] does to all attempts.
type BatchMiddleware func(next BatchHandler) BatchHandler

// UseBatch returns b with middleware around its ProcessBatch; the first one is called first. If b is a
// GatedBatcher, the result is, too; AdmitBatch is not wrapped.
func UseBatch(b Batcher, middleware ...BatchMiddleware) Batcher {
	if len(middleware) == 0 {
		return b
	}
	handle := BatchHandler(b.ProcessBatch)
	for i := len(middleware) - 1; i >= 0; i-- {
		handle = middleware[i](handle)
	}
	used := batch{b.Type(), b.Options(), handle}
	if gated, ok := b.(GatedBatcher); ok {
		return usedGatedBatch{used, gated}
	}
	return used
}

type usedGatedBatch struct {
	batch
	gated GatedBatcher
}

func (u usedGatedBatch) AdmitBatch(ctx context.Context, jobs []Job) (Pass, int, error) {
	return u.gated.AdmitBatch(ctx, jobs)
}

// RunBatch runs one call, for workers and tests: it calls ProcessBatch and returns an outcome for
// each job, also after an error of the call, which it returns, too.
func RunBatch(ctx context.Context, b Batcher, jobs []Job) ([]Outcome[any], error) {
	outcomes, err := b.ProcessBatch(ctx, jobs)
	if len(outcomes) != len(jobs) {
		if err == nil {
			err = lengthError(len(outcomes), len(jobs))
		}
		outcomes = make([]Outcome[any], len(jobs))
	}
	for i := range outcomes {
		if err != nil && outcomes[i].Err == nil {
			outcomes[i] = Outcome[any]{Err: err}
		}
	}
	return outcomes, err
}
