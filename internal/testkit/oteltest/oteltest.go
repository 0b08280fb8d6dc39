// Package oteltest receives the traces of processes under test: it is an OTLP/HTTP endpoint on
// loopback that stores all spans. It hides the protocol's nested messages and encodings.
package oteltest

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

const (
	maxRequestBytes = 64 << 20
	contentType     = "application/x-protobuf"
)

// Receiver stores the spans that processes export to it. Its methods are safe for concurrent use.
type Receiver struct {
	server *httptest.Server

	mu      sync.Mutex
	spans   []Span
	changed chan struct{} // closed and replaced when spans arrive
}

// New starts a receiver, which stops at the end of the test.
func New(t testing.TB) *Receiver {
	t.Helper()
	r := &Receiver{changed: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", r.export)
	r.server = httptest.NewServer(mux)
	t.Cleanup(r.server.Close)
	return r
}

// Endpoint returns the value for OTEL_EXPORTER_OTLP_ENDPOINT. OTEL_EXPORTER_OTLP_PROTOCOL must be
// http/protobuf. The receiver accepts traces only, no metrics or logs.
func (r *Receiver) Endpoint() string { return r.server.URL }

// Spans returns the spans received so far, in order of arrival.
func (r *Receiver) Spans() []Span {
	spans, _ := r.snapshot()
	return spans
}

func (r *Receiver) snapshot() ([]Span, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.spans), r.changed
}

// WaitFor calls done with all spans, at once and after each arrival, until done returns true. It
// returns the spans. The test fails if this takes longer than timeout.
func (r *Receiver) WaitFor(t testing.TB, timeout time.Duration, done func([]Span) bool) []Span {
	t.Helper()
	expired := time.NewTimer(timeout)
	defer expired.Stop()
	for {
		spans, changed := r.snapshot()
		if done(spans) {
			return spans
		}
		select {
		case <-changed:
		case <-expired.C:
			t.Fatalf("await spans: not there after %s; %d arrived:\n%s", timeout, len(spans), list(spans))
		}
	}
}

func list(spans []Span) string {
	var b strings.Builder
	for _, s := range spans {
		fmt.Fprintf(&b, "%s: %s (%s) trace %s span %s parent %s\n",
			s.Service, s.Name, s.Kind, s.TraceID, s.SpanID, s.ParentID)
	}
	return b.String()
}

func (r *Receiver) export(w http.ResponseWriter, req *http.Request) {
	if got := req.Header.Get("Content-Type"); got != contentType {
		http.Error(w, "only "+contentType, http.StatusUnsupportedMediaType)
		return
	}
	body, err := read(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var batch collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &batch); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.add(flatten(&batch))
	w.Header().Set("Content-Type", contentType) // an empty body is the empty response message: all spans were accepted
}

func read(req *http.Request) ([]byte, error) {
	body := io.Reader(req.Body)
	if req.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(body)
		if err != nil {
			return nil, err
		}
		body = unzipped
	}
	data, err := io.ReadAll(io.LimitReader(body, maxRequestBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxRequestBytes {
		return nil, fmt.Errorf("more than %d bytes", maxRequestBytes)
	}
	return data, nil
}

func (r *Receiver) add(spans []Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans = append(r.spans, spans...)
	close(r.changed)
	r.changed = make(chan struct{})
}
