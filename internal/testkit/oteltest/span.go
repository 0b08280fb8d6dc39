package oteltest

import (
	"encoding/hex"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
)

// Span is an exported span. Ids are in hex; "" means that there is none.
type Span struct {
	Service       string // the resource's service.name
	Name          string
	Kind          string // internal, server, client, producer or consumer
	TraceID       string
	SpanID        string
	ParentID      string
	Start, End    time.Time
	Attributes    map[string]any // string, bool, int64, float64, []byte, []any or map[string]any
	Links         []Link
	Events        []Event
	StatusCode    string // Unset, Ok or Error
	StatusMessage string
}

// Link is a reference to another span, which may belong to another trace.
type Link struct {
	TraceID, SpanID string
}

// Event is something that happened during a span, such as an error.
type Event struct {
	Name       string
	Attributes map[string]any
}

var kinds = map[tracepb.Span_SpanKind]string{
	tracepb.Span_SPAN_KIND_INTERNAL: "internal",
	tracepb.Span_SPAN_KIND_SERVER:   "server",
	tracepb.Span_SPAN_KIND_CLIENT:   "client",
	tracepb.Span_SPAN_KIND_PRODUCER: "producer",
	tracepb.Span_SPAN_KIND_CONSUMER: "consumer",
}

var statuses = map[tracepb.Status_StatusCode]string{
	tracepb.Status_STATUS_CODE_UNSET: "Unset",
	tracepb.Status_STATUS_CODE_OK:    "Ok",
	tracepb.Status_STATUS_CODE_ERROR: "Error",
}

func flatten(batch *collector.ExportTraceServiceRequest) []Span {
	var spans []Span
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

func span(service string, s *tracepb.Span) Span {
	out := Span{
		Service:       service,
		Name:          s.GetName(),
		Kind:          kinds[s.GetKind()],
		TraceID:       hex.EncodeToString(s.GetTraceId()),
		SpanID:        hex.EncodeToString(s.GetSpanId()),
		ParentID:      hex.EncodeToString(s.GetParentSpanId()),
		Start:         time.Unix(0, int64(s.GetStartTimeUnixNano())),
		End:           time.Unix(0, int64(s.GetEndTimeUnixNano())),
		Attributes:    attributes(s.GetAttributes()),
		StatusCode:    statuses[s.GetStatus().GetCode()],
		StatusMessage: s.GetStatus().GetMessage(),
	}
	for _, l := range s.GetLinks() {
		out.Links = append(out.Links, Link{
			TraceID: hex.EncodeToString(l.GetTraceId()),
			SpanID:  hex.EncodeToString(l.GetSpanId()),
		})
	}
	for _, e := range s.GetEvents() {
		out.Events = append(out.Events, Event{Name: e.GetName(), Attributes: attributes(e.GetAttributes())})
	}
	return out
}

func attributes(pairs []*common.KeyValue) map[string]any {
	all := make(map[string]any, len(pairs))
	for _, pair := range pairs {
		all[pair.GetKey()] = value(pair.GetValue())
	}
	return all
}

func value(v *common.AnyValue) any {
	switch v := v.GetValue().(type) {
	case *common.AnyValue_StringValue:
		return v.StringValue
	case *common.AnyValue_BoolValue:
		return v.BoolValue
	case *common.AnyValue_IntValue:
		return v.IntValue
	case *common.AnyValue_DoubleValue:
		return v.DoubleValue
	case *common.AnyValue_BytesValue:
		return v.BytesValue
	case *common.AnyValue_KvlistValue:
		return attributes(v.KvlistValue.GetValues())
	case *common.AnyValue_ArrayValue:
		all := make([]any, 0, len(v.ArrayValue.GetValues()))
		for _, item := range v.ArrayValue.GetValues() {
			all = append(all, value(item))
		}
		return all
	}
	return nil
}
