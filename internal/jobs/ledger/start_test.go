package ledger_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func TestStart(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T", "job_timeout", "1500", "max_retries", "0")
		w.append("g", 3)
		w.create("h", "beta", "T")
		w.append("h", 1)
		w.quiet()
		run := w.begin("T", "c", 4)
		for _, j := range run {
			require.Equal(w, int64(1), j.token)
		}
		require.Equal(w, ledger.GroupTerms{Tenant: "acme", JobTimeout: 1500 * time.Millisecond, MaxRetries: 0}, run[0].terms)
		require.Equal(w, ledger.GroupTerms{Tenant: "beta", MaxRetries: -1}, run[3].terms)
		require.Equal(w, map[string]int64{"in_flight": 3}, w.ledger("g"))
		require.Equal(w, map[string]int64{"in_flight": 1}, w.ledger("h"))
		require.NotEmpty(w, w.c.HGet(w.Context(), w.p.Group("g"), "started").Val())
		require.ElementsMatch(w, []string{"g", "h"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.Len(w, w.pending(w.p.Ready("T")), 4, "the entries stay until there is an outcome")
	})
}

// TestStartTwice: a worker that did not get the reply repeats the start: the job gets a new attempt
// and counts once.
func TestStartTwice(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		run := w.begin("T", "c", 2)
		w.start("T", run)
		require.Equal(w, int64(2), run[0].token)
		require.Equal(w, map[string]int64{"in_flight": 2}, w.ledger("g"))

		// A start with the job's first token is refused, because the job has another attempt now;
		// the job's entry stays for reclaim.
		lost := slices.Clone(run)
		w.unchanged(func() { w.start("T", lost) })
		require.Equal(w, int64(-1), lost[0].token)
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(run...)))
		require.Empty(w, w.pending(w.p.Ready("T")))
	})
}

// TestStartStale: a job that was reclaimed, is done, or whose group is cancelled or gone is not
// started. Its stale entry is removed.
func TestStartStale(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 3)
		w.create("cancelled", "acme", "T")
		w.append("cancelled", 1)
		w.create("gone", "acme", "T")
		w.append("gone", 1)
		require.Equal(w, 5, w.admit("T", 10, noLimit).Moved)
		run := w.read("T", "c")
		slices.SortFunc(run, byJob)
		cancelled, ready, back, ended, gone := run[0], run[1], run[2], run[3], run[4]
		w.cancel("cancelled")
		require.NoError(w, w.c.Del(w.Context(), w.p.Group("gone"), w.p.States("gone")).Err())
		w.start("T", run[3:4])
		w.outcome("T", done(run[3]))
		require.Equal(w, 2, w.reclaim("T", 3).Taken)
		w.promoteAll("T", 2)
		again := w.read("T", "d")
		require.Len(w, again, 2)
		require.Equal(w, "RRD", w.states("g"))

		stale := []taken{cancelled, ready, back, ended, gone}
		w.start("T", stale)
		for _, j := range stale {
			require.Negative(w, j.token)
		}
		require.Equal(w, "RRD", w.states("g"))
		require.Len(w, w.pending(w.p.Ready("T")), 2, "the new attempts' entries")
		w.start("T", again)
		require.Equal(w, []int64{2, 2}, []int64{again[0].token, again[1].token})
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(again...)))
		require.Equal(w, map[string]int64{"done": 3}, w.ledger("g"))
	})
}

