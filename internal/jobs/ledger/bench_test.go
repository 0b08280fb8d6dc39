package ledger_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// batch is the number of jobs that a benchmark moves in one call, as roles do under load.
const batch = 200

// bench measures a step that moves a batch of jobs, on a private Redis; prepare returns the step.
// µs/job is the whole step: building its calls, the round trips and the scripts. redis-µs/job is
// the time of the scripts as Redis reports it.
func bench(b *testing.B, prepare func(w *world, group string) func()) {
	w := newWorld(b, redistest.Server(b).Client(), "b:")
	prepare(w, "warm")() // loads the script into Redis's cache
	b.ReportAllocs()
	calls, script := 0, 0
	for b.Loop() {
		b.StopTimer()
		step := prepare(w, strconv.Itoa(calls))
		require.NoError(b, w.c.ConfigResetStat(b.Context()).Err())
		b.StartTimer()
		step()
		b.StopTimer()
		script += w.scriptMicros()
		calls++
		b.StartTimer()
	}
	jobs := float64(calls * batch)
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/jobs, "µs/job")
	b.ReportMetric(float64(script)/jobs, "redis-µs/job")
	b.ReportMetric(jobs/b.Elapsed().Seconds(), "jobs/s")
}

// scriptMicros returns how long scripts ran since the statistics were reset, in µs.
func (w *world) scriptMicros() int {
	stats := w.c.Info(w.Context(), "commandstats").Val()
	_, found, _ := strings.Cut(stats, "cmdstat_evalsha:")
	var calls, micros int
	_, err := fmt.Sscanf(found, "calls=%d,usec=%d", &calls, &micros)
	require.NoError(w, err, stats)
	return micros
}

func BenchmarkAppend(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.create(group, "acme", "T")
		a := ledger.AppendArgs{Group: group, Jobs: jobs(batch)}
		return func() { w.appendJobs(a) }
	})
}

func BenchmarkAdmit(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.c.Del(w.Context(), w.p.Ready("T")) // removes the last batch, so that the stream stays short
		w.fill(group, batch, "acme", "T")
		return func() { require.Equal(w, batch, w.admit("T", batch, limit(1e9)).Moved) }
	})
}

func BenchmarkStart(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.fill(group, batch, "acme", "T")
		w.admit("T", batch, noLimit)
		jobs := w.read("T", "c")
		return func() { w.start("T", jobs) }
	})
}

func BenchmarkOutcome(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.fill(group, batch, "acme", "T")
		report := done(w.begin("T", "c", batch)...)
		return func() { require.Equal(w, ledger.OutcomeReply{Owned: batch}, w.outcome("T", report)) }
	})
}

// BenchmarkOutcomeRetry measures the slow path of Outcome: every job is retried. In the part
// errors=0 the jobs have had no error before; in the other part each job has had KeptErrors errors.
func BenchmarkOutcomeRetry(b *testing.B) {
	for _, before := range []int{0, ledger.KeptErrors} {
		b.Run(fmt.Sprintf("errors=%d", before), func(b *testing.B) {
			bench(b, func(w *world, group string) func() {
				w.c.FlushDB(w.Context()) // removes the last batch, which is to run again
				*w.limits = lastLimit{}  // they are set again
				w.fill(group, batch, "acme", "T")
				jobs := w.begin("T", "c", batch)
				for range before {
					jobs = w.retried("T", jobs...)
				}
				report := []ledger.GroupOutcome{{Group: group}}
				for _, j := range jobs {
					report[0].Others = append(report[0].Others, other(ledger.OutcomeRetry, j, 0)[0].Others...)
				}
				return func() { require.Equal(w, ledger.OutcomeReply{Owned: batch}, w.outcome("T", report)) }
			})
		})
	}
}

// BenchmarkStartAgain measures the start of jobs that have had one error each.
func BenchmarkStartAgain(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.fill(group, batch, "acme", "T")
		var report []ledger.GroupOutcome
		for _, j := range w.begin("T", "c", batch) {
			report = append(report, other(ledger.OutcomeRetry, j, 0)...)
		}
		w.outcome("T", report)
		w.promoteAll("T", batch)
		jobs := w.read("T", "c")
		return func() { w.start("T", jobs) }
	})
}

func BenchmarkPromote(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.c.Del(w.Context(), w.p.Ready("T"))
		w.fill(group, batch, "acme", "T")
		var report []ledger.GroupOutcome
		for _, j := range w.begin("T", "c", batch) {
			report = append(report, other(ledger.OutcomeReleased, j, 0)...)
		}
		w.outcome("T", report)
		return func() { w.promoteAll("T", batch) }
	})
}

func BenchmarkReduce(b *testing.B) {
	bench(b, func(w *world, group string) func() {
		w.fill(group, batch, "acme", "T")
		w.outcome("T", done(w.begin("T", "c", batch)...))
		read := w.readResults(1)
		return func() { require.Equal(w, ledger.ReduceOK, w.reduceInto("0", read[0]).State) }
	})
}
