package backpressure

import (
	"context"
	"sync/atomic"
)

// claim is who wants to add jobs.
type claim struct {
	who     string
	sure    bool // nobody else goes by this name
	patient bool // it looks for room by itself: nothing is kept for it

	base string // of a body in pieces: what all its pieces are named after
	part int64  // the piece's number
}

// Request is one attempt to add jobs, for backpressure: a producer that was told when to come again
// is known by its name when it does, and what is on its way to Redis is not overlooked.
type Request struct {
	claim
	controller *Controller // that has let it in
	jobs       atomic.Int64
}

type requestKey struct{}

// WithRequest names who submits or appends under the context. Sure says that nobody else goes by
// the name: an idempotency key, say, and not only what the content is. The caller ends the Request
// when it has its answer.
func WithRequest(ctx context.Context, who string, sure bool) (context.Context, *Request) {
	return withRequest(ctx, claim{who: who, sure: sure})
}

// WithPiece is WithRequest for a piece of a body; one that is sent again has the same base.
func WithPiece(ctx context.Context, who, base string, part int64) (context.Context, *Request) {
	return withRequest(ctx, claim{who: who, base: base, part: part})
}

// WithPatience is for one who will look for room again by itself, whatever time it is told.
func WithPatience(ctx context.Context) (context.Context, *Request) {
	return withRequest(ctx, claim{patient: true})
}

func withRequest(ctx context.Context, c claim) (context.Context, *Request) {
	r := &Request{claim: c}
	return context.WithValue(ctx, requestKey{}, r), r
}

// End says that its jobs are stored, or will never be.
func (r *Request) End() {
	if n := r.jobs.Swap(0); n > 0 {
		r.controller.flying.Add(-n)
	}
}

func requestOf(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// letIn counts jobs that are about to be stored.
func (r *Request) letIn(p *Controller, jobs int64) {
	if r != nil {
		r.controller = p
		r.jobs.Add(jobs)
		p.flying.Add(jobs)
	}
}
