package ledger_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

const sampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// seven creates the group g with seven jobs; those with even ordinals are sampled.
func (w *world) seven() {
	w.create("g", "acme", "T")
	jobs := jobs(7)
	for i := range jobs {
		if i%2 == 0 {
			jobs[i].TraceParent = sampled
		}
	}
	w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: jobs})
}

// steps sorts the steps by ordinal, checks that their traces are those of seven's sampled jobs, and
// removes the traces.
func (w *world) steps(got []ledger.JobStep) []ledger.JobStep {
	w.Helper()
	for i := range got {
		require.Equal(w, sampled[:35], got[i].Trace[:35])
		got[i].Trace = ""
	}
	slices.SortFunc(got, func(a, b ledger.JobStep) int { return int(a.Ordinal - b.Ordinal) })
	return got
}

func TestStepsOfFailedAndReclaimedJobs(t *testing.T) {
	both(t, func(w *world) {
		w.seven()
		run := w.begin("T", "c", 6)
		step := func(name string, ordinal int64, attempt int, code string) ledger.JobStep {
			return ledger.JobStep{Name: name, Tenant: "acme", Group: "g", Ordinal: ordinal, Attempt: attempt, Code: code}
		}
		report := other(ledger.OutcomeFailed, run[0], 0)
		report[0].Others[0].Code = "BOOM"
		report[0].Others = append(report[0].Others, other(ledger.OutcomeFailed, run[1], 0)[0].Others...)
		require.Equal(w, []ledger.JobStep{step("fail", 0, 1, "BOOM")}, w.steps(w.outcome("T", report).Steps))
		require.Empty(w, w.outcome("T", report).Steps, "a stale outcome ends nothing")
		require.Equal(w, sampled[:35], w.job("g", 0).LastError().Trace[:35], "the record of a failed job has its trace")
		require.Empty(w, w.job("g", 1).LastError().Trace)
		require.Equal(w, []ledger.JobStep{step("reclaim", 2, 1, ""), step("reclaim", 4, 1, "")}, w.steps(w.reclaim("T", 1).Steps))
		w.promoteAll("T", 4)
		w.start("T", w.read("T", "c"))
		require.Equal(w, []ledger.JobStep{step("fail", 2, 2, "WORKER_LOST"), step("fail", 4, 2, "WORKER_LOST")}, w.steps(w.reclaim("T", 1).Steps))
	})
}

func TestStepsOfCancelledJobs(t *testing.T) {
	both(t, func(w *world) {
		w.seven()
		run := w.begin("T", "c", 4) // 4, 5 and 6 wait
		w.outcome("T", other(ledger.OutcomeRetry, run[0], 0))
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
		ready := w.read("T", "c")
		w.cancel("g")
		var got []ledger.JobStep
		for more := true; more; {
			var steps []ledger.JobStep
			var err error
			more, steps, err = ledger.Sweep(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			got = append(got, steps...)
		}
		require.Zero(w, w.c.Exists(w.Context(), w.p.Cancelled("g", "T")).Val())
		w.start("T", ready) // the worker records the span of 4
		require.Equal(w, int64(ledger.TokenCancelled), ready[0].token)
		got = append(got, w.outcome("T", done(run[2])).Steps...)
		got = append(got, w.outcome("T", other(ledger.OutcomeFailed, run[3], 0)).Steps...)
		var ordinals []int64
		for _, s := range w.steps(got) {
			require.Equal(w, "cancel", s.Name)
			ordinals = append(ordinals, s.Ordinal)
		}
		require.Equal(w, []int64{0, 2, 6}, ordinals)
	})
}
