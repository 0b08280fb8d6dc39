package oteltest

import (
	"encoding/hex"
	"strings"
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
		Kind:          strings.ToLower(strings.TrimPrefix(s.GetKind().String(), "SPAN_KIND_")),
		TraceID:       hex.EncodeToString(s.GetTraceId()),
		SpanID:        hex.EncodeToString(s.GetSpanId()),
		ParentID:      hex.EncodeToString(s.GetParentSpanId()),
		Start:         time.Unix(0, int64(s.GetStartTimeUnixNano())),
		End:           time.Unix(0, int64(s.GetEndTimeUnixNano())),
		Attributes:    attributes(s.GetAttributes()),
		StatusCode:    statusCode(s.GetStatus().GetCode()),
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

// statusCode turns STATUS_CODE_OK into Ok.
func statusCode(code tracepb.Status_StatusCode) string {
	name := strings.TrimPrefix(code.String(), "STATUS_CODE_")
	return name[:1] + strings.ToLower(name[1:])
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
