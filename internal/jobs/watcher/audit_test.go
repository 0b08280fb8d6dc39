package watcher_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/checkers"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// frequentAudit is a configuration with incremental checks every 20 ms, so that a test can wait for
// them.
var frequentAudit = watcher.Config{Audit: watcher.Audit{Interval: 20 * time.Millisecond, Lease: 100 * time.Millisecond}}

// violations returns the published violations, oldest first, without those of the law results about
// a whole group: stagetest causes them, because it reduces results without an aggregate.
func violations(w *stagetest.World) []api.AuditEvent {
	w.T.Helper()
	entries, err := w.Conn.Cmd.XRange(context.WithoutCancel(w.T.Context()), w.Space.Events(), "-", "+").Result()
	require.NoError(w.T, err)
	var all []api.AuditEvent
	for _, m := range entries {
		if m.Values["type"] != "audit.violation" {
			continue
		}
		e := stagetest.Decode[api.AuditEvent](w.T, m.Values["data"].(string))
		require.Equal(w.T, e.ID, m.Values["id"])
		if e.Violation.Law != audit.LawResults || e.Violation.Ordinal != nil {
			all = append(all, e)
		}
	}
	return all
}

// measured gives the test's world telemetry with metrics. Watchers that the test starts afterwards
// use it.
func measured(w *stagetest.World) {
	w.T.Helper()
	tel, err := telemetry.Setup(w.T.Context(), telemetry.Options{Service: "watcher", LogWriter: io.Discard})
	require.NoError(w.T, err)
	w.T.Cleanup(func() { require.NoError(w.T, tel.Shutdown(context.Background())) })
	w.Tel = tel
}

// metrics returns the metrics as Prometheus would read them.
func metrics(w *stagetest.World) string {
	answer := httptest.NewRecorder()
	w.Tel.MetricsHandler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return answer.Body.String()
}

// requireSound runs a full audit and requires that it finds nothing but violations of the law
// results about a whole group (see violations).
func requireSound(w *stagetest.World) {
	w.T.Helper()
	r, err := audit.Run(context.WithoutCancel(w.T.Context()), w.Conn, w.Space, audit.Options{})
	require.NoError(w.T, err)
	for _, v := range r.Violations {
		require.Equal(w.T, audit.LawResults, v.Law, v.Detail)
		require.Nil(w.T, v.Ordinal, v.Detail)
	}
}

// TestVanishedJobsEndAsLost: a job that vanishes from a queue, the ready stream, the non-ready jobs
// or the results stream is found, published as a violation and ended as LOST. Then its group can
// complete.
func TestVanishedJobsEndAsLost(t *testing.T) {
	for name, tt := range map[string]struct {
		vanish func(ctx context.Context, w *stagetest.World) error
	}{
		"from the queue": {func(ctx context.Context, w *stagetest.World) error {
			return w.Conn.Cmd.LPop(ctx, w.P.Queue("g", "T")).Err()
		}},
		"from the ready stream": {func(ctx context.Context, w *stagetest.World) error {
			w.Admit("T")
			return w.Conn.Cmd.XDel(ctx, w.P.Ready("T"), w.Conn.Cmd.XRange(ctx, w.P.Ready("T"), "-", "+").Val()[1].ID).Err()
		}},
		"from the non-ready": {func(ctx context.Context, w *stagetest.World) error {
			w.Admit("T")
			back(ctx, w, w.Take("T", "c", 1)[0])
			return w.Conn.Cmd.ZRemRangeByRank(ctx, w.P.NonReadyOf("acme"), 0, 0).Err()
		}},
		"from the results": {func(ctx context.Context, w *stagetest.World) error {
			w.Admit("T")
			w.Done("null", w.Take("T", "c", 1)...)
			return w.Conn.Cmd.XTrimMaxLen(ctx, w.P.ResultStream(), 0).Err()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			stagetest.Both(t, func(w *stagetest.World) {
				ctx := context.WithoutCancel(w.T.Context())
				w.Jobs("g", "T", 3)
				require.NoError(w.T, tt.vanish(ctx, w))
				measured(w)
				run(w, frequentAudit, "w")
				w.Await("the job to end", func() bool { return w.Group("g").FailuresByCode["LOST"] == 1 })
				w.Admit("T")
				w.Done("null", w.Take("T", "c", 2)...)
				w.Reduce()
				w.Await("the group to end", func() bool { return w.Group("g").Status == api.StatusCompleted })
				require.Equal(w.T, api.Counts{Accepted: 3, Done: 2, Failed: 1}, w.Counts("g"))
				requireSound(w)
				told := violations(w)
				require.Len(w.T, told, 1)
				require.Equal(w.T, "g", told[0].Group.ID)
				require.Equal(w.T, "g", told[0].Violation.Group)
				require.NotNil(w.T, told[0].Violation.Ordinal)
				require.Equal(w.T, "LOST", w.DeadLetters()[0].Code)
				require.Contains(w.T, metrics(w), `bulk_action_watcher_dead_letter_total{code="LOST"} 1`)
				require.Contains(w.T, metrics(w), `bulk_action_worker_dead_letter_total{reason="lost"} 1`)
			})
		})
	}
}

