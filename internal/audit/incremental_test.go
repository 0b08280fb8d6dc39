package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// watch makes a round, and looks closer at who is suspicious.
func (w *world) watch(s *IncrementalCheck, alarmed bool) (Candidates, Report) {
	found, err := s.Run(w.Context(), alarmed)
	w.ok(err)
	if len(found.Groups) == 0 {
		return found, Report{OK: true}
	}
	r, err := RunGroups(w.Context(), w.conn, w.space, s.p, found, Options{})
	w.ok(err)
	return found, r
}

// What makes a group unable to end is found by rounds, within some of them, or at once when
// they are alarmed.
func TestIncrementalCheckFindsWhatStopsAGroup(t *testing.T) {
	online := []string{
		"accepted", "two counters that even out", "negative counter", "no states", "one state more", "queued job gone", "queue gone", "ready entry gone",
		"entry of a started job gone", "parked job gone", "failure gone", "results entry gone", "queue of many gone", "ready stream gone",
	}
	for _, c := range tampers {
		if !slices.Contains(online, c.name) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url, prefix := redistest.Shared(t)
			w := newWorld(t, url, prefix, 1)
			inhabited(w)
			p := w.space.Partition(0)
			s, calm := NewIncrementalCheck(w.conn, p), NewIncrementalCheck(w.conn, p)
			found, _ := w.watch(s, false)
			require.Equal(t, Candidates{}, found, "nothing has stood still yet")
			for range 3 {
				_, r := w.watch(s, false)
				require.Empty(t, r.Violations)
			}
			want := c.do(w)
			var r Report
			for rounds := 0; len(r.Violations) == 0; rounds++ {
				require.LessOrEqual(t, rounds, maxRecheckGap+1)
				_, r = w.watch(s, false)
			}
			got := summary(r)
			require.Subset(t, want, got)
			require.NotEmpty(t, got)
			if missing := strings.Contains(c.name, "gone") && c.name != "failure gone"; missing {
				require.NotEmpty(t, r.Missing)
				whole, err := Partition(t.Context(), w.conn, w.space, p, Options{})
				require.NoError(t, err)
				require.Equal(t, whole.Missing, r.Missing, "as the look at everything finds them")
			}
			_, again := w.watch(calm, true)
			require.Equal(t, got, summary(again), "alarmed, it is found in one round")
		})
	}
}

// Groups that stand still, because their jobs take long or have no worker, are looked at
// ever less often.
func TestIncrementalCheckBacksOffWhileAGroupIsUnchanged(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	p := w.space.Partition(0)
	w.create("idle", "acme", "T")
	w.append("idle", jobs(5))
	w.create("long", "acme", "L")
	w.append("long", jobs(5))
	w.start(p, "L", func() []taken { w.admit(p, "L", 5, noLimit); return w.read(p, "L", "c", 5) }())
	s, looks := NewIncrementalCheck(w.conn, p), ""
	for range 24 {
		found, _ := w.watch(s, false)
		require.NotContains(t, found.Groups, "idle", "its queue is as long as its ledger says")
		looks += strconv.Itoa(len(found.Groups))
	}
	require.Equal(t, "011010001000000010000000", looks)
	found, _ := w.watch(s, true)
	require.Equal(t, []string{"long"}, found.Groups)
}

// A tenant of more groups than fit into one reading is read twice.
func TestIncrementalCheckOfALargeTenant(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	p := w.space.Partition(0)
	for i := range 150 {
		id := fmt.Sprint("g", i)
		w.create(id, "acme", "T")
		w.append(id, jobs(2, later))
	}
	s := NewIncrementalCheck(w.conn, p)
	for range 3 {
		found, _ := w.watch(s, false)
		require.Empty(t, found)
	}
	w.ok(w.c.ZRemRangeByRank(w.Context(), p.NonReadyOf("acme"), 7, 7).Err())
	found, r := w.watch(s, false)
	require.Equal(t, []string{"acme"}, found.Tenants)
	require.Len(t, r.Missing, 1)
	require.Len(t, r.Missing[0].Jobs, 1)

	// One gets its first type between two rounds; one is on the list and has gone.
	w.create("new", "acme", "T")
	found, _ = w.watch(s, false)
	require.Equal(t, []string{"acme"}, found.Tenants)
	w.append("new", jobs(1))
	found, _ = w.watch(s, false)
	require.Empty(t, found.Tenants, "that one is met anew first")
	found, r = w.watch(s, false)
	require.Equal(t, []string{"acme"}, found.Tenants)
	require.Len(t, r.Violations, 1, "%v", r.Violations)
	w.ok(w.c.Del(w.Context(), p.Group("new")).Err())
	w.watch(s, false)
	w.watch(s, false)
}

// While jobs move through all scripts, rounds and the closer looks that they lead to find nothing.
func TestIncrementalCheckFindsNothingWhileJobsMove(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	crew := *w
	crew.tb = hard{t}
	c := &churn{world: &crew, tenants: []string{"a", "b", "c"}, types: []string{"T", "U"}}
	stop := c.run(t.Context(), false)
	t.Cleanup(func() { _ = stop() })
	s, looks := NewIncrementalCheck(w.conn, w.space.Partition(0)), 0
	for i := 0; i < 100 || c.moves.Load() < 500; i++ {
		found, r := w.watch(s, i%5 == 0)
		require.Empty(t, r.Violations, "%v", found)
		require.Empty(t, r.Missing)
		require.Empty(t, found.Tenants)
		looks += len(found.Groups)
	}
	require.NoError(t, stop())
	require.Positive(t, looks)
}

// What a round costs Redis.
func BenchmarkIncrementalCheck(b *testing.B) {
	for name, size := range map[string]struct{ groups, jobs int }{"1000 groups": {1000, 5}, "100000 jobs": {1, 100_000}} {
		b.Run(name, func(b *testing.B) {
			url, prefix := redistest.Shared(b)
			space, err := keyspace.New(prefix, 1)
			require.NoError(b, err)
			conn, err := redisx.Connect(b.Context(), redisx.Config{URL: url})
			require.NoError(b, err)
			defer conn.Close()
			w := &world{tb: b, conn: conn, c: conn.Cmd, space: space}
			for i := range size.groups {
				id := fmt.Sprint("g", i)
				w.create(id, fmt.Sprint("t", i%50), "T")
				w.append(id, jobs(size.jobs))
			}
			s := NewIncrementalCheck(conn, space.Partition(0))
			w.watch(s, false)
			cpu, out := usage(w)
			for b.Loop() {
				w.watch(s, false)
			}
			cpuNow, outNow := usage(w)
			b.ReportMetric((cpuNow-cpu)*1e6/float64(b.N), "redis_us/op")
			b.ReportMetric((outNow-out)/float64(b.N), "bytes/op")
			cpu, out = usage(w)
			_, err = Partition(b.Context(), conn, space, space.Partition(0), Options{})
			require.NoError(b, err)
			cpuNow, outNow = usage(w)
			b.ReportMetric((cpuNow-cpu)*1e3, "redis_ms_for_everything")
			b.ReportMetric((outNow-out)/1e6, "MB_for_everything")
		})
	}
}

// usage is the CPU time (s) and the bytes sent by Redis so far.
func usage(w *world) (cpu, out float64) {
	info := w.c.(*redis.Client).InfoMap(w.Context(), "cpu", "stats").Val()
	number := func(section, field string) float64 {
		n, err := strconv.ParseFloat(info[section][field], 64)
		w.ok(err)
		return n
	}
	return number("CPU", "used_cpu_user") + number("CPU", "used_cpu_sys"), number("Stats", "total_net_output_bytes")
}