// TestStartAfterTheConsumerGroupWasLost: after a consumer group was deleted and created again,
// Redis delivers its entries again under their old ids while the first reader still holds them.
// Each of the four jobs still becomes done once.
func TestStartAfterTheConsumerGroupWasLost(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 4)
		require.Equal(w, 4, w.admit("T", 4, noLimit).Moved)
		first := w.read("T", "first")
		w.start("T", first[:3])

		require.NoError(w, w.c.XGroupDestroy(w.Context(), w.p.Ready("T"), keyspace.GroupWorkers).Err())
		second := w.read("T", "second")
		require.Len(w, second, 4)
		w.start("T", second)
		tokens := func(jobs []taken) (all []int64) {
			for _, j := range jobs {
				all = append(all, j.token)
			}
			return all
		}
		require.Equal(w, []int64{2, 2, 2, 1}, tokens(second), "a job that runs gets another attempt")
		require.Equal(w, map[string]int64{"in_flight": 4}, w.ledger("g"))

		// The first reader's reports, done, failed and retry, are stale and leave the entries,
		// which the second reader has now.
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(first[0])))
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", other(ledger.OutcomeFailed, first[1], 0)))
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", other(ledger.OutcomeRetry, first[2], 0)))
		require.Len(w, w.pending(w.p.Ready("T")), 4)
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(second[0], second[3])))

		// The consumer group is deleted once more: a third reader may not start the jobs while the
		// second reader may still run them.
		require.NoError(w, w.c.XGroupDestroy(w.Context(), w.p.Ready("T"), keyspace.GroupWorkers).Err())
		third := w.read("T", "third")
		require.Len(w, third, 2)
		w.start("T", third)
		require.Equal(w, []int64{-1, -1}, tokens(third))
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(second[1])))

		// The jobs of the third reader's entries are not lost: reclaim takes back the one that is
		// not done.
		require.Equal(w, ledger.ReclaimReply{Taken: 1}, w.reclaim("T", 3))
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(second[2])))
		w.promoteAll("T", 1)
		last := w.read("T", "fourth")
		w.start("T", last)
		require.Equal(w, []int64{3}, tokens(last))
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(last...)))
		require.Equal(w, map[string]int64{"done": 4}, w.ledger("g"))
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
	})
}

// TestStartNamedTwice: a job that is named twice in one call is counted once.
func TestStartNamedTwice(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
		j := w.read("T", "c")[0]
		run := []taken{j, j}
		w.start("T", run)
		require.Equal(w, []int64{1, -1}, []int64{run[0].token, run[1].token})
		require.Equal(w, map[string]int64{"in_flight": 1}, w.ledger("g"))
		require.Len(w, w.pending(w.p.Ready("T")), 1)
		require.Equal(w, ledger.OutcomeReply{Owned: 1, Stale: 1}, w.outcome("T", done(run[0], run[0])))
		require.Equal(w, map[string]int64{"done": 1}, w.ledger("g"))
		require.Len(w, w.c.XRange(w.Context(), w.p.ResultStream(), "-", "+").Val(), 1)
	})
}

// TestStartFarApartAndOften: Start works for the first and the last of 1,000 jobs in one call, and
// for attempts above the number of attempt marks, 90.
func TestStartFarApartAndOften(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1000)
		for moved := 0; moved < 1000; {
			moved += w.admit("T", 500, noLimit).Moved
			w.read("T", "c")
		}
		run := w.reread("T")
		far := []taken{run[0], run[999]}
		w.start("T", far)
		require.Equal(w, "I"+strings.Repeat("R", 998)+"I", w.states("g"))

		j := far[0]
		for attempt := int64(1); attempt <= 95; attempt++ {
			require.Equal(w, attempt, j.token)
			require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeReleased, j, 0)))
			w.promoteAll("T", 1)
			again := w.read("T", "c")
			w.start("T", again)
			j = again[0]
		}
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(j, far[1])))
		require.Equal(w, map[string]int64{"done": 2, "ready": 998}, w.ledger("g"))
	})
}

// reread returns all entries of a ready stream, read or not.
func (w *world) reread(typ string) []taken {
	w.Helper()
	var out []taken
	for _, m := range w.c.XRange(w.Context(), w.p.Ready(typ), "-", "+").Val() {
		d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		require.NoError(w, err)
		out = append(out, taken{entry: m.ID, Job: d})
	}
	return out
}
