package groups_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

// TestListIsPaged: lists of groups of several partitions, many of them created in the same
// millisecond, contain each group once and in order, with every page size.
func TestListIsPaged(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	const n = 60
	type created struct {
		ms int64
		id string
	}
	var all []created
	for i := range n {
		g := created{int64(1_700_000_000_000 + i/20), fmt.Sprint("g", i)} // twenty in each ms
		if i%3 == 0 {
			g.ms += 3 // a third of them later, to mix the partitions
		}
		all = append(all, g)
		tenant := fmt.Sprint("t", i%7)
		_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: g.id, Tenant: tenant, Type: "T"}, now)
		require.NoError(t, err)
		p := w.Space.OfTenant(tenant)
		for _, key := range []string{p.Groups(), p.GroupsOf(tenant), p.Open()} {
			require.NoError(t, w.Conn.Cmd.ZAdd(stagetest.Trusted(t), key, redis.Z{Score: float64(g.ms), Member: g.id}).Err())
		}
	}
	slices.SortFunc(all, func(a, b created) int { return cmp.Or(cmp.Compare(b.ms, a.ms), cmp.Compare(b.id, a.id)) })
	list := func(q messages.ListQuery) (ids []string) {
		t.Helper()
		for {
			page, err := w.Store.Groups(stagetest.Trusted(t), q)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.Groups), q.Limit)
			for _, g := range page.Groups {
				ids = append(ids, g.ID)
			}
			if page.Cursor == "" {
				return ids
			}
			require.Len(t, page.Groups, q.Limit)
			q.Cursor = page.Cursor
		}
	}
	ids := func(keep func(string) bool) (ids []string) {
		for _, g := range all {
			if keep(g.id) {
				ids = append(ids, g.id)
			}
		}
		return ids
	}
	everyone := func(string) bool { return true }
	for _, limit := range []int{1, 2, 3, 7, 19, 20, 59, 60, 61} {
		require.Equal(t, ids(everyone), list(messages.ListQuery{Limit: limit}), "pages of %d", limit)
	}
	require.Equal(t, ids(func(id string) bool { return w.Group(id).Tenant == "t3" }), list(messages.ListQuery{Limit: 2, Tenant: "t3"}))

	for _, id := range []string{"g5", "g17", "g42"} {
		_, err := w.Store.Cancel(stagetest.Trusted(t), id)
		require.NoError(t, err)
	}
	cancelled := func(id string) bool { return id == "g5" || id == "g17" || id == "g42" }
	require.Equal(t, ids(cancelled), list(messages.ListQuery{Limit: 2, Status: api.StatusCancelled}))
	require.Equal(t, ids(func(id string) bool { return !cancelled(id) }), list(messages.ListQuery{Limit: 10, Status: api.StatusCreated}))
	require.Empty(t, list(messages.ListQuery{Limit: 10, Status: api.StatusFailed}))

	// Deleted and new groups disturb no page.
	page, err := w.Store.Groups(stagetest.Trusted(t), messages.ListQuery{Limit: 10})
	require.NoError(t, err)
	gone := all[15].id
	p := w.Space.OfTenant(w.Group(gone).Tenant)
	require.NoError(t, w.Conn.Cmd.Del(stagetest.Trusted(t), p.Group(gone)).Err())
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "new", Type: "T"}, now)
	require.NoError(t, err)
	require.Equal(t, slices.DeleteFunc(ids(everyone)[10:], func(id string) bool { return id == gone }), list(messages.ListQuery{Limit: 4, Cursor: page.Cursor}))

	for _, cursor := range []string{"x", "1", "1.", "1.{}", ".g", "99999999999999999999.g"} {
		_, err := w.Store.Groups(stagetest.Trusted(t), messages.ListQuery{Limit: 1, Cursor: cursor})
		var invalid *messages.ValidationError
		require.ErrorAs(t, err, &invalid, cursor)
	}
}

