package telemetry

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// RoomMetrics are the metrics of the waiting room, in broker and ingest processes. The label event
// has the ids of at most 64 events; all further events share the value [Other].
type RoomMetrics struct {
	counters                            map[string]metric.Int64Counter
	clockOff                            metric.Int64Counter
	positionAge, notify, script         metric.Float64Histogram
	waiting, away, slots, streams, pace metric.Float64ObservableGauge
	pending, lag, late                  metric.Float64ObservableGauge

	mu     sync.Mutex
	labels map[string]bool
	gauges map[string]RoomGauges
}

// RoomGauges are the sizes of an event at present: numbers of users and slots, and of the streams
// of this broker (Connections). Pace is in promotions a second; negative: unknown, counted as 0.
// Lag is how long nobody was promoted although somebody could be.
type RoomGauges struct {
	Waiting, Away, Used, Free, Connections int64
	Pace                                   float64
	Lag                                    time.Duration
}

// The names of the counters of RoomMetrics, for [RoomMetrics.Count].
const (
	RoomEntered     = "entered"
	RoomPromoted    = "promoted"
	RoomAdmitted    = "admitted"
	RoomCompleted   = "completed"
	RoomLeft        = "left"
	RoomNoShows     = "no_shows"
	RoomExpired     = "expired"
	RoomRefused     = "refused"
	RoomSlowReaders = "slow_readers"
	RoomReconnects  = "reconnects"
	RoomOrphans     = "orphans"
	RoomResyncs     = "resyncs"
)

// NewRoomMetrics creates the counters and histograms.
func NewRoomMetrics(meter metric.Meter) *RoomMetrics {
	m := &RoomMetrics{
		counters: map[string]metric.Int64Counter{}, labels: map[string]bool{}, gauges: map[string]RoomGauges{},
	}
	for name, help := range map[string]string{
		RoomEntered:     "Users who got a number.",
		RoomPromoted:    "Users who got a slot.",
		RoomAdmitted:    "Users who got a token.",
		RoomCompleted:   "Users whose session was completed.",
		RoomLeft:        "Users who left or were removed.",
		RoomNoShows:     "Promoted users who did not fetch their token.",
		RoomExpired:     "Places and tokens whose time was over.",
		RoomRefused:     "Requests to enter that were refused.",
		RoomSlowReaders: "Streams that were closed because the client did not read.",
		RoomReconnects:  "Users who came back to a place that they had.",
		RoomOrphans:     "Users of dead brokers who became away.",
		RoomResyncs:     "Events whose positions were loaded.",
	} {
		m.counters[name] = must(meter.Int64Counter(NamePrefix+"room_"+name+"_total", metric.WithDescription(help)))
	}
	m.clockOff = must(meter.Int64Counter(NamePrefix+"room_clock_off_total",
		metric.WithDescription("Seconds in which the broker's clock was more than 2 s off Redis's.")))
	m.clockOff.Add(context.Background(), 0)
	ms := func(name, help string) metric.Float64Histogram {
		return must(meter.Float64Histogram(NamePrefix+"room_"+name, metric.WithDescription(help),
			metric.WithExplicitBucketBoundaries(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000)))
	}
	m.positionAge = ms("position_age_ms", "Age of the positions that streams are shown.")
	m.notify = ms("promote_to_notify_ms", "Time from the promotion to the token on the stream.")
	m.script = ms("script_ms", "Duration of the scripts of the waiting room.")
	return m
}

// ShowGauges creates the gauges of a broker. pending returns how many dispatch messages of the last
// half minute are in the broker's Redis stream.
func (m *RoomMetrics) ShowGauges(meter metric.Meter, pending func(ctx context.Context) int64) {
	gauge := func(name, help string) metric.Float64ObservableGauge {
		return must(meter.Float64ObservableGauge(NamePrefix+"room_"+name, metric.WithDescription(help)))
	}
	m.waiting = gauge("waiting", "Users who wait.")
	m.away = gauge("away", "Users who are away and keep their places.")
	m.slots = gauge("slots", "Slots by state.")
	m.streams = gauge("connections", "Open streams of this broker.")
	m.pace = gauge("pace", "Promotions a second in the last minute, without those that filled free slots.")
	m.pending = gauge("dispatch_pending", "Messages of the last half minute in the stream of this broker.")
	m.lag = gauge("promotion_lag_ms", "Time without promotions although a user waits and a slot is free.")
	m.late = gauge("promotion_late_events", "Events with a lag of promotion.")
	all := []metric.Observable{m.waiting, m.away, m.slots, m.streams, m.pace, m.pending, m.lag, m.late}
	must(meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		m.observe(o)
		o.ObserveFloat64(m.pending, float64(pending(ctx)))
		return nil
	}, all...))
}

