package telemetry

import (
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// Operation is what a span does with messages: messaging.operation.type of the
// semantic conventions.
type Operation string

// The operations that this system has.
const (
	OpSend    Operation = "send"
	OpReceive Operation = "receive"
	OpProcess Operation = "process"
	OpSettle  Operation = "settle"
)

// MessagingAttributes describe an operation, under the name that the system gives it, on a
// destination: a stream or a queue.
func MessagingAttributes(op Operation, name, destination string) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingSystemKey.String("redis"), // not in the conventions' list, which allow others
		semconv.MessagingOperationTypeKey.String(string(op)),
		semconv.MessagingOperationName(name),
		semconv.MessagingDestinationName(destination),
	}
}

// MessageID is the id of the one message that a span is about.
func MessageID(id string) attribute.KeyValue { return semconv.MessagingMessageID(id) }

// MessageCount is how many messages a batch holds; it is for spans of batches only.
func MessageCount(n int) attribute.KeyValue { return semconv.MessagingBatchMessageCount(n) }

// JobAttributes name a job. An ordinal below 0 or an attempt below 1 is not known yet and left out.
func JobAttributes(tenant, group string, ordinal int64, attempt int) []attribute.KeyValue {
	attrs := make([]attribute.KeyValue, 0, 4)
	attrs = append(attrs, attribute.String("bulkaction.tenant", tenant), attribute.String("bulkaction.group", group))
	if ordinal >= 0 {
		attrs = append(attrs, attribute.String("bulkaction.job", group+"."+strconv.FormatInt(ordinal, 10)))
	}
	if attempt >= 1 {
		attrs = append(attrs, attribute.Int("bulkaction.attempt", attempt))
	}
	return attrs
}

// WaitAttributes say how long a job has waited for its turn, for a permit, and for a
// congested partner.
func WaitAttributes(fairness, rate, congestion time.Duration) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.Int64("bulkaction.wait.fairness_ms", fairness.Milliseconds()),
		attribute.Int64("bulkaction.wait.rate_ms", rate.Milliseconds()),
		attribute.Int64("bulkaction.wait.congestion_ms", congestion.Milliseconds()),
	}
}