// TestListByStatusIsBounded: one call of Groups looks at 5,000 groups at most, and the next call
// continues there.
func TestListByStatusIsBounded(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "old", Tenant: "acme", Type: "T"}, now)
	require.NoError(t, err)
	_, err = w.Store.Cancel(stagetest.Trusted(t), "old")
	require.NoError(t, err)
	p := w.Space.OfTenant("acme")
	newer := make([]redis.Z, 5300) // their data is deleted
	for i := range newer {
		newer[i] = redis.Z{Score: float64(time.Now().Add(time.Hour).UnixMilli()), Member: fmt.Sprint("g", i)}
	}
	require.NoError(t, w.Conn.Cmd.ZAdd(stagetest.Trusted(t), p.Groups(), newer...).Err())

	first, err := w.Store.Groups(stagetest.Trusted(t), messages.ListQuery{Limit: 10, Status: api.StatusCancelled})
	require.NoError(t, err)
	require.Empty(t, first.Groups)
	require.NotEmpty(t, first.Cursor)
	require.Equal(t, 5000, first.Scanned)
	second, err := w.Store.Groups(stagetest.Trusted(t), messages.ListQuery{Limit: 10, Status: api.StatusCancelled, Cursor: first.Cursor})
	require.NoError(t, err)
	require.Len(t, second.Groups, 1)
	require.Equal(t, "old", second.Groups[0].ID)
	require.Empty(t, second.Cursor)
	require.Equal(t, 301, second.Scanned)
}

// TestListByTags: groups of a tenant are found by their tags without a look at others, newest first and in
// pages; several tags must all match, also beside other filters and without a tenant.
func TestListByTags(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := stagetest.Trusted(w.T)
		for i := range 12 {
			g := &messages.SubmitGroup{ID: fmt.Sprintf("g%02d", i), Tenant: "acme", Type: "T", Tags: api.Tags{"n": fmt.Sprint(i % 3)}}
			if i%2 == 0 {
				g.Tags["even"] = "yes"
			}
			if i == 3 {
				g.Type = "U"
			}
			_, err := w.Store.Submit(ctx, g, now)
			require.NoError(w.T, err)
		}
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: "other", Tenant: "globex", Type: "T", Tags: api.Tags{"n": "0"}}, now)
		require.NoError(w.T, err)
		for i := range 20 {
			_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: fmt.Sprint("plain", i), Tenant: "acme", Type: "T"}, now)
			require.NoError(w.T, err)
		}
		list := func(q messages.ListQuery) (ids []string, scanned int) {
			for {
				page, err := w.Store.Groups(ctx, q)
				require.NoError(w.T, err)
				scanned += page.Scanned
				for _, g := range page.Groups {
					ids = append(ids, g.ID)
					require.True(w.T, g.Tags.Include(q.Tags), g.ID)
				}
				if q.Cursor = page.Cursor; q.Cursor == "" {
					slices.Sort(ids)
					return ids, scanned
				}
			}
		}
		for _, tt := range []struct {
			q       messages.ListQuery
			ids     []string
			scanned int
		}{
			{messages.ListQuery{Tenant: "acme", Tags: api.Tags{"n": "0"}}, []string{"g00", "g03", "g06", "g09"}, 4},
			{messages.ListQuery{Tenant: "acme", Tags: api.Tags{"n": "0", "even": "yes"}}, []string{"g00", "g06"}, 4},
			{messages.ListQuery{Tenant: "acme", Tags: api.Tags{"n": "0"}, Type: "U"}, []string{"g03"}, 4},
			{messages.ListQuery{Tenant: "acme", Tags: api.Tags{"n": "0", "even": "no"}}, nil, 0},
			{messages.ListQuery{Tags: api.Tags{"n": "0"}}, []string{"g00", "g03", "g06", "g09", "other"}, 33},
		} {
			for _, tt.q.Limit = range []int{1, 3, 100} {
				ids, scanned := list(tt.q)
				require.Equal(w.T, tt.ids, ids, "%+v", tt.q)
				require.Equal(w.T, tt.scanned, scanned, "%+v", tt.q)
			}
		}
		g, err := w.Store.Group(ctx, "g00")
		require.NoError(w.T, err)
		require.Equal(w.T, api.Tags{"n": "0", "even": "yes"}, g.Tags)
	})
}

