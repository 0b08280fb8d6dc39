package guard

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func release(context.Context, *Lease) error { return nil }

// meteredClient returns a client with metrics, and a function that reads the metrics as a map of
// "name{label=value,...}" to values; a histogram's value is its count.
func meteredClient(t *testing.T, url, prefix string) (*Client, func() map[string]float64) {
	opts, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(opts)
	reader := sdkmetric.NewManualReader()
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	c := New(rdb, Prefix(prefix), Meter(provider.Meter("test")), MetricPrefix("x_"))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		c.renewer.loseAll()
		_ = c.Close(ctx)
		_ = rdb.Close()
	})
	return c, func() map[string]float64 {
		var all metricdata.ResourceMetrics
		require.NoError(t, reader.Collect(context.WithoutCancel(t.Context()), &all))
		found := map[string]float64{}
		for _, scope := range all.ScopeMetrics {
			for _, m := range scope.Metrics {
				collect(found, m)
			}
		}
		return found
	}
}

func collect(found map[string]float64, m metricdata.Metrics) {
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		addPoints(found, m.Name, data.DataPoints)
	case metricdata.Gauge[int64]:
		addPoints(found, m.Name, data.DataPoints)
	case metricdata.Gauge[float64]:
		addPoints(found, m.Name, data.DataPoints)
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			found[series(m.Name, p.Attributes.Encoded(encoder{}))] = float64(p.Count)
		}
	}
}

func addPoints[N int64 | float64](found map[string]float64, name string, points []metricdata.DataPoint[N]) {
	for _, p := range points {
		found[series(name, p.Attributes.Encoded(encoder{}))] = float64(p.Value)
	}
}

// encoder writes labels as a=1,b=2.
type encoder struct{}

func (encoder) Encode(labels attribute.Iterator) string {
	var all []string
	for labels.Next() {
		label := labels.Attribute()
		all = append(all, string(label.Key)+"="+label.Value.String())
	}
	return strings.Join(all, ",")
}

func (encoder) ID() attribute.EncoderID { return attribute.EncoderID{} }

func series(name, labels string) string {
	if labels == "" {
		return name
	}
	return name + "{" + labels + "}"
}

// TestMetrics compares the names, labels and values of all metrics of a client. Of times and
// connections it checks only that they are there. Names and labels are contracts.
func TestMetrics(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		c, collected := meteredClient(t, url, prefix)
		ctx := t.Context()
		p, err := c.Pool(ctx, "p", Spec{
			Members: []Member{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "d"}},
			Breaker: BreakerPolicy{Failures: 1, OpenFor: time.Hour, Successes: 1}, Lease: 30 * time.Second,
		})
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "d", Disable))
		l, err := p.TryAcquire(ctx, On("a"))
		require.NoError(t, err)
		require.NoError(t, l.Release(ctx, Failure)) // opens a
		_, err = p.TryAcquire(ctx, On("a"))
		require.ErrorIs(t, err, ErrDenied)
		l, err = p.TryAcquire(ctx, On("b"))
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "b", TakeBack)) // lost
		l.lose()
		l, err = p.TryAcquire(ctx, On("c"))
		require.NoError(t, err)
		require.NoError(t, l.ReleaseUnknown(ctx))
		l, err = p.TryAcquire(ctx, On("c"))
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "c", Open))
		require.NoError(t, c.Control(ctx, "p", "c", CloseBreaker))
		require.NoError(t, l.Release(ctx, Success)) // stale
		_, err = p.TryAcquire(ctx, On("c"))
		require.NoError(t, err)
		d, err := c.Limiter("l", Bucket(1, time.Hour)).Take(ctx, "k", 1)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.NoError(t, c.Measure(ctx))

		got := collected()
		for _, timing := range []string{
			"x_guard_wait_ms{guard=p}", "x_guard_call_ms{op=acquire}", "x_guard_call_ms{op=declare}", "x_guard_call_ms{op=release}",
			"x_guard_call_ms{op=take}", "x_guard_call_ms{op=inspect}", "x_guard_call_ms{op=control}",
			"x_redis_ping_ms", "x_redis_pool_active", "x_redis_pool_idle",
		} {
			require.Contains(t, got, timing)
			delete(got, timing)
		}
		require.Equal(t, map[string]float64{
			"x_guard_requests_total{guard=p,result=granted}": 5, "x_guard_requests_total{guard=p,result=denied}": 1,
			"x_guard_requests_total{guard=l,result=granted}":    1,
			"x_guard_denied_total{guard=p,reason=circuit_open}": 1,
			"x_guard_breaker_changes_total{guard=p,to=open}":    1,
			"x_guard_unknown_member_total{guard=p}":             1,
			"x_guard_held{guard=p}":                             1,
			"x_guard_outage{guard=p}":                           0,
			"x_guard_members{guard=p,state=free}":               1, "x_guard_members{guard=p,state=cooling}": 1,
			"x_guard_members{guard=p,state=busy}": 1, "x_guard_members{guard=p,state=off}": 1,
			"x_guard_leases_ended_total{guard=p,how=expired}": 0, "x_guard_leases_ended_total{guard=p,how=lost}": 1,
			"x_guard_leases_ended_total{guard=p,how=stale}": 1,
			"x_guard_queue_size{guard=p}":                   0,
			"x_redis_pool_timeouts":                         0,
		}, got)
		c.StopMeasuring()
		for name := range collected() {
			require.NotContains(t, name, "guard_members")
			require.NotContains(t, name, "leases_ended")
		}
	})
}

