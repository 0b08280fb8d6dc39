package ledger_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestCreate(t *testing.T) {
	onStores(t, func(w *world) {
		a := ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "high", "name": "Spring"}}
		status, err := ledger.Create(w.Context(), w.c, w.p, a)
		require.NoError(w, err)
		require.Equal(w, api.StatusCreated, status)

		group := w.c.HGetAll(w.Context(), w.p.Group("g")).Val()
		at := group["at:created"]
		require.Equal(w, map[string]string{
			"id": "g", "tenant": "acme", "type": "T", "hash": "h", "status": "CREATED", "round": "1", "lane": "high", "name": "Spring", "at:created": at,
		}, group)
		for _, index := range []string{w.p.Groups(), w.p.GroupsOf("acme"), w.p.Open()} {
			require.Equal(w, float64(number(at)), w.c.ZScore(w.Context(), index, "g").Val(), index)
		}
		require.Equal(w, []event{{"g", "CREATED", 1}}, w.events())
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("watcher")).Val())

		// A second Create with the same arguments changes nothing and answers CREATED; one with
		// another hash is refused as a conflict.
		w.unchanged(func() {
			status, err := ledger.Create(w.Context(), w.c, w.p, a)
			require.NoError(w, err)
			require.Equal(w, api.StatusCreated, status)
			a.Hash = "other"
			_, err = ledger.Create(w.Context(), w.c, w.p, a)
			require.ErrorIs(w, err, api.ErrConflict)
		})
	})
}

func TestCreateAgainTellsTheStatus(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		w.advance("g")
		w.unchanged(func() {
			status, err := ledger.Create(w.Context(), w.c, w.p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h"})
			require.NoError(w, err)
			require.Equal(w, api.StatusCompleted, status)
		})
	})
}

type event struct {
	group, status string
	round         int64
}

// events returns all events of the outbox in order. It checks that the snapshot in each has the
// event's group, status and round.
func (w *world) events() []event {
	w.Helper()
	var all []event
	entries, err := ledger.ReadOutbox(w.Context(), w.c, w.p, 1_000_000)
	require.NoError(w, err)
	for i := range entries {
		require.NoError(w, entries[i].Err)
		for _, m := range entries[i].Moves {
			e := event{entries[i].Group, string(m.Status), number(entries[i].Round)}
			require.Equal(w, e, event{m.After.ID, string(m.After.Status), int64(m.After.Round)})
			require.Equal(w, m.At, m.After.Entered[strings.ToLower(e.status)])
			for status, at := range m.After.Entered {
				require.False(w, at.After(m.At), "%v has %s", e, status)
			}
			all = append(all, e)
		}
	}
	return all
}

func TestSeal(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.seal("g")
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g"), "sealed").Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		w.unchanged(func() {
			w.seal("g")
			w.sealWith("g", 2, true, nil)
			w.sealWith("g", 3, false, api.ErrConflict)
			w.sealWith("g", 1, false, api.ErrConflict)
		})
	})
}

func TestSealUnknown(t *testing.T) {
	onStores(t, func(w *world) {
		w.unchanged(func() {
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrNotFound)
		})
	})
}

func TestSealCancelled(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.cancel("g")
		w.unchanged(func() {
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrConflict)
			w.sealWith("g", 1, false, api.ErrConflict)
		})
	})
}

// TestSealWithATotalBeforeTheJobs: for a group with 1 job a total of 3 is announced. Other totals,
// and a Seal without one, are refused; the append of 2 more jobs seals the group.
func TestSealWithATotalBeforeTheJobs(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.sealWith("g", 3, false, nil)
		w.unchanged(func() {
			w.sealWith("g", 3, false, nil)             // again
			w.sealWith("g", 4, false, api.ErrConflict) // another total
			w.sealWith("g", 0, false, api.ErrConflict) // fewer than the group has
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrConflict, "less than announced")
		})
		w.append("g", 2)
		w.unchanged(func() {
			w.seal("g")
			w.sealWith("g", 3, true, nil)
		})
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g"), "sealed").Val())
	})
}

func TestSealATotalThatIsThere(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.unchanged(func() { w.sealWith("g", 1, false, api.ErrConflict) })
		w.sealWith("g", 2, true, nil)

		w.create("announced", "acme", "T", "total", "2")
		w.unchanged(func() {
			w.sealWith("announced", 3, false, api.ErrConflict)
			w.sealWith("announced", 2, false, nil)
		})
		w.create("empty", "acme", "T", "total", "0")
		w.seal("empty")
	})
}

// sealWith calls Seal with a total. It checks that Seal returns the values sealed, which says
// whether the group is sealed now, and want.
func (w *world) sealWith(group string, total int64, sealed bool, want error) {
	w.Helper()
	got, err := ledger.Seal(w.Context(), w.c, w.p, group, &total)
	require.ErrorIs(w, err, want)
	require.Equal(w, sealed, got)
}

func (w *world) schedule(most int) (int, time.Duration) {
	w.Helper()
	n, next, err := ledger.Schedule(w.Context(), w.c, w.p, most)
	require.NoError(w, err)
	return n, next
}

