package ledger_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// jobErrors parses a record of errors:GROUP, in which each line is an error. An unreadable line
// becomes an error with a code that begins with "unreadable".
func jobErrors(record string) []ledger.JobError {
	var all []ledger.JobError
	for line := range strings.Lines(record) {
		var e ledger.JobError
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			e.Code = "unreadable: " + line
		}
		all = append(all, e)
	}
	return all
}

// retried ends the attempts of jobs in flight with an error, then promotes the jobs, reads them and
// starts their next attempts.
func (w *world) retried(typ string, jobs ...taken) []taken {
	w.Helper()
	var report []ledger.GroupOutcome
	for _, j := range jobs {
		report = append(report, other(ledger.OutcomeRetry, j, 0)...)
	}
	require.EqualValues(w, len(jobs), w.outcome(typ, report).Owned)
	return w.again(typ, len(jobs))
}

// again promotes n non-ready jobs as they become due, reads them as consumer c and starts them.
func (w *world) again(typ string, n int) []taken {
	w.Helper()
	w.promoteAll(typ, n)
	jobs := w.read(typ, "c")
	require.Len(w, jobs, n)
	w.start(typ, jobs)
	return jobs
}

// lastErrors returns "CODE TEXT ATTEMPT" for each error that is kept of a job, newest first.
func (w *world) lastErrors(group string, ordinal int64) []string {
	w.Helper()
	var all []string
	for _, e := range w.job(group, ordinal).Errors {
		require.Equal(w, ordinal, e.Ordinal)
		require.WithinDuration(w, time.Now(), e.Time(), time.Minute)
		all = append(all, fmt.Sprint(e.Code, " ", e.Error, " ", e.Attempts))
	}
	return all
}

// endWith reports an attempt's outcome with an error, and then reports it again: the second report
// is stale and changes nothing.
func (w *world) endWith(kind ledger.OutcomeKind, j taken, code string) {
	w.Helper()
	report := other(kind, j, 0)
	report[0].Others[0].Code, report[0].Others[0].Text = code, "line\nbreak"
	require.EqualValues(w, 1, w.outcome("T", report).Owned)
	w.unchanged(func() { require.EqualValues(w, 1, w.outcome("T", report).Stale) })
}

// TestLastErrors: the last three errors of a job remain while it is retried and after it has
// failed; a new round begins without them. Start gives the last error to the next attempt.
func TestLastErrors(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.seal("g")
		run := w.begin("T", "c", 2)
		w.outcome("T", done(run[1]))
		require.Zero(w, run[0].last)
		require.Empty(w, w.lastErrors("g", 0))
		w.endWith(ledger.OutcomeRetry, run[0], "ONE")
		first := w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val()
		require.Equal(w, []string{"ONE line\nbreak 1"}, w.lastErrors("g", 0))

		second := w.again("T", 1)[0]
		require.Equal(w, []any{"ONE", "line\nbreak", 1}, []any{second.last.Code, second.last.Error, second.last.Attempts})
		require.Equal(w, ledger.ReclaimReply{Taken: 1}, w.reclaim("T", 3))
		w.unchanged(func() { // the worker that was lost reports late
			require.EqualValues(w, 1, w.outcome("T", other(ledger.OutcomeRetry, second, 0)).Stale)
		})
		lost := "WORKER_LOST the worker was lost while it ran the job 2"
		require.Equal(w, []string{lost, "ONE line\nbreak 1"}, w.lastErrors("g", 0))

		third := w.again("T", 1)[0]
		require.Equal(w, "WORKER_LOST", third.last.Code)
		w.endWith(ledger.OutcomeThrottled, third, "THREE")
		fourth := w.again("T", 1)[0]
		w.endWith(ledger.OutcomeRetry, fourth, "FOUR")
		require.Equal(w, []string{"FOUR line\nbreak 4", "THREE line\nbreak 3", lost}, w.lastErrors("g", 0))
		require.NotContains(w, w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val(), first, "only the last ones are kept")

		fifth := w.again("T", 1)[0]
		require.Equal(w, "FOUR", fifth.last.Code)
		w.endWith(ledger.OutcomeFailed, fifth, "FIVE")
		want := []string{"FIVE line\nbreak 5", "FOUR line\nbreak 4", "THREE line\nbreak 3"}
		require.Equal(w, want, w.lastErrors("g", 0))
		list, _, err := ledger.ListJobs(w.Context(), w.c, w.p, "g", "", 0, 10)
		require.NoError(w, err)
		require.Equal(w, w.job("g", 0), list[0].JobStatus)
		require.Empty(w, list[1].Errors)

		// A new round begins without errors.
		require.Equal(w, ledger.ReduceOK, w.reduceInto("0", w.readResults(1)[0]).State)
		w.advance("g")
		_, err = w.reopen("g")
		require.NoError(w, err)
		w.requeue("g")
		require.Zero(w, w.c.Exists(w.Context(), w.p.Errors("g")).Val())
		require.Empty(w, w.lastErrors("g", 0))
		w.unchanged(func() { w.requeue("g") })
		again := w.begin("T", "c", 1)[0]
		require.Zero(w, again.last)
		again = w.retried("T", again)[0]
		require.Len(w, w.lastErrors("g", 0), 1)
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(again)))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Errors("g")).Val(), "a done job keeps none")
		require.Empty(w, w.lastErrors("g", 0))
	})
}

