package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
)

func invalidField(field, problem string) *web.Problem {
	return web.NewProblem(api.Invalid, field+": "+problem, api.FieldError{Field: field, Problem: problem})
}

// malformedJSON returns the problem of a body that encoding/json could not split into fields.
func malformedJSON(err error) *web.Problem {
	problem := "is not JSON: " + truncate(err.Error())
	return web.NewProblem(api.MalformedJSON, "body: "+problem, api.FieldError{Field: "body", Problem: problem})
}

var (
	errInternal = web.NewProblem(api.Internal,
		"the request could not be served; its X-Request-Id finds the reason in the server's log")
	errShutdown = web.RetryLater(api.ShuttingDown, time.Second, "this server is shutting down: try again")
)

// problemOf converts an error to the problem that the client gets. known is false for an unexpected
// error; then the problem does not show the error's text.
func problemOf(err error) (p *web.Problem, known bool) {
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
		p = web.NewProblem(code, truncate(err.Error()))
		for _, f := range invalid.Fields {
			p.Fields = append(p.Fields, api.FieldError{Field: f.Field, Problem: f.Problem})
		}
	case errors.As(err, &tooLarge):
		p = web.NewProblem(api.TooLarge, err.Error(),
			api.FieldError{
				Field:   tooLarge.Field,
				Problem: fmt.Sprintf("is %d bytes; at most %d are accepted", tooLarge.Size, tooLarge.Limit),
			})
	case errors.Is(err, api.ErrNotFound), errors.Is(err, apikey.ErrNoKey):
		p = web.NewProblem(api.NotFound, err.Error())
	case errors.Is(err, apikey.ErrFull):
		p = web.NewProblem(api.Conflict, err.Error())
	case errors.Is(err, api.ErrTenant):
		detail := api.ErrTenant.Error()
		if other, ok := errors.AsType[*api.OtherTenantError](err); ok {
			detail = other.Error()
		}
		p = web.NewProblem(api.WrongTenant, detail)
	case errors.Is(err, api.ErrNotAllowed):
		p = web.NewProblem(api.NotAllowed, "this call is not for your key")
	case errors.Is(err, api.ErrSealed):
		p = web.NewProblem(api.Sealed, err.Error())
	case errors.Is(err, api.ErrConflict):
		// the code says the kind
		p = web.NewProblem(api.Conflict, strings.TrimSuffix(err.Error(), ": "+api.ErrConflict.Error()))
	case errors.Is(err, api.ErrChanged):
		p = web.NewProblem(api.Changed, err.Error())
	case errors.Is(err, api.ErrNotConfigured):
		p = web.NewProblem(api.NotConfigured, err.Error())
	case errors.Is(err, api.ErrUpstream):
		p = web.NewProblem(api.Upstream, err.Error())
	case errors.Is(err, api.ErrInvalid):
		p = web.NewProblem(api.Invalid, err.Error())
	case errors.As(err, &busy):
		p = web.RetryLater(api.Backlog, max(busy.RetryAfter, time.Second), err.Error())
	case errors.Is(err, api.ErrBackpressure):
		p = web.RetryLater(api.Backlog, time.Second, err.Error())
	case errors.Is(err, api.ErrReplicas):
		p = web.RetryLater(api.FewReplicas, time.Second,
			"too few replicas have confirmed the write: try again in a moment; a repetition does no harm")
	case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		p = web.RetryLater(api.StoreUnavailable, time.Second,
			"Redis can't be reached or does not answer: try again in a moment")
	default:
		return errInternal, false
	}
	return p, true
}

// writeProblem answers with the problem of err.
func (s *server) writeProblem(w http.ResponseWriter, r *http.Request, err error) {
	s.problem(w, r, err).Write(w)
}

// problem returns the problem that answers err, sets the headers of the answer, and logs an
// unexpected error. If the request's body was not read to its end, the server closes the connection
// after the answer.
func (s *server) problem(w http.ResponseWriter, r *http.Request, err error) *web.Problem {
	p, known := problemOf(err)
	if !known {
		web.LogFailure(s.Log, r, err, slog.String("request_id", w.Header().Get("X-Request-Id")))
	}
	web.SetRetryAfter(w.Header(), p.RetryAfter)
	if p.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	bodyOf(r).closeAfterAnswer(w.Header())
	return p
}
