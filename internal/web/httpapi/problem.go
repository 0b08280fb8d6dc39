package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// problemError is an error with the problem document that answers it.
type problemError struct {
	api.Problem
	retryAfter time.Duration // 0: the answer has no Retry-After
}

func (e *problemError) Error() string { return e.Title + ": " + e.Detail }

func newProblem(code api.ProblemCode, detail string, fields ...api.FieldError) *problemError {
	return &problemError{Problem: api.Problem{
		Type: code.URI(), Code: code, Title: http.StatusText(code.Status()), Status: code.Status(),
		Detail: detail, Fields: fields,
	}}
}

func invalidField(field, problem string) *problemError {
	return newProblem(api.Invalid, field+": "+problem, api.FieldError{Field: field, Problem: problem})
}

// malformedJSON returns the problem of a body that encoding/json could not split into fields.
func malformedJSON(err error) *problemError {
	problem := "is not JSON: " + truncate(err.Error())
	return newProblem(api.MalformedJSON, "body: "+problem, api.FieldError{Field: "body", Problem: problem})
}

func retryLater(code api.ProblemCode, after time.Duration, detail string) *problemError {
	p := newProblem(code, detail)
	p.retryAfter = after
	return p
}

var (
	errInternal = newProblem(api.Internal,
		"the request could not be served; its X-Request-Id finds the reason in the server's log")
	errShutdown = retryLater(api.ShuttingDown, time.Second, "this server is shutting down: try again")
)

// problemOf converts an error to the problem that the client gets. known is false for an unexpected
// error; then the problem does not show the error's text.
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
		code := api.Invalid
		if invalid.Malformed {
			code = api.MalformedJSON
		}
		p = newProblem(code, truncate(err.Error()))
		for _, f := range invalid.Fields {
			p.Fields = append(p.Fields, api.FieldError{Field: f.Field, Problem: f.Problem})
		}
	case errors.As(err, &tooLarge):
		p = newProblem(api.TooLarge, err.Error(),
			api.FieldError{
				Field:   tooLarge.Field,
				Problem: fmt.Sprintf("is %d bytes; at most %d are accepted", tooLarge.Size, tooLarge.Limit),
			})
	case errors.Is(err, api.ErrNotFound), errors.Is(err, apikey.ErrNoKey):
		p = newProblem(api.NotFound, err.Error())
	case errors.Is(err, apikey.ErrFull):
		p = newProblem(api.Conflict, err.Error())
	case errors.Is(err, api.ErrTenant):
		detail := api.ErrTenant.Error()
		if other, ok := errors.AsType[*api.OtherTenantError](err); ok {
			detail = other.Error()
		}
		p = newProblem(api.WrongTenant, detail)
	case errors.Is(err, api.ErrNotAllowed):
		p = newProblem(api.NotAllowed, "this call is not for your key")
	case errors.Is(err, api.ErrSealed):
		p = newProblem(api.Sealed, err.Error())
	case errors.Is(err, api.ErrConflict):
		// the code says the kind
		p = newProblem(api.Conflict, strings.TrimSuffix(err.Error(), ": "+api.ErrConflict.Error()))
	case errors.Is(err, api.ErrChanged):
		p = newProblem(api.Changed, err.Error())
	case errors.Is(err, api.ErrNotConfigured):
		p = newProblem(api.NotConfigured, err.Error())
	case errors.Is(err, api.ErrUpstream):
		p = newProblem(api.Upstream, err.Error())
	case errors.Is(err, api.ErrInvalid):
		p = newProblem(api.Invalid, err.Error())
	case errors.As(err, &busy):
		p = retryLater(api.Backlog, max(busy.RetryAfter, time.Second), err.Error())
	case errors.Is(err, api.ErrBackpressure):
		p = retryLater(api.Backlog, time.Second, err.Error())
	case errors.Is(err, api.ErrReplicas):
		p = retryLater(api.FewReplicas, time.Second,
			"too few replicas have confirmed the write: try again in a moment; a repetition does no harm")
	case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		p = retryLater(api.StoreUnavailable, time.Second,
			"Redis can't be reached or does not answer: try again in a moment")
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

// problem returns the problem that answers err, sets the headers of the answer, and logs an
// unexpected error. If the request's body was not read to its end, the server closes the connection
// after the answer.
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
	if p.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
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
