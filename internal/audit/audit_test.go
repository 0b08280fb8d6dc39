package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestCleanWorld(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := newWorld(t, url, prefix, 3)
		inhabited(w)
		r := w.audit(Options{})
		require.Empty(t, r.Violations)
		require.True(t, r.OK)
		require.EqualValues(t, 16, r.Groups)
		require.EqualValues(t, 84+50+8+44+5+10+2+2+3000, r.Jobs)
		require.Equal(t, r, w.audit(Options{stateBytes: 1}), "one group at a time")
	})
}

func TestNothingThere(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 2)
	b, err := json.Marshal(w.audit(Options{}))
	require.NoError(t, err)
	require.JSONEq(t, `{"ok":true,"groups":0,"jobs":0,"violations":[]}`, string(b))
}

// In a cluster, all keys that a transaction reads are in one hash slot.
func TestCluster(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Cluster(t, 3)
	w := newWorld(t, url, "c:", 16)
	inhabited(w)
	require.Empty(t, w.audit(Options{}).Violations)
	n := w.jobIn("all", ledger.Ready, 0)
	w.ok(w.c.XDel(w.Context(), w.all().Ready("T"), w.entry("T", "all", n).ID).Err())
	w.ok(w.c.Del(w.Context(), w.space.OfGroup("many").Owner("many")).Err())
	require.Equal(t, []string{of(LawLocation, "all", n), whole(LawRegistry, "many")}, summary(w.audit(Options{})))

	w.ok(w.c.Set(w.Context(), w.space.OfGroup("empty").Owner("empty"), "nobody", 0).Err())
	w.ok(w.c.Set(w.Context(), w.space.OfGroup("gone").Owner("gone"), "acme", 0).Err())
	r, repairs := w.repair()
	require.Empty(t, r.Violations)
	require.Len(t, repairs, 3)
	require.Equal(t, "globex", w.tenant("empty"))
	w.ok(CheckOwnerKeys(w.Context(), w.conn, w.space, &r))
	require.Equal(t, []string{whole(LawRegistry, "gone")}, summary(r))
	repairs = nil
	w.ok(RepairOwnerKeys(w.Context(), w.conn, w.space, func(r RepairResult) { repairs = append(repairs, r) }))
	require.Len(t, repairs, 1)
	r = w.audit(Options{})
	w.ok(CheckOwnerKeys(w.Context(), w.conn, w.space, &r))
	require.Empty(t, r.Violations)
}

func TestViolationAsJSON(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	w.create("g", "acme", "T")
	w.append("g", jobs(2))
	w.ok(w.c.LPop(w.Context(), w.part("g").Queue("g", "T")).Err())
	w.incr(w.part("g").Group("g"), "throttles", 1)
	w.ok(w.c.Del(w.Context(), w.space.OfGroup("g").Owner("g")).Err())
	b, err := json.Marshal(w.audit(Options{}))
	require.NoError(t, err)
	require.JSONEq(t, `{"ok":false,"groups":1,"jobs":2,"violations":[
		{"law":"registry","partition":0,"group":"g","detail":"it is a group of tenant acme, but its owner key says \"\""},
		{"law":"location","partition":0,"group":"g","ordinal":0,"detail":"it is waiting at attempt 0, but not in the group's queues"}]}`, string(b))
}

// The number of results in an aggregate is checked even if the audit doesn't have its reducer.
func TestUnknownReducer(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	most := reducer.MapReduce(func(r reducer.Result) (int64, error) { return r.Ordinal, nil }, func(a, b int64) int64 { return max(a, b) })
	w.ok(w.plans.Register("highest", most))
	w.create("g", "acme", "T", "aggregate", `[{"as":"h","op":"highest"},{"as":"n","op":"count"}]`)
	p := w.part("g")
	w.append("g", jobs(5))
	w.work(p, "T")
	require.Empty(t, w.audit(Options{}).Violations)
	require.Empty(t, w.audit(Options{Reducers: w.plans}).Violations)

	w.ok(w.c.HSet(w.Context(), p.Aggregate("g"), "partial:0", `{"count":4,"aggregates":{}}`).Err())
	for _, opts := range []Options{{}, {Reducers: w.plans}} {
		require.Equal(t, []string{whole(LawResults, "g")}, summary(w.audit(opts)))
	}
	w.ok(w.c.HSet(w.Context(), p.Aggregate("g"), "partial:0", `{}`).Err())
	require.Equal(t, []string{whole(LawResults, "g")}, summary(w.audit(Options{})))
}

// A tenant with more groups and non-ready jobs than fit into one page is recounted.
func TestLargeTenant(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		w := newWorld(t, url, prefix, 1)
		for i := range 20 {
			id := fmt.Sprint("g", i)
			w.create(id, "acme", "T")
			w.append(id, jobs(2))
			w.append(id, jobs(40, later))
		}
		require.Empty(t, w.audit(Options{}).Violations)
		for _, counter := range counterNames {
			w.incr(w.space.OfTenant("acme").Tenant("acme"), counter, 1)
		}
		require.Len(t, w.audit(Options{}).Violations, 3)
	})
}

func TestStops(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Run(ctx, w.conn, w.space, Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "audit partition 0: read groups: ")
}

// A worker that reads a job of a cancelled group may drop it before the cancellation is completed.
func TestCancelledMeanwhile(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := newWorld(t, url, prefix, 1)
	p := w.space.Partition(0)
	w.create("g", "acme", "T")
	w.append("g", jobs(20))
	w.append("g", jobs(5, later))
	w.admit(p, "T", 10, noLimit)
	read := w.read(p, "T", "c", 8)
	w.done(p, "T", w.start(p, "T", read[:2])...)
	w.cancel("g")
	require.Empty(t, w.audit(Options{}).Violations)
	require.Empty(t, w.start(p, "T", read[2:]))
	require.Empty(t, w.audit(Options{}).Violations)
	w.sweep("g")
	require.Empty(t, w.audit(Options{}).Violations)
	require.EqualValues(t, 2, w.c.XLen(w.Context(), p.Ready("T")).Val(), "the entries that no worker has read")
	w.reduce(p, "0", 10)
	require.Empty(t, w.audit(Options{}).Violations)
}
