package ledger_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestOutcomeDone(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.create("h", "beta", "T")
		trace := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		w.appendJobs(ledger.AppendArgs{Group: "h", Jobs: []ledger.NewJob{{Payload: []byte("1"), TraceParent: trace}, {Payload: large}}})
		run := w.begin("T", "c", 4)
		require.Equal(w, ledger.OutcomeReply{Owned: 4}, w.outcome("T", done(run...)))
		for _, g := range []string{"g", "h"} {
			require.Equal(w, "DD", w.states(g))
			require.Equal(w, map[string]int64{"done": 2}, w.ledger(g))
		}
		entries := w.c.XRange(w.Context(), w.p.ResultStream(), "-", "+").Val()
		require.Len(w, entries, 2, "one entry a group and batch")
		require.Equal(w, map[string]any{"g": "g", "l": `{"ordinal":0}` + "\n" + `{"ordinal":1}`, "t": "", "p": "acme"}, entries[0].Values)
		require.Equal(w, map[string]any{"g": "h", "l": `{"ordinal":0}` + "\n" + `{"ordinal":1}`, "t": "0 " + run[2].Trace, "p": "beta"}, entries[1].Values)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Payloads("h")).Val(), "what lay apart goes with its job")
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "unfinished").Val())
		w.unchanged(func() { require.Equal(w, ledger.OutcomeReply{Stale: 4}, w.outcome("T", done(run...))) })
	})
}

// kinds lists outcomes and the state that each leads to. For a job that will run again, it also has
// attempt, retries, throttles and losses, as in the moving blob, and the reason.
var kinds = []struct {
	kind                  ledger.OutcomeKind
	place, counts, reason string
}{
	{ledger.OutcomeRetry, "non_ready", "1|1|0|0", "E"},
	{ledger.OutcomeThrottled, "non_ready", "1|0|1|0", "A"},
	{ledger.OutcomeReleased, "non_ready", "1|0|0|0", ""},
	{ledger.OutcomeDeferred, "non_ready", "1|0|0|0", "G"},
	{ledger.OutcomeFailed, "failed", "", ""},
}

func TestOutcomeKinds(t *testing.T) {
	onStores(t, func(w *world) {
		for i, k := range kinds {
			g := fmt.Sprint("g", i)
			w.fill(g, 1, fmt.Sprint("t", i), "T")
			report := other(k.kind, w.begin("T", "c", 1)[0], 0)
			failed := map[bool]int64{true: 1}[k.kind == ledger.OutcomeFailed]
			require.Equal(w, ledger.OutcomeReply{Owned: 1, Failed: failed}, w.outcome("T", report), k.kind)
			require.Equal(w, map[string]int64{k.place: 1}, w.ledger(g), k.kind)
			require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val(), k.kind)
			require.Empty(w, w.pending(w.p.Ready("T")), k.kind)
			w.unchanged(func() { require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", report), k.kind) })
			if k.place == "non_ready" {
				blob := w.c.ZRange(w.Context(), w.p.NonReadyOf(fmt.Sprint("t", i)), 0, -1).Val()
				require.Len(w, blob, 1)
				require.Regexp(w, `^`+regexp.QuoteMeta(g+"|T|"+k.counts)+`\|\d+\|0\|0\|\d+\|`+k.reason+`\|0\|\d+\|\|\{"n":0\}$`, blob[0])
				congested := w.c.HGet(w.Context(), w.p.Tenant(fmt.Sprint("t", i)), "congested").Val()
				require.Equal(w, k.kind != ledger.OutcomeDeferred, congested == "1", k.kind)
			}
		}
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g0"), "retries").Val())
		require.Equal(w, "4", w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
	})
}

// TestOutcomeDeferred: a started job and one that was not started are deferred five times, by a
// minute and an hour. They use no retries or throttles, wait exactly as long as asked, and do not
// count as congested.
func TestOutcomeDeferred(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.admit("T", 2, noLimit)
		for range 5 {
			run := w.read("T", "c")
			slices.SortFunc(run, byJob)
			require.Len(w, run, 2)
			w.start("T", run[:1])
			report := other(ledger.OutcomeDeferred, run[0], time.Minute)
			report[0].Others = append(report[0].Others, other(ledger.OutcomeDeferred, run[1], time.Hour)[0].Others...)
			require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", report))
			require.Equal(w, "NN", w.states("g"))
			require.Equal(w, map[string]int64{"non_ready": 2}, w.ledger("g"))
			require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
			w.unchanged(func() { require.Equal(w, ledger.OutcomeReply{Stale: 2}, w.outcome("T", report)) })
			for i, wait := range []time.Duration{time.Minute, time.Hour} {
				var last ledger.JobError
				require.NoError(w, json.Unmarshal([]byte(w.c.HGet(w.Context(), w.p.Errors("g"), fmt.Sprint(i)).Val()), &last))
				require.Equal(w, "G", last.Reason)
				require.Equal(w, wait.Milliseconds(), last.Until-last.At)
			}
			require.False(w, w.c.HExists(w.Context(), w.p.Tenant("acme"), "congested").Val())
			require.Zero(w, w.c.Exists(w.Context(), w.p.Congestion("acme")).Val())
			keys := []string{w.p.NonReadyOf("acme"), w.p.NonReady()}
			for _, key := range keys { // both jobs are due
				for _, member := range w.c.ZRange(w.Context(), key, 0, -1).Val() {
					w.c.ZAdd(w.Context(), key, redis.Z{Score: 1, Member: member})
				}
			}
			w.promoteAll("T", 2)
		}
		run := w.read("T", "c")
		w.start("T", run)
		require.Equal(w, []any{0, 0}, []any{run[0].Retries, run[0].Throttles})
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(run...)))
	})
}

