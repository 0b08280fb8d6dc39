package ledger_test

import (
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// large is a payload of more than 4 KiB, which is stored outside of the blob.
var large = []byte(`"` + strings.Repeat("x", 5000) + `"`)

func inAnHour() string { return timestamp(time.Now().Add(time.Hour)) }

// hold creates a group of n jobs with a run_at in an hour. In the sorted set of scheduled groups it
// makes the group due at once; its hash keeps the later run_at.
func (w *world) hold(group string, n int) {
	w.Helper()
	w.create(group, "acme", "T", "run_at", inAnHour())
	w.append(group, n)
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: group}).Err())
}

// spent creates the group g with three waiting jobs of a tenant, and sets the permits that the
// tenant has spent to 1,000, in the window of the function limit: more than any limit of the tests.
func (w *world) spent(tenant string) {
	w.Helper()
	w.create("g", tenant, "T")
	w.append("g", 3)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant(tenant), "w", 0, "n", 1000).Err())
}

// overdue sets the due times of a tenant's non-ready jobs to 1 ms after 1970.
func (w *world) overdue(tenant string) {
	w.Helper()
	for _, blob := range w.c.ZRange(w.Context(), w.p.NonReadyOf(tenant), 0, -1).Val() {
		require.NoError(w, w.c.ZAddXX(w.Context(), w.p.NonReadyOf(tenant), redis.Z{Score: 1, Member: blob}).Err())
	}
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: tenant}).Err())
}

// nonReady creates a group of n non-ready jobs of tenant acme and type T: a worker has released
// them, so they are due at once.
func (w *world) nonReady(group string, n int) {
	w.Helper()
	w.create(group, "acme", "T")
	w.append(group, n)
	for _, j := range w.begin("T", "c", n) {
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeReleased, j, 0)))
	}
}

// failed creates a group of n jobs of type T that all failed in their second attempt; its status is
// FAILED.
func (w *world) failed(group string, n int) {
	w.Helper()
	w.nonReady(group, n)
	w.seal(group)
	w.promoteAll("T", n)
	run := w.read("T", "c")
	w.start("T", run)
	for _, j := range run {
		require.Equal(w, ledger.OutcomeReply{Owned: 1, Failed: 1}, w.outcome("T", other(ledger.OutcomeFailed, j, 0)))
	}
	w.advance(group)
	require.Equal(w, "FAILED", w.status(group))
}

// everywhere creates a group of tenant acme and type T with eight jobs: done, failed, non-ready
// after an error, in flight, ready, the marker, scheduled and waiting. It counts acme's permits as
// spent.
func (w *world) everywhere(group string) {
	w.Helper()
	w.create(group, "acme", "T")
	w.append(group, 6)
	run := w.begin("T", "c", 4)
	w.outcome("T", done(run[0]))
	w.outcome("T", other(ledger.OutcomeFailed, run[1], 0))
	w.outcome("T", other(ledger.OutcomeRetry, run[2], time.Hour))
	w.admit("T", 1, noLimit)
	w.appendJobs(ledger.AppendArgs{Group: group, Jobs: []ledger.NewJob{{Payload: large, RunAt: new(time.Now().Add(time.Hour))}}})
	w.append(group, 1)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant("acme"), "w", 0, "n", 1000).Err())
	require.Equal(w, 1, w.admit("T", 1, limit(20)).NonReady)
	require.Equal(w, "DFNIRNNW", w.states(group))
}

func timestamp(t time.Time) string { return fmtInt(t.UnixMilli()) }

func (w *world) appending(a ledger.AppendArgs) act {
	return func() error {
		_, err := ledger.Append(w.Context(), w.c, w.p, a)
		return err
	}
}

func (w *world) sealing(group string, total *int64) act {
	return func() error {
		_, err := ledger.Seal(w.Context(), w.c, w.p, group, total)
		return err
	}
}

func (w *world) admitting(l ledger.Limit) act {
	return func() error {
		_, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{Type: "T", Most: 10, Cap: 10, Limit: l, Seed: seed, LaneWeights: [3]int{6, 3, 1}})
		return err
	}
}

func (w *world) promoting(l ledger.Limit) act {
	return func() error {
		_, err := ledger.Promote(w.Context(), w.c, w.p, ledger.PromoteArgs{Most: 10, Limit: l, Seed: seed, Caps: map[string]int{"T": 10}})
		return err
	}
}

func (w *world) starting(jobs []taken) act {
	g := ledger.StartGroup{Group: jobs[0].Group}
	for _, j := range jobs {
		g.Jobs = append(g.Jobs, ledger.StartJob{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt})
	}
	return func() error {
		_, err := ledger.Start(w.Context(), w.c, w.p, "T", []ledger.StartGroup{g})
		return err
	}
}

func (w *world) reporting(groups []ledger.GroupOutcome) act {
	return func() error {
		_, err := ledger.Outcome(w.Context(), w.c, w.p, "T", ledger.Congestion{Base: time.Hour, Cap: time.Hour}, groups)
		return err
	}
}

func (w *world) reclaiming(maxLosses int) act {
	return func() error {
		_, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", 0, 100, maxLosses)
		return err
	}
}

func (w *world) reducing(e results) act {
	return func() error {
		_, err := ledger.Reduce(w.Context(), w.c, w.p, ledger.ReduceArgs{
			Group: e.group, Partial: "0", State: []byte("{}"), Lines: []byte(e.lines), Entries: []string{e.entry}, Ordinals: e.ordinals,
		})
		return err
	}
}

func (w *world) sweeping(group string) act {
	return func() error {
		_, _, err := ledger.Sweep(w.Context(), w.c, w.p, group)
		return err
	}
}
