package guard

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// mostLabels is how many names of guards may be values of the metric label guard. Further guards
// have the label "other".
const mostLabels = 64

// pingTimeout bounds the PING that each collection of metrics sends to measure redis_ping_ms.
const pingTimeout = 500 * time.Millisecond

// meter are the metrics of a Client. The label guard is the guard's name without its kind and, of a
// PerKey, without the key; see mostLabels. Members are never labels.
type meter struct {
	c *Client

	requests, denials, changes, unknown metric.Int64Counter
	waits, calls                        metric.Float64Histogram
	registration                        metric.Registration
	measured                            measured

	mu     sync.Mutex
	labels map[string]bool
}

func newMeter(c *Client) *meter {
	m := &meter{c: c, labels: map[string]bool{}}
	of := c.cfg.meter
	if of == nil {
		of = noop.NewMeterProvider().Meter("guard")
	}
	prefix := c.cfg.metricPrefix
	var errs []error
	counter := func(name, what string) metric.Int64Counter {
		n, err := of.Int64Counter(prefix+name, metric.WithDescription(what))
		errs = append(errs, err)
		return n
	}
	histogram := func(name, what string) metric.Float64Histogram {
		h, err := of.Float64Histogram(prefix+name, metric.WithDescription(what), metric.WithUnit("ms"),
			metric.WithExplicitBucketBoundaries(0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000, 5000, 30000, 60000))
		errs = append(errs, err)
		return h
	}
	gauge := func(name, what string) metric.Int64ObservableGauge {
		g, err := of.Int64ObservableGauge(prefix+name, metric.WithDescription(what))
		errs = append(errs, err)
		return g
	}
	total := func(name, what string) metric.Int64ObservableCounter {
		g, err := of.Int64ObservableCounter(prefix+name, metric.WithDescription(what))
		errs = append(errs, err)
		return g
	}
	m.requests = counter("guard_requests_total", "calls by result")
	m.denials = counter("guard_denied_total", "denied calls by reason")
	m.unknown = counter("guard_unknown_member_total", "members that were given back because this process lacks them")
	m.changes = counter("guard_breaker_changes_total", "changes of state of circuit breakers")
	m.waits = histogram("guard_wait_ms", "time until a call was granted or refused")
	m.calls = histogram("guard_call_ms", "time of one call to Redis")
	held := gauge("guard_held", "leases that this process holds")
	queue := gauge("guard_queue_size", "calls of this process that stand in queues")
	outage := gauge("guard_outage", "1 while Redis is away for this guard")
	members := gauge("guard_members", "members by state: free, cooling, busy, off")
	ended := total("guard_leases_ended_total", "leases that ended otherwise than by a release that counted: "+
		"expired before they were claimed, lost, or released after the breaker had changed (stale)")
	active := gauge("redis_pool_active", "connections of the pool that are in use")
	idle := gauge("redis_pool_idle", "connections of the pool that are not in use")
	timeouts := total("redis_pool_timeouts", "calls that got no connection of the pool in time")
	ping, err := of.Float64ObservableGauge(prefix+"redis_ping_ms", metric.WithDescription("time of a PING"),
		metric.WithUnit("ms"))
	errs = append(errs, err)
	m.registration, err = of.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		for label, s := range m.sums() {
			with := metric.WithAttributes(attribute.String("guard", label))
			o.ObserveInt64(held, s.held, with)
			o.ObserveInt64(queue, s.queued, with)
			o.ObserveInt64(outage, s.outage, with)
		}
		m.measured.observe(o, members, ended)
		if s := c.rdb.PoolStats(); s != nil {
			o.ObserveInt64(active, int64(s.TotalConns)-int64(s.IdleConns))
			o.ObserveInt64(idle, int64(s.IdleConns))
			o.ObserveInt64(timeouts, int64(s.Timeouts))
		}
		ctx, cancel := context.WithTimeout(ctx, pingTimeout)
		defer cancel()
		if began := time.Now(); c.rdb.Ping(ctx).Err() == nil { // else it has no value
			o.ObserveFloat64(ping, ms(time.Since(began)))
		}
		return nil
	}, held, queue, outage, members, ended, active, idle, timeouts, ping)
	if err := errors.Join(append(errs, err)...); err != nil {
		c.cfg.logger.Warn("guard: metrics are incomplete", "error", err)
	}
	return m
}

