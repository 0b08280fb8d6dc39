package ledger_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func (w *world) reopen(group string) (int, error) {
	w.Helper()
	return ledger.Reopen(w.Context(), w.c, w.p, group, "", ledger.RetryChoice{})
}

// TestRetryMore: the pages of an operation add failed jobs to the round that the first one has opened,
// until the group has ended; nobody else does, and a repeated page changes nothing.
func TestRetryMore(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 4)
		more := func(operation, page string, jobs ...int64) error {
			return ledger.RetryMore(w.Context(), w.c, w.p, "g", operation, page, ledger.RetryChoice{Jobs: jobs})
		}
		require.NoError(w, more("o", "1", 0))
		require.ErrorIs(w, more("o", "2", 1), ledger.ErrMoving)
		w.requeue("g")
		require.NoError(w, more("o", "2", 1))
		require.NoError(w, more("o", "2", 1), "the same page")
		require.ErrorIs(w, more("p", "1", 2), api.ErrConflict, "another operation")
		w.requeue("g")
		require.ErrorIs(w, more("p", "1", 2), api.ErrConflict)
		_, err := w.reopen("g")
		require.ErrorIs(w, err, api.ErrConflict, "a command")
		w.advance("g")
		require.Equal(w, map[string]int64{"waiting": 2, "failed": 2}, w.ledger("g"))
		w.admit("T", 4, noLimit)
		jobs := w.read("T", "c")
		w.start("T", jobs)
		require.NoError(w, more("o", "3", 2), "it runs")
		w.outcome("T", done(jobs...))
		w.reduceAll()
		w.advance("g")
		require.Equal(w, "RUNNING", w.status("g"), "the group waits for the third page")
		w.requeue("g")
		require.Equal(w, int64(1), w.ledger("g")["waiting"])
		require.NoError(w, ledger.Cancel(w.Context(), w.c, w.p, "g"))
		require.ErrorIs(w, more("o", "4", 3), api.ErrConflict, "it has ended")
		require.NoError(w, more("o", "3", 2), "a repeated page")
	})
}

func TestReopenAndRequeue(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: []ledger.NewJob{
			{Payload: []byte(`"a|\n"`)}, {Payload: []byte("1")}, {Type: "U", Payload: large}, {Payload: []byte("3")},
		}})
		run := w.begin("T", "c", 3)
		report := other(ledger.OutcomeFailed, run[0], 0)
		report[0].Others[0].Code = `A/"B"`
		w.outcome("T", report)
		w.outcome("T", done(run[1]))
		w.outcome("T", other(ledger.OutcomeFailed, run[2], 0))
		w.outcome("U", other(ledger.OutcomeFailed, w.begin("U", "c", 1)[0], 0))
		w.reduceAll()
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))
		w.quiet()

		round, err := w.reopen("g")
		require.NoError(w, err)
		require.Equal(w, 2, round)
		require.Equal(w, "CREATED", w.status("g"))
		require.Equal(w, event{"g", "CREATED", 2}, w.events()[5])
		group := w.c.HGetAll(w.Context(), w.p.Group("g")).Val()
		for _, field := range []string{"at:dispatched", "at:running", "at:aggregating", "at:completed", "started"} {
			require.NotContains(w, group, field)
		}
		require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), w.p.Open(), 0, -1).Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.Ended()).Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		w.unchanged(func() {
			round, err := w.reopen("g")
			require.NoError(w, err)
			require.Equal(w, 2, round, "while it has not begun to run, it is the same round")
		})
		require.Zero(w, w.advance("g"), "it stays until its jobs are requeued")
		require.Equal(w, map[string]int64{"done": 1, "failed": 3}, w.ledger("g"))

		w.requeue("g")
		require.Equal(w, "WAWW", w.states("g"))
		require.Equal(w, map[string]int64{"done": 1, "waiting": 3}, w.ledger("g"))
		require.ElementsMatch(w, []string{`0||"a|\n"`, `3||3`}, w.queue("g", "T"))
		require.Equal(w, []string{"2||"}, w.queue("g", "U"))
		require.Equal(w, string(large), w.c.HGet(w.Context(), w.p.Payloads("g"), "2").Val())
		require.Equal(w, map[string]string{`A/"B"`: "0", "BOOM": "0"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.Failures("g")).Val())
		tenant := w.c.HGetAll(w.Context(), w.p.Tenant("acme")).Val()
		require.Equal(w, []string{"3", "3"}, []string{tenant["active"], tenant["unfinished"]})
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val())
		w.unchanged(func() { w.requeue("g") })

		// The failed jobs run again under new attempts, and the group goes through its
		// states again.
		second := append(w.begin("T", "c", 2), w.begin("U", "c", 1)...)
		for _, j := range second {
			require.Equal(w, []any{2, 0, int64(2)}, []any{j.Attempt, j.Retries, j.token})
		}
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(run[0])), "the first round is over")
		w.outcome("T", done(second[:2]...))
		w.outcome("U", done(second[2]))
		w.reduceAll()
		require.Equal(w, "COMPLETED", w.status("g"))
		require.Equal(w, map[string]int64{"done": 4}, w.ledger("g"))
		require.Equal(w, event{"g", "COMPLETED", 2}, w.events()[9])
		_, err = w.reopen("g")
		require.ErrorContains(w, err, "no job has failed")
	})
}

