package audittest

import (
	"strconv"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

const aggregates = `[{"as":"n","op":"count"},{"as":"cost","op":"sum","field":"data.cost"}]`

// Inhabit fills a world with groups whose jobs are in all states. Nothing is paused, so no job is
// suspended. The group "all" has jobs in each state but cancelled. Its tenant has a bound of jobs in flight.
func Inhabit(w *World) {
	all, p := "all", w.Space.OfTenant("acme")
	w.OK(ledger.SetTenant(w.Context(), w.C, p, "acme", ledger.TenantSettings{InFlight: new(int64(100))}))
	w.Create(all, "acme", "T", "aggregate", aggregates, "tags", "a=1")
	w.Append(all, Jobs(60))
	w.Append(all, Jobs(3, large))
	w.Append(all, Jobs(5, large, OfType("U")))
	w.Append(all, Jobs(12, OfType("U")))
	w.Append(all, Jobs(4, Later))
	w.Admit(p, "T", 40, NoLimit)
	w.Admit(p, "U", 8, NoLimit)
	started := w.Start(p, "U", w.Read(p, "U", "c1", 6))
	w.Done(p, "U", started[:3]...)
	started = w.Start(p, "T", w.Read(p, "T", "c1", 35))
	w.Done(p, "T", started[:6]...)
	w.Reduce(p, "0", 5)
	w.Reduce(p, "7", 2)
	w.back(p, "T", ledger.OutcomeFailed, 0, started[6:9]...)
	w.back(p, "T", ledger.OutcomeRetry, time.Hour, started[9:11]...)
	w.back(p, "T", ledger.OutcomeThrottled, time.Hour, started[11:13]...)
	w.back(p, "T", ledger.OutcomeReleased, 0, started[13:15]...)
	w.back(p, "T", ledger.OutcomeDeferred, time.Hour, started[15:16]...)
	w.promote(p, "T")
	w.Start(p, "T", []Taken{started[20]}) // a second time, with the same entry
	w.back(p, "T", ledger.OutcomeUnstarted, 0, w.Read(p, "T", "c2", 2)...)

	// Groups that completed or failed. Then "expired" loses its result lines, and "retried" is
	// reopened.
	for _, g := range []struct{ id, tenant string }{
		{"completed", "globex"}, {"expired", "globex"}, {"failed", "acme"}, {"retried", "acme"},
		{"partly", "initech"},
	} {
		p := w.Space.OfTenant(g.tenant)
		w.Create(g.id, g.tenant, g.id, "aggregate", aggregates, "failure_threshold", "0.5")
		w.Append(g.id, Jobs(10))
		w.seal(g.id)
		switch g.id {
		case "failed", "retried", "partly":
			w.Admit(p, g.id, 10, NoLimit)
			some := w.Start(p, g.id, w.Read(p, g.id, "c", 10))
			n := map[string]int{"failed": 5, "retried": 8, "partly": 2}[g.id]
			w.back(p, g.id, ledger.OutcomeFailed, 0, some[:n]...)
			w.Done(p, g.id, some[n:]...)
			w.Reduce(p, "1", 100)
		default:
			w.Work(p, g.id)
		}
		w.advance(g.id)
	}
	require.Equal(w, "COMPLETED", w.status("completed"))
	require.Equal(w, "FAILED", w.status("failed"))
	require.Equal(w, "COMPLETED", w.status("partly"))
	w.OK(ledger.Expire(w.Context(), w.C, w.Part("expired"), "expired", w.lead(w.Part("expired")), true))
	w.did(ledger.Reopen(w.Context(), w.C, p, "retried", "", ledger.RetryChoice{}))
	w.Create("moved", "acme", "moved")
	w.Append("moved", Jobs(8))
	w.seal("moved")
	w.Admit(p, "moved", 10, NoLimit)
	w.back(p, "moved", ledger.OutcomeFailed, 0, w.Start(p, "moved", w.Read(p, "moved", "c", 5))...)
	w.Done(p, "moved", w.Start(p, "moved", w.Read(p, "moved", "c", 5))...)
	w.Reduce(p, "3", 100)
	w.advance("moved")
	w.did(ledger.Reopen(w.Context(), w.C, p, "moved", "", ledger.RetryChoice{}))
	w.complete(ledger.Requeue, p, "moved")

	// Cancelled groups, one swept and one not yet.
	for _, id := range []string{"cancelled", "sweeping"} {
		w.Create(id, "hooli", id)
		w.Append(id, Jobs(20))
		w.Append(id, Jobs(2, Later))
		p := w.Part(id)
		w.Admit(p, id, 10, NoLimit)
		some := w.Start(p, id, w.Read(p, id, "c", 7))
		w.Done(p, id, some[:2]...)
		w.back(p, id, ledger.OutcomeFailed, 0, some[2:3]...)
		w.back(p, id, ledger.OutcomeRetry, time.Hour, some[3:4]...)
		w.Cancel(id)
	}
	w.Sweep("cancelled")

	// Create a scheduled group, a group of a rate-limited tenant, empty groups, a group that is
	// about to end, and a large one.
	w.Create("scheduled", "globex", "T", "run_at", strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10))
	w.Append("scheduled", Jobs(5))
	w.Create("limited", "umbrella", "limited")
	w.Append("limited", Jobs(10))
	neighbour := "umbrella"
	for w.Space.OfTenant(neighbour) != w.Space.OfTenant("umbrella") || neighbour == "umbrella" {
		neighbour += "-"
	}
	w.Create("beside", neighbour, "beside")
	w.Append("beside", Jobs(2))
	w.Admit(w.Part("limited"), "limited", 10, limittest.Ever(3))
	require.Equal(w, 1, w.count("limited", ledger.NonReady))
	w.Create("empty", "globex", "T")
	w.Create("sealed", "globex", "T")
	w.seal("sealed")
	w.advance("sealed")
	require.Equal(w, "COMPLETED", w.status("sealed"))
	w.Create("ending", "globex", "ending")
	w.Append("ending", Jobs(2))
	w.Work(w.Part("ending"), "ending")
	w.seal("ending")
	w.Create("many", "acme", "many", "tags", "a=1\nb=2")
	w.Append("many", Jobs(1200)) // more than two pages
	w.Admit(p, "many", 50, NoLimit)

	w.Admit(p, "T", 3, NoLimit)
	w.Done(p, "T", w.Start(p, "T", w.Read(p, "T", "c3", 3))...)

	w.tell(p, "acme", "x.1.running", "x.1.aggregating", "x.1.completed")
	w.settle(p, ledger.Retry)
	w.settle(p, ledger.Dead)
	w.tell(p, "acme|https://a.example:444", "y.1.completed")

	for _, letter := range "WNRIDAF" {
		require.Positive(w, w.count(all, ledger.Letter(letter)), string(letter))
	}
}

// tell adds callbacks to a queue of tenant acme.
func (w *World) tell(p keyspace.Partition, queue string, ids ...string) {
	var all []ledger.NewCallback
	for _, id := range ids {
		all = append(all, ledger.NewCallback{ID: id, Queue: queue, Tenant: "acme", Group: "x", Type: "group.completed", Body: []byte(id)})
	}
	_, errs, err := ledger.AddCallbacks(w.Context(), w.C, p, all)
	require.Empty(w, errs)
	w.OK(err)
}

// settle makes an attempt with a callback that is due, which ends so.
func (w *World) settle(p keyspace.Partition, how ledger.Settlement) {
	all, _, _, err := ledger.ClaimCallbacks(w.Context(), w.C, p, ledger.Claim{Most: 1, Each: 1, Lease: time.Minute})
	w.OK(err)
	require.Len(w, all, 1)
	w.did(ledger.SettleCallback(w.Context(), w.C, p, &all[0], how, time.Hour, "answered 500", ""))
}
