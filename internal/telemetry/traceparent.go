package telemetry

import (
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
)

// ParseTraceParent parses a W3C traceparent into a remote span context, without allocating. It
// returns the empty context if s is not valid.
func ParseTraceParent(s string) trace.SpanContext {
	parent, ok := api.ParseTraceParent(s)
	if !ok {
		return trace.SpanContext{}
	}
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: parent.TraceID, SpanID: parent.SpanID, TraceFlags: trace.TraceFlags(parent.Flags), Remote: true,
	})
}

// FormatTraceParent returns a span context as a W3C traceparent of 55 bytes, or "" if the context
// is not valid.
func FormatTraceParent(sc trace.SpanContext) string {
	if !sc.IsValid() {
		return ""
	}
	return api.TraceParent{TraceID: sc.TraceID(), SpanID: sc.SpanID(), Flags: byte(sc.TraceFlags())}.String()
}