func TestSchedule(t *testing.T) {
	onStores(t, func(w *world) {
		n, next := w.schedule(10)
		require.Zero(w, n)
		require.Negative(w, next, "nothing is held")

		// A busy machine may need long until the groups are created and have their jobs.
		soon := time.Now().Add(2 * time.Second).Truncate(time.Millisecond)
		w.create("g", "acme", "T", "run_at", timestamp(soon))
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: append(jobs(2), ledger.NewJob{Type: "U", Payload: []byte("1")})})
		w.fill("h", 1, "acme", "T", "run_at", timestamp(soon.Add(time.Hour)))
		w.eventually(func() bool {
			n, next = w.schedule(10)
			return n == 1
		})
		require.False(w, time.Now().Before(soon), "not before its time")
		require.InDelta(w, time.Hour, next, float64(time.Minute))
		require.Equal(w, "3", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
		w.unchanged(func() {
			n, _ := w.schedule(10)
			require.Zero(w, n, "it is not held any more")
		})

		w.append("g", 1)
		require.Equal(w, "4", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
		require.Equal(w, 3, w.admit("T", 10, noLimit).Moved)
		require.Equal(w, 1, w.admit("U", 10, noLimit).Moved)
		require.Equal(w, map[string]int64{"ready": 4}, w.ledger("g"))
		require.Equal(w, map[string]int64{"waiting": 1}, w.ledger("h"))
	})
}

// TestScheduleAfterALateAppend: jobs that are appended between a group's run_at and the call of
// Schedule that releases it count once in the tenant's counter active.
func TestScheduleAfterALateAppend(t *testing.T) {
	onStores(t, func(w *world) {
		w.hold("g", 2)
		w.c.HSet(w.Context(), w.p.Group("g"), "run_at", timestamp(time.Now().Add(-time.Minute)))
		w.append("g", 1)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active()).Val())
		n, _ := w.schedule(10)
		require.Equal(w, 1, n)
		require.Equal(w, "3", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
	})
}

func TestScheduleTakesAFewAtATime(t *testing.T) {
	onStores(t, func(w *world) {
		for i := range 5 {
			w.hold(fmt.Sprint("g", i), 1)
		}
		for _, want := range []int{2, 2, 1, 0} {
			n, _ := w.schedule(2)
			require.Equal(w, want, n)
		}
		require.Equal(w, 5, w.admit("T", 10, noLimit).Moved)
	})
}

// TestScheduleGroupsThatEnded: Schedule removes a cancelled and an unknown group from the schedule.
// No tenant becomes active, and no job can be admitted.
func TestScheduleGroupsThatEnded(t *testing.T) {
	onStores(t, func(w *world) {
		w.hold("g", 1)
		w.cancel("g")
		w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: "g"}, redis.Z{Score: 1, Member: "gone"}) // a state that a torn script may leave
		n, next := w.schedule(10)
		require.Equal(w, 2, n)
		require.Negative(w, next)
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active(), w.p.Scheduled()).Val())
	})
}

func TestAdvance(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		step := func(n int, status string) {
			w.Helper()
			require.Equal(w, n, w.advance("g"))
			require.Equal(w, status, w.status("g"))
			require.NotContains(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val(), "g")
			w.unchanged(func() { require.Zero(w, w.advance("g")) })
		}
		step(0, "CREATED") // more jobs may come
		w.seal("g")
		step(1, "DISPATCHED")
		run := w.begin("T", "c", 2)
		step(0, "RUNNING")
		w.outcome("T", done(run[0]))
		step(0, "RUNNING")
		w.outcome("T", other(ledger.OutcomeRetry, run[1], 0))
		w.promoteAll("T", 1)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		step(1, "AGGREGATING")
		w.reduceInto("0", w.readResults(1)[0])
		step(0, "AGGREGATING") // one result is missing
		require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), w.p.Open(), 0, -1).Val())
		w.reduceInto("1", w.readResults(1)[0])
		step(0, "COMPLETED")

		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}, {"g", "RUNNING", 1}, {"g", "AGGREGATING", 1}, {"g", "COMPLETED", 1}}, w.events())
		at := int64(0)
		for _, state := range []string{"created", "dispatched", "running", "aggregating", "completed"} {
			next := number(w.c.HGet(w.Context(), w.p.Group("g"), "at:"+state).Val())
			require.GreaterOrEqual(w, next, at, state)
			at = next
		}
		require.Zero(w, w.c.Exists(w.Context(), w.p.Open()).Val())
		require.Equal(w, float64(at), w.c.ZScore(w.Context(), w.p.Ended(), "g").Val())
		require.Equal(w, map[string]string{"unfinished": "0", "ended": "2"}, w.countersOf("acme"), "the tenant's congestion starts afresh")
		require.Zero(w, w.advance("nobody"))
	})
}

// countersOf returns a tenant's hash without its start tag in the lane normal of type T, and
// without the fields that hold times.
func (w *world) countersOf(tenant string) map[string]string {
	w.Helper()
	h := w.c.HGetAll(w.Context(), w.p.Tenant(tenant)).Val()
	for _, field := range []string{"tag:T:normal", "pace", "rs", "rd"} {
		delete(h, field)
	}
	return h
}