// TestMeasureIsBounded: of 80 locks, a pool and a key guard, Measure shows lock00 by its name, but
// neither lock70 nor the key guard, and at most mostLabels names and one more. firstGuards orders
// pools and semaphores before breakers and locks.
func TestMeasureIsBounded(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		c, collected := meteredClient(t, url, prefix)
		ctx := t.Context()
		for i := range 80 {
			require.NoError(t, c.Lock(fmt.Sprintf("lock%02d", i)).Do(ctx, release))
		}
		_, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}})
		require.NoError(t, err)
		require.NoError(t, c.PerKey("k", Spec{}).For("x").Do(ctx, release))
		require.NoError(t, c.Measure(ctx))
		states := map[string]float64{}
		for name, n := range collected() {
			if strings.HasPrefix(name, "x_guard_members{") {
				states[name] = n
			}
		}
		require.LessOrEqual(t, len(states), 4*(mostLabels+1))
		require.EqualValues(t, 1, states["x_guard_members{guard=lock00,state=free}"])
		require.NotContains(t, states, "x_guard_members{guard=k,state=free}")
		require.NotContains(t, states, "x_guard_members{guard=lock70,state=free}")
	})
	names := []string{"lock/a", "pool/z", "breaker/b", "pool/z", "pool/a", "semaphore/s"}
	require.Equal(t, []string{"pool/a", "pool/z", "semaphore/s", "breaker/b", "lock/a"}, firstGuards(slices.Clone(names)))
}

// TestMeasureOfALargePool: of a pool with more than mostCountedMembers members, Measure counts the
// free ones, and counts all others as busy, also one that is off.
func TestMeasureOfALargePool(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t) // miniredis needs seconds for so many members
	c, collected := meteredClient(t, url, prefix)
	ctx := t.Context()
	members := make([]Member, mostCountedMembers+1)
	for i := range members {
		members[i].ID = fmt.Sprint(i)
	}
	_, err := c.Pool(ctx, "p", Spec{Members: members})
	require.NoError(t, err)
	require.NoError(t, c.Control(ctx, "p", "7", Disable))
	require.NoError(t, c.rdb.ZRem(ctx, keyspace.GuardBase(prefix, kindPool, "p")+"free", "8").Err())
	require.NoError(t, c.Measure(ctx))
	got := collected()
	require.EqualValues(t, mostCountedMembers-1, got["x_guard_members{guard=p,state=free}"])
	require.EqualValues(t, 2, got["x_guard_members{guard=p,state=busy}"])
}
