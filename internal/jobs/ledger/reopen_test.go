package ledger_test

import (
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

func TestReopenAndRequeue(t *testing.T) {
	both(t, func(w *world) {
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
		require.Equal(w, 4, w.advance("g"))
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
		w.create("open", "acme", "U")
		w.append("open", 1)
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
	w.create(group, "acme", "T")
	w.append(group, n)
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
		w.failed("g", 1)
		require.True(w, w.retire("T", time.Minute))
		w.retry("g")
		require.Equal(w, []string{"T"}, w.c.ZRange(w.Context(), w.p.Types(), 0, -1).Val())
		w.start("T", w.begin("T", "c", 1))
	})
}
