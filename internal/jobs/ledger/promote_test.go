package ledger_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestPromote(t *testing.T) {
	onStores(t, func(w *world) {
		r := w.promote(noLimit, "T")
		require.WithinDuration(w, time.Now(), time.UnixMicro(r.AtUS), time.Minute)
		require.Equal(w, ledger.PromoteReply{Wait: -time.Millisecond, Permits: []ledger.Permit{}, Denials: []ledger.Denial{}, AtUS: r.AtUS}, r)
		w.nonReady("g", 3)
		require.Equal(w, map[string]int64{"non_ready": 3}, w.ledger("g"))
		require.Equal(w, "3", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())

		r = w.promote(noLimit, "T")
		require.Equal(w, ledger.PromoteReply{Moved: 3, Wait: -time.Millisecond, Permits: []ledger.Permit{{Tenant: "acme", N: 3}}, Denials: []ledger.Denial{}, AtUS: r.AtUS}, r)
		require.Equal(w, map[string]int64{"ready": 3}, w.ledger("g"))
		require.Zero(w, w.c.Exists(w.Context(), w.p.NonReady(), w.p.NonReadyOf("acme")).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())
		w.unchanged(func() { require.Zero(w, w.promote(noLimit, "T").Moved) })

		run := w.read("T", "c")
		w.start("T", run)
		require.Equal(w, ledger.OutcomeReply{Owned: 3}, w.outcome("T", done(run...)))
		for _, j := range run {
			require.Equal(w, 2, j.Attempt)
		}
	})
}

// due creates a group with one job, which is non-ready after an error, and sets its due time to ms
// (since 1970).
func (w *world) due(group, tenant, typ string, ms float64) {
	w.Helper()
	w.fill(group, 1, tenant, typ)
	require.Equal(w, 1, w.admit(typ, 1, noLimit).Moved)
	run := w.read(typ, "c")
	w.start(typ, run)
	require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome(typ, other(ledger.OutcomeRetry, run[0], time.Second)))
	blobs := w.c.ZRange(w.Context(), w.p.NonReadyOf(tenant), -1, -1).Val()
	require.Contains(w, blobs[0], group+"|")
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.NonReadyOf(tenant), redis.Z{Score: ms, Member: blobs[0]}).Err())
	first := w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf(tenant), 0, 0).Val()[0]
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: first.Score, Member: tenant}).Err())
}

func TestPromoteInTheOrderOfDueTimes(t *testing.T) {
	onStores(t, func(w *world) {
		hour := float64(time.Now().Add(time.Hour).UnixMilli())
		w.due("c", "x", "T", 30)
		w.due("b", "y", "T", 20)
		w.due("d", "x", "T", 40)
		w.due("a", "z", "T", 10)
		w.due("e", "x", "T", hour)
		r := w.promote(noLimit, "T")
		require.Equal(w, 4, r.Moved)
		require.InDelta(w, time.Hour, r.Wait, float64(time.Minute))
		require.Equal(w, "abcd", w.admitted("T", group))
		require.Equal(w, hour, w.c.ZScore(w.Context(), w.p.NonReady(), "x").Val())
		require.Equal(w, map[string]int64{"non_ready": 1}, w.ledger("e"))
	})
}

func TestPromoteTakesAFewAtATime(t *testing.T) {
	onStores(t, func(w *world) {
		w.nonReady("g", 150)
		require.Equal(w, 100, w.promote(noLimit, "T").Moved)
		require.Equal(w, 50, w.promote(noLimit, "T").Moved)
		require.Equal(w, map[string]int64{"ready": 150}, w.ledger("g"))
	})
}