// TestAdvanceAGroupWithoutJobs: one call of Advance moves a sealed group without jobs from CREATED
// to COMPLETED, with an event for each state.
func TestAdvanceAGroupWithoutJobs(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		require.Equal(w, 4, w.advance("g"))
		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}, {"g", "RUNNING", 1}, {"g", "AGGREGATING", 1}, {"g", "COMPLETED", 1}}, w.events())
	})
}

func TestAdvanceByThreshold(t *testing.T) {
	onStores(t, func(w *world) {
		for i, c := range []struct {
			threshold    string
			jobs, failed int
			want         string
		}{
			{"", 3, 0, "COMPLETED"}, {"", 3, 2, "COMPLETED"}, {"", 3, 3, "FAILED"},
			{"0.5", 4, 1, "COMPLETED"}, {"0.5", 4, 2, "FAILED"}, {"0.01", 3, 0, "COMPLETED"}, {"0.01", 3, 1, "FAILED"},
			{"0.1", 30, 3, "FAILED"}, {"0.1", 30, 2, "COMPLETED"}, {"0.3", 10, 3, "FAILED"}, {"0.07", 100, 7, "FAILED"}, {"0.29", 100, 29, "FAILED"},
		} {
			g := fmt.Sprint("g", i)
			if c.threshold == "" {
				w.create(g, "acme", "T")
			} else {
				w.create(g, "acme", "T", "failure_threshold", c.threshold)
			}
			w.append(g, c.jobs)
			w.seal(g)
			run := w.begin("T", "c", c.jobs)
			for _, j := range run[:c.failed] {
				w.outcome("T", other(ledger.OutcomeFailed, j, 0))
			}
			w.outcome("T", done(run[c.failed:]...))
			w.reduceAll()
			w.advance(g) // reduce has not ended a group of which all jobs have failed
			require.Equal(w, c.want, w.status(g), "%+v", c)
		}
	})
}

// TestAdvanceKeepsABusyTenant: when a group without jobs ends, its tenant stays active, because two
// jobs of another group of the tenant are waiting.
func TestAdvanceKeepsABusyTenant(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("other", 2, "acme", "U")
		w.create("g", "acme", "T")
		w.seal("g")
		w.advance("g")
		require.Equal(w, []string{"acme"}, w.c.SMembers(w.Context(), w.p.Active()).Val())
		require.Equal(w, map[string]string{"active": "2", "unfinished": "2"}, w.countersOf("acme"))
	})
}

// TestAdvanceBesideAnUnsweptGroup: a group of tenant acme ends while a cancelled group of acme is
// only partly swept. The rest of the sweep deletes acme's counters active and congested; the next
// job that is appended makes acme active again.
func TestAdvanceBesideAnUnsweptGroup(t *testing.T) {
	onStores(t, func(w *world) {
		w.everywhere("g")
		w.cancel("g")
		require.NoError(w, w.sweeping("g")()) // its states, not its non-ready jobs
		w.create("other", "acme", "T")
		w.seal("other")
		w.advance("other")
		w.sweep("g")
		require.Equal(w, map[string]string{"n": "1000", "unfinished": "0", "w": "0", "ended": "2"}, w.countersOf("acme"), "its congestion starts afresh")
		w.fill("next", 1, "acme", "T")
		require.Equal(w, []string{"acme"}, w.c.SMembers(w.Context(), w.p.Active()).Val())
	})
}

// TestExpireIsFenced: a watcher that has lost the leadership deletes no group.
func TestExpireIsFenced(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))
		expire := func(fence int64) error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, false) }
		w.unchanged(func() { require.ErrorIs(w, expire(0), ledger.ErrFenced, "nobody leads") })
		old := w.fence()
		require.NoError(w, w.c.HSet(w.Context(), w.p.Watch(), "until", 1).Err()) // its leader lease has ended
		fence, err := ledger.Lead(w.Context(), w.c, w.p, "w2", time.Minute)
		require.NoError(w, err)
		w.unchanged(func() { require.ErrorIs(w, expire(old), ledger.ErrFenced) })
		require.NoError(w, expire(fence))
	})
}

// TestNoStateBeginsBeforeTheLastOne: Redis's clock goes back between the transitions of a group.
func TestNoStateBeginsBeforeTheLastOne(t *testing.T) {
	t.Parallel()
	server, url := redistest.Mini(t)
	at := time.UnixMilli(1_700_000_000_000)
	server.SetTime(at)
	w := newWorld(t, client(t, url), "t:")
	for _, group := range []string{"advanced", "cancelled"} {
		w.fill(group, 1, "acme", "T")
		w.seal(group)
	}
	server.SetTime(at.Add(-300 * time.Millisecond))
	w.admit("T", 2, noLimit)
	_, err := ledger.Advance(t.Context(), w.c, w.p, "advanced")
	require.NoError(t, err)
	w.cancel("cancelled")
	for group, state := range map[string]string{"advanced": "at:dispatched", "cancelled": "at:cancelled"} {
		require.Equal(t, "1700000000000", w.c.HGet(t.Context(), w.p.Group(group), state).Val(), group)
	}
}