// back reports a job as to be retried in an hour.
func back(ctx context.Context, w *stagetest.World, j stagetest.Held) {
	w.T.Helper()
	_, err := ledger.Outcome(ctx, w.Conn.Cmd, w.P, j.Type, ledger.Congestion{Base: time.Hour, Cap: time.Hour}, []ledger.GroupOutcome{{Group: j.Group, Others: []ledger.OtherJob{{
		Entry: j.Entry, Ordinal: j.Ordinal, Attempt: j.Attempt, Kind: ledger.OutcomeRetry, Waits: j.Waits, Queued: []byte(j.Queued), Code: "BOOM", Text: "it broke",
	}}}})
	require.NoError(w.T, err)
}

// TestRunningJobIsNotLostAtOnce: the entry of a job in flight is deleted, and a job lease is an
// hour. A violation is published, and the worker's report still makes the job done.
func TestRunningJobIsNotLostAtOnce(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	held := w.Take("T", "c", 1)
	require.NoError(t, w.Conn.Cmd.XDel(t.Context(), w.P.Ready("T"), held[0].Entry).Err())
	cfg := frequentAudit
	cfg.Audit.Lease = time.Hour
	run(w, cfg, "w")
	w.Await("the violation", func() bool { return len(violations(w)) == 1 })
	w.Done("null", held...)
	w.Reduce()
	w.Await("the group to end", func() bool { return w.Group("g").Status == api.StatusCompleted })
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, w.Counts("g"))
}

// TestVanishedJobsOfABusyGroupEndAsLost: jobs whose ready stream was deleted or renamed, or whose
// results stream was deleted, end as failed with the code LOST, while other jobs of their group
// make progress.
func TestVanishedJobsOfABusyGroupEndAsLost(t *testing.T) {
	for name, vanish := range map[string]func(context.Context, *stagetest.World) error{
		"DEL of the ready stream": func(ctx context.Context, w *stagetest.World) error {
			return w.Conn.Cmd.Del(ctx, w.P.Ready("T")).Err()
		},
		"RENAME of the ready stream": func(ctx context.Context, w *stagetest.World) error {
			return w.Conn.Cmd.Rename(ctx, w.P.Ready("T"), w.P.Ready("T")+".away").Err()
		},
		"DEL of the results stream": func(ctx context.Context, w *stagetest.World) error {
			w.Done("null", w.Take("T", "c", 3)...)
			return w.Conn.Cmd.Del(ctx, w.P.ResultStream()).Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			ctx := context.WithoutCancel(t.Context())
			_, err := w.Store.Submit(auth.Trust(ctx), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3)}, groups.Origin{At: time.Now()})
			require.NoError(t, err)
			w.Admit("T")
			require.NoError(t, vanish(ctx, w))
			run(w, frequentAudit, "w")
			ended := int64(0)
			w.Await("the vanished jobs to end", func() bool {
				require.NoError(t, w.Store.Append(auth.Trust(ctx), "g", stagetest.Numbered(1), fmt.Sprint(ended), groups.Origin{At: time.Now()}))
				w.Admit("T")
				w.Done("null", w.Take("T", "c", 1)...)
				w.Reduce()
				ended++
				return w.Group("g").FailuresByCode["LOST"] == 3
			})
			require.Equal(t, api.Counts{Accepted: 3 + ended, Done: ended, Failed: 3}, w.Counts("g"))
			requireSound(w)
		})
	}
}

