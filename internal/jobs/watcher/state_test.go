package watcher_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/internal/testkit/tamper"
)

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
	t.Parallel()
	w := stagetest.Shared(t)
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

	tamper.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Waiting, 1)
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

	tamper.AddToCount(t, w.Conn.Cmd, w.P, "g", ledger.Waiting, -1)
	run(w, cfg, "w-2")
	w.Await("the end of the violation", func() bool { return auditState(w).OK })
	require.Equal(t, "w-2", auditState(w).Partitions[0].Leader)
	require.Empty(t, auditState(w).Violations)
}

// TestStateOutlivesALeader: a new leader, which has made incremental checks and no full audit,
// shows the violations and the time of the earlier leader's last full audit.
func TestStateOutlivesALeader(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	cfg := frequentAudit
	cfg.Audit.FullInterval = 50 * time.Millisecond
	w.Jobs("g", "T", 3)
	tamper.SetWaiting(t, w.Conn.Cmd, w.P, "T", 7)
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
	t.Parallel()
	w := stagetest.Shared(t)
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
	t.Parallel()
	w := stagetest.Shared(t)
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
	t.Parallel()
	w := stagetest.Shared(t)
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
	t.Parallel()
	w := stagetest.Shared(t)
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
