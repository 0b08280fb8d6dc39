package telemetry

import (
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
)

// Operation is the kind of work with messages that a span describes: the attribute
// messaging.operation.type of the OpenTelemetry semantic conventions.
type Operation string

// The operations of this system.
const (
	OpSend    Operation = "send"
	OpReceive Operation = "receive"
	OpProcess Operation = "process"
	OpSettle  Operation = "settle"
)

// MessagingAttributes returns the attributes of an operation on a destination (a stream or a
// queue). name is this system's own name of the operation, for example "admit".
func MessagingAttributes(op Operation, name, destination string) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingSystemKey.String("redis"), // not in the conventions' list, but other values are allowed
		semconv.MessagingOperationTypeKey.String(string(op)),
		semconv.MessagingOperationName(name),
		semconv.MessagingDestinationName(destination),
	}
}

// MessageID returns the attribute with the id of the message that a span handles.
func MessageID(id string) attribute.KeyValue { return semconv.MessagingMessageID(id) }

// MessageCount returns the attribute with the number of messages in a batch. Only spans of batches
// have it.
func MessageCount(n int) attribute.KeyValue { return semconv.MessagingBatchMessageCount(n) }

// JobAttributes returns the attributes that identify a job. An ordinal below 0 or an attempt below
// 1 means "not known yet" and is left out.
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

// JobKey returns the attribute with the producer's own name of a job. It may be personal data, so
// only the span of the processor's run has it, and no log line.
func JobKey(key string) attribute.KeyValue { return attribute.String("bulkaction.job.key", key) }

// WaitAttributes returns the attributes that say how long a job has waited: behind other jobs
// (fairness), for a permit (rate), and after attempts that failed or were throttled, deferred or
// reclaimed (congestion).
func WaitAttributes(fairness, rate, congestion time.Duration) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.Int64("bulkaction.wait.fairness_ms", fairness.Milliseconds()),
		attribute.Int64("bulkaction.wait.rate_ms", rate.Milliseconds()),
		attribute.Int64("bulkaction.wait.congestion_ms", congestion.Milliseconds()),
	}
}