// TestReclaimOfALeaseWithoutItsJobStartsAnAudit: the script reclaim finds that the entry of a job
// in flight was deleted. An incremental check ends the job as LOST, although the interval is an
// hour.
func TestReclaimOfALeaseWithoutItsJobStartsAnAudit(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 2)
	w.Admit("T")
	held := w.Take("T", "c", 2)
	cfg := frequentAudit
	cfg.Audit.Interval = time.Hour
	run(w, cfg, "w")
	w.Await("the first renewal", func() bool { return stagetest.Renewals(t, w.Conn.Cmd, w.P) > 0 })
	require.NoError(t, w.Conn.Cmd.XDel(t.Context(), w.P.Ready("T"), held[0].Entry).Err())
	r, err := ledger.Reclaim(t.Context(), w.Conn.Cmd, w.P, "T", 0, 1, 5, false)
	require.NoError(t, err)
	require.Len(t, r.Missing, 1)
	w.Await("the job to end", func() bool { return w.Group("g").FailuresByCode["LOST"] == 1 })
	require.Equal(t, api.Counts{Accepted: 2, InFlight: 1, Failed: 1}, w.Counts("g"))
	suspicious, err := ledger.TakeDeletedFound(t.Context(), w.Conn.Cmd, w.P)
	require.NoError(t, err)
	require.False(t, suspicious)
}

// TestViolationOfAMovingGroupIsAnnouncedOnce: a violation is published once, although its group
// moves and the counts in its detail change meanwhile.
func TestViolationOfAMovingGroupIsAnnouncedOnce(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 5)
	stagetest.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Cancelled, 1)
	run(w, frequentAudit, "w")
	count := func() (n int) {
		for _, e := range violations(w) {
			if e.Violation.Law == audit.LawConservation {
				n++
			}
		}
		return n
	}
	w.Await("the violation", func() bool { return count() == 1 })
	w.Admit("T")
	began := time.Now()
	w.Await("more checks", func() bool { return time.Since(began) > time.Second })
	require.Equal(t, 1, count())
}

// TestAllViolationsAreCounted: 150 jobs vanish. The metric counts 150 violations, although only 101
// are published: 100, and one that summarizes the other 50.
func TestAllViolationsAreCounted(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 150)
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.P.Queue("g", "T")).Err())
	cfg := frequentAudit
	cfg.Audit.Lease = time.Hour
	measured(w)
	run(w, cfg, "w")
	w.Await("the metric", func() bool {
		return strings.Contains(metrics(w), `bulk_action_audit_violations{law="location"} 150`)
	})
	w.Await("the published violations", func() bool { return len(violations(w)) == 101 })
}

// TestViolationsAreAnnouncedOnce: a violation is published again only after it was gone.
func TestViolationsAreAnnouncedOnce(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 2)
	run(w, frequentAudit, "w")
	count := func() (n int) {
		for _, e := range violations(w) {
			if e.Violation.Law == audit.LawConservation {
				require.Equal(t, "accepted is 2, the other counts add up to 3: waiting 2, done 1", e.Violation.Detail)
				require.Equal(t, "g", e.Group.ID)
				n++
			}
		}
		return n
	}
	wrong := func(by int64, want int) {
		stagetest.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Done, by)
		w.Await("the violation", func() bool { return count() == want })
	}
	wrong(1, 1)
	awaitMoreChecks := func() { // waits for more checks
		began := time.Now()
		w.Await("more checks", func() bool { return time.Since(began) > time.Second })
	}
	awaitMoreChecks()
	wrong(-1, 1)
	awaitMoreChecks()
	wrong(1, 2)
}

