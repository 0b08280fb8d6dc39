package roomapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// problem is an error with its problem document (RFC 9457).
type problem struct {
	api.Problem
	reason     string        // of Metrics.Refused; "": it is not counted
	stream     string        // reason of the frame reconnect; "": a stream request gets the status
	retryAfter time.Duration // 0: the answer has no Retry-After
}

func (p *problem) Error() string { return p.Title + ": " + p.Detail }

func newProblem(code api.ProblemCode, reason, detail string, fields ...api.FieldError) *problem {
	return &problem{reason: reason, Problem: api.Problem{
		Type: code.URI(), Code: code, Title: http.StatusText(code.Status()), Status: code.Status(),
		Detail: detail, Fields: fields,
	}}
}

// later marks a problem as temporary: the client may repeat the request after this time. stream is
// the reason in the frame reconnect, with which a stream request is answered.
func (p *problem) later(stream string, after time.Duration) *problem {
	p.stream, p.retryAfter = stream, after
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
	switch {
	case errors.As(err, &p):
		return p, true
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
func (s *server) problem(r *http.Request, err error) *problem {
	p, known := problemOf(err)
	if !known && r.Context().Err() == nil {
		s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, "request failed",
			slog.String("method", r.Method), slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	return p
}

// refuse returns the problem of an error of a request to enter. If the problem has a reason, it
// counts it in the metric of refusals.
func (s *server) refuse(r *http.Request, err error) *problem {
	p := s.problem(r, err)
	if p.reason == "" {
		return p
	}
	event := r.PathValue("event")
	switch p.reason {
	case "closed", "sold_out", "full": // the room knows the event
	default:
		event = ""
	}
	s.metrics.Refused(event, p.reason)
	return p
}

// write answers with the problem.
func (p *problem) write(w http.ResponseWriter) {
	p.setRetryAfter(w.Header())
	writeJSON(w, p.Status, "application/problem+json", p.Problem)
}

func (p *problem) setRetryAfter(h http.Header) {
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((p.retryAfter+time.Second-1)/time.Second), 10))
	}
}

// writeJSON answers with v as JSON. An error of the encoder would be a bug.
func writeJSON(w http.ResponseWriter, status int, contentType string, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Errorf("encode answer: %w", err))
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // an error means that the client has left
}

// byMethod returns a handler that selects one of the handlers in m by the request's method; other
// methods get 405. If m is empty, all requests get 404.
func (s *server) byMethod(m map[string]handler) http.Handler {
	allow := strings.Join(slices.Sorted(maps.Keys(m)), ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		switch serve, ok := m[r.Method]; {
		case ok:
			err = serve(w, r)
		case len(m) == 0:
			err = newProblem(api.NoSuchPath, "", "no such path: see /openapi.yaml")
		default:
			w.Header().Set("Allow", allow)
			err = newProblem(api.MethodNotAllowed, "", "this path accepts "+allow)
		}
		if err == nil || errors.Is(err, context.Canceled) && r.Context().Err() != nil {
			return // the client has left
		}
		s.problem(r, err).write(w)
	})
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

// logPanic recovers from a panic of a handler, logs its place, and breaks the connection. It logs
// the panic's value only if it is a runtime error, because any other value might contain a token.
func (s *server) logPanic(r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	err, _ := v.(error)
	if errors.Is(err, http.ErrAbortHandler) {
		panic(v)
	}
	attrs := []slog.Attr{slog.String("method", r.Method), slog.String("path", r.URL.Path),
		slog.String("stack", string(debug.Stack()))}
	var fault runtime.Error
	if errors.As(err, &fault) {
		attrs = append(attrs, slog.Any("error", fault))
	}
	s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, "handler panicked", attrs...)
	panic(http.ErrAbortHandler)
}
