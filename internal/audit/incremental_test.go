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

// watch makes an incremental check, and audits the candidates job by job.
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

// Incremental checks find what keeps a group from ending: within some checks, or in the first one
// if it is alarmed.
func TestIncrementalCheckFindsWhatStopsAGroup(t *testing.T) {
	online := []string{
		"accepted", "two counts whose errors cancel out", "negative count", "no states", "one state too many", "queued job gone", "queue gone", "ready entry gone",
		"entry of a started job gone", "non-ready job gone", "failure gone", "results entry gone", "queue of many gone", "ready stream gone",
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
			require.Equal(t, Candidates{}, found, "no group is known yet, so none is unchanged")
			for range 3 {
				_, r := w.watch(s, false)
				require.Empty(t, r.Violations)
			}
			want := c.do(w)
			var r Report
			for checks := 0; len(r.Violations) == 0; checks++ {
				require.LessOrEqual(t, checks, maxRecheckGap+1)
				_, r = w.watch(s, false)
			}
			got := summary(r)
			require.Subset(t, want, got)
			require.NotEmpty(t, got)
			if missing := strings.Contains(c.name, "gone") && c.name != "failure gone"; missing {
				require.NotEmpty(t, r.Missing)
				whole, err := Partition(t.Context(), w.conn, w.space, p, Options{})
				require.NoError(t, err)
				require.Equal(t, whole.Missing, r.Missing, "as a full audit finds them")
			}
			_, again := w.watch(calm, true)
			require.Equal(t, got, summary(again), "an alarmed check finds it at once")
		})
	}
}

// Groups that don't change, because their jobs take long or have no worker, become candidates less
// and less often.
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
	s, candidates := NewIncrementalCheck(w.conn, p), ""
	for range 24 {
		found, _ := w.watch(s, false)
		require.NotContains(t, found.Groups, "idle", "its queue is as long as its counts say")
		candidates += strconv.Itoa(len(found.Groups))
	}
	require.Equal(t, "011010001000000010000000", candidates)
	found, _ := w.watch(s, true)
	require.Equal(t, []string{"long"}, found.Groups)
}

// A tenant with more groups than fit into one transaction is read twice.
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

	// A group gets its first type between two checks. Then it is deleted, but stays on the list.
	w.create("new", "acme", "T")
	found, _ = w.watch(s, false)
	require.Equal(t, []string{"acme"}, found.Tenants)
	w.append("new", jobs(1))
	found, _ = w.watch(s, false)
	require.Empty(t, found.Tenants, "the check learns the new type of the group first")
	found, r = w.watch(s, false)
	require.Equal(t, []string{"acme"}, found.Tenants)
	require.Len(t, r.Violations, 1, "%v", r.Violations)
	w.ok(w.c.Del(w.Context(), p.Group("new")).Err())
	w.watch(s, false)
	w.watch(s, false)
}

// While all scripts move jobs, incremental checks and the audits of their candidates find no
// violation.
func TestIncrementalCheckFindsNothingWhileJobsMove(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	crew := *w
	crew.tb = hard{t}
	c := &churn{world: &crew, tenants: []string{"a", "b", "c"}, types: []string{"T", "U"}}
	stop := c.run(t.Context(), false)
	t.Cleanup(func() { _ = stop() })
	s, candidates := NewIncrementalCheck(w.conn, w.space.Partition(0)), 0
	for i := 0; i < 100 || c.moves.Load() < 500; i++ {
		found, r := w.watch(s, i%5 == 0)
		require.Empty(t, r.Violations, "%v", found)
		require.Empty(t, r.Missing)
		require.Empty(t, found.Tenants)
		candidates += len(found.Groups)
	}
	require.NoError(t, stop())
	require.Positive(t, candidates)
}

// BenchmarkIncrementalCheck measures what a check costs Redis, compared with a full audit.
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
			b.ReportMetric((cpuNow-cpu)*1e3, "redis_ms_for_full_audit")
			b.ReportMetric((outNow-out)/1e6, "MB_for_full_audit")
		})
	}
}

// usage returns the CPU time in seconds that Redis has used so far, and the bytes that it has sent.
func usage(w *world) (cpu, out float64) {
	info := w.c.(*redis.Client).InfoMap(w.Context(), "cpu", "stats").Val()
	number := func(section, field string) float64 {
		n, err := strconv.ParseFloat(info[section][field], 64)
		w.ok(err)
		return n
	}
	return number("CPU", "used_cpu_user") + number("CPU", "used_cpu_sys"), number("Stats", "total_net_output_bytes")
}
