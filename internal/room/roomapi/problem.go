package roomapi

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// problem is a problem document with what the waiting room needs to know of it.
type problem struct {
	web.Problem
	reason string // of Metrics.Refused; "": it is not counted
	stream string // reason of the frame reconnect; "": a stream request gets the status
}

func newProblem(code api.ProblemCode, reason, detail string, fields ...api.FieldError) *problem {
	return &problem{Problem: *web.NewProblem(code, detail, fields...), reason: reason}
}

// later marks a problem as temporary: the client may repeat the request after this time. stream is
// the reason in the frame reconnect, with which a stream request is answered.
func (p *problem) later(stream string, after time.Duration) *problem {
	p.stream, p.RetryAfter = stream, after
	return p
}

// Reasons of the frame reconnect.
const (
	draining  = "draining"
	busy      = "busy"
	redisAway = "redis_away"
)

// problemOf returns the problem that the API answers for an error. known is false for an unexpected
// error: the answer does not contain its text.
func problemOf(err error) (p *problem, known bool) {
	soon := time.Duration(1+rand.IntN(4)) * time.Second // not all clients at the same time
	var plain *web.Problem
	switch {
	case errors.As(err, &p):
		return p, true
	case errors.As(err, &plain):
		return &problem{Problem: *plain}, true
	case errors.Is(err, ErrUnknownEvent):
		p = newProblem(api.UnknownEvent, "unknown_event", "there is no such event")
	case errors.Is(err, ErrNoTicket):
		p = newProblem(api.NoTicket, "", "you have no ticket of this event: enter with POST …/ticket")
	case errors.Is(err, ErrNotReady):
		p = newProblem(api.NotYourTurn, "",
			"it is not your turn yet: the ticket's state must be READY or IN_PROGRESS")
	case errors.Is(err, ErrClosed):
		p = newProblem(api.EventClosed, "closed", "the event is closed: nobody can enter")
	case errors.Is(err, ErrSoldOut):
		p = newProblem(api.SoldOut, "sold_out", "the event is sold out: nobody can enter")
	case errors.Is(err, ErrFull):
		p = newProblem(api.QueueFull, "full", "the queue is as long as it may be: try again later").
			later(busy, 10*time.Second)
	case errors.Is(err, ErrDraining):
		p = newProblem(api.ShuttingDown, draining, "this server is stopping: try again").
			later(draining, soon)
	case errors.Is(err, ErrBusy):
		p = newProblem(api.Busy, busy, "this server is busy: try again in a moment").
			later(busy, soon)
	case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		p = newProblem(api.StoreUnavailable, redisAway, "the store does not answer: try again in a moment").
			later(redisAway, soon)
	default:
		p = newProblem(api.Internal, "",
			"the request could not be served; the server's log tells why").later(busy, 0)
		return p, false
	}
	return p, true
}

// problem returns the problem of an error. It logs an unexpected error, unless the client has
// closed the connection.
func (a *API) problem(r *http.Request, err error) *problem {
	p, known := problemOf(err)
	if !known && r.Context().Err() == nil {
		web.LogFailure(a.log, r, err)
	}
	return p
}

// fail answers with the problem of a handler's error, unless the client has left.
func (a *API) fail(w http.ResponseWriter, r *http.Request, err error) {
	if !errors.Is(err, context.Canceled) || r.Context().Err() == nil {
		a.problem(r, err).Write(w)
	}
}

// refuse returns the problem of an error of a request to enter. If the problem has a reason, it
// counts it in the metric of refusals.
func (a *API) refuse(r *http.Request, err error) *problem {
	p := a.problem(r, err)
	if p.reason == "" {
		return p
	}
	event := r.PathValue("event")
	switch p.reason {
	case "closed", "sold_out", "full": // the room knows the event
	default:
		event = ""
	}
	a.metrics.Refused(event, p.reason)
	return p
}

// eventOf returns the event in the request's path, or a problem if that is no valid id.
func eventOf(r *http.Request) (string, error) {
	event := r.PathValue("event")
	if !api.ValidID(event) {
		const rule = "must be 1 to 128 letters, digits, dots, underscores or dashes"
		return "", newProblem(api.Invalid, "", "event "+rule,
			api.FieldError{Field: "event", Problem: rule})
	}
	return event, nil
}

// logPanic recovers from a panic of a handler, logs it, and breaks the connection.
func (a *API) logPanic(r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(v)
	}
	web.LogPanic(a.log, r, v)
	panic(http.ErrAbortHandler)
}