// TestReopenRepeated: a repeated request of a retry is answered with its round, 2, and opens no
// round, before and after round 2 has ended. Another request is refused until then, and afterwards
// opens round 3.
func TestReopenRepeated(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 1)
		again := func(request string) (int, error) {
			return ledger.Reopen(w.Context(), w.c, w.p, "g", request, ledger.RetryChoice{})
		}
		round, err := again("first")
		require.NoError(w, err)
		require.Equal(w, 2, round)
		w.requeue("g")
		w.unchanged(func() {
			round, err = again("first")
			require.NoError(w, err)
			require.Equal(w, 2, round)
			_, err = again("second")
			require.ErrorIs(w, err, api.ErrConflict)
			_, err = again("")
			require.ErrorIs(w, err, api.ErrConflict)
		})
		w.failSome("g", 1)
		w.advance("g")
		require.Equal(w, "FAILED", w.status("g"))
		w.unchanged(func() {
			round, err = again("first")
			require.NoError(w, err)
			require.Equal(w, 2, round, "late, and no third round")
		})
		round, err = again("second")
		require.NoError(w, err)
		require.Equal(w, 3, round)
	})
}

func TestReopenRefuses(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("open", 1, "acme", "U")
		w.create("cancelled", "acme", "T")
		w.cancel("cancelled")
		w.create("fine", "acme", "T")
		w.seal("fine")
		w.advance("fine")
		w.failed("running", 1)
		w.retry("running")
		w.unchanged(func() {
			for group, says := range map[string]string{
				"open": "is CREATED", "cancelled": "is CANCELLED", "fine": "no job has failed", "running": "is CREATED",
			} {
				_, err := w.reopen(group)
				require.ErrorIs(w, err, api.ErrConflict, group)
				require.ErrorContains(w, err, says)
				w.requeue(group) // changes nothing
			}
			_, err := w.reopen("nobody")
			require.ErrorIs(w, err, api.ErrNotFound)
			w.requeue("nobody")
		})
	})
}

// failedMany creates an ended group of n failed jobs.
func (w *world) failedMany(group string, n int) {
	w.Helper()
	w.fill(group, n, "acme", "T")
	w.seal(group)
	for left := n; left > 0; left -= 200 {
		w.failSome(group, min(200, left))
	}
	w.advance(group)
	require.Equal(w, "FAILED", w.status(group))
}

// failSome begins n jobs of a group and reports them as failed in one batch. It returns n.
func (w *world) failSome(group string, n int) int64 {
	w.Helper()
	report := []ledger.GroupOutcome{{Group: group}}
	for _, j := range w.begin("T", "c", n) {
		report[0].Others = append(report[0].Others, other(ledger.OutcomeFailed, j, 0)[0].Others...)
	}
	r := w.outcome("T", report)
	require.Equal(w, ledger.OutcomeReply{Owned: int64(n), Failed: int64(n)}, r)
	return r.Owned
}

// TestRequeueManyJobs: a group with 3,000 failed jobs, more than one HSCAN call returns, is
// requeued completely, in at least 15 calls.
func TestRequeueManyJobs(t *testing.T) {
	onRedis(t, func(w *world) {
		const n = 3000
		w.failedMany("g", n)
		_, err := w.reopen("g")
		require.NoError(w, err)
		calls := 0
		for more := true; more; calls++ {
			more, err = ledger.Requeue(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			require.Less(w, calls, n, "it comes to an end")
			if calls%10 == 0 {
				w.ledger("g")
			}
		}
		require.GreaterOrEqual(w, calls, n/200, "a bounded number in each")
		require.Equal(w, strings.Repeat("W", n), w.states("g"))
		require.Equal(w, map[string]int64{"waiting": n}, w.ledger("g"))
		require.Equal(w, int64(n), w.c.LLen(w.Context(), w.p.Queue("g", "T")).Val())
		require.Equal(w, fmt.Sprint(n), w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Codes("g"), "BOOM").Val())
	})
}

