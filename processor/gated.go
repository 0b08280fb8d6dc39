package processor

import (
	"context"
	"time"
)

// Gated is a Processor whose jobs need a permission that processes share, such as an account with a
// rate limit. The worker obtains the permission before it starts the job, so a job that waits for
// one takes no slot and uses no retry.
//
// Admit is called concurrently, before each start of a job, with the job that Process will get, but
// without its Tenant. It may wait some seconds; a processor that can't get a permission by then
// returns a [Deferred] error, and the job is not started. ctx ends when the job's group is
// cancelled, its lease is lost or the worker shuts down; the job is then given back. ctx has the
// timeout of the job's type, too. After any other error the job is started without a call of
// Process: the error decides about the job as an error of Process does. A nil Pass lets the job
// start without a permission.
type Gated interface {
	Processor
	Admit(ctx context.Context, job Job) (Pass, error)
}

// Pass is the permission for one attempt of a job.
type Pass interface {
	// Into returns the context that Process gets.
	Into(ctx context.Context) context.Context
	// Return gives the permission back and says how the attempt ended, by the error of Process; by
	// [context.Canceled] if it ended by a timeout that its group has made shorter than the type's.
	// It is called once for each pass, with a Deferred error if the job was not started after all.
	// It must not wait for a network, because its caller holds a slot.
	Return(err error)
}

// Limited is an optional interface of a Gated processor. With it, a worker reads ahead only as many
// jobs as may get a permission soon, and fetchers keep the ready stream of the type short, so that
// the order of the jobs stays fair. Availability is called often, and does no I/O.
type Limited interface {
	Availability() Availability
}

// Availability says how many permissions can be had.
type Availability struct {
	Free      int       // permissions that are free now; negative: not known or not bounded
	Next      time.Time // until then no job gets a permission; zero: not known
	PerSecond float64   // permissions a second of all processes together; +Inf: not bounded
}

// Run is for tests of processors: it runs one attempt of a job much as a worker does, and returns
// what Process returns. If p is Gated, it first calls Admit, whose error it returns, and calls the
// Return of the Pass after Process.
func Run(ctx context.Context, p Processor, job Job) (result any, err error) {
	gated, ok := p.(Gated)
	if !ok {
		return p.Process(ctx, job)
	}
	pass, err := gated.Admit(ctx, job)
	if err != nil {
		return nil, err
	}
	if pass != nil {
		ctx = pass.Into(ctx)
		defer func() { pass.Return(err) }()
	}
	return p.Process(ctx, job)
}
