package guard

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestBounds: with 100 leases and 200 waiters, one call of the script wait ends at most 16 leases,
// removes at most 64 waiters, frees at most 16 members and makes at most 16 grants. Its reply next
// = 0 asks for another call.
func TestBounds(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	s := rapidtest.NewScripts(t, &redis.Options{Addr: server.Addr()}, nil, allScripts...)
	st := &stage{T: t, s: s, now: 1_700_000_000_000_000, base: "t:guard:{pool/p}:"}
	const members, waiters = 100, 200
	args := []any{0, "sliding|1|1000|0|1|60000|1|1|3000|4000|1000|0", 1, members}
	for i := range members {
		args = append(args, fmt.Sprintf("m%03d", i), "")
	}
	st.must("declare", args...)
	for i := range members {
		require.Equal(t, "GRANTED", st.must("acquire", fmt.Sprint("x-", i), "x", "", "", 0, 0, 1000, "")[0])
	}
	for i := range waiters {
		require.Equal(t, "QUEUED", st.must("acquire", fmt.Sprint("y-", i), "y", "", "", 0, 1000, 1000, "")[0])
	}
	size := func(key string) int64 { return s.ZCard(t.Context(), st.base+key).Val() }
	rules := refRules{failures: 1, successes: 1, concurrency: 1}
	lawful := func() {
		_, keys, err := s.Run(st.now, "inspect", guardKeys(st.base), []any{0, 0})
		require.NoError(t, err)
		readStored(check{t}, st.base, keys).lawful(check{t}, func(string) refRules { return rules })
	}

	// All leases have expired, and the deadlines of all waiters have passed: each call of the
	// script wait ends at most 16 leases and removes at most 64 waiters.
	st.now += 4_000_000
	calls := 0
	for next := int64(0); next == 0; calls++ {
		leases, queue := size("leases"), size("queue")
		reply := st.must("wait", "z")
		next = reply[0].(int64)
		require.LessOrEqual(t, leases-size("leases"), int64(16), "leases that one call ends")
		require.LessOrEqual(t, queue-size("queue"), int64(64), "waiters that one call removes")
		lawful()
	}
	require.Equal(t, [3]int64{}, [3]int64{size("leases"), size("queue"), size("free")})
	require.Equal(t, int64(members), size("cooling"), "a lost lease spends its permit at its end")
	require.LessOrEqual(t, calls, members/16+2)

	// All members are due at once.
	st.now += 4_000_000
	for next := int64(0); next == 0; {
		cooling := size("cooling")
		next = st.must("wait", "z")[0].(int64)
		require.LessOrEqual(t, cooling-size("cooling"), int64(16), "members that one call frees")
		lawful()
	}
	require.Equal(t, int64(members), size("free"))

	// Many calls wait and many members become free at once: one script call makes at most 16
	// grants.
	for i := range members {
		require.Equal(t, "GRANTED", st.must("acquire", fmt.Sprint("v-", i), "v", "", "", 0, 0, 1000, "")[0])
	}
	for i := range members {
		require.Equal(t, "QUEUED", st.must("acquire", fmt.Sprint("w-", i), "w", "", "", 0, 60_000, 1000, "")[0])
	}
	st.now += 4_000_000
	served := map[string]bool{}
	for range 200 {
		ids := []any{"w"}
		for i := range members {
			if id := fmt.Sprint("w-", i); !served[id] {
				ids = append(ids, id)
			}
		}
		reply := st.must("wait", ids...)
		granted := 0
		for i, id := range ids[1:] {
			if reply[i].([]any)[0] == "GRANTED" {
				require.Equal(t, fmt.Sprint("w-", len(served)), id, "first in, first out")
				served[id.(string)] = true
				granted++
			}
		}
		require.LessOrEqual(t, granted, 16)
		lawful()
		if len(served) == members {
			break
		}
		st.now += 50_000
	}
	require.Len(t, served, members)
}