// TestLastErrorsOfADeferredJob: a job is deferred, retried after an error, and deferred four more
// times. Each further attempt gets that error, not a deferral, as the last error. Of the failed job
// the error and the final one are kept.
func TestLastErrorsOfADeferredJob(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		j := w.begin("T", "c", 1)[0]
		w.endWith(ledger.OutcomeDeferred, j, "BUSY")
		j = w.again("T", 1)[0]
		require.Zero(w, j.last, "it was only deferred")
		w.endWith(ledger.OutcomeRetry, j, "TWO")
		for range 4 {
			j = w.again("T", 1)[0]
			require.Equal(w, "TWO", j.last.Code)
			w.endWith(ledger.OutcomeDeferred, j, "BUSY")
		}
		require.Equal(w, []string{"BUSY line\nbreak 6", "TWO line\nbreak 2"}, w.lastErrors("g", 0))
		j = w.again("T", 1)[0]
		w.endWith(ledger.OutcomeReleased, j, "")
		require.Len(w, w.lastErrors("g", 0), 2, "a release is no error")
		w.endWith(ledger.OutcomeFailed, w.again("T", 1)[0], "EIGHT")
		require.Equal(w, []string{"EIGHT line\nbreak 8", "TWO line\nbreak 2"}, w.lastErrors("g", 0))
	})
}

// TestLastErrorsOfABatch: one Start of six jobs gives each of the two jobs that were retried its
// own last error, although an unreadable line precedes one of them, and the released jobs none.
func TestLastErrorsOfABatch(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []string{"g", "h", "i"} {
			w.create(g, "acme", "T")
			w.append(g, 2)
		}
		var report []ledger.GroupOutcome
		for _, j := range w.begin("T", "c", 6) {
			kind := ledger.OutcomeReleased
			if j.Group != "h" && j.Ordinal == 1 {
				kind = ledger.OutcomeRetry
			}
			o := other(kind, j, 0)
			o[0].Others[0].Code = j.Group
			report = append(report, o...)
		}
		w.outcome("T", report)
		w.c.HSet(w.Context(), w.p.Errors("g"), "1", "no JSON\n"+w.c.HGet(w.Context(), w.p.Errors("g"), "1").Val())
		for _, j := range w.again("T", 6) {
			want := ""
			if j.Group != "h" && j.Ordinal == 1 {
				want = j.Group
			}
			require.Equal(w, want, j.last.Code, "%s.%d", j.Group, j.Ordinal)
		}
	})
}

// TestLastErrorsAreDeletedWithTheGroup: the hash errors:GROUP is deleted when the group expires,
// and when it is swept after a cancellation. After a sweep a failed job still has its record in
// failures:GROUP.
func TestLastErrorsAreDeletedWithTheGroup(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []string{"g", "h"} {
			w.create(g, "acme", "T")
			w.append(g, 1)
			w.seal(g)
			w.outcome("T", other(ledger.OutcomeFailed, w.retried("T", w.begin("T", "c", 1)...)[0], 0))
			require.EqualValues(w, 1, w.c.HLen(w.Context(), w.p.Errors(g)).Val())
		}
		w.cancel("h")
		w.sweep("h")
		require.Len(w, w.lastErrors("h", 0), 1, "a failed job keeps its failure")
		w.advance("g")
		w.expire("g")
		require.Zero(w, w.c.Exists(w.Context(), w.p.Errors("g"), w.p.Errors("h")).Val())
	})
}

// TestStartWithUnreadableErrors: one call starts jobs of two groups, although errors:GROUP of the
// second has the wrong Redis type. Only the job of the first group gets its last error.
func TestStartWithUnreadableErrors(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []string{"a", "b"} {
			w.create(g, "acme", "T")
			w.append(g, 1)
		}
		var report []ledger.GroupOutcome
		for _, j := range w.begin("T", "c", 2) {
			report = append(report, other(ledger.OutcomeRetry, j, 0)...)
		}
		w.outcome("T", report)
		w.promoteAll("T", 2)
		require.NoError(w, w.c.Set(w.Context(), w.p.Errors("b"), "a string", 0).Err())
		jobs := w.read("T", "c")
		require.Len(w, jobs, 2)
		w.start("T", jobs)
		require.Equal(w, "BOOM", jobs[0].last.Code)
		require.Zero(w, jobs[1].last)
		for _, j := range jobs {
			require.EqualValues(w, j.Attempt, j.token, j.Group)
		}
	})
}