// TestOutcomeDeferredBesideRetried: of two jobs in one batch, the deferred one does not lengthen
// the wait of the retried one.
func TestOutcomeDeferredBesideRetried(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		run := w.begin("T", "c", 2)
		slices.SortFunc(run, byJob)
		report := other(ledger.OutcomeDeferred, run[0], time.Hour)
		report[0].Others = append(report[0].Others, other(ledger.OutcomeRetry, run[1], 0)[0].Others...)
		w.outcomeIn(ledger.Congestion{Base: 500 * time.Millisecond, Cap: time.Minute, RPS: 1}, "T", report)
		first := w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf("acme"), 0, 0).Val()[0]
		d, err := ledger.ParseJob(first.Member.(string))
		require.NoError(w, err)
		require.Equal(w, []int64{1, 500}, []int64{d.Ordinal, int64(first.Score) - d.SinceMS})
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Congestion("acme"), "returns").Val())
	})
}

// TestOutcomeStale: a stale outcome of any kind changes nothing but the entry in the ready stream
// and the counter of stale reports: after a reclaim, of an older or later attempt, of a group that
// was cancelled or is gone, of an ordinal that the group does not have.
func TestOutcomeStale(t *testing.T) {
	stale := map[string]func(w *world, j *taken){
		"taken back": func(w *world, _ *taken) {
			require.Equal(w, 1, w.reclaim("T", 3).Taken)
		},
		"runs elsewhere": func(w *world, _ *taken) {
			w.reclaim("T", 3)
			w.promoteAll("T", 1)
			w.start("T", w.read("T", "d"))
		},
		"started again": func(w *world, j *taken) {
			w.start("T", []taken{*j})
		},
		"an attempt to come": func(_ *world, j *taken) { j.token, j.Attempt = 2, 2 },
		"cancelled":          func(w *world, _ *taken) { w.cancel("g") },
		"swept":              func(w *world, _ *taken) { w.cancel("g"); w.sweep("g") },
		"gone":               func(w *world, _ *taken) { w.c.Del(w.Context(), w.p.Group("g"), w.p.States("g")) },
		"beyond the group":   func(_ *world, j *taken) { j.Ordinal = 1000 },
	}
	for name, happens := range stale {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				w.fill("g", 1, "acme", "T")
				j := w.begin("T", "c", 1)[0]
				happens(w, &j)
				reports := [][]ledger.GroupOutcome{done(j)}
				for _, k := range kinds {
					reports = append(reports, other(k.kind, j, 0))
				}
				reports = append(reports, other(ledger.OutcomeUnstarted, j, 0))
				held := w.pending(w.p.Ready("T"))
				for i, report := range reports {
					before := w.dump()
					require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", report), i)
					after := w.dump()
					delete(before, "ready:T")
					delete(after, "ready:T")
					require.Equal(w, before, after)
				}
				if name == "started again" || name == "an attempt to come" {
					require.Equal(w, held, w.pending(w.p.Ready("T")), "the entry may be the one that holds the job")
				}
			})
		})
	}
}

