package audit

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// beyondRepair lists the tampers after which a violation stays: the right results or times are not
// known.
var beyondRepair = []string{
	"one state too many", "no states", "unknown state letter",
	"reduced to done", "done to reduced", "reduced to waiting in an ended group",
	"result line gone", "result line twice", "result line of another job", "unreadable result line", "result lines deleted, not expired",
	"partial aggregate gone", "partial aggregate with a higher count", "aggregate with a higher count", "unreadable partial aggregate",
	"in the wrong partition", "failed below its threshold", "unknown status", "no time of a state", "time of a later state",
	"times out of order", "unsealed",
	// Redis leaves these alone: dequeue and reduce skip the duplicate.
	"queued job twice", "queued job in two queues, among many", "results entry twice",
}

func (w *world) repair() (Report, []RepairResult) {
	var all []RepairResult
	r, err := Repair(w.Context(), w.conn, w.space, Options{}, func(r RepairResult) { all = append(all, r) })
	w.ok(err)
	return r, all
}

// requireRepaired repairs what a tamper has done. Each violation is repaired or gets a reason why
// not, and a second repair does nothing.
func (c tamper) requireRepaired(w *world, before Report) {
	r, repairs := w.repair()
	require.NotEmpty(w, repairs)
	left := slices.Contains(beyondRepair, c.name)
	require.Equal(w, !left, r.OK, "%v\n%v", r.Violations, repairs)
	done := 0
	for _, v := range repairs {
		if v.Done {
			done++
			continue
		}
		require.True(w, left, "%v", v)
		require.Contains(w, v.Detail, "; ", "why")
	}
	require.True(w, left || done > 0)
	require.LessOrEqual(w, len(r.Violations), len(before.Violations))
	again, repairs := w.repair()
	require.Equal(w, r.Violations, again.Violations)
	for _, v := range repairs {
		require.False(w, v.Done, "%v", v)
	}
}

// A repair while the roles are at work ends the jobs that vanished, unless the worker that held one
// has ended it, and harms no other job.
func TestRepairOfAMovingWorld(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 2)
	crew := *w
	crew.tb = hard{t}
	c := &churn{world: &crew, tenants: []string{"a", "b", "c", "d", "e"}, types: []string{"T", "U"}}
	stop := c.run(t.Context(), false)
	t.Cleanup(func() { _ = stop() })
	vanished := map[string]bool{}
	note := func(group string, ordinal int64) { vanished[fmt.Sprintf("%s.%d", group, ordinal)] = true }
	for i := range 6 {
		for _, p := range w.space.All() {
			for _, typ := range c.types {
				if entries := w.c.XRevRangeN(w.Context(), p.Ready(typ), "+", "-", 1).Val(); len(entries) > 0 {
					if w.c.XDel(w.Context(), p.Ready(typ), entries[0].ID).Val() == 1 {
						d, err := ledger.ParseJob(ledger.MessageBlob(entries[0].Values))
						w.ok(err)
						note(d.Group, d.Ordinal)
					}
				}
				w.incr(p.Load(typ), "waiting", 1)
			}
			if ids := w.c.ZRange(w.Context(), p.Open(), 0, 0).Val(); len(ids) > 0 {
				for _, typ := range c.types {
					if ordinal, ok := ledger.QueuedOrdinal(w.c.LPop(w.Context(), p.Queue(ids[0], typ)).Val()); ok {
						note(ids[0], ordinal)
					}
				}
				w.incr(p.Group(ids[0]), "ready", int64(i+1))
				if w.c.HLen(w.Context(), p.Group(ids[0])).Val() == 1 { // the group has just expired
					w.ok(w.c.Del(w.Context(), p.Group(ids[0])).Err())
				}
			}
			w.addNonReady(p, "a", moving("nosuch", "T", 1, 0))
		}
		w.repair()
	}
	require.NoError(t, stop())
	r, _ := w.repair()
	require.Empty(t, r.Violations)
	lost := 0
	for _, p := range w.space.All() {
		for _, m := range w.c.XRange(w.Context(), p.DeadLetters(), "-", "+").Val() {
			if m.Values["code"] == "LOST" {
				lost++
				require.Contains(t, vanished, m.Values["job"], "a healthy job was lost")
			}
		}
	}
	require.Positive(t, lost)
	t.Logf("%d moves, %d jobs vanished, %d ended as lost", c.moves.Load(), len(vanished), lost)
}