func TestJob(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		later := time.Now().Add(time.Hour)
		jobs := stagetest.Numbered(6)
		jobs[5].RunAt = &later
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
		w.Admit("T")
		held := w.Take("T", "c", 4)
		w.Done("7", held[0])
		w.Fail("BOOM", held[1])
		_, err := ledger.Outcome(ctx, w.Conn.Cmd, w.P, "T", ledger.Congestion{Cap: time.Hour}, []ledger.GroupOutcome{{Group: "g", Others: []ledger.OtherJob{{
			Entry: held[2].Entry, Ordinal: 2, Attempt: 1, Kind: ledger.OutcomeRetry, Retries: 1, Waits: held[2].Waits, Queued: []byte(held[2].Queued),
			Delay: time.Minute, Code: "DOWN", Text: "it is down",
		}}}})
		require.NoError(w.T, err)

		var states []string
		for i := range int64(6) {
			j := w.Job("g", i)
			require.Equal(w.T, fmt.Sprint("g.", i), j.ID)
			states = append(states, j.State)
		}
		require.Equal(w.T, []string{"done", "failed", "non_ready", "in_flight", "ready", "non_ready"}, states)
		require.Equal(w.T, "BOOM", w.Job("g", 1).LastError.Code)
		retried := w.Job("g", 2)
		require.Equal(w.T, "DOWN", retried.LastError.Code)
		require.Equal(w.T, 1, retried.Attempts)
		require.Equal(w.T, time.Minute, retried.Until.Sub(retried.LastError.At))
		require.Equal(w.T, []api.JobError{{Code: "DOWN", Error: "it is down", Attempt: 1, At: retried.LastError.At}}, retried.Errors)
		failed := w.Job("g", 1)
		require.Equal(w.T, []api.JobError{*failed.LastError}, failed.Errors)
		for _, j := range []api.Job{failed, w.Job("g", 4), w.Job("g", 5)} {
			require.Equal(w.T, "T", j.Type)
			require.Equal(w.T, string(jobs[j.Ordinal].Payload), string(j.Payload))
			require.WithinDuration(w.T, time.Now(), *j.AcceptedAt, time.Minute)
			require.Equal(w.T, j.State != "failed", j.Waits != nil)
			require.Empty(w.T, j.PayloadHint)
		}
		require.Equal(w.T, failed.LastError.At, *failed.EndedAt)
		for i, hint := range map[int64]string{0: "are done are not kept", 2: "was not looked for", 3: "while the job runs"} {
			require.Contains(w.T, w.Job("g", i).PayloadHint, hint)
		}
		hidden, err := w.Store.Job(auth.With(ctx, auth.Principal{Role: auth.Reader}), "g", 1)
		require.NoError(w.T, err)
		require.Empty(w.T, hidden.Payload)
		require.Contains(w.T, hidden.PayloadHint, "who may see payloads")
		list, err := w.Store.Jobs(ctx, "g", messages.JobQuery{Limit: 10})
		require.NoError(w.T, err)
		require.Equal(w.T, retried.LastError, list.Jobs[2].LastError)
		require.Nil(w.T, list.Jobs[2].Errors, "a list has only the last error")

		for _, ordinal := range []int64{-1, 6, messages.MaxTotal, 1<<63 - 1, 1 << 62} {
			_, err := w.Store.Job(ctx, "g", ordinal)
			require.ErrorIs(w.T, err, api.ErrNotFound, "%d", ordinal)
		}
		_, err = w.Store.Job(ctx, "nobody", 0)
		require.ErrorIs(w.T, err, api.ErrNotFound)
	})
}

// TestJobsByCode: pages have each job that failed with the code once, in order, and no other.
func TestJobsByCode(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 1300 // more than one step
	w.Jobs("g", "T", n)
	w.Admit("T")
	held := w.Take("T", "c", n)
	w.Fail("BOOM", held[:n-1]...)
	w.Fail("RARE", held[n-1])
	q := messages.JobQuery{Code: "BOOM", Limit: 400}
	next := int64(0)
	for {
		list, err := w.Store.Jobs(stagetest.Trusted(t), "g", q)
		require.NoError(t, err)
		for _, j := range list.Jobs {
			require.Equal(t, next, j.Ordinal)
			require.Equal(t, "T", j.Type)
			next++
		}
		if q.Cursor = list.Cursor; q.Cursor == "" {
			break
		}
	}
	require.EqualValues(t, n-1, next)
	list, err := w.Store.Jobs(stagetest.Trusted(t), "g", messages.JobQuery{Code: "RARE", State: "failed", Limit: 1})
	require.NoError(t, err)
	require.Len(t, list.Jobs, 1)
	require.EqualValues(t, n-1, list.Jobs[0].Ordinal)
	_, err = w.Store.Jobs(stagetest.Trusted(t), "g", messages.JobQuery{Code: "RARE", State: "done", Limit: 1})
	var invalid *messages.ValidationError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "state", invalid.Fields[0].Field)
}