func TestListOfGuards(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix+"[x]*:")
		ctx := t.Context()
		_, other := newTestClient(t, url, prefix+"[x]y:") // its name would match an unescaped pattern
		require.NoError(t, other.Lock("other").Do(ctx, release))

		want := []string{"breaker/b", "lock/l", "pool/p", "semaphore/s"}
		_, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}, {ID: "b"}, {ID: "c"}}})
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "a", Disable))
		l, err := c.use(kindPool, "p", nil).acquire(ctx, acquireConfig{member: "b"})
		require.NoError(t, err)
		require.NoError(t, c.Lock("l").Do(ctx, release))
		require.NoError(t, c.Semaphore("s", 3).Do(ctx, release))
		done, err := c.Breaker("b", BreakerPolicy{Failures: 1, OpenFor: time.Hour, Successes: 1}).Allow(ctx)
		require.NoError(t, err)
		done(Failure)
		hosts := c.PerKey("hosts", Spec{})
		var keys []string
		for i := range 25 {
			keys = append(keys, fmt.Sprintf("key/hosts/h%02d", i))
			require.NoError(t, hosts.For(fmt.Sprintf("H%02d", i)).Do(ctx, release))
		}

		for _, limit := range []int{1, 3, 7, 1000} {
			require.Equal(t, want, listAll(t, c, Query{Limit: limit}), limit)
			require.Equal(t, keys, listAll(t, c, Query{Kind: "key", Limit: limit}), limit)
		}
		require.Equal(t, []string{"pool/p"}, listAll(t, c, Query{Kind: "pool"}))
		names, err := c.Guards(ctx, false)
		require.NoError(t, err)
		require.Equal(t, want, names)
		names, err = c.Guards(ctx, true)
		require.NoError(t, err)
		require.Len(t, names, len(want)+len(keys))

		page, err := c.List(ctx, Query{Kind: "pool"})
		require.NoError(t, err)
		require.Equal(t, []api.GuardSummary{{
			Name: "pool/p", Rev: 1, Members: 3, Free: 1, Leases: 1,
			Counters: map[string]int64{"granted": 1, "denied": 0, "queued": 0, "expired": 0, "stale": 0, "lost": 0},
		}}, page.Guards)
		require.NoError(t, l.Release(ctx, Success))

		for _, bad := range []Query{{Kind: "pools"}, {Cursor: "x"}, {Cursor: "1.2"}, {Cursor: "-1.2."}, {Cursor: "1.x."}} {
			_, err := c.List(ctx, bad)
			require.ErrorIs(t, err, ErrInvalid, bad)
		}
		page, err = c.List(ctx, Query{Cursor: "7.0."}) // of a cluster that had more masters
		require.NoError(t, err)
		require.Equal(t, api.GuardList{Guards: []api.GuardSummary{}}, page)
	})
}

func listAll(t *testing.T, c *Client, q Query) (names []string) {
	t.Helper()
	for {
		page, err := c.List(t.Context(), q)
		require.NoError(t, err)
		require.LessOrEqual(t, len(page.Guards), max(q.Limit, fewListed*boolInt(q.Limit == 0)))
		for _, g := range page.Guards {
			names = append(names, g.Name)
		}
		if q.Cursor = page.Cursor; q.Cursor == "" {
			slices.Sort(names)
			return names
		}
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestControlErrors(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		_, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}})
		require.NoError(t, err)
		require.ErrorIs(t, c.Control(ctx, "none", "a", Disable), ErrUnknownGuard)
		require.ErrorIs(t, c.Control(ctx, "p", "b", Disable), ErrUnknownMember)
		require.ErrorIs(t, c.Control(ctx, "pool/p", "a", Open), ErrNoBreaker)
		for _, name := range []string{"", "/p", "pools/p", "pool/", "pool/a/b", "key/p", "key/p/", "a b"} {
			require.ErrorIs(t, c.Control(ctx, name, "a", Disable), ErrInvalid, name)
		}
		require.ErrorIs(t, c.Control(ctx, "p", "a b", Disable), ErrInvalid)
		require.ErrorIs(t, c.Control(ctx, "p", "a", "stop"), ErrInvalid)
		for _, do := range []Action{Disable, Disable, Enable, Enable, TakeBack} {
			require.NoError(t, c.Control(ctx, "p", "a", do))
		}
		require.Empty(t, c.meter.labels["none"], "a name that operators give is no label")
	})
}

func release(context.Context, *Lease) error { return nil }

// meteredClient returns a client with metrics, and a function that reads the metrics as a map of
// "name{label=value,...}" to values; a histogram's value is its count.
func meteredClient(t *testing.T, url, prefix string) (*Client, func() map[string]float64) {
	rdb := redis.NewUniversalClient(redistest.Options(t, url))
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
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
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
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
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

// sendings is a hook of the Redis client that counts what is sent, a pipeline once, and takes its
// time.
type sendings struct{ n atomic.Int64 }

func (s *sendings) count() {
	s.n.Add(1)
	time.Sleep(5 * time.Millisecond)
}

func (s *sendings) DialHook(next redis.DialHook) redis.DialHook { return next }
func (s *sendings) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.count()
		return next(ctx, cmd)
	}
}
func (s *sendings) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		s.count()
		return next(ctx, cmds)
	}
}

// TestListReadsGuardsTogether: a page of guards costs much fewer round trips than it has guards.
func TestListReadsGuardsTogether(t *testing.T) {
	t.Parallel()
	// A server of its own: a SCAN on the shared one finds keys twice while its table grows.
	rdb, c := newTestClient(t, redistest.Server(t).URL(), "")
	const guards = 250
	for i := range guards {
		require.NoError(t, c.Lock(fmt.Sprint("l", i)).Do(t.Context(), release))
	}
	_, err := c.List(t.Context(), Query{Limit: 1}) // loads the script
	require.NoError(t, err)
	seen := &sendings{}
	rdb.AddHook(seen)
	page, err := c.List(t.Context(), Query{Limit: guards})
	require.NoError(t, err)
	require.Len(t, page.Guards, guards)
	require.Less(t, seen.n.Load(), int64(guards/2))
}