func TestPromoteSpendsPermits(t *testing.T) {
	onStores(t, func(w *world) {
		w.nonReady("g", 6)
		l := limit(4)
		r := w.promote(l, "T")
		require.Equal(w, 4, r.Moved)
		require.Equal(w, []ledger.Permit{{Tenant: "acme", N: 4}}, r.Permits)
		require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "per_group"}}, r.Denials)
		for _, key := range []string{w.p.Rate(), w.p.Tenant("acme")} {
			require.Equal(w, "4", w.c.HGet(w.Context(), key, "n").Val(), key)
		}
		// Now no permit is left in this window, neither for promote nor for admit.
		w.fill("h", 1, "beta", "T")
		require.Equal(w, ledger.AdmitLimited, w.admit("T", 1, l).State)
		r = w.promote(l, "T")
		require.Zero(w, r.Moved)
		require.InDelta(w, l.Window-time.Duration(time.Now().UnixMilli())*time.Millisecond, r.Wait, float64(time.Minute), "until the next window")
		require.Equal(w, map[string]int64{"ready": 4, "non_ready": 2}, w.ledger("g"))
	})
}

// TestPromoteSharesPermits: of 10 permits a tenant with 8 due jobs and no waiting ones gets its
// share, 5, beside a tenant with 5 waiting jobs.
func TestPromoteSharesPermits(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("b", "beta", "T")
		for i := range 8 {
			w.due(fmt.Sprint("g", i), "acme", "T", float64(i))
		}
		w.append("b", 5) // makes beta active
		r := w.promote(limit(10), "T")
		require.Equal(w, 5, r.Moved)
		require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "per_group"}}, r.Denials)
		require.Greater(w, w.promote(limit(10), "T").Wait, time.Hour, "it comes back in the next window")
		require.Equal(w, 5, w.admit("T", 10, limit(10)).Moved)
	})
}

// TestPromoteTenantsTakeTurnsOverWindows: 6 tenants have due jobs, and a window has 2 permits. In 9
// windows the tenants get permits in turn, 3 times each.
func TestPromoteTenantsTakeTurnsOverWindows(t *testing.T) {
	onStores(t, func(w *world) {
		const tenants, permits = 6, 2
		for i := range tenants {
			tenant := string(rune('a' + i))
			for j := range 3 {
				w.due(fmt.Sprint(tenant, j), tenant, "T", float64(100*j+i))
			}
			w.c.SAdd(w.Context(), w.p.Active(), tenant) // gives each tenant a share of 1
		}
		turns := ""
		for window := range 9 {
			// The windows of this test are long: the next one begins when the test resets
			// the counters.
			r := w.promote(limit(permits), "T")
			require.Equal(w, permits, r.Moved, "window %d", window)
			turns += w.admitted("T", func(j taken) string { return j.Group[:1] })
			for i := range tenants {
				w.c.HDel(w.Context(), w.p.Tenant(string(rune('a'+i))), "n")
			}
			w.c.HDel(w.Context(), w.p.Rate(), "n")
			// Tenants whose due time was moved to the next window become due now, after the others.
			for i, z := range w.c.ZRangeByScoreWithScores(w.Context(), w.p.NonReady(), &redis.ZRangeBy{Min: "1000000000", Max: "+inf"}).Val() {
				w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: float64(1000*(window+1) + i), Member: z.Member})
			}
		}
		require.Equal(w, strings.Repeat("abcdef", 3), turns)
	})
}

// TestPromoteBesideAFullReadyStream: 2 of 250 due jobs of type T fill its ready stream. The others
// delay neither their tenant's due job of type U nor a job of type V of another tenant.
func TestPromoteBesideAFullReadyStream(t *testing.T) {
	onRedis(t, func(w *world) {
		const blocked = 250
		w.fill("full", blocked, "acme", "T")
		for _, j := range w.begin("T", "c", blocked) {
			w.outcome("T", other(ledger.OutcomeReleased, j, 0))
		}
		w.fill("other", 1, "acme", "U")
		run := w.begin("U", "c", 1)
		w.outcome("U", other(ledger.OutcomeReleased, run[0], 0))
		w.due("neighbour", "beta", "V", float64(time.Now().UnixMilli()))

		caps := map[string]int{"T": 2, "U": 5, "V": 5}
		first := w.promoteBelow(caps, noLimit)
		require.Positive(w, first.Skipped)
		w.promoteAllBelow(caps, 4-first.Moved)
		require.Equal(w, map[string]int64{"ready": 2, "non_ready": blocked - 2}, w.ledger("full"))
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("other"))
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("neighbour"))

		// As soon as workers have read entries, the stream has free capacity again.
		w.read("T", "c")
		w.eventually(func() bool { w.promoteBelow(caps, noLimit); return w.ledger("full")["ready"] == 4 })
	})
}

