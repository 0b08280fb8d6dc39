package httpapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
)

// ServeHTTP serves one request. Besides calling the handler, it sets the request's id, writes a log
// line, refuses what checkOrigin refuses, and recovers from a panic.
func (s *server) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w := &responseWriter{ResponseWriter: rw, ctl: http.NewResponseController(rw), body: s.newBodyReader(rw, r)}
	r = r.WithContext(r.Context()) // a copy, because net/http needs the body of its own request unchanged
	r.Body = w.body
	r.URL = withoutPrefix(r.URL, s.Prefix)
	start := time.Now()
	id := r.Header.Get("X-Request-Id")
	if !api.ValidID(id) {
		id = uuid.NewString()
	}
	w.Header().Set("X-Request-Id", id)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")

	defer func() {
		v := recover()
		if err, _ := v.(error); v != nil && !errors.Is(err, http.ErrAbortHandler) {
			web.LogPanic(s.Log, r, v, slog.String("request_id", id))
			if w.status == 0 {
				s.writeProblem(w, r, errInternal)
				v = nil
			}
		}
		took := time.Since(start)
		s.Log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelDebug, "request served",
			slog.String("request_id", id), slog.String("method", r.Method), slog.String("path", r.URL.Path),
			slog.Int("status", w.status), slog.Int64("bytes", w.bytes), slog.Duration("took", took),
			slog.String("key", w.keyID))
		s.Metrics.Served(r, w.status, took)
		if v != nil {
			// Break the connection, so that the client does not mistake a part of the answer for
			// the whole.
			panic(http.ErrAbortHandler)
		}
	}()
	if err := s.checkOrigin(r); err != nil {
		s.fail(w, r, err)
		return
	}
	if s.Prefix != "" && s.UI != nil && r.URL.Path+"/" == uiRoot {
		http.Redirect(w, r, s.Prefix+uiRoot, http.StatusSeeOther) // the mux knows no prefix
		return
	}
	s.mux.ServeHTTP(w, r)
}

// withoutPrefix returns the URL of a request without the prefix that a proxy may have left in it.
func withoutPrefix(u *url.URL, prefix string) *url.URL {
	if prefix == "" || u.Path != prefix && !strings.HasPrefix(u.Path, prefix+"/") {
		return u
	}
	short := *u
	short.Path = cmp.Or(strings.TrimPrefix(u.Path, prefix), "/")
	short.RawPath = strings.TrimPrefix(u.RawPath, prefix)
	return &short
}

// checkOrigin refuses requests that change something and come from a web page of another origin. A
// server on loopback refuses all requests whose Host header is no loopback name.
func (s *server) checkOrigin(r *http.Request) error {
	if s.loopbackOnly && !loopbackHostHeader(r.Host) {
		return web.NewProblem(api.WrongHost,
			"this server listens on loopback and serves only the hosts localhost and loopback addresses")
	}
	if err := s.csrf.Check(r); err != nil {
		return web.NewProblem(api.CrossSite,
			"requests that change something are not accepted from web pages of another origin")
	}
	return nil
}

// maxNamedParams is the largest number of unknown query parameters that an answer names.
const maxNamedParams = 10

// onlyQuery returns serve as a handler that refuses requests with a query parameter that is not in
// known, so that a misspelt one does not go unnoticed. Only the parameter tag may be repeated.
func onlyQuery(known []string, serve web.Handler) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		q, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			return web.NewProblem(api.BadParameter, "the query is malformed: "+truncate(err.Error()))
		}
		for _, name := range slices.Sorted(maps.Keys(q)) {
			if len(q[name]) > 1 && name != "tag" {
				return web.NewProblem(api.BadParameter,
					fmt.Sprintf("the query parameter %q is given %d times: give it once", truncate(name), len(q[name])),
					api.FieldError{Field: truncate(name), Problem: "must be given once"})
			}
		}
		var unknown []api.FieldError
		for _, name := range slices.Sorted(maps.Keys(q)) {
			if len(unknown) < maxNamedParams && !slices.Contains(known, name) {
				unknown = append(unknown, api.FieldError{
					Field: truncate(name), Problem: "is not a query parameter of this call",
				})
			}
		}
		if len(unknown) == 0 {
			return serve(w, r)
		}
		detail := fmt.Sprintf("unknown query parameter %q: this call has ", unknown[0].Field)
		if len(known) == 0 {
			return web.NewProblem(api.BadParameter, detail+"none", unknown...)
		}
		return web.NewProblem(api.BadParameter, detail+strings.Join(known, ", "), unknown...)
	}
}

// fail answers a request with the problem of err. If a part of the answer is already sent, or the
// client has disconnected, it panics with http.ErrAbortHandler to break the connection.
func (s *server) fail(w http.ResponseWriter, r *http.Request, err error) {
	if w.(*responseWriter).status != 0 || errors.Is(err, context.Canceled) {
		s.Log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelDebug, "answer aborted",
			slog.String("request_id", w.Header().Get("X-Request-Id")), slog.Any("error", err))
		panic(http.ErrAbortHandler)
	}
	s.writeProblem(w, r, err)
}

// isLoopback reports whether addr can be reached only from its own machine.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		host = addr
	}
	return isLoopbackHost(host)
}

func loopbackHostHeader(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return isLoopbackHost(strings.Trim(host, "[]"))
}

func isLoopbackHost(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// responseWriter records the status and size of the answer, and sets a deadline for each write,
// except in event streams.
type responseWriter struct {
	http.ResponseWriter
	ctl     *http.ResponseController
	body    *bodyReader // of the request
	status  int         // 0 until the answer has begun
	bytes   int64
	keyID   string // of the API key; "" without one
	isEvent bool   // the answer is an event stream, which sets a deadline for each frame
}

func (w *responseWriter) WriteHeader(code int) {
	if w.status == 0 && code >= 200 {
		w.status = code
		w.isEvent = w.Header().Get("Content-Type") == "text/event-stream"
	}
	w.extendDeadline()
	w.ResponseWriter.WriteHeader(code)
}

func (w *responseWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	w.extendDeadline()
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

// extendDeadline sets the deadline for the next write. It ignores the error of a test server
// without deadlines.
func (w *responseWriter) extendDeadline() {
	if !w.isEvent {
		_ = w.ctl.SetWriteDeadline(time.Now().Add(idleTimeout))
	}
}

// Unwrap lets http.ResponseController find the wrapped writer.
func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

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