// TestLostRenewalsBreakDurability: if the counter of leader-lease renewals in Redis goes back,
// Redis has lost confirmed writes: that is a violation of the law durability.
func TestLostRenewalsBreakDurability(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		stagetest.SetRenewals(w.T, w.Conn.Cmd, w.P, 100)
		run(w, frequentAudit, "w")
		renewals := func() int64 { return stagetest.Renewals(w.T, w.Conn.Cmd, w.P) }
		w.Await("some renewals", func() bool { return renewals() > 101 })
		stagetest.SetRenewals(w.T, w.Conn.Cmd, w.P, 90)
		var told []api.AuditEvent
		w.Await("the violation", func() bool { told = violations(w); return len(told) == 1 })
		require.Equal(w.T, audit.LawDurability, told[0].Violation.Law)
		require.Regexp(w.T, `^redis lost about 1[0-9]s of confirmed writes and is at renewal 91: `, told[0].Violation.Detail)
		require.Nil(w.T, told[0].Group)
		w.Await("more renewals", func() bool { return renewals() > 92 })
		require.Len(w.T, violations(w), 1)
	})
}

// TestFullAuditFindsWhatNoGroupShows: the full audit finds an unreadable entry in a ready stream,
// which changes no group's counts, and publishes it as a violation of the law location.
func TestFullAuditFindsWhatNoGroupShows(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 2)
	require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.Ready("T"), Values: []string{"k", "v"}}).Err())
	cfg := frequentAudit
	cfg.Audit.FullInterval = 50 * time.Millisecond
	run(w, cfg, "w")
	w.Await("the violation", func() bool { return len(violations(w)) == 1 })
	require.Equal(t, audit.LawLocation, violations(w)[0].Violation.Law)
}

// TestFullAuditOfTheWaitingRoom: an event of the waiting room has a slot and no settings. The
// watcher's full audit publishes two violations, whose details do not name the user of the slot.
func TestFullAuditOfTheWaitingRoom(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	p := w.Space.OfEvent("sale")
	require.NoError(t, w.Conn.Cmd.ZAdd(t.Context(), p.Rooms(), redis.Z{Score: 1e15, Member: "sale"}).Err())
	require.NoError(t, w.Conn.Cmd.ZAdd(t.Context(), p.RoomSlots("sale"), redis.Z{Score: 1e15, Member: "secret"}).Err())
	cfg := frequentAudit
	cfg.Audit.FullInterval, cfg.Audit.Others = 50*time.Millisecond, checkers.CheckRoomsOf
	run(w, cfg, "w")
	w.Await("the violations", func() bool { return len(violations(w)) == 2 })
	for _, e := range violations(w) {
		require.Equal(t, waitingroom.LawState, e.Violation.Law)
		require.Equal(t, p.Index(), e.Violation.Partition)
		require.NotContains(t, e.Violation.Detail, "secret")
	}
}

func auditState(w *stagetest.World) api.AuditState {
	w.T.Helper()
	st, err := w.Store.Audit(stagetest.Trusted(w.T))
	require.NoError(w.T, err)
	return st
}

// TestStateOfTheAuditIsStored: groups.Store.Audit, which answers GET /v1/audit, returns the times
// of the watcher's last audits and the open violations. It returns them also after the watcher has
// stopped, until an audit no longer finds them.
func TestStateOfTheAuditIsStored(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 3)
	before := auditState(w)
	require.False(t, before.OK, "no watcher has looked")
	require.Equal(t, []api.AuditedPartition{{}}, before.Partitions)
	require.Empty(t, before.Violations)

	began := time.Now().Add(-time.Second)
	cfg := frequentAudit
	cfg.Audit.FullInterval = 50 * time.Millisecond
	stop := run(w, cfg, "w-1")
	w.Await("both kinds of audit", func() bool {
		p := auditState(w).Partitions[0]
		return p.LookedAt != nil && p.DeepAt != nil
	})
	sound := auditState(w)
	require.True(t, sound.OK)
	require.Equal(t, "w-1", sound.Partitions[0].Leader)
	require.WithinRange(t, *sound.Partitions[0].LookedAt, began, time.Now())
	require.WithinRange(t, *sound.Partitions[0].DeepAt, began, time.Now())
	require.Contains(t, sound.ByLaw, "location")

	stagetest.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Waiting, 1)
	w.Await("the violation", func() bool { return len(auditState(w).Violations) > 0 })
	found := auditState(w)
	require.False(t, found.OK)
	require.Equal(t, "g", found.Violations[0].Group)
	require.Positive(t, found.ByLaw[found.Violations[0].Law])

	stop()
	stopped := auditState(w)
	require.Empty(t, stopped.Partitions[0].Leader, "it has given up its lease")
	require.NotEmpty(t, stopped.Violations)
	require.False(t, stopped.OK)

	stagetest.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Waiting, -1)
	run(w, cfg, "w-2")
	w.Await("the end of the violation", func() bool { return auditState(w).OK })
	require.Equal(t, "w-2", auditState(w).Partitions[0].Leader)
	require.Empty(t, auditState(w).Violations)
}

