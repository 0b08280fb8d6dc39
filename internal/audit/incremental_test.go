package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// watch makes an incremental check and audits its candidates job by job. It returns both results.
func watch(w *audittest.World, s *Incremental) (Candidates, Report) {
	found, _, err := s.Run(w.Context())
	w.OK(err)
	if len(found.Groups) == 0 {
		return found, Report{OK: true}
	}
	r, err := RunGroups(w.Context(), w.Conn, w.Space, s.p, found, Options{})
	w.OK(err)
	return found, r
}

// TestCheckFindsWhatStopsAGroup: after each of 14 tampers, an incremental check and the audit of
// its candidates find at least one of the tamper's violations, and no other.
func TestCheckFindsWhatStopsAGroup(t *testing.T) {
	online := []string{
		"accepted", "two counts whose errors cancel out", "negative count", "no states", "one state too many", "queued job gone", "queue gone", "ready entry gone",
		"entry of a started job gone", "non-ready job gone", "failure gone", "results entry gone", "queue of many gone", "ready stream gone",
	}
	for _, c := range audittest.Tampers {
		if !slices.Contains(online, c.Name) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			url, prefix := redistest.Parallel(t)
			w := audittest.New(t, url, prefix, 1)
			audittest.Inhabit(w)
			p := w.Space.Partition(0)
			s := NewIncremental(w.Conn, p)
			for range 2 {
				_, r := watch(w, s)
				require.Empty(t, r.Violations)
			}
			want := c.Do(w)
			_, r := watch(w, s)
			got := audittest.Summary(r.Violations)
			require.Subset(t, want, got)
			require.NotEmpty(t, got)
			if missing := strings.Contains(c.Name, "gone") && c.Name != "failure gone"; missing {
				require.NotEmpty(t, r.Missing)
				whole, err := Partition(t.Context(), w.Conn, w.Space, p, Options{})
				require.NoError(t, err)
				require.Equal(t, whole.Missing, r.Missing, "as a full audit finds them")
			}
		})
	}
}

// TestCheckNamesGroupsWithJobsInStreams: groups are candidates while they have jobs in streams.
func TestCheckNamesGroupsWithJobsInStreams(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	p := w.Space.Partition(0)
	w.Create("idle", "acme", "T")
	w.Append("idle", audittest.Jobs(5))
	w.Create("busy", "acme", "L")
	w.Append("busy", audittest.Jobs(1))
	s := NewIncremental(w.Conn, p)
	candidates := func() []string {
		found, _ := watch(w, s)
		return found.Groups
	}
	require.Empty(t, candidates())
	w.Admit(p, "L", 1, audittest.NoLimit)
	require.Equal(t, []string{"busy"}, candidates())
	jobs := w.Start(p, "L", w.Read(p, "L", "c", 1))
	require.Equal(t, []string{"busy"}, candidates())
	w.Done(p, "L", jobs...)
	require.Equal(t, []string{"busy"}, candidates())
	w.Reduce(p, "0", 10)
	require.Empty(t, candidates())
}

// TestCheckOfALargeTenant: a tenant has 150 groups, more than fit into one transaction. Checks find
// nothing, until a non-ready job is deleted: then the tenant is a candidate.
func TestCheckOfALargeTenant(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	p := w.Space.Partition(0)
	for i := range 150 {
		id := fmt.Sprint("g", i)
		w.Create(id, "acme", "T")
		w.Append(id, audittest.Jobs(2, audittest.Later))
	}
	s := NewIncremental(w.Conn, p)
	for range 3 {
		found, _ := watch(w, s)
		require.Empty(t, found)
	}
	w.OK(w.C.ZRemRangeByRank(w.Context(), p.NonReadyOf("acme"), 7, 7).Err())
	found, r := watch(w, s)
	require.Equal(t, []string{"acme"}, found.Tenants)
	require.Len(t, r.Missing, 1)
	require.Len(t, r.Missing[0].Jobs, 1)

	// A group gets its first type between two checks. Later it is deleted, but its id stays on the
	// list of open groups.
	w.Create("new", "acme", "T")
	found, _ = watch(w, s)
	require.Equal(t, []string{"acme"}, found.Tenants)
	w.Append("new", audittest.Jobs(1))
	found, _ = watch(w, s)
	require.Empty(t, found.Tenants, "the check learns the new type of the group first")
	found, r = watch(w, s)
	require.Equal(t, []string{"acme"}, found.Tenants)
	require.Len(t, r.Violations, 1, "%v", r.Violations)
	w.OK(w.C.Del(w.Context(), p.Group("new")).Err())
	watch(w, s)
	watch(w, s)
}