// TestSubmittedBy: a group has the id of the key that submitted it, a repetition with another key
// changes nothing, and without a key there is no field.
func TestSubmittedBy(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	as := func(key string) context.Context {
		return auth.With(context.WithoutCancel(t.Context()), auth.Principal{Role: auth.Admin, KeyID: key})
	}
	submit := func(ctx context.Context, id string) {
		g := messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Name: "news " + id, Jobs: stagetest.Numbered(1)}
		_, err := w.Store.Submit(ctx, &g, groups.Origin{At: time.Now()})
		require.NoError(t, err)
	}
	submit(as("key_1"), "g")
	submit(as("key_2"), "g")
	submit(stagetest.Trusted(t), "h")
	require.Equal(t, "key_1", w.Group("g").SubmittedBy)
	require.Empty(t, w.Group("h").SubmittedBy)
	require.False(t, w.Conn.Cmd.HExists(as(""), w.P.Group("h"), "submitted_by").Val())

	for _, q := range []messages.ListQuery{{Name: "news g"}, {Prefix: "g"}, {Prefix: "g", Name: "news g"}} {
		q.Limit = 10
		list, err := w.Store.Groups(as("key_1"), q)
		require.NoError(t, err)
		require.Len(t, list.Groups, 1)
		require.Equal(t, "g", list.Groups[0].ID)
	}
}

func TestResultsAndFailures(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 600
	w.Jobs("g", "T", n)
	w.Admit("T")
	held := w.Take("T", "c", n)
	w.Fail("BOOM", held[:n/2]...)
	for i := n / 2; i < n; i += 10 { // many chunks
		w.Done("1", held[i:i+10]...)
	}
	w.Reduce()
	var done, failed []int64
	require.NoError(t, w.Store.Results(stagetest.Trusted(t), "g", func(result []byte) error {
		done = append(done, stagetest.Decode[api.Result](t, string(result)).Ordinal)
		return nil
	}))
	require.NoError(t, eachFailure(stagetest.Trusted(t), w, messages.FailureQuery{}, func(f api.Failure) error {
		require.Equal(t, "BOOM", f.Code)
		failed = append(failed, f.Ordinal)
		return nil
	}))
	slices.Sort(failed)
	var want []int64
	for i := range int64(n) {
		want = append(want, i)
	}
	require.Equal(t, want[n/2:], done)
	require.Equal(t, want[:n/2], failed)

	stop := fmt.Errorf("enough")
	require.ErrorIs(t, w.Store.Results(stagetest.Trusted(t), "g", func([]byte) error { return stop }), stop)
	require.ErrorIs(t, eachFailure(stagetest.Trusted(t), w, messages.FailureQuery{}, func(api.Failure) error { return stop }), stop)
}

// TestReadingADeletedGroupIsNoSuccess: the group, or its results, are deleted while its results,
// failures or jobs are read. What was read must not look like all. A retry meanwhile is no error.
func TestReadingADeletedGroupIsNoSuccess(t *testing.T) {
	const n = 400
	for name, remove := range map[string]func(*stagetest.World, int64) error{
		"the group": func(w *stagetest.World, fence int64) error {
			return ledger.Expire(stagetest.Trusted(w.T), w.Conn.Cmd, w.P, "g", fence, false)
		},
		"its results": func(w *stagetest.World, fence int64) error {
			return ledger.Expire(stagetest.Trusted(w.T), w.Conn.Cmd, w.P, "g", fence, true)
		},
		"nothing": func(w *stagetest.World, _ int64) error {
			_, err := w.Store.Retry(stagetest.Trusted(w.T), "g", api.RetryChoice{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			w.Jobs("g", "T", n)
			w.Admit("T")
			held := w.Take("T", "c", n)
			w.Fail("BOOM", held[:n/2]...)
			for i := n / 2; i < n; i += 10 {
				w.Done("1", held[i:i+10]...)
			}
			w.Reduce()
			fence, err := ledger.Lead(stagetest.Trusted(t), w.Conn.Cmd, w.P, "test", time.Minute)
			require.NoError(t, err)
			_, err = ledger.Advance(stagetest.Trusted(t), w.Conn.Cmd, w.P, "g")
			require.NoError(t, err)
			removed := false
			err = w.Store.Results(stagetest.Trusted(t), "g", func([]byte) error {
				if removed {
					return nil
				}
				removed = true
				return remove(w, fence)
			})
			if name == "nothing" {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, api.ErrNotFound)
				require.ErrorContains(t, err, "not all")
			}
		})
	}
}