// TestStateOutlivesALeader: a new leader, which has made incremental checks and no full audit,
// shows the violations and the time of the earlier leader's last full audit.
func TestStateOutlivesALeader(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	cfg := frequentAudit
	cfg.Audit.FullInterval = 50 * time.Millisecond
	w.Jobs("g", "T", 3)
	stagetest.SetWaiting(t, w.Conn.Cmd, w.P, "T", 7)
	stop := run(w, cfg, "w-1")
	w.Await("the violation", func() bool { return len(auditState(w).Violations) > 0 })
	stop()
	first := auditState(w)

	cfg.Audit.FullInterval = time.Hour
	run(w, cfg, "w-2")
	w.Await("a check of the new leader", func() bool {
		now := auditState(w).Partitions[0]
		return now.Leader == "w-2" && now.LookedAt.After(*first.Partitions[0].LookedAt)
	})
	second := auditState(w)
	require.Equal(t, first.Violations, second.Violations)
	require.Equal(t, first.ByLaw, second.ByLaw)
	require.Equal(t, first.Partitions[0].DeepAt, second.Partitions[0].DeepAt)
}

// TestUnreadableState: a stored state of the audit that can't be read does not stop the audit,
// which replaces it.
func TestUnreadableState(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), w.P.Audit(), "a").Err())
	_, err := w.Store.Audit(stagetest.Trusted(t))
	require.Error(t, err)
	run(w, frequentAudit, "w-1")
	w.Await("the next check", func() bool {
		st, err := w.Store.Audit(stagetest.Trusted(t))
		return err == nil && st.OK
	})
}

func TestStateOfTheAuditIsForTheSystem(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for _, p := range []auth.Principal{{}, {Role: auth.Producer, Tenant: "a"}, {Role: auth.Reader, Tenant: "a"}, {Role: auth.Metrics}} {
		_, err := w.Store.Audit(auth.With(t.Context(), p))
		require.ErrorIs(t, err, api.ErrNotAllowed)
	}
	_, err := w.Store.Audit(t.Context())
	require.Error(t, err)
}

// TestBusiestTenantsAreFound: the watcher stores the only tenant that has jobs, with its 3
// unfinished ones.
func TestBusiestTenantsAreFound(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 3)
	run(w, watcher.Config{}, "w-1")
	w.Await("the busiest tenants", func() bool {
		l, err := w.Store.BusiestTenants(stagetest.Trusted(t), 10)
		return err == nil && len(l.Tenants) == 1 && l.Tenants[0].ID == "acme" && l.Tenants[0].Unfinished == 3
	})
}

// TestHistoryIsRecorded: two watchers run. The history gets samples, of which no two are in the
// same period of 10 s, and the first has the 3 waiting jobs.
func TestHistoryIsRecorded(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 3)
	run(w, watcher.Config{}, "w-1")
	run(w, watcher.Config{}, "w-2")
	samples := func() []ledger.Sample {
		all, err := ledger.Samples(t.Context(), w.Conn.Cmd, w.Space, 10)
		require.NoError(t, err)
		return all
	}
	w.Await("two samples", func() bool { return len(samples()) >= 2 })
	all := samples()
	require.EqualValues(t, 3, all[0].Accepted)
	require.EqualValues(t, 3, all[0].Waiting)
	require.EqualValues(t, 1, all[0].ActiveTenants)
	for i := range all[1:] {
		require.NotEqual(t, all[i].At.Truncate(ledger.SampleSlot), all[i+1].At.Truncate(ledger.SampleSlot))
	}
}

