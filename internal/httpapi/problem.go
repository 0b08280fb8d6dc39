package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// problemError is an error that contains its problem document.
type problemError struct {
	api.Problem
	retryAfter time.Duration // 0: the answer has no Retry-After
}

func (e *problemError) Error() string { return e.Title + ": " + e.Detail }

func newProblem(status int, detail string, fields ...api.FieldError) *problemError {
	return &problemError{Problem: api.Problem{
		Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: detail, Fields: fields,
	}}
}

func invalidField(field, problem string) *problemError {
	return newProblem(http.StatusUnprocessableEntity, field+" "+problem, api.FieldError{Field: field, Problem: problem})
}

func retryLater(status int, after time.Duration, detail string) *problemError {
	p := newProblem(status, detail)
	p.retryAfter = after
	return p
}

var (
	errInternal = newProblem(http.StatusInternalServerError,
		"the request could not be served; its X-Request-Id finds the reason in the server's log")
	errShutdown = retryLater(http.StatusServiceUnavailable, time.Second, "this server is shutting down: try again")
)

// problemOf converts an error to the problem of its answer. known is false for an unexpected error,
// whose text is not shown to the client.
func problemOf(err error) (p *problemError, known bool) {
	var (
		invalid  *messages.ValidationError
		tooLarge *messages.TooLargeError
		busy     *api.BackpressureError
	)
	switch {
	case errors.As(err, &p):
		return p, true
	case errors.As(err, &invalid):
		p = newProblem(http.StatusUnprocessableEntity, truncate(err.Error()))
		for _, f := range invalid.Fields {
			p.Fields = append(p.Fields, api.FieldError{Field: f.Field, Problem: f.Problem})
		}
	case errors.As(err, &tooLarge):
		p = newProblem(http.StatusRequestEntityTooLarge, err.Error(),
			api.FieldError{
				Field:   tooLarge.Field,
				Problem: fmt.Sprintf("is %d bytes; at most %d are accepted", tooLarge.Size, tooLarge.Limit),
			})
	case errors.Is(err, api.ErrNotFound):
		p = newProblem(http.StatusNotFound, err.Error())
	case errors.Is(err, api.ErrConflict), errors.Is(err, api.ErrSealed):
		p = newProblem(http.StatusConflict, err.Error())
	case errors.Is(err, api.ErrChanged):
		p = newProblem(http.StatusPreconditionFailed, err.Error())
	case errors.Is(err, api.ErrNotConfigured):
		p = newProblem(http.StatusNotImplemented, err.Error())
	case errors.Is(err, api.ErrUpstream):
		p = newProblem(http.StatusBadGateway, err.Error())
	case errors.Is(err, api.ErrInvalid):
		p = newProblem(http.StatusUnprocessableEntity, err.Error())
	case errors.As(err, &busy):
		p = retryLater(http.StatusTooManyRequests, max(busy.RetryAfter, time.Second), err.Error())
	case errors.Is(err, api.ErrBackpressure):
		p = retryLater(http.StatusTooManyRequests, time.Second, err.Error())
	case errors.Is(err, api.ErrReplicas):
		p = retryLater(http.StatusServiceUnavailable, time.Second,
			"too few replicas have confirmed the write: try again in a moment; a repetition does no harm")
	case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		p = retryLater(http.StatusServiceUnavailable, time.Second,
			"the store cannot be reached or does not answer: try again in a moment")
	default:
		return errInternal, false
	}
	return p, true
}

// writeProblem answers with the problem of err.
func (s *server) writeProblem(w http.ResponseWriter, r *http.Request, err error) {
	p := s.problem(w, r, err)
	writeJSON(w, p.Status, "application/problem+json", p.Problem)
}

// problem returns the problem of err, sets the headers of its answer, and logs an unexpected error.
// If the body is not read to its end, the server then closes the connection.
func (s *server) problem(w http.ResponseWriter, r *http.Request, err error) *problemError {
	p, known := problemOf(err)
	if !known {
		s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, "request failed",
			slog.String("request_id", w.Header().Get("X-Request-Id")), slog.String("method", r.Method),
			slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	if p.retryAfter > 0 {
		seconds := (p.retryAfter + time.Second - 1) / time.Second
		w.Header().Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
	}
	bodyOf(r).closeAfterAnswer(w.Header())
	return p
}

// writeJSON answers with v as JSON.
func writeJSON(w http.ResponseWriter, status int, contentType string, v any) {
	body := encode(v)
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // an error means that the client has left
}

// encode returns v as JSON. A value that can't be encoded is a bug: encode panics, and ServeHTTP
// recovers.
func encode(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Errorf("encode answer: %w", err))
	}
	return body
}