// TestFailuresWithPayloads: the method Failures gives the failed jobs' payloads if asked, also
// those that are stored separately. A lost payload is null.
func TestFailuresWithPayloads(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		large := `"` + strings.Repeat("x", 5000) + `"`
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: []messages.Job{
			{Payload: json.RawMessage(`{"a":"|"}`), Key: "k"}, {Payload: json.RawMessage(large)}, {Payload: json.RawMessage(large)},
		}})
		w.Admit("T")
		w.Fail("BOOM", w.Take("T", "c", 3)...)
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		payloads := func(asked bool) []string {
			got := make([]string, 3)
			require.NoError(w.T, eachFailure(ctx, w, messages.FailureQuery{Payloads: asked}, func(f api.Failure) error {
				got[f.Ordinal] = string(f.Payload)
				return nil
			}))
			return got
		}
		require.Equal(w.T, []string{`{"a":"|"}`, large, large}, payloads(true))
		require.Equal(w.T, []string{"", "", ""}, payloads(false))
		require.JSONEq(w.T, large, string(w.Job("g", 1).Payload))
		require.NoError(w.T, w.Conn.Cmd.Del(ctx, w.P.Payloads("g")).Err())
		require.Contains(w.T, w.Job("g", 1).PayloadHint, "not stored")
		require.Equal(w.T, []string{`{"a":"|"}`, "null", "null"}, payloads(true))
	})
}

// TestViewWithoutItsReducer: a process in which the reducer of a group's aggregate is not
// registered shows the group without the aggregate, and says why.
func TestViewWithoutItsReducer(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := reducer.NewRegistry()
	require.NoError(t, registry.Register("own", reducer.MapReduce(
		func(reducer.Result) (int, error) { return 1, nil }, func(a, b int) int { return a + b })))
	knows := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	_, err := knows.Submit(stagetest.Trusted(t), &messages.SubmitGroup{
		ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(2), Aggregate: []messages.Aggregate{{As: "x", Op: "own"}}}, now)
	require.NoError(t, err)
	w.Jobs("h", "T", 1)
	views, err := w.Store.ReadViews(stagetest.Trusted(t), w.P, []string{"g", "gone", "h"})
	require.NoError(t, err)
	require.Len(t, views, 2)
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, views[0].Counts)
	require.Equal(t, "null", string(views[0].Aggregate["x"]))
	require.Contains(t, views[0].AggregateErrors["x"], `op "own" is unknown`)
	shown, err := knows.Group(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	require.Equal(t, "null", string(shown.Aggregate["x"]))
	require.Empty(t, shown.AggregateErrors)
}

// TestReducerThatNoAggregatorHas: a submission warns of it, and why names it once the group's jobs
// have ended.
func TestReducerThatNoAggregatorHas(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	registry := reducer.NewRegistry()
	require.NoError(t, registry.Register("own", reducer.MapReduce(
		func(reducer.Result) (int, error) { return 1, nil }, func(a, b int) int { return a + b })))
	report := func(id string, ops ...string) {
		require.NoError(t, presence.PublishStage(ctx, w.Conn, w.Space, api.StageStatus{ID: id, Role: "aggregator", Reducers: ops}))
	}
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T"}}}))
	report("a", "count")
	submit := func(id string) []string {
		store := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil) // it caches what is served
		accepted, err := store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Seal: true, Jobs: stagetest.Numbered(1),
			Aggregate: []messages.Aggregate{{As: "x", Op: "own"}, {As: "n", Op: "count"}}}, now)
		require.NoError(t, err)
		return accepted.Warnings
	}
	require.Equal(t, []string{"No live aggregator has the reducer own: the group does not end until one has."}, submit("g"))
	w.Admit("T")
	w.Done("1", w.Take("T", "w", 1)...)
	_, err := ledger.Advance(ctx, w.Conn.Cmd, w.P, "g")
	require.NoError(t, err)
	why, err := w.Store.Why(ctx, "g")
	require.NoError(t, err)
	require.Contains(t, why.Detail, "All of its jobs have ended, but no live aggregator has the reducer own: start one that has it.")
	report("b", "count", "own")
	require.Empty(t, submit("h"))
	why, err = w.Store.Why(ctx, "g")
	require.NoError(t, err)
	require.NotContains(t, why.Detail, "own")
}