// TestOutcomeUnstarted: a job that a worker returns unstarted goes to the end of the ready stream,
// under a new attempt.
func TestOutcomeUnstarted(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		require.Equal(w, 2, w.admit("T", 2, noLimit).Moved)
		run := w.read("T", "c")
		report := other(ledger.OutcomeUnstarted, run[0], 0)
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", report))
		require.Equal(w, map[string]int64{"ready": 2}, w.ledger("g"))
		w.unchanged(func() { require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", report)) })
		again := w.read("T", "d")
		require.Len(w, again, 1)
		require.Equal(w, []any{int64(0), 2, 0, 0, 0, run[0].Waits, run[0].Payload}, []any{again[0].Ordinal, again[0].Attempt, again[0].Retries, again[0].Throttles, again[0].Losses, again[0].Waits, again[0].Payload})

		// After a start whose reply was lost, a worker reports the job as unstarted. Because the
		// start took effect, the job becomes non-ready, not ready.
		w.start("T", run[1:])
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeUnstarted, run[1], 0)))
		require.Equal(w, "RN", w.states("g"))
		require.Equal(w, map[string]int64{"ready": 1, "non_ready": 1}, w.ledger("g"))
	})
}

func TestOutcomeFailed(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte(`"a|b"`)}, {Payload: large}}})
		run := w.begin("T", "c", 2)
		w.outcome("T", other(ledger.OutcomeRetry, run[0], 0))
		w.promoteAll("T", 1)
		second := w.read("T", "c")
		w.start("T", second)
		require.True(w, w.c.HExists(w.Context(), w.p.Errors("g"), "0").Val())
		for _, j := range []taken{second[0], run[1]} {
			report := other(ledger.OutcomeFailed, j, 0)
			report[0].Others[0].Code, report[0].Others[0].Text = `A/"B"`, "line\nbreak"
			require.Equal(w, ledger.OutcomeReply{Owned: 1, Failed: 1}, w.outcome("T", report))
		}
		require.Equal(w, map[string]int64{"failed": 2}, w.ledger("g"))
		require.Equal(w, map[string]string{`A/"B"`: "2"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		require.EqualValues(w, 1, w.c.HLen(w.Context(), w.p.Errors("g")).Val(), "the errors before the last one stay")

		letters := w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val()
		require.Len(w, letters, 2)
		for i, l := range letters {
			at := l.Values["at"]
			require.Equal(w, map[string]any{
				"job": fmt.Sprint("g.", i), "tenant": "acme", "group": "g", "ordinal": fmt.Sprint(i), "type": "T", "code": `A/"B"`, "error": "line\nbreak",
				"attempts": fmt.Sprint(2 - i), "at": at, "payload": []string{`"a|b"`, string(large)}[i],
			}, l.Values)
			failure := w.c.HGet(w.Context(), w.p.Failures("g"), fmt.Sprint(i)).Val()
			text, blob, ok := strings.Cut(failure, "\n")
			require.True(w, ok)
			var err map[string]any
			require.NoError(w, json.Unmarshal([]byte(text), &err))
			require.Equal(w, map[string]any{"ordinal": float64(i), "code": `A/"B"`, "error": "line\nbreak", "attempts": float64(2 - i), "at": float64(number(at)), "round": 1.0, "letter": l.ID}, err)
			d, parsed := ledger.ParseJob(blob)
			require.NoError(w, parsed)
			require.Equal(w, []any{"g", "T", int64(i), "0|0|0"}, []any{d.Group, d.Type, d.Ordinal, d.Waits})
		}
	})
}

// TestOutcomeBesideASpoiledGroup: of a batch with the groups a and b, whose states:b has the wrong
// Redis type, only a takes effect. The entry of a's job stays until that job is reported again.
func TestOutcomeBesideASpoiledGroup(t *testing.T) {
	onStores(t, func(w *world) {
		for _, g := range []string{"a", "b"} {
			w.fill(g, 1, "acme", "T")
		}
		run := w.begin("T", "c", 2)
		slices.SortFunc(run, byJob)
		w.spoil(w.p.States("b"), "string")
		_, err := ledger.Outcome(w.Context(), w.c, w.p, "T", soon, done(run...))
		require.Error(w, err)
		require.Equal(w, map[string]int64{"done": 1}, w.ledger("a"))
		require.Len(w, w.pending(w.p.Ready("T")), 2)
		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(run[0])), "alone, it is settled already and its entry goes")
		require.Len(w, w.pending(w.p.Ready("T")), 1)
	})
}

