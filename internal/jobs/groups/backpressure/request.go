package backpressure

import (
	"context"
	"sync/atomic"
)

// client identifies who wants to add jobs, so that a refused client is recognized when it returns.
type client struct {
	key    string // name of the client or its request
	unique bool   // no other client has this key
	// retries says that the caller tries again by itself until it is accepted. It gets no
	// reservation.
	retries bool

	body  string // for a piece of a streamed body: identifies the body
	piece int64  // number of the piece in the body
}

// Request is one attempt of a client to add jobs. By it the admission controller recognizes a
// client that was refused before, and counts jobs that are on their way to Redis.
type Request struct {
	client
	controller *Controller // that has accepted the jobs
	jobs       atomic.Int64
}

type requestKey struct{}

// WithRequest returns a context for one submission or append. key names the client or its request.
// unique says that no other client has this key, for example because it is an idempotency key. The
// caller must call End after the jobs are stored or refused.
func WithRequest(ctx context.Context, key string, unique bool) (context.Context, *Request) {
	return withRequest(ctx, client{key: key, unique: unique})
}

// WithPiece is WithRequest for one piece of a streamed body. A body that is sent again must have
// the same body id.
func WithPiece(ctx context.Context, key, body string, piece int64) (context.Context, *Request) {
	return withRequest(ctx, client{key: key, body: body, piece: piece})
}

// WithoutReservation is WithRequest for a caller that tries again by itself until it is accepted,
// whatever Retry-After says.
func WithoutReservation(ctx context.Context) (context.Context, *Request) {
	return withRequest(ctx, client{retries: true})
}

func withRequest(ctx context.Context, cl client) (context.Context, *Request) {
	r := &Request{client: cl}
	return context.WithValue(ctx, requestKey{}, r), r
}

// End tells the controller that the request's jobs are stored now, or never will be: they are no
// longer counted as on their way.
func (r *Request) End() {
	if n := r.jobs.Swap(0); n > 0 {
		r.controller.inTransit.Add(-n)
	}
}

func requestOf(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// start counts the jobs of an accepted request as on their way to Redis. r may be nil.
func (r *Request) start(c *Controller, jobs int64) {
	if r != nil {
		r.controller = c
		r.jobs.Add(jobs)
		c.inTransit.Add(jobs)
	}
}
