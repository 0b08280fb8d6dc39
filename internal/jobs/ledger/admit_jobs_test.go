package ledger_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// admitFor admits up to `most` jobs of type T for workers with `slots` slots. The ready stream may
// hold slots + ahead jobs.
func (w *world) admitFor(slots, ahead, most int) ledger.AdmitReply {
	w.Helper()
	r, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
		Type: "T", Most: most, Cap: 1000, Slots: slots, Ahead: ahead, Limit: noLimit, Seed: seed, LaneWeights: [3]int{6, 3, 1},
	})
	require.NoError(w, err)
	return r
}

// TestAdmitForSoManyWorkers: with 5 worker slots and 4 jobs ahead, the ready stream holds at most 9
// jobs, started or not. After 3 of them are done, the fetcher is woken and can admit 3 more.
func TestAdmitForSoManyWorkers(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 100)
		require.Equal(w, 9, w.admitFor(5, 4, 50).Moved)
		require.Equal(w, ledger.AdmitFull, w.admitFor(5, 4, 50).State)
		run := w.readSome("T", "c", 5)
		w.start("T", run)
		require.Equal(w, ledger.AdmitFull, w.admitFor(5, 4, 50).State, "what runs counts")
		w.quiet()
		w.outcome("T", done(run[:3]...))
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val(), "the fetcher is told that there is room")
		require.Equal(w, 3, w.admitFor(5, 4, 50).Moved)
		require.Equal(w, map[string]int64{"done": 3, "in_flight": 2, "ready": 7, "waiting": 88}, w.ledger("g"))
	})
}

// TestAdmitMintsSpans: after its admission, the trace context of a sampled job names the span of
// the admission; a job without a trace context gets none.
func TestAdmitMintsSpans(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		parent := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
			{Payload: []byte(`1`), TraceParent: parent}, {Payload: []byte(`2`)}, {Payload: []byte(`"|"`), TraceParent: parent},
		}})
		traced := w.admit("T", 10, noLimit).Traced
		require.Len(w, traced, 2)
		run := w.read("T", "c")
		for i, tr := range traced {
			j := run[2*i]
			since := time.UnixMilli(j.SinceMS)
			require.Equal(w, fmt.Sprintf("0badcafe%08x", i+1), tr.SpanID)
			require.Equal(w, strings.Replace(parent, "b7ad6b7169203331", tr.SpanID, 1), j.Trace)
			require.Equal(w, ledger.AdmitTrace{TracedJob: ledger.TracedJob{Group: "g", Tenant: "acme", Ordinal: int64(2 * i), Parent: parent, SpanID: tr.SpanID}, Now: since, Fairness: since.Sub(j.Accepted)}, tr)
		}
		require.Empty(w, run[1].Trace)
		require.Equal(w, []string{"1", "2", `"|"`}, []string{run[0].Payload, run[1].Payload, run[2].Payload})
	})
}

// TestAdmitEverything: 435 jobs of 30 groups, which belong to 7 tenants and are in all three lanes,
// are admitted exactly once each, and the counts agree.
func TestAdmitEverything(t *testing.T) {
	both(t, func(w *world) {
		var groups []string
		for i := range 30 {
			g := fmt.Sprintf("g%d", i)
			w.create(g, fmt.Sprintf("t%d", i%7), "T", "lane", []string{"high", "normal", "low"}[i%3])
			w.append(g, i)
			groups = append(groups, g)
		}
		seen := map[string]int{}
		for moved := true; moved; {
			moved = w.admit("T", 37, noLimit).Moved > 0
			for _, j := range w.read("T", "c") {
				seen[fmt.Sprint(j.Group, ".", j.Ordinal)]++
			}
		}
		require.Len(w, seen, 29*30/2)
		for i, g := range groups {
			require.Equal(w, strings.Repeat("R", i), w.states(g))
			w.ledger(g)
		}
		require.Equal(w, 1, slices.Max(slices.Collect(maps.Values(seen))), "none twice")
	})
}