// TestRequeueBesideJobsThatFailAgain: after each call of Requeue, up to 20 jobs of a group of 250
// fail again. They stay failed, although more calls requeue the other jobs.
func TestRequeueBesideJobsThatFailAgain(t *testing.T) {
	onStores(t, func(w *world) {
		const n = 250
		w.failedMany("g", n)
		_, err := w.reopen("g")
		require.NoError(w, err)
		failed := int64(0)
		for more := true; more; {
			more, err = ledger.Requeue(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			failed += w.failSome("g", min(20, int(w.ledger("g")["waiting"])))
		}
		require.Equal(w, map[string]int64{"waiting": n - failed, "failed": failed}, w.ledger("g"))
		require.Equal(w, failed, w.c.HLen(w.Context(), w.p.Failures("g")).Val())
		require.False(w, w.c.HExists(w.Context(), w.p.Group("g"), "requeue").Val())
	})
}

// TestRequeueGarbage: a failure record that can't be parsed is quarantined and does not block the
// others.
func TestRequeueGarbage(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 2)
		w.c.HSet(w.Context(), w.p.Failures("g"), "7", "nonsense", "x", `{"code":"C"}`+"\nno blob", "8", `{"code":1}`+"\n"+"g|T|1|0|0|0|0|0|0|1||8|1||1", "9", "{\n"+"g|T|1|0|0|0|0|0|0|1||9|1||1")
		w.retry("g")
		require.Equal(w, map[string]int64{"waiting": 2}, w.ledger("g"))
		require.Len(w, w.c.LRange(w.Context(), w.p.Quarantine(), 0, -1).Val(), 4)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Failures("g")).Val())
		require.False(w, w.c.HExists(w.Context(), w.p.Group("g"), "requeue").Val())
	})
}

// TestRequeueBringsATypeBack: requeueing a failed job of a retired type makes the type known again.
func TestRequeueBringsATypeBack(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 1)
		require.True(w, w.retire("T", time.Minute))
		w.retry("g")
		require.Equal(w, []string{"T"}, w.c.ZRange(w.Context(), w.p.Types(), 0, -1).Val())
		w.start("T", w.begin("T", "c", 1))
	})
}

// TestRetryChoice: a retry that chooses an error code and a job requeues 3 of 6 failed jobs and
// deletes their dead letters. The others stay failed until a retry without a choice.
func TestRetryChoice(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 6, "acme", "T")
		w.seal("g")
		w.admit("T", 6, noLimit)
		run := w.read("T", "c")
		w.start("T", run)
		for i, code := range []string{"A", "A", "B", "C", "C", "C"} {
			o := other(ledger.OutcomeFailed, run[i], 0)
			o[0].Others[0].Code = code
			w.outcome("T", o)
		}
		w.advance("g")
		choose := func(request string, c ledger.RetryChoice) error {
			_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", request, c)
			return err
		}
		letters := func() (jobs []string) {
			for _, m := range w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val() {
				jobs = append(jobs, m.Values["job"].(string))
			}
			return jobs
		}
		require.Len(w, letters(), 6)

		require.ErrorIs(w, choose("", ledger.RetryChoice{Codes: []string{"X"}, Jobs: []int64{6, 99}}), api.ErrConflict)
		chosen := ledger.RetryChoice{Codes: []string{"A", "X"}, Jobs: []int64{3}}
		require.NoError(w, choose("r", chosen))
		require.NoError(w, choose("r", chosen), "the same request")
		require.NoError(w, choose("", chosen), "the same choice")
		require.ErrorContains(w, choose("", ledger.RetryChoice{}), "a retry of other jobs has just begun")
		w.requeue("g")
		require.Equal(w, map[string]int64{"waiting": 3, "failed": 3}, w.ledger("g"))
		require.ElementsMatch(w, []string{"g.2", "g.4", "g.5"}, letters())
		codes := w.c.HGetAll(w.Context(), w.p.Codes("g")).Val()
		require.Equal(w, []string{"0", "1", "2"}, []string{codes["A"], codes["B"], codes["C"]})

		// One of the three requeued jobs fails again; the other two are done. Then a retry without
		// a choice runs all failed jobs.
		w.admit("T", 6, noLimit)
		again := w.read("T", "c")
		require.Len(w, again, 3)
		w.start("T", again)
		w.outcome("T", other(ledger.OutcomeFailed, again[0], 0))
		w.outcome("T", done(again[1:]...))
		require.Len(w, letters(), 4)
		w.reduceAll()
		w.advance("g")
		require.NoError(w, choose("s", ledger.RetryChoice{}))
		w.requeue("g")
		require.Equal(w, int64(4), w.ledger("g")["waiting"])
		require.Empty(w, letters())
	})
}

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
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
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
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
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
	onStores(t, func(w *world) {
		for _, g := range []string{"g", "h", "i"} {
			w.fill(g, 2, "acme", "T")
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
	onStores(t, func(w *world) {
		for _, g := range []string{"g", "h"} {
			w.fill(g, 1, "acme", "T")
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
	onStores(t, func(w *world) {
		for _, g := range []string{"a", "b"} {
			w.fill(g, 1, "acme", "T")
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