// TestGroupSummary: GroupSummary leaves out an aggregate that takes more bytes in Redis than the
// caller allows.
func TestGroupSummary(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Submit(messages.SubmitGroup{
		ID: "g", Type: "T", Jobs: stagetest.Numbered(2), Aggregate: []messages.Aggregate{{As: "n", Op: "count"}}})
	summary := func(most int64) (api.Group, bool) {
		g, complete, err := w.Store.GroupSummary(stagetest.Trusted(t), "g", most)
		require.NoError(t, err)
		return g, complete
	}
	whole, err := w.Store.Group(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	g, complete := summary(0)
	require.True(t, complete, "there are no results yet")
	require.Equal(t, whole, g)

	w.Admit("T")
	w.Done("1", w.Take("T", "test", 2)...)
	asked, err := ledger.EncodeAggregates(reducer.NewRegistry(), []messages.Aggregate{{As: "n", Op: "count"}})
	require.NoError(t, err)
	plan, err := ledger.AggregatePlan(reducer.NewRegistry(), asked)
	require.NoError(t, err)
	for _, m := range w.ReadResults("test") {
		state := plan.New()
		require.NoError(t, state.Add(reducer.Result{Ordinal: 0}))
		require.NoError(t, state.Add(reducer.Result{Ordinal: 1}))
		encoded, err := state.Encode()
		require.NoError(t, err)
		reply, err := ledger.Reduce(stagetest.Trusted(t), w.Conn.Cmd, w.P, ledger.ReduceArgs{
			Group: "g", Partial: strconv.Itoa(ledger.Partials - 1), Lines: []byte(m.Values["l"].(string)),
			Entries: []string{m.ID}, Ordinals: []int64{0, 1}, State: encoded,
		})
		require.NoError(t, err)
		require.Equal(t, ledger.ReduceOK, reply[0].State)
	}
	whole, err = w.Store.Group(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	require.Equal(t, "2", string(whole.Aggregate["n"]))
	g, complete = summary(1000)
	require.True(t, complete)
	require.Equal(t, whole, g)
	g, complete = summary(10)
	require.False(t, complete)
	require.Empty(t, g.Aggregate)
	require.Equal(t, whole.Counts, g.Counts)

	_, _, err = w.Store.GroupSummary(stagetest.Trusted(t), "none", 0)
	require.ErrorIs(t, err, api.ErrNotFound)
}

// TestGroupSummaryOfFailures: GroupSummary contains the aggregate of failed jobs, also if no job is
// done; it counts towards the size limit of aggregates.
func TestGroupSummaryOfFailures(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Submit(messages.SubmitGroup{ID: "g", Type: "T", Seal: true, Jobs: stagetest.Numbered(2),
		Aggregate: []messages.Aggregate{{As: "n", Op: "count", Over: reducer.OverFailed}}})
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "test", 2)...)
	r, err := ledger.Advance(stagetest.Trusted(t), w.Conn.Cmd, w.P, "g")
	require.NoError(t, err)
	require.EqualValues(t, 2, r[0].Failures)
	require.NoError(t, w.Store.ReduceFailures(stagetest.Trusted(t), w.P, "g", r[0]))

	g, complete, err := w.Store.GroupSummary(stagetest.Trusted(t), "g", 1000)
	require.NoError(t, err)
	require.True(t, complete)
	require.Equal(t, "2", string(g.Aggregate["n"]))
	g, complete, err = w.Store.GroupSummary(stagetest.Trusted(t), "g", 10)
	require.NoError(t, err)
	require.False(t, complete)
	require.Empty(t, g.Aggregate)
}