// TestCheckFindsNothingWhileJobsMove: while all scripts move jobs, incremental checks and the
// audits of their candidates find no violation.
func TestCheckFindsNothingWhileJobsMove(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 1)
	c := audittest.NewChurn(w, []string{"a", "b", "c"}, []string{"T", "U"})
	stop := c.Run(t.Context(), false)
	t.Cleanup(func() { _ = stop() })
	s, candidates := NewIncremental(w.Conn, w.Space.Partition(0)), 0
	for i := 0; i < 100 || c.Moves.Load() < 500; i++ {
		found, r := watch(w, s)
		require.Empty(t, r.Violations, "%v", found)
		require.Empty(t, r.Missing)
		require.Empty(t, found.Tenants)
		candidates += len(found.Groups)
	}
	require.NoError(t, stop())
	require.Positive(t, candidates)
}

// BenchmarkCheck measures the CPU time and bytes that an incremental check and the audit of its
// candidates cost Redis, with 200 jobs in the ready stream, and the cost of a full audit for
// comparison.
func BenchmarkCheck(b *testing.B) {
	for name, size := range map[string]struct{ groups, jobs int }{"1000 groups": {1000, 5}, "100000 jobs": {1, 100_000}} {
		b.Run(name, func(b *testing.B) {
			url, prefix := redistest.Shared(b)
			w := audittest.New(b, url, prefix, 1)
			for i := range size.groups {
				id := fmt.Sprint("g", i)
				w.Create(id, fmt.Sprint("t", i%50), "T")
				w.Append(id, audittest.Jobs(size.jobs))
			}
			w.Admit(w.Space.Partition(0), "T", 200, audittest.NoLimit)
			s := NewIncremental(w.Conn, w.Space.Partition(0))
			watch(w, s)
			cpu, out := usage(w)
			for b.Loop() {
				watch(w, s)
			}
			cpuNow, outNow := usage(w)
			b.ReportMetric((cpuNow-cpu)*1e6/float64(b.N), "redis_us/op")
			b.ReportMetric((outNow-out)/float64(b.N), "bytes/op")
			cpu, out = usage(w)
			_, err := Partition(b.Context(), w.Conn, w.Space, w.Space.Partition(0), Options{})
			require.NoError(b, err)
			cpuNow, outNow = usage(w)
			b.ReportMetric((cpuNow-cpu)*1e3, "redis_ms_for_full_audit")
			b.ReportMetric((outNow-out)/1e6, "MB_for_full_audit")
		})
	}
}

// usage returns the CPU time in seconds that Redis has used so far, and the bytes that it has sent.
func usage(w *audittest.World) (cpu, out float64) {
	info := w.C.(*redis.Client).InfoMap(w.Context(), "cpu", "stats").Val()
	number := func(section, field string) float64 {
		n, err := strconv.ParseFloat(info[section][field], 64)
		w.OK(err)
		return n
	}
	return number("CPU", "used_cpu_user") + number("CPU", "used_cpu_sys"), number("Stats", "total_net_output_bytes")
}

// TestGroupWithKeyOfWrongTypeIsACandidate: although a key has the wrong Redis type, the check finds
// the lost job of the group good. If the key is one that checks read of the group bad, the audit of
// the candidates reports it.
func TestGroupWithKeyOfWrongTypeIsACandidate(t *testing.T) {
	for _, c := range audittest.WrongTypes {
		t.Run(c.Name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := audittest.New(t, url, prefix, 1)
				c.Do(w)
				found, r := watch(w, NewIncremental(w.Conn, w.Space.Partition(0)))
				require.Contains(t, found.Groups, "good")
				require.Contains(t, audittest.Summary(r.Violations), audittest.Of(LawLocation, "good", 0))
				require.Len(t, r.Missing[0].Jobs, 1)
				if c.Group != "" && c.Name != "codes" && c.Name != "results" && c.Name != "aggregate" { // these are not read
					require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
				}
			})
		})
	}
}
