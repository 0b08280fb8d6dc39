package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
)

// ServeHTTP serves one request. Besides calling the handler, it sets the request's id, writes a log
// line, refuses what checkOrigin refuses, and recovers from a panic.
func (s *server) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w := &responseWriter{ResponseWriter: rw, ctl: http.NewResponseController(rw), server: s}
	r = r.WithContext(r.Context()) // a copy, because net/http needs the body of its own request unchanged
	r.Body = s.newBodyReader(rw, r)
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
			s.logPanic(r, id, v)
			if w.status == 0 {
				s.writeProblem(w, r, errInternal)
				v = nil
			}
		}
		s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelDebug, "request served",
			slog.String("request_id", id), slog.String("method", r.Method), slog.String("path", r.URL.Path),
			slog.Int("status", w.status), slog.Int64("bytes", w.bytes), slog.Duration("took", time.Since(start)),
			slog.String("key", w.keyID))
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
	s.mux.ServeHTTP(w, r)
}

// checkOrigin refuses requests that change something and come from a web page of another origin. A
// server on loopback refuses all requests whose Host header is no loopback name.
func (s *server) checkOrigin(r *http.Request) error {
	if s.loopbackOnly && !loopbackHostHeader(r.Host) {
		return newProblem(api.WrongHost,
			"this server listens on loopback and serves only the hosts localhost and loopback addresses")
	}
	if err := s.csrf.Check(r); err != nil {
		return newProblem(api.CrossSite,
			"requests that change something are not accepted from web pages of another origin")
	}
	return nil
}

// byMethod returns a handler that selects one of m by the request's method. If m is empty, it
// answers 404.
func (s *server) byMethod(m handlersByMethod) http.Handler {
	allow := strings.Join(slices.Sorted(maps.Keys(m)), ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		switch serve, ok := m[r.Method]; {
		case ok:
			err = serve(w, r)
		case len(m) == 0:
			err = newProblem(api.NoSuchPath, "no such path: see /openapi.yaml")
		default:
			w.Header().Set("Allow", allow)
			err = newProblem(api.MethodNotAllowed, "this path accepts "+allow)
		}
		if err != nil {
			s.fail(w.(*responseWriter), r, err)
		}
	})
}

// maxNamedParams is the largest number of unknown query parameters that an answer names.
const maxNamedParams = 10

// onlyQuery returns serve as a handler that refuses requests with a query parameter that is not in
// known, so that a misspelt one does not go unnoticed.
func onlyQuery(known []string, serve handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		q, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			return newProblem(api.BadParameter, "the query is malformed: "+truncate(err.Error()))
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
			return newProblem(api.BadParameter, detail+"none", unknown...)
		}
		return newProblem(api.BadParameter, detail+strings.Join(known, ", "), unknown...)
	}
}

// fail answers a request with the problem of err. If a part of the answer is already sent, or the
// client has disconnected, it panics with http.ErrAbortHandler to break the connection.
func (s *server) fail(w *responseWriter, r *http.Request, err error) {
	if w.status != 0 || errors.Is(err, context.Canceled) {
		s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelDebug, "answer aborted",
			slog.String("request_id", w.Header().Get("X-Request-Id")), slog.Any("error", err))
		panic(http.ErrAbortHandler)
	}
	s.writeProblem(w, r, err)
}

// logPanic logs where a handler panicked. It logs the panic's value only if it is a runtime error,
// because any other value might contain a payload.
func (s *server) logPanic(r *http.Request, id string, v any) {
	attrs := []slog.Attr{slog.String("request_id", id), slog.String("method", r.Method),
		slog.String("path", r.URL.Path),
		slog.String("stack", string(debug.Stack()))}
	if err, ok := v.(error); ok {
		var fault runtime.Error
		if errors.As(err, &fault) {
			attrs = append(attrs, slog.Any("error", fault))
		}
	}
	s.log.LogAttrs(context.WithoutCancel(r.Context()), slog.LevelError, "handler panicked", attrs...)
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

// responseWriter records the status and size of the answer, and sets a deadline for each write.
type responseWriter struct {
	http.ResponseWriter
	ctl    *http.ResponseController
	server *server
	status int // 0 until the answer has begun
	bytes  int64
	keyID  string // of the API key; "" without one

	ownDeadlines bool // the handler sets the deadlines
}

func (w *responseWriter) WriteHeader(code int) {
	if w.status == 0 && code >= 200 {
		w.status = code
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
	if !w.ownDeadlines {
		_ = w.ctl.SetWriteDeadline(time.Now().Add(idleTimeout))
	}
}

// Unwrap lets http.ResponseController find the wrapped writer.
func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