// observe reports the gauges of all events. Events that share the label Other are added up; of
// their lags it reports the longest.
func (m *RoomMetrics) observe(o metric.Observer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sums := map[string]RoomGauges{}
	late := 0
	for event, g := range m.gauges {
		if g.Lag > 0 {
			late++
		}
		label := m.label(event)
		s := sums[label]
		sums[label] = RoomGauges{
			Waiting: s.Waiting + g.Waiting, Away: s.Away + g.Away, Used: s.Used + g.Used, Free: s.Free + g.Free,
			Connections: s.Connections + g.Connections, Pace: s.Pace + max(0, g.Pace), Lag: max(s.Lag, g.Lag),
		}
	}
	o.ObserveFloat64(m.late, float64(late))
	for label, s := range sums {
		of := attribute.String("event", label)
		with := func(gauge metric.Float64ObservableGauge, v float64, more ...attribute.KeyValue) {
			o.ObserveFloat64(gauge, v, metric.WithAttributes(append(more, of)...))
		}
		with(m.waiting, float64(s.Waiting))
		with(m.away, float64(s.Away))
		with(m.slots, float64(s.Used), attribute.String("state", "used"))
		with(m.slots, float64(s.Free), attribute.String("state", "free"))
		with(m.streams, float64(s.Connections))
		with(m.pace, s.Pace)
		with(m.lag, milliseconds(s.Lag))
	}
}

// label returns the label of an event: its id, or Other if maxRoomLabels other events have labels
// of their own. The caller holds mu.
func (m *RoomMetrics) label(event string) string {
	if !m.labels[event] {
		if len(m.labels) >= maxRoomLabels {
			return Other
		}
		m.labels[event] = true
		// Without a 0 before it, the first thing that is counted is no increase.
		for name, counter := range m.counters {
			if name != RoomRefused { // which has another label
				counter.Add(context.Background(), 0, metric.WithAttributes(attribute.String("event", event)))
			}
		}
	}
	return event
}

// maxRoomLabels is the most events that have a label of their own: the first ones of the process.
const maxRoomLabels = 64

func (m *RoomMetrics) of(event string, more ...attribute.KeyValue) metric.MeasurementOption {
	m.mu.Lock()
	defer m.mu.Unlock()
	return metric.WithAttributes(append(more, attribute.String("event", m.label(event)))...)
}

// Count adds n to a counter of an event; counter is one of the constants RoomEntered to
// RoomResyncs.
func (m *RoomMetrics) Count(counter, event string, n int) {
	if n > 0 {
		m.counters[counter].Add(context.Background(), int64(n), m.of(event))
	}
}

// Refused counts a refused request to enter; event is "" if it may not exist. reason is a label of
// the metric.
func (m *RoomMetrics) Refused(event, reason string) {
	m.counters[RoomRefused].Add(context.Background(), 1, m.of(event, attribute.String("reason", reason)))
}

// ClockWasOff counts a second in which the broker's clock was more than 2 s off Redis's.
func (m *RoomMetrics) ClockWasOff() { m.clockOff.Add(context.Background(), 1) }

// PositionAge records, for one round, the age of the oldest position that the broker knows for a
// stream of an event.
func (m *RoomMetrics) PositionAge(event string, age time.Duration) {
	m.positionAge.Record(context.Background(), milliseconds(age), m.of(event))
}

// Notified records the time from the promotion of some users of an event at once to the sending of
// their tokens over their streams. It is called once for all these users.
func (m *RoomMetrics) Notified(event string, took time.Duration) {
	m.notify.Record(context.Background(), milliseconds(took), m.of(event))
}

// Script records the duration of one call of a Lua script of the waiting room.
func (m *RoomMetrics) Script(name string, took time.Duration) {
	m.script.Record(context.Background(), milliseconds(took), metric.WithAttributes(attribute.String("script", name)))
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// SetGauges sets the present sizes of an event.
func (m *RoomMetrics) SetGauges(event string, g RoomGauges) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gauges[event] = g
}

// DropGauges deletes the gauges of all events for which keep returns false.
func (m *RoomMetrics) DropGauges(keep func(event string) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for event := range m.gauges {
		if !keep(event) {
			delete(m.gauges, event)
		}
	}
}
