package processor

import "context"

// Handler runs one attempt of a job, as Processor.Process does.
type Handler func(ctx context.Context, job Job) (result any, err error)

// Middleware adds something to all attempts, such as a log line, a span or a check: it returns a
// Handler that calls next. It may change the context, the result and the error.
type Middleware func(next Handler) Handler

// Use returns p with middleware around its Process; the first one is called first. If p is Gated,
// the result is, too; if p is also Limited, the result is. Admit is not wrapped.
func Use(p Processor, middleware ...Middleware) Processor {
	if len(middleware) == 0 {
		return p
	}
	handle := Handler(p.Process)
	for i := len(middleware) - 1; i >= 0; i-- {
		handle = middleware[i](handle)
	}
	u := used{p, handle}
	gated, ok := p.(Gated)
	if !ok {
		return u
	}
	limited, ok := p.(Limited)
	if !ok {
		return usedGated{u, gated}
	}
	return usedLimited{usedGated{u, gated}, limited}
}

// used is a processor with middleware.
type used struct {
	Processor
	handle Handler
}

func (u used) Process(ctx context.Context, job Job) (any, error) { return u.handle(ctx, job) }

type usedGated struct {
	used
	gated Gated
}

func (u usedGated) Admit(ctx context.Context, job Job) (Pass, error) { return u.gated.Admit(ctx, job) }

type usedLimited struct {
	usedGated
	limited Limited
}

func (u usedLimited) Availability() Availability { return u.limited.Availability() }