func TestStats(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	w.Limit(ledger.Meter{Limiter: "fixed", Window: time.Second}, 100, ledger.ShareStatic)
	for i := range 8 {
		w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", i), Type: "A", Jobs: []messages.Job{{Payload: []byte(`1`)}, {Payload: []byte(`2`), Type: "B"}}})
	}
	w.Admit("A")
	st, err := w.Store.Stats(stagetest.Trusted(t))
	require.NoError(t, err)
	require.Equal(t, 4, st.Partitions)
	require.EqualValues(t, 8, st.Groups)
	require.EqualValues(t, 8, st.ActiveTenants)
	require.Equal(t, []api.TypeStats{
		{Type: "A", Backlog: 8, Runnable: 8, Ready: 8, Totals: api.JobTotals{Accepted: 8}}, {Type: "B", Backlog: 8, Runnable: 8, Waiting: 8, Totals: api.JobTotals{Accepted: 8}},
	}, st.Types)
	require.Equal(t, api.JobTotals{Accepted: 16}, st.Totals)
	st.RateLimit.Used = 0
	require.Equal(t, api.RateLimit{Limiter: "fixed", Share: "static", RPS: 100, WindowMS: 1000}, st.RateLimit)
	body, err := json.Marshal(st)
	require.NoError(t, err)
	require.False(t, strings.Contains(string(body), "null"), "%s", body)
}

// meeting is a hook of the Redis client: each command of one name waits until some of them are
// under way at the same time.
type meeting struct {
	name    string
	waiting atomic.Int64 // how many are still missing
	met     chan struct{}
	calls   atomic.Int64
}

func newMeeting(name string, n int64) *meeting {
	m := &meeting{name: name, met: make(chan struct{})}
	m.waiting.Store(n)
	return m
}

func (*meeting) DialHook(next redis.DialHook) redis.DialHook { return next }

func (*meeting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (m *meeting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == m.name {
			m.calls.Add(1)
			if m.waiting.Add(-1) == 0 {
				close(m.met)
			}
			select {
			case <-m.met:
			case <-time.After(20 * time.Second):
				return errors.New("no other command came: partitions are asked one after the other")
			}
		}
		return next(ctx, cmd)
	}
}

// TestPartitionsAreAskedTogether: a page of groups asks 8 of 64 partitions at the same time, each
// once; only the partition that has most of the newest groups is asked again. Pages miss no group.
// A type is paused in several partitions at the same time, too.
func TestPartitionsAreAskedTogether(t *testing.T) {
	w := stagetest.Parallel(t, 64)
	ctx := stagetest.Trusted(t)
	var want []string
	for i := range 75 {
		id, tenant := fmt.Sprintf("g%d", i), "busy"
		if i < 50 { // the others are newer
			tenant = fmt.Sprintf("t%d", i)
		}
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: tenant, Type: "T"}, now)
		require.NoError(t, err)
		require.NoError(t, w.Conn.Cmd.ZAdd(ctx, w.Space.OfTenant(tenant).Groups(), redis.Z{Score: float64(1000 + i), Member: id}).Err())
		want = append([]string{id}, want...)
	}
	conn := w.Connect()
	asked := newMeeting("zrevrangebyscore", 8)
	conn.Cmd.AddHook(asked)
	store := groups.New(groups.Config{}, conn, w.Space, w.Tel, reducer.NewRegistry(), nil)
	var got []string
	for q := (messages.ListQuery{Limit: 20}); ; {
		page, err := store.Groups(ctx, q)
		require.NoError(t, err)
		if q.Cursor == "" {
			require.EqualValues(t, 64+1, asked.calls.Load())
		}
		for _, g := range page.Groups {
			got = append(got, g.ID)
		}
		if q.Cursor = page.Cursor; q.Cursor == "" {
			break
		}
	}
	require.Equal(t, want, got)

	conn.Cmd.AddHook(newMeeting("evalsha", 8))
	require.NoError(t, store.PauseType(ctx, "T"))
	for _, p := range w.Space.All() {
		paused, err := ledger.TypePaused(ctx, conn.Cmd, p, "T")
		require.NoError(t, err)
		require.True(t, paused)
	}
}