// TestPromoteSuspectsBesideAFullReadyStream: two suspects become ready although the stream is full.
// The job that the same dead worker had read and not started stays non-ready.
func TestPromoteSuspectsBesideAFullReadyStream(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 4, "acme", "T")
		require.Equal(w, 4, w.admit("T", 4, noLimit).Moved)
		read := w.readSome("T", "lost", 3)
		w.start("T", read[:2])
		require.Equal(w, 3, w.reclaim("T", 3).Taken)
		require.Equal(w, "NNNR", w.states("g"))
		caps := map[string]int{"T": 1}
		w.promoteAllBelow(caps, 2)
		require.Equal(w, "RRNR", w.states("g"))
	})
}

// TestPromoteSuspendsAndDropsBesideAFullReadyStream: due jobs of a paused group are suspended and
// those of a cancelled group are dropped although the stream is full.
func TestPromoteSuspendsAndDropsBesideAFullReadyStream(t *testing.T) {
	onStores(t, func(w *world) {
		for _, group := range []string{"a", "b", "c", "d"} {
			w.nonReady(group, 3)
		}
		w.pause(ledger.PauseGroup, "b")
		w.cancel("c")
		w.eventually(func() bool {
			r := w.promoteBelow(map[string]int{"T": 0}, noLimit)
			require.Zero(w, r.Moved)
			return r.Skipped == 6 // of a and d
		})
		require.EqualValues(w, 3, w.c.ZCard(w.Context(), w.p.SuspendedOf("acme")).Val())
		require.EqualValues(w, 6, w.c.ZCard(w.Context(), w.p.NonReadyOf("acme")).Val())
		w.promoteAll("T", 6)
		require.Equal(w, "RRR NNN RRR", w.states("a")+" "+w.states("b")+" "+w.states("d"))
	})
}

// TestPromoteStates: jobs of a group become ready wherever their states are, close together or far
// apart, and the states between them stay.
func TestPromoteStates(t *testing.T) {
	onRedis(t, func(w *world) {
		const n = 9000
		w.fill("g", n, "acme", "T")
		again := map[int64]bool{0: true, 3: true, 4: true, 255: true, 256: true, 5000: true, n - 1: true}
		for begun := 0; begun < n; begun += 100 {
			report := []ledger.GroupOutcome{{Group: "g"}}
			for _, j := range w.begin("T", "c", 100) {
				if again[j.Ordinal] {
					report[0].Others = append(report[0].Others, other(ledger.OutcomeReleased, j, 0)[0].Others...)
				}
			}
			if len(report[0].Others) > 0 {
				w.outcome("T", report)
			}
		}
		w.promoteAll("T", len(again))
		states := []byte(strings.Repeat("I", n))
		for ordinal := range again {
			states[ordinal] = 'R'
		}
		require.Equal(w, string(states), w.states("g"))
		for _, j := range w.read("T", "c") {
			require.Equal(w, 2, j.Attempt)
			require.True(w, again[j.Ordinal], j.Ordinal)
		}
	})
}