// TestOutcomeCongestion: a throttled job waits for base + n / rate seconds, where n of the tenant's
// jobs are congested before it and rate is the tenant's share of RPS: here 500 ms and 250 ms for
// each of n. A cap bounds the wait. A Retry-After, and a deferral's wait, are kept as they are.
func TestOutcomeCongestion(t *testing.T) {
	onStores(t, func(w *world) {
		const n = 10
		w.fill("g", n+5, "acme", "T")
		w.fill("b", 1, "beta", "T")
		run := w.begin("T", "c", n+6)
		run = slices.DeleteFunc(run, func(j taken) bool { return j.Group != "g" })
		w.c.SAdd(w.Context(), w.p.Active(), "acme", "beta") // two active tenants: each has half of the rate
		terms := ledger.Congestion{Base: 500 * time.Millisecond, Cap: 2600 * time.Millisecond, RPS: 8}
		report := []ledger.GroupOutcome{{Group: "g"}}
		for _, j := range run[:n] {
			report[0].Others = append(report[0].Others, other(ledger.OutcomeThrottled, j, 0)[0].Others...)
		}
		require.Equal(w, ledger.OutcomeReply{Owned: n}, w.outcomeIn(terms, "T", report))
		waits := func() (all []int64) {
			for _, z := range w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val() {
				d, err := ledger.ParseJob(z.Member.(string))
				require.NoError(w, err)
				all = append(all, int64(z.Score)-d.SinceMS)
			}
			return all
		}
		require.Equal(w, []int64{500, 750, 1000, 1250, 1500, 1750, 2000, 2250, 2500, 2600}, waits())
		require.Equal(w, "10", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())

		for i, c := range []struct {
			kind  ledger.OutcomeKind
			delay time.Duration
			want  time.Duration
			terms ledger.Congestion
		}{
			{ledger.OutcomeThrottled, time.Minute, time.Minute, terms},                                              // Retry-After wins, even above the cap
			{ledger.OutcomeThrottled, 7 * time.Millisecond, 7 * time.Millisecond, terms},                            // and even below the formula
			{ledger.OutcomeThrottled, -2 * time.Second, 2 * time.Second, ledger.Congestion{Cap: time.Minute}},       // a minimum, if the downstream API named no time
			{ledger.OutcomeRetry, 3 * time.Second, 3 * time.Second, ledger.Congestion{Cap: time.Minute, RPS: 1000}}, // the longer of the two
			{ledger.OutcomeDeferred, time.Minute, time.Minute, terms},                                               // as asked, above the cap
		} {
			w.c.Del(w.Context(), w.p.NonReadyOf("acme"))
			report := other(c.kind, run[n+i], c.delay)
			require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcomeIn(c.terms, "T", report))
			require.Equal(w, []int64{c.want.Milliseconds()}, waits(), i)
			var on struct {
				At, Until int64
				Reason    string
			}
			require.NoError(w, json.Unmarshal([]byte(w.c.HGet(w.Context(), w.p.Errors("g"), fmt.Sprint(run[n+i].Ordinal)).Val()), &on))
			require.Equal(w, c.want.Milliseconds(), on.Until-on.At)
		}
	})
}

// TestOutcomeCallsTheWatcherAtTheEnd: of the outcomes of a sealed group's two jobs, only the last
// makes the group dirty and wakes the watcher, and the aggregator from its pause.
func TestOutcomeCallsTheWatcherAtTheEnd(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.seal("g")
		run := w.begin("T", "c", 2)
		w.c.Del(w.Context(), w.p.Dirty())
		w.quiet()
		w.outcome("T", done(run[0]))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Dirty(), w.p.Wake("aggregator")).Val())
		w.outcome("T", other(ledger.OutcomeFailed, run[1], 0))
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		for _, role := range []string{"watcher", "aggregator"} {
			require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake(role)).Val(), role)
		}
	})
}

// TestOutcomeOfALostStart: a failover has lost the start of a job, but not its entry in the ready
// stream. A report of the worker that started the job must not remove the entry: reclaim takes the
// job back, and another worker runs it.
func TestOutcomeOfALostStart(t *testing.T) {
	onStores(t, func(w *world) {
		for _, kind := range []ledger.OutcomeKind{outcomeDone, ledger.OutcomeRetry, ledger.OutcomeFailed, ledger.OutcomeReleased} {
			g := "g" + string(kind)
			w.fill(g, 1, "acme", "T")
			run := w.begin("T", "c", 1)
			w.c.SetRange(w.Context(), w.p.States(g), 0, "R")
			w.c.HSet(w.Context(), w.p.Group(g), "ready", 1, "in_flight", 0)
			report := done(run...)
			if kind != outcomeDone {
				report = other(kind, run[0], 0)
			}
			w.unchanged(func() { require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", report), kind) })
			require.Equal(w, ledger.ReclaimReply{Taken: 1}, w.reclaim("T", 3), kind)
			w.promoteAll("T", 1)
			again := w.read("T", "d")
			w.start("T", again)
			require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(again...)), kind)
		}
	})
}
