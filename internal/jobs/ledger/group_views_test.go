package ledger_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestGroupFields: Encode returns the hash fields of GroupFields: lane always, the others only if
// they are set (max_retries and total may be set to 0). Times and durations are in ms.
func TestGroupFields(t *testing.T) {
	t.Parallel()
	require.Equal(t, map[string]string{"lane": "normal"}, (&ledger.GroupFields{Lane: "normal"}).Encode())
	retries, at, threshold, total := 0, time.UnixMilli(1_700_000_000_000), 0.25, int64(0)
	require.Equal(t, map[string]string{
		"lane": "high", "name": "Mailing", "base_priority": "-1.5", "max_retries": "0", "job_timeout": "1500", "run_at": "1700000000000",
		"failure_threshold": "0.25", "total": "0", "aggregate": "[]",
	}, (&ledger.GroupFields{
		Lane: "high", Name: "Mailing", BasePriority: -1.5, MaxRetries: &retries, JobTimeout: 1500 * time.Millisecond, RunAt: &at,
		FailureThreshold: &threshold, Total: &total, Aggregate: "[]",
	}).Encode())
}

func TestListGroups(t *testing.T) {
	onStores(t, func(w *world) {
		for _, g := range []ledger.ListedGroup{{5, "a"}, {5, "b"}, {5, "c"}, {5, "d"}, {7, "e"}, {3, "f"}} {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Score: g.At, Member: g.ID})
			if g.ID != "d" {
				w.c.ZAdd(w.Context(), w.p.GroupsOf("acme"), redis.Z{Score: g.At, Member: g.ID})
			}
		}
		list := func(tenant string, before ledger.ListedGroup, limit int) (ids string) {
			groups, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{Tenant: tenant, Before: before}, limit)
			require.NoError(w, err)
			for _, g := range groups {
				ids += g.ID
			}
			return ids
		}
		require.Equal(w, "edcbaf", list("", ledger.Newest(), 10))
		require.Equal(w, "ecbaf", list("acme", ledger.Newest(), 10))
		require.Equal(w, "ed", list("", ledger.Newest(), 2))
		require.Equal(w, "dc", list("", ledger.ListedGroup{At: 7, ID: "e"}, 2))
		// b, c and d are as old as the place and fill the first page.
		require.Equal(w, "af", list("", ledger.ListedGroup{At: 5, ID: "b"}, 3))
		require.Equal(w, "f", list("", ledger.ListedGroup{At: 5, ID: "a"}, 1))
		require.Empty(w, list("", ledger.ListedGroup{At: 3, ID: "f"}, 1))
		require.Empty(w, list("nobody", ledger.Newest(), 1))

		since, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{Before: ledger.Newest(), Since: time.UnixMilli(5)}, 10)
		require.NoError(w, err)
		require.Len(w, since, 5, "f is older")
	})
}

// TestListWith: ListWith names a list with all groups of the status, for every status: also while a
// cancelled group is not swept yet, and after a retry.
func TestListWith(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("failed", 2)
		w.failed("again", 2)
		_, err := w.reopen("again")
		require.NoError(w, err)
		w.create("completed", "acme", "T")
		w.seal("completed")
		w.advance("completed")
		w.fill("cancelled", 1, "acme", "T")
		w.cancel("cancelled")
		w.create("open", "acme", "T")
		for status, ids := range map[string][]string{
			"FAILED": {"failed"}, "CREATED": {"open", "again"}, "COMPLETED": {"completed"}, "CANCELLED": {"cancelled"},
			"RUNNING": nil, "DISPATCHED": nil, "AGGREGATING": nil,
		} {
			found, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{List: ledger.ListWith(api.Status(status)), Before: ledger.Newest()}, 100)
			require.NoError(w, err)
			var with []string
			for _, g := range found {
				if w.status(g.ID) == status {
					with = append(with, g.ID)
				}
			}
			require.ElementsMatch(w, ids, with, status)
		}
		at, _ := w.c.ZScore(w.Context(), w.p.Failed(), "failed").Result()
		require.Equal(w, number(w.c.HGet(w.Context(), w.p.Group("failed"), "at:failed").Val()), int64(at))
		require.Equal(w, []string{"failed"}, w.c.ZRange(w.Context(), w.p.Failed(), 0, -1).Val(), "only failed groups")
	})
}

func TestGroupState(t *testing.T) {
	onStores(t, func(w *world) {
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
	})
}