// TestPromoteBehindVeryManyThatAreBlocked: 1,050 due jobs of type T, whose ready stream is full,
// are before a job of type U: more than one call can check. The job of type U becomes ready.
func TestPromoteBehindVeryManyThatAreBlocked(t *testing.T) {
	onRedis(t, func(w *world) {
		const blocked, behind = 2300, 1050
		w.fill("full", blocked, "acme", "T")
		for nonReady := 0; nonReady < blocked; {
			report := []ledger.GroupOutcome{{Group: "full"}}
			for _, j := range w.begin("T", "c", min(200, blocked-nonReady)) {
				report[0].Others = append(report[0].Others, other(ledger.OutcomeReleased, j, 0)[0].Others...)
				nonReady++
			}
			w.outcome("T", report)
		}
		for i, blob := range w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val() {
			w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: float64(i), Member: blob})
		}
		w.due("other", "acme", "U", behind+0.5)
		w.eventually(func() bool {
			w.promoteBelow(map[string]int{"T": 0, "U": 5}, noLimit)
			return w.ledger("other")["ready"] == 1
		})
		require.Equal(w, map[string]int64{"non_ready": blocked}, w.ledger("full"))
		w.eventually(func() bool {
			w.promoteBelow(map[string]int{"T": 10, "U": 5}, noLimit)
			return w.ledger("full")["ready"] == 10
		})
	})
}

// TestPromoteCap: the ready stream of a type that is not in Caps holds at most Cap undelivered
// jobs, that of a type in Caps as many as its value there.
func TestPromoteCap(t *testing.T) {
	onStores(t, func(w *world) {
		w.nonReady("g", 5)
		args := ledger.PromoteArgs{
			Most: 100, Meter: w.use(noLimit), Seed: seed, FullWait: time.Hour, Cap: 2, Caps: map[string]int{"U": 1000},
		}
		promote := func() ledger.PromoteReply {
			r, err := ledger.Promote(w.Context(), w.c, w.p, args)
			require.NoError(w, err)
			return r
		}
		w.eventually(func() bool { return promote().Moved == 2 })
		require.Equal(w, map[string]int64{"ready": 2, "non_ready": 3}, w.ledger("g"))

		w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Member: "acme"}) // before FullWait is over
		args.Caps["T"] = 4
		require.Equal(w, 2, promote().Moved)
		require.Equal(w, map[string]int64{"ready": 4, "non_ready": 1}, w.ledger("g"))
	})
}

func TestPromoteDropsWhatEnded(t *testing.T) {
	onStores(t, func(w *world) {
		w.nonReady("g", 2)
		w.cancel("g")
		require.Zero(w, w.promote(noLimit, "T").Moved)
		require.Zero(w, w.c.Exists(w.Context(), w.p.NonReady(), w.p.NonReadyOf("acme")).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
		w.sweep("g")
		require.Equal(w, map[string]int64{"cancelled": 2}, w.ledger("g"))

		// Promote drops a blob of an earlier attempt from the non-ready jobs. A script that a crash
		// of Redis interrupted may leave one.
		w.due("h", "beta", "T", 1)
		blob := w.c.ZRange(w.Context(), w.p.NonReadyOf("beta"), 0, -1).Val()[0]
		require.Equal(w, 1, w.promote(noLimit, "T").Moved)
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("beta"), redis.Z{Score: 1, Member: blob})
		w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: "beta"})
		require.Zero(w, w.promote(noLimit, "T").Moved)
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("h"))
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		run := w.read("T", "c")
		w.start("T", run)
		w.outcome("T", other(ledger.OutcomeReleased, run[0], 0))
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("beta"), redis.Z{Score: 1, Member: blob})
		require.Equal(w, 1, w.promote(noLimit, "T").Moved)
		run = w.read("T", "c")
		require.Len(w, run, 1)
		require.Equal(w, 3, run[0].Attempt)
	})
}

