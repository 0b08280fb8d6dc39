package ledger_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

func TestListGroups(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []ledger.CreatedGroup{{5, "a"}, {5, "b"}, {5, "c"}, {5, "d"}, {7, "e"}, {3, "f"}} {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Score: g.Created, Member: g.ID})
			if g.ID != "d" {
				w.c.ZAdd(w.Context(), w.p.GroupsOf("acme"), redis.Z{Score: g.Created, Member: g.ID})
			}
		}
		list := func(tenant string, before ledger.CreatedGroup, limit int) (ids string) {
			groups, err := ledger.ListGroups(w.Context(), w.c, w.p, tenant, before, limit)
			require.NoError(w, err)
			for _, g := range groups {
				ids += g.ID
			}
			return ids
		}
		require.Equal(w, "edcbaf", list("", ledger.Newest(), 10))
		require.Equal(w, "ecbaf", list("acme", ledger.Newest(), 10))
		require.Equal(w, "ed", list("", ledger.Newest(), 2))
		require.Equal(w, "dc", list("", ledger.CreatedGroup{Created: 7, ID: "e"}, 2))
		// b, c and d are as old as the place and fill the first page.
		require.Equal(w, "af", list("", ledger.CreatedGroup{Created: 5, ID: "b"}, 3))
		require.Equal(w, "f", list("", ledger.CreatedGroup{Created: 5, ID: "a"}, 1))
		require.Empty(w, list("", ledger.CreatedGroup{Created: 3, ID: "f"}, 1))
		require.Empty(w, list("nobody", ledger.Newest(), 1))
	})
}

func TestGroupState(t *testing.T) {
	both(t, func(w *world) {
		read := func(group string) (ledger.GroupState, bool) {
			var state func() (ledger.GroupState, bool)
			_, err := w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
				state = ledger.QueueGroupState(w.Context(), pipe, w.p, group)
				return nil
			})
			require.NoError(w, err)
			return state()
		}
		_, exists := read("g")
		require.False(w, exists)
		_, err := ledger.GroupStatus(w.Context(), w.c, w.p, "g")
		require.ErrorIs(w, err, api.ErrNotFound)

		w.create("g", "acme", "T", "total", "2")
		g, exists := read("g")
		require.True(w, exists)
		require.Equal(w, ledger.GroupState{Status: api.StatusCreated, Round: 1, Announced: true}, g)
		w.appendJobs(ledger.AppendArgs{Group: "g", Request: ledger.SubmissionPrefix + "0", Mode: ledger.AppendSeal, Jobs: jobs(2)})
		w.pause(ledger.PauseGroup, "g")
		g, _ = read("g")
		require.Equal(w, ledger.GroupState{Status: g.Status, Round: 1, Sealed: true, Announced: true, Paused: true, Submitted: true}, g)
		w.cancel("g")
		g, _ = read("g")
		require.Equal(w, ledger.GroupState{Status: api.StatusCancelled, Round: 1, Sealed: true, Announced: true, Submitted: true}, g)
		status, err := ledger.GroupStatus(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.Equal(w, api.StatusCancelled, status)
	})
}

// Encoded fields are read back by ReadGroups and by the scripts.
func TestGroupFields(t *testing.T) {
	t.Parallel()
	require.Equal(t, map[string]string{"lane": "normal", "name": "", "base_priority": "0"}, (&ledger.GroupFields{Lane: "normal"}).Encode())
	retries, at, threshold, total := 0, time.UnixMilli(1_700_000_000_000), 0.25, int64(0)
	require.Equal(t, map[string]string{
		"lane": "high", "name": "Mailing", "base_priority": "-1.5", "max_retries": "0", "job_timeout": "1500", "run_at": "1700000000000",
		"failure_threshold": "0.25", "total": "0", "aggregate": "[]",
	}, (&ledger.GroupFields{
		Lane: "high", Name: "Mailing", BasePriority: -1.5, MaxRetries: &retries, JobTimeout: 1500 * time.Millisecond, RunAt: &at,
		FailureThreshold: &threshold, Total: &total, Aggregate: "[]",
	}).Encode())
}

func TestOwner(t *testing.T) {
	both(t, func(w *world) {
		_, err := ledger.GroupOwner(w.Context(), w.c, w.p, "g")
		require.ErrorIs(w, err, api.ErrNotFound)
		for _, tenant := range []string{"acme", "acme", "globex"} {
			owner, err := ledger.RegisterOwner(w.Context(), w.c, w.p, "g", tenant)
			require.NoError(w, err)
			require.Equal(w, "acme", owner)
		}
		owner, err := ledger.GroupOwner(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.Equal(w, "acme", owner)
		var first, none func() string
		_, _ = w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
			first, none = ledger.QueueOwner(w.Context(), pipe, w.p, "g"), ledger.QueueOwner(w.Context(), pipe, w.p, "h")
			return nil
		})
		require.Equal(w, "acme", first())
		require.Empty(w, none())
	})
}

// QueueRequests looks for each request id where append has stored it.
func TestQueueRequests(t *testing.T) {
	both(t, func(w *world) {
		stored := func(requests ...string) bool {
			var all func() bool
			_, _ = w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
				all = ledger.QueueRequests(w.Context(), pipe, w.p, requests...)
				return nil
			})
			return all()
		}
		w.create("g", "acme", "T")
		var all []string
		for _, request := range []string{"a#g#1#0", "@", "@x-1", "@17", ledger.EntryRequest("1700000000000-0") + "#0", "@1-"} {
			require.False(w, stored(request), request)
			w.appendJobs(ledger.AppendArgs{Group: "g", Request: request, Jobs: jobs(1)})
			require.True(w, stored(request), request)
			all = append(all, request)
		}
		require.True(w, stored(all...))
		require.False(w, stored(append(all, "another")...))
		require.EqualValues(w, 2, w.c.ZCard(w.Context(), w.p.Entries()).Val())
	})
}

func TestReadQueues(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []struct {
			id, tenant, typ string
			jobs            int
		}{{"a", "acme", "T", 3}, {"b", "acme", "T", 5}, {"c", "acme", "U", 1}, {"d", "globex", "T", 2}} {
			w.create(g.id, g.tenant, g.typ)
			w.append(g.id, g.jobs)
		}
		w.pause(ledger.PauseType, "U")
		acme, other := ledger.TenantQueue{Type: "T", Lane: "normal", Tenant: "acme"}, ledger.TenantQueue{Type: "U", Lane: "normal", Tenant: "acme"}
		none := ledger.TenantQueue{Type: "T", Lane: "high", Tenant: "acme"}
		read := func(most int64) map[ledger.TenantQueue]ledger.QueuedGroups {
			queues, err := ledger.ReadQueues(w.Context(), w.c, w.p, []ledger.TenantQueue{acme, other, none}, most)
			require.NoError(w, err)
			return queues
		}
		require.Equal(w, map[ledger.TenantQueue]ledger.QueuedGroups{
			acme:  {Groups: []ledger.QueuedGroup{{ID: "a", Waiting: 3}, {ID: "b", Waiting: 5}}},
			other: {Groups: []ledger.QueuedGroup{{ID: "c", Waiting: 1}}, TypePaused: true},
			none:  {Groups: []ledger.QueuedGroup{}},
		}, read(10))
		require.Equal(w, []ledger.QueuedGroup{{ID: "a", Waiting: 3}}, read(1)[acme].Groups)
	})
}