func TestStatuses(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("a", "acme", "T")
		w.create("b", "acme", "T")
		w.cancel("b")
		statuses, err := ledger.Statuses(w.Context(), w.c, w.p, []string{"b", "missing", "a"})
		require.NoError(w, err)
		require.Equal(w, []api.Status{api.StatusCancelled, "", api.StatusCreated}, statuses)
		statuses, err = ledger.Statuses(w.Context(), w.c, w.p, nil)
		require.NoError(w, err)
		require.Empty(w, statuses)

		require.NoError(w, w.c.Set(w.Context(), w.p.Group("list"), "1", 0).Err())
		_, err = ledger.Statuses(w.Context(), w.c, w.p, []string{"missing", "list"})
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

func TestTenantOf(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		tenant, err := ledger.TenantOf(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.Equal(w, "acme", tenant)
		tenant, err = ledger.TenantOf(w.Context(), w.c, w.p, "missing")
		require.NoError(w, err)
		require.Empty(w, tenant)
	})
}

func TestReadProgress(t *testing.T) {
	onStores(t, func(w *world) {
		read := func(groups ...string) []ledger.Progress {
			refs := make([]ledger.GroupRef, len(groups))
			for i, g := range groups {
				refs[i] = ledger.GroupRef{Partition: w.p, ID: g}
			}
			all, err := ledger.ReadProgress(w.Context(), w.c, refs)
			require.NoError(w, err)
			return all
		}
		require.Empty(w, read())

		w.fill("g", 6, "acme", "T")
		w.seal("g")
		w.create("other", "beta", "T")
		run := w.begin("T", "c", 4)
		w.outcome("T", done(run[0]))
		w.outcome("T", other(ledger.OutcomeFailed, run[1], 0))
		w.outcome("T", other(ledger.OutcomeRetry, run[2], time.Hour))

		all := read("g", "missing", "other")
		require.Len(w, all, 3)
		g := all[0]
		require.Equal(w, api.Counts{Accepted: 6, Waiting: 2, NonReady: 1, InFlight: 1, Done: 1, Failed: 1}, g.Counts)
		require.EqualValues(w, 1, g.Retries)
		require.Zero(w, g.Reduced)
		require.WithinDuration(w, time.Now(), g.Created, time.Minute)
		require.False(w, g.Started.Before(g.Created))
		require.Zero(w, g.JobsEnded)
		require.Zero(w, g.Completed)
		require.Equal(w, ledger.Progress{}, all[1])
		require.Equal(w, ledger.Progress{Status: api.StatusCreated, Created: all[2].Created}, all[2])

		w.cancel("other")
		require.Equal(w, api.StatusCancelled, read("other")[0].Status)
	})
}

// TestReadProgressOfACompletedGroup: the Progress of a group that is COMPLETED has the time at
// which its last job ended and, not earlier, the time at which it became COMPLETED.
func TestReadProgressOfACompletedGroup(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T")
		w.seal("g")
		w.outcome("T", done(w.begin("T", "c", 3)...))
		w.reduceAll()
		w.advance("g")
		all, err := ledger.ReadProgress(w.Context(), w.c, []ledger.GroupRef{{Partition: w.p, ID: "g"}})
		require.NoError(w, err)
		g := all[0]
		require.Equal(w, api.StatusCompleted, g.Status)
		require.Equal(w, api.Counts{Accepted: 3, Done: 3}, g.Counts)
		require.EqualValues(w, 3, g.Reduced)
		require.False(w, g.Started.Before(g.Created))
		require.False(w, g.JobsEnded.Before(g.Started))
		require.False(w, g.Completed.Before(g.JobsEnded))
	})
}

func TestReadPartials(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T", "aggregate", `[{"op":"count"}]`)
		w.create("new", "beta", "U")
		w.outcome("T", done(w.begin("T", "c", 2)...))
		var reduced ledger.ReduceReply
		for _, e := range w.readResults(10) {
			reduced = w.reduceInto("3", e)
			require.Equal(w, ledger.ReduceOK, reduced.State)
		}
		require.NoError(w, w.c.Set(w.Context(), w.p.Group("wrong type"), "1", 0).Err())

		read := ledger.ReadPartials(w.Context(), w.c, w.p, "3", []string{"g", "wrong type", "missing", "new"})
		require.Len(w, read, 4)
		require.Equal(w, ledger.PartialAggregate{
			Exists: true, Tenant: "acme", Aggregates: `[{"op":"count"}]`, Version: reduced.Version, State: "2",
		}, read[0])
		require.ErrorContains(w, read[1].Err, "WRONGTYPE")
		require.Equal(w, ledger.PartialAggregate{}, read[2])
		require.Equal(w, ledger.PartialAggregate{Exists: true, Tenant: "beta"}, read[3])
		require.Zero(w, ledger.ReadPartials(w.Context(), w.c, w.p, "4", []string{"g"})[0].Version, "of another number")
		require.Empty(w, ledger.ReadPartials(w.Context(), w.c, w.p, "3", nil))
	})
}