// TestPromoteQuarantinesWhatCantBeRead: a blob that can't be parsed is quarantined, and a second
// blob of a job is dropped. The job becomes ready once.
func TestPromoteQuarantinesWhatCantBeRead(t *testing.T) {
	onStores(t, func(w *world) {
		w.due("g", "acme", "T", 5)
		blob := w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()[0]
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"}, redis.Z{Score: 6, Member: blob + "twin"})
		require.Equal(w, 1, w.promote(noLimit, "T").Moved)
		require.Equal(w, []string{"non-ready:acme nonsense"}, w.c.LRange(w.Context(), w.p.Quarantine(), 0, -1).Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.NonReadyOf("acme")).Val())
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("g"))
		require.Len(w, w.read("T", "c"), 1)
	})
}

func TestPromoteTellsHowLongJobsHaveWaited(t *testing.T) {
	onStores(t, func(w *world) {
		ago := func(d time.Duration) string { return timestamp(time.Now().Add(-d)) }
		parent := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		for _, c := range []struct {
			reason           string
			rate, congestion time.Duration
		}{
			{"R", 5 * time.Second, 0}, {"A", 0, 5 * time.Second}, {"E", 0, 5 * time.Second}, {"S", 0, 0},
			{"G", 0, 5 * time.Second},
		} {
			w.create(c.reason, "acme", "T")
			w.appendJobs(ledger.AppendArgs{Group: c.reason, Jobs: []ledger.NewJob{{Payload: []byte("1"), TraceParent: parent, RunAt: new(time.Now().Add(time.Hour))}}})
			blob := w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, 0).Val()[0]
			queued := blob[strings.Index(blob, "|S|")+3:]
			w.c.Del(w.Context(), w.p.NonReadyOf("acme"))
			w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: c.reason + "|T|0|0|0|0|7000|0|0|" + ago(5*time.Second) + "|" + c.reason + "|" + queued})
			w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: "acme"})

			r := w.promote(noLimit, "T")
			require.Len(w, r.Traced, 1)
			run := w.read("T", "c")
			fair, rate, congestion := run[0].Waited()
			require.Equal(w, 7*time.Second, fair)
			require.InDelta(w, c.rate, rate, float64(time.Second), c.reason)
			require.InDelta(w, c.congestion, congestion, float64(time.Second), c.reason)

			tr := r.Traced[0]
			require.Equal(w, "0badcafe00000001", tr.SpanID)
			require.Equal(w, strings.Replace(parent, "b7ad6b7169203331", tr.SpanID, 1), run[0].Trace)
			require.InDelta(w, 5*time.Second, tr.Now.Sub(tr.Since), float64(time.Second))
			require.Equal(w, []any{c.reason, "acme", int64(0), parent, 1, c.reason}, []any{tr.Group, tr.Tenant, tr.Ordinal, tr.Parent, tr.Attempt, tr.Reason})
		}
	})
}

// TestPromoteGetsItsTurnOfASinglePlace: if a ready stream has free capacity for one job at a time,
// as with long jobs, a due job and waiting jobs both are among the first four that run.
func TestPromoteGetsItsTurnOfASinglePlace(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("a", 1, "acme", "T")
		w.outcome("T", other(ledger.OutcomeRetry, w.begin("T", "c", 1)[0], 0))
		w.fill("b", 30, "beta", "T")
		w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: "acme"})
		for _, m := range w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val() {
			w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: m})
		}
		var order []string
		for range 8 { // the fetcher always calls before the dispatcher
			w.admitBelow(1, "T", 5, noLimit)
			w.c.ZAddXX(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: "acme"}) // makes the tenant due again soon
			w.promoteBelow(map[string]int{"T": 1}, noLimit)
			run := w.read("T", "c")
			w.start("T", run)
			for _, j := range run {
				order = append(order, j.Group)
			}
			w.outcome("T", done(run...))
		}
		require.Contains(w, order[:4], "a", order)
		require.Contains(w, order[:4], "b", order)
		require.GreaterOrEqual(w, len(order), 7, "and no place is left empty for long")
	})
}
