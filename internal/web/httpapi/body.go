package httpapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"golang.org/x/sync/semaphore"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web"
)

// mediaType returns the media type of the body. It refuses, by the headers, media types that are
// not in want, charsets other than UTF-8 and US-ASCII, parameters that it does not know, and
// compression.
func mediaType(r *http.Request, want ...string) (string, error) {
	typ, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	charset := strings.ToLower(params["charset"])
	encoding := r.Header.Get("Content-Encoding")
	header := strings.ToLower(params["header"])
	delete(params, "charset")
	if typ == "text/csv" {
		delete(params, "header")
	}
	switch {
	case err != nil, !slices.Contains(want, typ):
		return "", web.NewProblem(api.UnsupportedMedia, "Content-Type must be "+strings.Join(want, " or "))
	case charset != "" && charset != "utf-8" && charset != "us-ascii":
		return "", web.NewProblem(api.UnsupportedMedia, "the body must be in UTF-8")
	case typ == "text/csv" && header != "" && header != "present":
		return "", web.NewProblem(api.UnsupportedMedia,
			"Content-Type text/csv must have a header row, so its parameter header must be present: "+
				"the first row names the payload's fields")
	case len(params) > 0:
		return "", web.NewProblem(api.UnsupportedMedia, fmt.Sprintf(
			"Content-Type has the parameter %q, which is not known: leave it out",
			truncate(slices.Sorted(maps.Keys(params))[0])))
	case encoding != "" && encoding != "identity":
		return "", web.NewProblem(api.UnsupportedMedia, "the body must not be compressed")
	}
	return typ, nil
}

// bodyReader reads the body of a request, and refuses a body that arrives too slowly. It remembers
// the error or the end of the body.
//
// A body has a credit, the time for which the server still waits for it. The credit starts at
// slowStart. Waiting uses it up, and each KiB that arrives adds a second, up to slowStart, or up to
// idleTimeout for a streamed body. A body that is read into memory must also be complete after
// waits of bodyTimeout in all. A streamed body may take any time, and may be slower as long as its
// lines end: at the end of each line its credit is idleTimeout. Time that the server itself needs
// does not count.
type bodyReader struct {
	io.ReadCloser
	server   *server
	ctl      *http.ResponseController
	streamed bool // it may take any time, and the server's shutdown interrupts it
	credit   time.Duration
	waited   time.Duration // for the client, in all
	// err is the error or io.EOF that ended the body. After it, no read deadline may be set:
	// net/http then reads in the background, and a deadline would cancel the request's context.
	err error
}

func (s *server) newBodyReader(w http.ResponseWriter, r *http.Request) *bodyReader {
	b := &bodyReader{ReadCloser: r.Body, server: s, ctl: http.NewResponseController(w), credit: slowStart}
	if r.Body == http.NoBody {
		b.err = io.EOF
	}
	b.setDeadline(slowStart) // for a body that no handler reads
	return b
}

// bodyOf returns the body of a request as the bodyReader with which ServeHTTP has replaced it.
func bodyOf(r *http.Request) *bodyReader { return r.Body.(*bodyReader) }

func (b *bodyReader) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	wait, most := min(b.credit, bodyTimeout-b.waited), slowStart
	if b.streamed {
		wait, most = b.credit, idleTimeout
	}
	b.setDeadline(wait)
	if b.streamed {
		defer context.AfterFunc(b.server.Closing, b.interrupt)()
		if b.server.Closing.Err() != nil {
			return 0, errShutdown
		}
	}
	start := time.Now()
	n, err := b.ReadCloser.Read(p)
	took := time.Since(start)
	b.waited += took
	b.credit = min(b.credit-took+time.Duration(n)*time.Second/minRate, most)
	if b.streamed && bytes.IndexByte(p[:n], '\n') >= 0 {
		b.credit = idleTimeout
	}
	switch {
	case errors.Is(err, io.EOF):
		_ = b.ctl.SetReadDeadline(time.Time{})
	case errors.Is(err, os.ErrDeadlineExceeded) && b.streamed && b.server.Closing.Err() != nil:
		return n, errShutdown
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = b.tooSlow()
	}
	b.err = err
	return n, err
}

// interrupt makes a Read that waits for the client return.
func (b *bodyReader) interrupt() { _ = b.ctl.SetReadDeadline(time.Unix(1, 0)) }

func (b *bodyReader) tooSlow() *web.Problem {
	detail := fmt.Sprintf("the body arrived too slowly: after %s it must bring %d bytes a second, ", slowStart, minRate)
	if b.streamed {
		return web.NewProblem(api.SlowBody, detail+fmt.Sprintf("or end a line every %s", idleTimeout))
	}
	return web.NewProblem(api.SlowBody, detail+fmt.Sprintf("and be complete after %s", bodyTimeout))
}

// setDeadline sets the deadline for later reads. It ignores errors, because the connections of test
// servers have no deadlines.
func (b *bodyReader) setDeadline(after time.Duration) {
	if b.err == nil {
		_ = b.ctl.SetReadDeadline(time.Now().Add(after))
	}
}

// closeAfterAnswer makes the server close the connection after the answer if the body was not read
// to its end. Otherwise the answer would wait for the rest of the body.
func (b *bodyReader) closeAfterAnswer(h http.Header) {
	if !errors.Is(b.err, io.EOF) {
		h.Set("Connection", "close")
		b.setDeadline(lingerTimeout)
	}
}