func TestResultsAndFailures(t *testing.T) {
	onStores(t, func(w *world) {
		w.c.RPush(w.Context(), w.p.Results("g"), "1\n2", "3", "4", "5", "6", "7", "8", "9", "10", "11\n12", "13") // two pages
		var lines []string
		require.NoError(w, ledger.Results(w.Context(), w.c, w.p, "g", func(line []byte) error {
			lines = append(lines, string(line))
			return nil
		}))
		require.Equal(w, []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13"}, lines)

		const n = 150 // more than one page
		w.failed("f", n)
		var ordinals, want []int64
		require.NoError(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(e ledger.JobError) error {
			require.Equal(w, "BOOM", e.Code)
			ordinals = append(ordinals, e.Ordinal)
			return nil
		}))
		for i := range int64(n) {
			want = append(want, i)
		}
		slices.Sort(ordinals)
		require.Equal(w, want, ordinals)

		stop := errors.New("enough")
		require.ErrorIs(w, ledger.Results(w.Context(), w.c, w.p, "g", func([]byte) error { return stop }), stop)
		require.ErrorIs(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return stop }), stop)
		w.c.HSet(w.Context(), w.p.Failures("f"), "0", "no JSON")
		require.ErrorContains(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return nil }), "failures of group f: read error record")

		for _, ordinal := range []string{"-1", "268435456", "9223372036854775807"} { // another program wrote it
			w.c.HSet(w.Context(), w.p.Failures("f"), "0", `{"ordinal":`+ordinal+`}`)
			require.ErrorContains(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return nil }), "failures of group f: no job has the ordinal "+ordinal)
		}
	})
}

// TestAdvanceMany: a cancelled group is unsettled until the last sweep, a reopened one until the last
// requeueing: it stays dirty. A group of a wrong type gets an error. The others advance.
func TestAdvanceMany(t *testing.T) {
	onStores(t, func(w *world) {
		require.NoError(w, w.c.Set(w.Context(), w.p.Group("wrong type"), "1", 0).Err())
		w.create("open", "acme", "U")
		w.seal("open")
		w.failed("reopened", 2)
		w.fill("cancelled", 1, "acme", "U")
		w.cancel("cancelled")
		_, err := w.reopen("reopened")
		require.NoError(w, err)
		names := []string{"cancelled", "wrong type", "reopened", "open", "missing"}
		advance := func() []ledger.AdvanceReply {
			replies, err := ledger.Advance(w.Context(), w.c, w.p, names...)
			require.NoError(w, err)
			require.ErrorContains(w, replies[1].Err, "advance group wrong type: ")
			require.ErrorContains(w, replies[1].Err, "WRONGTYPE")
			replies[1].Err = nil
			return replies
		}
		require.Equal(w, []ledger.AdvanceReply{{Unsettled: true}, {}, {Unsettled: true}, {Moved: 4, Round: 1}, {}}, advance())
		require.ElementsMatch(w, []string{"cancelled", "reopened"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		w.unchanged(func() { advance() })

		w.sweep("cancelled")
		w.requeue("reopened")
		require.Equal(w, []ledger.AdvanceReply{{Round: 1}, {}, {Moved: 1, Round: 2}, {Round: 1}, {}}, advance())
		require.Empty(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
	})
}

func TestOwner(t *testing.T) {
	onStores(t, func(w *world) {
		_, err := ledger.GroupOwner(w.Context(), w.c, w.p, "g")
		require.ErrorIs(w, err, api.ErrNotFound)
		claims := []ledger.OwnerClaim{
			{Partition: w.p, Group: "g", Tenant: "acme"}, {Partition: w.p, Group: "g", Tenant: "acme"}, {Partition: w.p, Group: "g", Tenant: "globex"},
		}
		for range 2 {
			require.NoError(w, ledger.RegisterOwners(w.Context(), w.c, claims))
			require.NoError(w, claims[0].Err)
			require.NoError(w, claims[1].Err)
			require.ErrorIs(w, claims[2].Err, api.ErrConflict)
			require.NotContains(w, claims[2].Err.Error(), "acme")
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
