// Package web has what the HTTP API, the console and the waiting room's calls for visitors have in
// common: the choice of a handler by path and method, problem documents (RFC 9457), event streams,
// and feeds of changing data that all viewers share.
package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// Problem is an error with the problem document that answers it.
type Problem struct {
	api.Problem
	RetryAfter time.Duration // 0: the answer has no Retry-After
}

func (p *Problem) Error() string { return p.Title + ": " + p.Detail }

// NewProblem returns a problem whose status is the one of its code.
func NewProblem(code api.ProblemCode, detail string, fields ...api.FieldError) *Problem {
	return &Problem{Problem: api.Problem{
		Type: code.URI(), Code: code, Title: http.StatusText(code.Status()), Status: code.Status(),
		Detail: detail, Fields: fields,
	}}
}

// RetryLater returns a temporary problem: the client may repeat the request after this time.
func RetryLater(code api.ProblemCode, after time.Duration, detail string) *Problem {
	p := NewProblem(code, detail)
	p.RetryAfter = after
	return p
}

// Write answers with the problem.
func (p *Problem) Write(w http.ResponseWriter) {
	SetRetryAfter(w.Header(), p.RetryAfter)
	WriteJSON(w, p.Status, "application/problem+json", p.Problem)
}

// SetRetryAfter sets the header Retry-After, unless after is 0.
func SetRetryAfter(h http.Header, after time.Duration) {
	if after > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((after+time.Second-1)/time.Second), 10))
	}
}

// WriteJSON answers with v as JSON.
func WriteJSON(w http.ResponseWriter, status int, contentType string, v any) {
	body := Encode(v)
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // an error means that the client has left
}

// Encode returns v as JSON. A value that can't be encoded is a bug: Encode panics.
func Encode(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Errorf("encode answer: %w", err))
	}
	return body
}

// Handler serves a request. If it returns an error, it has either written nothing, or has stopped
// in the middle of the answer.
type Handler func(w http.ResponseWriter, r *http.Request) error

// Routes has the handlers of an API by path, a pattern of http.ServeMux, and by method.
type Routes map[string]map[string]Handler

// Add adds a handler. The handler of a GET also serves HEAD, unless its answer is a stream.
func (t Routes) Add(method, path string, stream bool, serve Handler) {
	if t[path] == nil {
		t[path] = map[string]Handler{}
	}
	t[path][method] = serve
	if method == http.MethodGet && !stream {
		t[path][http.MethodHead] = serve
	}
}

// Register adds all handlers to mux, with one for all other paths, which has a problem, as a path
// has for other methods. fail answers with the error of a handler.
func (t Routes) Register(mux *http.ServeMux, fail func(w http.ResponseWriter, r *http.Request, err error)) {
	handle := func(path, allow string, methods map[string]Handler) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			var err error
			switch serve, ok := methods[r.Method]; {
			case ok:
				err = serve(w, r)
			case allow == "":
				err = NewProblem(api.NoSuchPath, "no such path: see /openapi.yaml")
			default:
				w.Header().Set("Allow", allow)
				err = NewProblem(api.MethodNotAllowed, "this path accepts "+allow)
			}
			if err != nil {
				fail(w, r, err)
			}
		})
	}
	handle("/", "", nil)
	for path, methods := range t {
		handle(path, strings.Join(slices.Sorted(maps.Keys(methods)), ", "), methods)
	}
}

// WhileValid returns a context that ends with the given cause when valid, which it calls each
// interval, returns false. Then it also interrupts a write of the answer w, unless w is nil, to a
// client that does not read. The caller must call end.
func WhileValid(
	ctx context.Context, w http.ResponseWriter, interval time.Duration, cause error, valid func() bool,
) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var checks sync.WaitGroup
	checks.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if valid() {
				continue
			}
			cancel(cause)
			if w != nil {
				_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0)) // test servers have no deadlines
			}
			return
		}
	})
	return ctx, func() {
		cancel(nil)
		checks.Wait()
	}
}

// LogFailure logs an unexpected error of a handler.
func LogFailure(log *slog.Logger, r *http.Request, err error, attrs ...slog.Attr) {
	logRequest(log, r, "request failed", append(attrs, slog.Any("error", err))...)
}

// LogPanic logs where a handler panicked with the value v. It logs v only if it is a runtime error,
// because any other value might contain a payload or a token.
func LogPanic(log *slog.Logger, r *http.Request, v any, attrs ...slog.Attr) {
	attrs = append(attrs, slog.String("stack", string(debug.Stack())))
	var fault runtime.Error
	if err, ok := v.(error); ok && errors.As(err, &fault) {
		attrs = append(attrs, slog.Any("error", fault))
	}
	logRequest(log, r, "handler panicked", attrs...)
}

func logRequest(log *slog.Logger, r *http.Request, text string, attrs ...slog.Attr) {
	all := append([]slog.Attr{slog.String("method", r.Method), slog.String("path", r.URL.Path)}, attrs...)
	log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, text, all...) //nolint:sloglint // callers give constants
}
