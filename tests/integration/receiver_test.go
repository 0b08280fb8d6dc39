package integration

import (
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

const (
	maxTraceBytes    = 64 << 20
	traceContentType = "application/x-protobuf"
)

// traceReceiver stores the spans that processes export to it. Its methods are safe for concurrent use.
type traceReceiver struct {
	server *httptest.Server

	mu      sync.Mutex
	spans   []exportedSpan
	changed chan struct{} // closed and replaced when spans arrive
}

// newTraceReceiver starts a receiver, which stops at the end of the test.
func newTraceReceiver(t testing.TB) *traceReceiver {
	t.Helper()
	r := &traceReceiver{changed: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", r.export)
	r.server = httptest.NewServer(mux)
	t.Cleanup(r.server.Close)
	return r
}

// Endpoint returns the value for OTEL_EXPORTER_OTLP_ENDPOINT. OTEL_EXPORTER_OTLP_PROTOCOL must be
// http/protobuf. The receiver accepts traces only, no metrics or logs.
func (r *traceReceiver) Endpoint() string { return r.server.URL }

// Spans returns the spans received so far, in order of arrival.
func (r *traceReceiver) Spans() []exportedSpan {
	spans, _ := r.snapshot()
	return spans
}

func (r *traceReceiver) snapshot() ([]exportedSpan, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.spans), r.changed
}

// WaitFor calls done with all spans, at once and after each arrival, until done returns true. It
// returns the spans. The test fails if this takes longer than timeout.
func (r *traceReceiver) WaitFor(t testing.TB, timeout time.Duration, done func([]exportedSpan) bool) []exportedSpan {
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
			t.Fatalf("await spans: not there after %s; %d arrived:\n%s", timeout, len(spans), listSpans(spans))
		}
	}
}

func listSpans(spans []exportedSpan) string {
	var b strings.Builder
	for _, s := range spans {
		fmt.Fprintf(&b, "%s: %s (%s) trace %s span %s parent %s\n",
			s.Service, s.Name, s.Kind, s.TraceID, s.SpanID, s.ParentID)
	}
	return b.String()
}

func (r *traceReceiver) export(w http.ResponseWriter, req *http.Request) {
	if got := req.Header.Get("Content-Type"); got != traceContentType {
		http.Error(w, "only "+traceContentType, http.StatusUnsupportedMediaType)
		return
	}
	body, err := readTraces(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var batch collectorpb.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &batch); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.add(flatten(&batch))
	w.Header().Set("Content-Type", traceContentType) // an empty body is the empty response message: all spans were accepted
}

func readTraces(req *http.Request) ([]byte, error) {
	body := io.Reader(req.Body)
	if req.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(body)
		if err != nil {
			return nil, err
		}
		body = unzipped
	}
	data, err := io.ReadAll(io.LimitReader(body, maxTraceBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxTraceBytes {
		return nil, fmt.Errorf("more than %d bytes", maxTraceBytes)
	}
	return data, nil
}

func (r *traceReceiver) add(spans []exportedSpan) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans = append(r.spans, spans...)
	close(r.changed)
	r.changed = make(chan struct{})
}

// exportedSpan is an exported span. Ids are in hex; "" means that there is none.
type exportedSpan struct {
	Service       string // the resource's service.name
	Name          string
	Kind          string // internal, server, client, producer or consumer
	TraceID       string
	SpanID        string
	ParentID      string
	Start         time.Time
	Attributes    map[string]any // string, bool, int64, float64, []byte, []any or map[string]any
	Links         []spanLink
	Events        []spanEvent
	StatusCode    string // Unset, Ok or Error
	StatusMessage string
}

// spanLink is a reference to another span, which may belong to another trace.
type spanLink struct {
	TraceID, SpanID string
}

// spanEvent is something that happened during a span, such as an error.
type spanEvent struct {
	Name       string
	Attributes map[string]any
}

func flatten(batch *collectorpb.ExportTraceServiceRequest) []exportedSpan {
	var spans []exportedSpan
	for _, resource := range batch.GetResourceSpans() {
		service, _ := attributes(resource.GetResource().GetAttributes())["service.name"].(string)
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				spans = append(spans, span(service, s))
			}
		}
	}
	return spans
}

func span(service string, s *tracepb.Span) exportedSpan {
	out := exportedSpan{
		Service:       service,
		Name:          s.GetName(),
		Kind:          strings.ToLower(strings.TrimPrefix(s.GetKind().String(), "SPAN_KIND_")),
		TraceID:       hex.EncodeToString(s.GetTraceId()),
		SpanID:        hex.EncodeToString(s.GetSpanId()),
		ParentID:      hex.EncodeToString(s.GetParentSpanId()),
		Start:         time.Unix(0, int64(s.GetStartTimeUnixNano())),
		Attributes:    attributes(s.GetAttributes()),
		StatusCode:    statusCode(s.GetStatus().GetCode()),
		StatusMessage: s.GetStatus().GetMessage(),
	}
	for _, l := range s.GetLinks() {
		out.Links = append(out.Links, spanLink{
			TraceID: hex.EncodeToString(l.GetTraceId()),
			SpanID:  hex.EncodeToString(l.GetSpanId()),
		})
	}
	for _, e := range s.GetEvents() {
		out.Events = append(out.Events, spanEvent{Name: e.GetName(), Attributes: attributes(e.GetAttributes())})
	}
	return out
}

// statusCode turns STATUS_CODE_OK into Ok.
func statusCode(code tracepb.Status_StatusCode) string {
	name := strings.TrimPrefix(code.String(), "STATUS_CODE_")
	return name[:1] + strings.ToLower(name[1:])
}

func attributes(pairs []*commonpb.KeyValue) map[string]any {
	all := make(map[string]any, len(pairs))
	for _, pair := range pairs {
		all[pair.GetKey()] = value(pair.GetValue())
	}
	return all
}

func value(v *commonpb.AnyValue) any {
	switch v := v.GetValue().(type) {
	case *commonpb.AnyValue_StringValue:
		return v.StringValue
	case *commonpb.AnyValue_BoolValue:
		return v.BoolValue
	case *commonpb.AnyValue_IntValue:
		return v.IntValue
	case *commonpb.AnyValue_DoubleValue:
		return v.DoubleValue
	case *commonpb.AnyValue_BytesValue:
		return v.BytesValue
	case *commonpb.AnyValue_KvlistValue:
		return attributes(v.KvlistValue.GetValues())
	case *commonpb.AnyValue_ArrayValue:
		all := make([]any, 0, len(v.ArrayValue.GetValues()))
		for _, item := range v.ArrayValue.GetValues() {
			all = append(all, value(item))
		}
		return all
	}
	return nil
}
