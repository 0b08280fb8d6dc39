package telemetry

import (
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// CallbackMetrics are the instruments of callbacks.
type CallbackMetrics struct {
	tries             map[string]counter // by outcome
	duration          histogram
	crowded, disabled counter
	counts            atomic.Pointer[[3]int64]
}

// NewCallbackMetrics creates the instruments of callbacks.
func NewCallbackMetrics(meter metric.Meter) *CallbackMetrics {
	i := instruments{meter}
	m := &CallbackMetrics{
		tries:    map[string]counter{},
		duration: i.histogram("callback_duration_ms", "How long a try to send a callback took.", 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 15000),
		crowded:  i.counter("callback_crowded_total", "Callbacks that died because their endpoint had too many pending ones."),
		disabled: i.counter("callback_endpoints_disabled_total", "Endpoints of tenants that were disabled, for an answer 410 or because they only failed."),
	}
	for how, outcome := range map[string]string{"ok": "delivered", "retry": "retried", "defer": "deferred", "dead": "dead"} {
		m.tries[how] = i.counter("callback_tries_total", "Tries to send a callback, by how they ended.", attribute.String("outcome", outcome))
	}
	pending := i.gauge("callback_pending", "Callbacks that wait for their delivery.")
	oldest := i.gauge("callback_oldest_ms", "Age of the oldest callback that waits for its delivery.")
	dead := i.gauge("callback_dead", "Callbacks that are not tried again by themselves.")
	i.observe(func(o metric.Observer) {
		if counts := m.counts.Load(); counts != nil {
			o.ObserveInt64(pending, counts[0])
			o.ObserveInt64(dead, counts[1])
			o.ObserveInt64(oldest, counts[2])
		}
	}, pending, dead, oldest)
	return m
}

// Tried counts a try to send a callback. how is ok, retry, defer or dead.
func (m *CallbackMetrics) Tried(how string, d time.Duration) {
	m.tries[how].add(1)
	m.duration.record(d)
}

// Crowded counts n callbacks that died because their endpoint had too many pending ones.
func (m *CallbackMetrics) Crowded(n int64) { m.crowded.add(int(n)) }

// Disabled counts an endpoint that was disabled.
func (m *CallbackMetrics) Disabled() { m.disabled.add(1) }

// SetCounts sets the gauges, which the leader shows; oldest is the age of the oldest pending callback.
func (m *CallbackMetrics) SetCounts(pending, dead int64, oldest time.Duration) {
	m.counts.Store(&[3]int64{pending, dead, max(0, oldest.Milliseconds())})
}

// HideCounts stops showing the gauges until the next SetCounts.
func (m *CallbackMetrics) HideCounts() { m.counts.Store(nil) }