func (m *meter) close() {
	if m.registration != nil {
		_ = m.registration.Unregister() // the meter may have ended before
	}
}

type sums struct{ held, queued, outage int64 }

// sums returns for each label, as it is now: the leases that this process holds, its calls in
// queues, and whether Redis is away. All guards of a PerKey have one label.
func (m *meter) sums() map[string]*sums {
	all := map[string]*sums{}
	of := func(g *shared) *sums {
		if all[g.label] == nil {
			all[g.label] = &sums{}
		}
		return all[g.label]
	}
	for _, g := range m.c.used() {
		s := of(g)
		if g.circuit.isOpen() {
			s.outage = 1
		}
	}
	m.c.renewer.each(func(g *shared, held int) { of(g).held += int64(held) })
	m.c.waits.each(func(g *shared, queued int) { of(g).queued += int64(queued) })
	return all
}

// label returns the metric label of a guard with this name: the name, or "other" if it is new and
// mostLabels names are in use. A name that it has returned stays in use.
func (m *meter) label(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.labels[name] {
		return name
	}
	if len(m.labels) >= mostLabels {
		return "other"
	}
	m.labels[name] = true
	return name
}

func (m *meter) count(c metric.Int64Counter, g *shared, key, value string) {
	if m.c.cfg.meter != nil {
		with := metric.WithAttributes(attribute.String("guard", g.label), attribute.String(key, value))
		c.Add(context.Background(), 1, with)
	}
}

// acquired counts the end of a call for a lease by its result, and records how long it took. A call
// with another error, such as ErrClosed or ErrSetup, it leaves out.
func (m *meter) acquired(g *shared, took time.Duration, l *Lease, err error) {
	if m.c.cfg.meter == nil {
		return
	}
	var denied *DeniedError
	result := ""
	switch {
	case l != nil && l.fence != 0:
		result = "granted"
	case l != nil || errors.Is(err, ErrUnavailable):
		result = "unavailable"
	case errors.As(err, &denied):
		result = "denied"
		m.count(m.denials, g, "reason", string(denied.Reason))
	case errors.Is(err, ErrQueueFull):
		result = "full"
	case errors.Is(err, ErrWaitTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		result = "timeout"
	default:
		return
	}
	m.count(m.requests, g, "result", result)
	m.waits.Record(context.Background(), ms(took), metric.WithAttributes(attribute.String("guard", g.label)))
}

// queued counts a call that was put into a queue.
func (m *meter) queued(g *shared) { m.count(m.requests, g, "result", "queued") }

// took counts a call of a limiter by its result, and records how long it took. Of errors it counts
// ErrUnavailable alone.
func (m *meter) took(g *shared, took time.Duration, d Decision, err error) {
	if m.c.cfg.meter == nil {
		return
	}
	m.called(takeScript.Name(), took)
	switch {
	case err == nil && d.Allowed:
		m.count(m.requests, g, "result", "granted")
	case err == nil:
		m.count(m.requests, g, "result", "denied")
		m.count(m.denials, g, "reason", string(RateLimited))
	case errors.Is(err, ErrUnavailable):
		m.unavailable(g)
	}
}

func (m *meter) unavailable(g *shared) { m.count(m.requests, g, "result", "unavailable") }

// called records the time of a call to Redis.
func (m *meter) called(op string, took time.Duration) {
	if m.c.cfg.meter != nil {
		m.calls.Record(context.Background(), ms(took), metric.WithAttributes(attribute.String("op", op)))
	}
}

// released counts a release that has changed the state of a breaker.
func (m *meter) released(g *shared, r settled) {
	if r.changed {
		m.count(m.changes, g, "to", breakerNames[r.breaker])
	}
}

// unknownMember counts a lease that was given back because this process can't use its member.
func (m *meter) unknownMember(g *shared, n int64) {
	if m.c.cfg.meter != nil {
		m.unknown.Add(context.Background(), n, metric.WithAttributes(attribute.String("guard", g.label)))
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