// readBody reads a body of at most limit bytes into memory. For a large body it reserves memory
// step by step while the body arrives, so that a client can't reserve memory by only announcing a
// size. The caller must call release, which frees the reservation, even after an error.
func (s *server) readBody(r *http.Request, limit int64) (body []byte, release func(), err error) {
	lease := &memoryLease{pool: s.bodyMemory}
	size := limit + 1 // a byte more than the body may have, so that the end or a larger body is seen
	if r.ContentLength >= 0 {
		size = r.ContentLength + 1
	}
	if size > limit+1 {
		return nil, lease.release, bodyTooLarge(limit)
	}
	body = make([]byte, 0, min(size, firstBuffer))
	for {
		n, err := r.Body.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case errors.Is(err, io.EOF):
			return body, lease.release, nil
		case err != nil:
			return nil, lease.release, brokenBody(err)
		case int64(len(body)) > limit:
			return nil, lease.release, bodyTooLarge(limit)
		case len(body) == cap(body):
			grown := min(2*int64(cap(body)), size)
			if err := lease.grow(r.Context(), grown); err != nil {
				return nil, lease.release, err
			}
			body = append(make([]byte, 0, grown), body...)
		}
	}
}

func bodyTooLarge(limit int64) *web.Problem {
	return web.NewProblem(api.TooLarge, "the body is larger than "+strconv.FormatInt(limit, 10)+
		" bytes: create the group without jobs and stream them to its jobs")
}

// brokenBody returns the problem for a body that could not be read to its end.
func brokenBody(err error) *web.Problem {
	if p, ok := errors.AsType[*web.Problem](err); ok {
		return p
	}
	return web.NewProblem(api.IncompleteBody, "the body ended before it was complete")
}

// truncate shortens a part of invalid input, which an error message repeats, to 300 bytes and an
// ellipsis.
func truncate(s string) string {
	const limit = 300
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// idempotencyKey returns the header Idempotency-Key without its optional quotes; "" when it is
// absent. It refuses an invalid or repeated one.
func idempotencyKey(r *http.Request) (string, error) {
	values := r.Header.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	key := values[0]
	if n := len(key); n >= 2 && key[0] == '"' && key[n-1] == '"' {
		key = key[1 : n-1]
	}
	if len(values) > 1 || !messages.ValidIdempotencyKey(key) {
		return "", web.NewProblem(api.Invalid, "the header Idempotency-Key is not a valid key",
			api.FieldError{Field: "Idempotency-Key", Problem: "must be 1 to 255 bytes of visible ASCII, once"})
	}
	return key, nil
}

// traceParent returns the header traceparent; "" when it is absent or malformed. The W3C standard
// says that malformed values are ignored.
func traceParent(r *http.Request) string {
	var w3c propagation.TraceContext
	out := propagation.MapCarrier{}
	w3c.Inject(w3c.Extract(context.Background(), propagation.HeaderCarrier(r.Header)), out)
	return out.Get("traceparent")
}

// bodyMemory limits the memory for large bodies of all requests together.
//
// A body reserves memory step by step while it arrives. If all bodies that hold memory waited for
// more, none of them would ever finish. Therefore at most one of them waits; the others are
// refused, which frees memory.
type bodyMemory struct {
	free    *semaphore.Weighted
	growing *semaphore.Weighted // held by the body that holds memory and waits for more

	mu       sync.Mutex
	holdTime time.Duration // how long bodies hold memory, averaged
}

func newBodyMemory() *bodyMemory {
	return &bodyMemory{free: semaphore.NewWeighted(maxBodyMemory), growing: semaphore.NewWeighted(1)}
}

// memoryLease is the memory that one body holds.
type memoryLease struct {
	pool  *bodyMemory
	bytes int64
	since time.Time // when it got its first memory
}

// grow makes the reservation of a body size bytes large; up to smallBody it needs none. If memory
// is short, it waits for at most bodyMemoryWait. A body that already holds memory does not wait if
// another such body does. Without memory, grow returns a problem with status 429, or the error of a
// context that was cancelled.
func (l *memoryLease) grow(ctx context.Context, size int64) error {
	if size <= smallBody {
		return nil
	}
	more := size - l.bytes
	if !l.pool.free.TryAcquire(more) && !l.await(ctx, more) {
		return l.pool.full(ctx)
	}
	if l.bytes == 0 {
		l.since = time.Now()
	}
	l.bytes = size
	return nil
}

func (l *memoryLease) await(ctx context.Context, more int64) bool {
	if l.bytes > 0 {
		if !l.pool.growing.TryAcquire(1) {
			return false
		}
		defer l.pool.growing.Release(1)
	}
	ctx, cancel := context.WithTimeout(ctx, bodyMemoryWait)
	defer cancel()
	return l.pool.free.Acquire(ctx, more) == nil
}

// release frees the memory. It may be called more than once.
func (l *memoryLease) release() {
	if l.bytes == 0 {
		return
	}
	l.pool.free.Release(l.bytes)
	l.bytes = 0
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.pool.holdTime += (time.Since(l.since) - l.pool.holdTime) / 4
}

// full returns the error for a body that gets no memory. Its Retry-After is the time for which
// bodies have held memory lately, on average, but at least a second.
func (m *bodyMemory) full(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return web.RetryLater(api.TooManyRequests, max(m.holdTime, time.Second),
		"too many large bodies are being read: retry, or stream the jobs")
}
