package ledger_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func TestStart(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T", "job_timeout", "1500", "max_retries", "0")
		w.fill("h", 1, "beta", "T")
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
		require.Len(w, w.pending(w.p.Ready("T")), 4, "the entries stay until there is an outcome")
		require.Equal(w, "CREATED", w.status("g"), "more jobs may come")
		w.seal("g")
		require.Equal(w, 2, w.advance("g"))
		w.fill("i", 1, "acme", "T")
		w.seal("i")
		w.advance("i")
		w.quiet()
		w.begin("T", "c", 1)
		require.Equal(w, "RUNNING", w.status("i"), "without the watcher")
		require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Wake("watcher")).Val(), "it publishes the event")
	})
}

// TestStartStale: a job that was reclaimed, is done, or whose group is cancelled or gone is not
// started. Its stale entry is removed.
func TestStartStale(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T")
		w.fill("cancelled", 1, "acme", "T")
		w.fill("gone", 1, "acme", "T")
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
	onStores(t, func(w *world) {
		w.fill("g", 4, "acme", "T")
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
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
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
	onRedis(t, func(w *world) {
		w.fill("g", 1000, "acme", "T")
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

func (w *world) renew(consumer string, jobs ...taken) []int {
	w.Helper()
	held := make([]ledger.Held, len(jobs))
	for i, j := range jobs {
		held[i] = ledger.Held{Entry: j.entry, Group: j.Group, Ordinal: j.Ordinal, Attempt: max(j.Attempt, int(j.token))}
	}
	lost, err := ledger.Renew(w.Context(), w.c, w.p, "T", consumer, held)
	require.NoError(w, err)
	return lost
}

func TestRenew(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 6, "acme", "T")
		w.fill("h", 1, "acme", "T")
		require.Equal(w, 7, w.admit("T", 10, noLimit).Moved)
		run := w.read("T", "c")
		slices.SortFunc(run, byJob)
		prefetched, started, ended, back, again, retried, cancelled := run[0], run[1:2], run[2:3], run[3:4], run[4:5], run[5:6], run[6]
		for _, jobs := range [][]taken{started, ended, back, again, again, retried} {
			w.start("T", jobs)
		}
		w.outcome("T", done(ended[0]))
		w.outcome("T", other(ledger.OutcomeRetry, back[0], time.Hour))
		stale := again[0]
		stale.token = 1 // the token of the first of two starts
		w.outcome("T", other(ledger.OutcomeReleased, retried[0], 0))
		w.promoteAll("T", 1)
		w.cancel("h")
		w.sweep("h")

		w.eventually(func() bool { return w.idle(started[0].entry) > 20*time.Millisecond })
		for range 2 { // the same call twice
			began := time.Now()
			require.Equal(w, []int{2, 3, 5, 6, 7}, w.renew("c", prefetched, started[0], ended[0], back[0], again[0], stale, retried[0], cancelled))
			for _, j := range []taken{prefetched, started[0], again[0]} {
				idle := w.idle(j.entry)
				require.LessOrEqual(w, idle, time.Since(began)+2*time.Millisecond, "the lease begins anew")
			}
		}
		require.Empty(w, w.renew("c"), "nothing is held")

		// If another consumer has claimed an entry, a Renew by the worker that holds the job's
		// attempt takes the entry back.
		require.NoError(w, w.c.XClaim(w.Context(), &redis.XClaimArgs{
			Stream: w.p.Ready("T"), Group: keyspace.GroupWorkers, Consumer: "thief", Messages: []string{started[0].entry},
		}).Err())
		require.Empty(w, w.renew("c", started[0]))
		require.Contains(w, w.pending(w.p.Ready("T")), "c "+started[0].entry)
	})
}

// idle returns the time since a pending entry of type T's ready stream was read, or its lease was
// last renewed.
func (w *world) idle(entry string) time.Duration {
	w.Helper()
	p, err := w.c.XPendingExt(w.Context(), &redis.XPendingExtArgs{
		Stream: w.p.Ready("T"), Group: keyspace.GroupWorkers, Start: entry, End: entry, Count: 1,
	}).Result()
	require.NoError(w, err)
	require.Len(w, p, 1)
	return p[0].Idle
}

func TestReclaim(t *testing.T) {
	onStores(t, func(w *world) {
		require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3), "nobody has read yet")
		w.fill("g", 3, "acme", "T")
		require.Equal(w, 3, w.admit("T", 3, noLimit).Moved)
		run := w.readSome("T", "c", 2)
		w.start("T", run[:1])
		require.Equal(w, "IRR", w.states("g"))

		// Only pending entries are reclaimed, and their jobs are due at once. A job counts a loss
		// only if the lost worker had started it.
		require.Equal(w, ledger.ReclaimReply{Taken: 2}, w.reclaim("T", 3))
		require.Equal(w, "NNR", w.states("g"))
		require.Equal(w, map[string]int64{"non_ready": 2, "ready": 1}, w.ledger("g"))
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Equal(w, "2", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())
		var on map[string]any
		require.NoError(w, json.Unmarshal([]byte(w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val()), &on))
		require.Equal(w, "WORKER_LOST", on["code"])
		require.False(w, w.c.HExists(w.Context(), w.p.Errors("g"), "1").Val())
		w.unchanged(func() { require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3)) })

		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(run[0])), "the lost worker comes late")
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("T"), "stale").Val(), "and is counted")
		w.promoteAll("T", 2)
		again := w.read("T", "d")
		require.Len(w, again, 3)
		for _, j := range again {
			want := map[int64][2]int{0: {2, 1}, 1: {2, 0}, 2: {1, 0}}[j.Ordinal]
			require.Equal(w, want, [2]int{j.Attempt, j.Losses}, "attempt and losses of job %d", j.Ordinal)
		}
		w.start("T", again)
		require.Equal(w, ledger.OutcomeReply{Owned: 3}, w.outcome("T", done(again...)))
	})
}

