package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// mediaType checks that the body is one of want, in UTF-8 and not compressed.
func mediaType(r *http.Request, want ...string) (string, error) {
	typ, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	charset := strings.ToLower(params["charset"])
	encoding := r.Header.Get("Content-Encoding")
	switch {
	case err != nil, !slices.Contains(want, typ):
		return "", newProblem(http.StatusUnsupportedMediaType, "Content-Type must be "+strings.Join(want, " or "))
	case charset != "" && charset != "utf-8" && charset != "us-ascii":
		return "", newProblem(http.StatusUnsupportedMediaType, "the body must be in UTF-8")
	case encoding != "" && encoding != "identity":
		return "", newProblem(http.StatusUnsupportedMediaType, "the body must not be compressed")
	}
	return typ, nil
}

// bodyReader reads a request's body under a deadline, and knows whether it has been
// read to its end.
type bodyReader struct {
	io.ReadCloser
	ctl   *http.ResponseController
	idle  time.Duration // renews the deadline before each read; 0: it stands
	ended error         // sticky: a deadline set after the end would cut off the handler instead
}

func newBodyReader(w http.ResponseWriter, r *http.Request) *bodyReader {
	b := &bodyReader{ReadCloser: r.Body, ctl: http.NewResponseController(w)}
	if r.Body == http.NoBody {
		b.ended = io.EOF
	}
	b.expire(bodyTimeout)
	return b
}

// bodyOf returns the body as ServeHTTP prepared it.
func bodyOf(r *http.Request) *bodyReader { return r.Body.(*bodyReader) }

func (b *bodyReader) Read(p []byte) (int, error) {
	if b.ended != nil {
		return 0, b.ended
	}
	if b.idle > 0 {
		b.expire(b.idle)
	}
	n, err := b.ReadCloser.Read(p)
	b.ended = err
	return n, err
}

// expire sets the deadline for the reads to come. A server without deadlines, as in
// tests, needs none.
func (b *bodyReader) expire(after time.Duration) {
	if b.ended == nil {
		_ = b.ctl.SetReadDeadline(time.Now().Add(after))
	}
}

// abandon prepares an answer that does not wait for what is left of the body: the connection is
// closed after it.
func (b *bodyReader) abandon(h http.Header) {
	if !errors.Is(b.ended, io.EOF) {
		h.Set("Connection", "close")
		b.expire(lingerTimeout)
	}
}

// readWhole reads a body of at most limit bytes into memory, and holds its share of bodyMemory
// until release is called, which is safe after an error too.
func (s *server) readWhole(r *http.Request, limit int64) (body []byte, release func(), err error) {
	release = func() {}
	if r.ContentLength > limit {
		return nil, release, bodyTooLarge(limit)
	}
	if share := r.ContentLength; share < 0 || share > smallBody {
		if share < 0 {
			share = limit
		}
		ctx, cancel := context.WithTimeout(r.Context(), bodyWait)
		defer cancel()
		if s.bodies.Acquire(ctx, share) != nil {
			return nil, release, comeAgain(http.StatusTooManyRequests, time.Second,
				"too many large bodies are being read: retry, or stream the jobs")
		}
		release = func() { s.bodies.Release(share) }
	}
	body, err = io.ReadAll(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		return nil, release, brokenBody(err)
	case int64(len(body)) > limit:
		return nil, release, bodyTooLarge(limit)
	}
	return body, release, nil
}

func bodyTooLarge(limit int64) *problemError {
	return newProblem(http.StatusRequestEntityTooLarge, "the body is larger than "+strconv.FormatInt(limit, 10)+
		" bytes: create the group without jobs and stream them to its jobs")
}

// brokenBody explains a body that could not be read to its end.
func brokenBody(err error) *problemError {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return newProblem(http.StatusRequestTimeout, "the body did not come in time")
	}
	return newProblem(http.StatusBadRequest, "the body broke off before its end")
}

// readOptional decodes the body of a command into v, which stays as it is when there is none.
// Nothing but v's fields is taken.
func (s *server) readOptional(r *http.Request, v any) error {
	body, release, err := s.readWhole(r, smallBody)
	defer release()
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	if _, err := mediaType(r, "application/json"); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return badField("body", clip(err.Error()))
	}
	if dec.More() {
		return badField("body", "has more than one JSON value")
	}
	return nil
}

// clip keeps what is told about bad input short.
func clip(s string) string {
	const limit = 300
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// idempotencyKey reads the header, which may be quoted as a structured field; "" when it is absent.
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
		return "", newProblem(http.StatusUnprocessableEntity, "the header Idempotency-Key is not a valid key",
			api.FieldError{Field: "Idempotency-Key", Problem: "must be 1 to 255 bytes of visible ASCII, once"})
	}
	return key, nil
}

// traceParent reads the W3C header; as the standard has it, a malformed one counts as absent.
func traceParent(r *http.Request) string {
	var w3c propagation.TraceContext
	out := propagation.MapCarrier{}
	w3c.Inject(w3c.Extract(context.Background(), propagation.HeaderCarrier(r.Header)), out)
	return out.Get("traceparent")
}