// end creates n groups of one job each, ends their jobs and moves the groups to a final status. The
// first group's job has failed.
func end(w *stagetest.World, n int) {
	w.T.Helper()
	for i := range n {
		w.Jobs(fmt.Sprint("g", i), "T", 1)
	}
	w.Admit("T")
	jobs := w.Take("T", "c", n)
	w.Fail("BOOM", jobs[0])
	for _, j := range jobs[1:] {
		w.Done("null", j)
	}
	w.Reduce()
	ctx := context.WithoutCancel(w.T.Context())
	for i := range n {
		_, err := ledger.Advance(ctx, w.Conn.Cmd, w.P, fmt.Sprint("g", i))
		require.NoError(w.T, err)
	}
}

func TestExpiresGroups(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	const n = 110 // more than one batch
	end(w, n)
	w.Jobs("open", "T", 1)
	<-time.After(20 * time.Millisecond)
	run(w, watcher.Config{Retention: watcher.Retention{Groups: 10 * time.Millisecond, DeadLetters: 10 * time.Millisecond, MessageIDs: time.Nanosecond}}, "w")
	w.Await("the end of the expired groups", func() bool { return w.Conn.Cmd.ZCard(ctx, w.P.Groups()).Val() == 1 })
	w.Await("the open group's events", func() bool { return len(ids(w, "open")) == 2 })
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("open"))
	for i := range n {
		_, err := w.Store.Group(auth.Trust(ctx), fmt.Sprint("g", i))
		require.ErrorIs(t, err, api.ErrNotFound)
	}
	// No key of the expired groups is left.
	var keys []string
	w.Await("the end of their keys", func() bool {
		all, err := w.Conn.Cmd.Keys(ctx, w.P.Base()+"*").Result()
		require.NoError(t, err)
		keys = keys[:0]
		for _, k := range all {
			if name := k[strings.LastIndexByte(k, ':')+1:]; strings.HasPrefix(name, "g") && strings.Trim(name[1:], "0123456789") == "" {
				keys = append(keys, k)
			}
		}
		return len(keys) == 0
	})
	// The id can be used again.
	w.Jobs("g0", "T", 2)
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts("g0"))
}

func TestExpiresResultsBeforeGroups(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	const n = 130
	end(w, n)
	<-time.After(20 * time.Millisecond)
	run(w, watcher.Config{Retention: watcher.Retention{Groups: time.Hour, Results: 10 * time.Millisecond}}, "w")
	w.Await("the end of the results", func() bool {
		for i := range n {
			if w.Conn.Cmd.Exists(ctx, w.P.Results(fmt.Sprint("g", i))).Val() > 0 {
				return false
			}
		}
		return true
	})
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, w.Counts("g7"))
	require.EqualValues(t, n, w.Conn.Cmd.ZCard(ctx, w.P.Ended()).Val())
}

func TestTrimsWhatIsPastItsRetention(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		long := time.Now().Add(-time.Hour)
		for _, stream := range []string{w.P.DeadLetters(), w.Space.Events(), w.Space.Rejected()} {
			for _, at := range []time.Time{long, time.Now()} {
				require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, ID: stagetest.EntryID(at), Values: []string{"type", "x", "data", `{"group":{}}`, "id", ""}}).Err())
			}
		}
		require.NoError(w.T, w.Conn.Cmd.ZAdd(ctx, w.P.Messages(),
			redis.Z{Score: float64(long.UnixMilli()), Member: "old"}, redis.Z{Score: float64(time.Now().UnixMilli()), Member: "new"}).Err())
		run(w, watcher.Config{Retention: watcher.Retention{MessageIDs: time.Minute, DeadLetters: time.Minute, Events: time.Minute}}, "w")
		for _, stream := range []string{w.P.DeadLetters(), w.Space.Events(), w.Space.Rejected()} {
			w.Await("the trimming of "+stream, func() bool { return w.Conn.Cmd.XLen(ctx, stream).Val() == 1 })
		}
		require.Equal(w.T, []string{"new"}, w.Conn.Cmd.ZRange(ctx, w.P.Messages(), 0, -1).Val())
	})
}

func TestWritesTheNumberOfPartitionsAgain(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	run(w, watcher.Config{NoProcessorTimeout: 10 * time.Millisecond}, "w")
	for range 2 {
		w.Await("the number of partitions", func() bool { return w.Conn.Cmd.Get(t.Context(), w.Space.PartitionCount()).Val() == "1" })
		require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.Space.PartitionCount()).Err())
	}
}