// TestReclaimOnlyWhatIsIdle: Reclaim with a lease of 50 ms takes back the job whose entry was idle
// for that long, and not the one that a worker renews.
func TestReclaimOnlyWhatIsIdle(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		run := w.begin("T", "c", 2)
		reclaim := func(lease time.Duration) int {
			r, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", lease, 100, 3, false)
			require.NoError(w, err)
			return r.Taken
		}
		require.Zero(w, reclaim(time.Hour))
		w.eventually(func() bool { return w.idle(run[1].entry) > 50*time.Millisecond })
		w.renew("c", run[0])
		w.eventually(func() bool {
			w.renew("c", run[0])
			return reclaim(50*time.Millisecond) == 1
		})
		require.Equal(w, "IN", w.states("g"))
	})
}

func TestReclaimTakesAFewAtATime(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 5, "acme", "T")
		w.begin("T", "c", 5)
		for _, want := range []int{2, 2, 1, 0} {
			r, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", 0, 2, 3, false)
			require.NoError(w, err)
			require.Equal(w, want, r.Taken)
			w.ledger("g")
		}
	})
}

func TestReclaimFailsWhatKillsItsWorkers(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.seal("g")
		w.begin("T", "c", 1)
		for range 2 {
			require.Equal(w, ledger.ReclaimReply{Taken: 1}, w.reclaim("T", 2))
			w.promoteAll("T", 1)
			w.start("T", w.read("T", "c"))
		}
		w.c.Del(w.Context(), w.p.Dirty())
		require.Equal(w, ledger.ReclaimReply{Failed: 1}, w.reclaim("T", 2))
		require.Equal(w, map[string]int64{"failed": 1}, w.ledger("g"))
		require.Equal(w, map[string]string{"WORKER_LOST": "1"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.DeadLetters()).Val())
		require.True(w, w.c.HExists(w.Context(), w.p.Failures("g"), "0").Val())
		require.Equal(w, "E2 E1 ", errorsIn(w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val()), "the errors before the last one stay")
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "unfinished").Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
	})
}

// TestReclaimReportsDeletedEntries: if another program has deleted a pending entry from the ready
// stream, the reply names this entry as missing, once, and the watcher is woken.
func TestReclaimReportsDeletedEntries(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		run := w.begin("T", "c", 2)
		w.c.XDel(w.Context(), w.p.Ready("T"), run[0].entry)
		r := w.reclaim("T", 3)
		require.Equal(w, ledger.ReclaimReply{Taken: 1, Missing: []string{run[0].entry}}, r)
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Watch(), "suspicious").Val(), "the watcher is to look for its job")
		require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Wake("watcher")).Val())
		require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3), "once")
		w.ledger("g")
	})
}

// TestReclaimGarbage: Reclaim removes pending entries that can't be read as a job, a second entry
// of a job, and those of a cancelled or deleted group.
func TestReclaimGarbage(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.fill("cancelled", 1, "beta", "T")
		require.Equal(w, 2, w.admit("T", 2, noLimit).Moved)
		blob := ledger.MessageBlob(w.c.XRange(w.Context(), w.p.Ready("T"), "-", "+").Val()[0].Values)
		for _, values := range [][]any{{"j", "nonsense"}, {"x", "", "y", ""}, {"j", blob}, {"j", "gone|T|1|0|0|0|0|0|0|1||0|1||1"}} {
			w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: values})
		}
		w.cancel("cancelled")
		w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
		w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "c", Streams: []string{w.p.Ready("T"), ">"}, Count: 10})
		require.Equal(w, ledger.ReclaimReply{Taken: 1, Stale: 5}, w.reclaim("T", 3))
		require.Equal(w, []string{"ready:T x  y ", "ready:T nonsense"}, w.c.LRange(w.Context(), w.p.Quarantine(), 0, 1).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Empty(w, w.pending(w.p.Ready("T")))
		require.Equal(w, map[string]int64{"non_ready": 1}, w.ledger("g"))
	})
}

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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
