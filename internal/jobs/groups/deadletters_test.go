package groups_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestDeadLetterFilters: the filters select among the dead letters of all partitions; pages have no
// gap and no repetition.
func TestDeadLetterFilters(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 3)
	begin := time.Now().Truncate(time.Second)
	const n = 120
	for i := range n {
		at := begin.Add(time.Duration(i) * time.Second)
		tenant := fmt.Sprint("t", i%4)
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.Space.OfTenant(tenant).DeadLetters(), ID: stagetest.EntryID(at),
			Values: []any{
				"job", fmt.Sprint("g.", i), "at", at.UnixMilli(), "tenant", tenant, "group", fmt.Sprint("g", i%2),
				"type", fmt.Sprint("T", i%3), "code", fmt.Sprint("C", i%5), "ordinal", i,
			},
		}).Err())
	}
	jobs := func(ctx context.Context, q groups.DeadLetterQuery) (all []string, scanned int) {
		for {
			page, err := w.Store.DeadLetters(ctx, q)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.DeadLetters), q.Limit)
			scanned += page.Scanned
			for _, d := range page.DeadLetters {
				all = append(all, d.Job)
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return all, scanned
			}
		}
	}
	for name, tt := range map[string]struct {
		q    groups.DeadLetterQuery
		want func(i int) bool
	}{
		"none":   {groups.DeadLetterQuery{}, func(int) bool { return true }},
		"tenant": {groups.DeadLetterQuery{Tenant: "t1"}, func(i int) bool { return i%4 == 1 }},
		"group":  {groups.DeadLetterQuery{Group: "g1"}, func(i int) bool { return i%2 == 1 }},
		"type":   {groups.DeadLetterQuery{Type: "T2"}, func(i int) bool { return i%3 == 2 }},
		"code":   {groups.DeadLetterQuery{Code: "C3"}, func(i int) bool { return i%5 == 3 }},
		"since":  {groups.DeadLetterQuery{Since: begin.Add(100 * time.Second)}, func(i int) bool { return i >= 100 }},
		"all of them": {
			groups.DeadLetterQuery{Tenant: "t1", Group: "g1", Type: "T0", Code: "C4", Since: begin.Add(9 * time.Second)},
			func(i int) bool { return i%4 == 1 && i%2 == 1 && i%3 == 0 && i%5 == 4 && i >= 9 },
		},
		"nothing": {groups.DeadLetterQuery{Code: "X"}, func(int) bool { return false }},
	} {
		var want []string
		for i := n - 1; i >= 0; i-- {
			if tt.want(i) {
				want = append(want, fmt.Sprint("g.", i))
			}
		}
		for _, limit := range []int{1, 7, 1000} {
			tt.q.Limit = limit
			got, scanned := jobs(stagetest.Trusted(t), tt.q)
			require.Equal(t, want, got, "%s, pages of %d", name, limit)
			require.LessOrEqual(t, scanned, n)
		}
	}
	acme := as(t, auth.Producer, "t1")
	_, err := w.Store.DeadLetters(acme, groups.DeadLetterQuery{Tenant: "t2", Limit: 1})
	require.ErrorIs(t, err, api.ErrTenant)
	got, _ := jobs(acme, groups.DeadLetterQuery{Group: "g0", Limit: 10})
	require.Empty(t, got, "its jobs are in group g1")
}

// TestDeadLettersOfManyPartitions: pages have no gap and no repetition even if many partitions have
// entries of the same millisecond. A cursor has 64 bytes at most; one that no page gave is refused.
func TestDeadLettersOfManyPartitions(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 64)
	want := map[string]bool{}
	for i := range 300 {
		p := w.Space.All()[i*7%64]
		job := fmt.Sprint("g.", i)
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: p.DeadLetters(), ID: fmt.Sprintf("%d-*", 1_000_000+i/100), Values: []any{"job", job, "code", "C"},
		}).Err())
		want[job] = true
	}
	q := groups.DeadLetterQuery{Limit: 7}
	for {
		page, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
		require.NoError(t, err)
		for _, d := range page.DeadLetters {
			require.True(t, want[d.Job], "%s again", d.Job)
			delete(want, d.Job)
		}
		require.LessOrEqual(t, len(page.Cursor), 64)
		if q.Cursor = page.Cursor; q.Cursor == "" {
			break
		}
	}
	require.Empty(t, want)
	for _, cursor := range []string{"x", "1-0", "1-0,", "1-0,64", "1-0,-1", "1,0", ",0", "0-0,0", "0-1,1"} {
		_, err := w.Store.DeadLetters(stagetest.Trusted(t), groups.DeadLetterQuery{Limit: 1, Cursor: cursor})
		require.ErrorContains(t, err, "cursor: must be one that an earlier page gave", cursor)
	}
}

// TestDeadLettersAreBoundedByBytes: a call of DeadLetters ends when it has looked at 16 MiB, and
// the next call continues there.
func TestDeadLettersAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	large := `"` + strings.Repeat("x", messages.MaxPayloadBytes-2) + `"`
	const n = 100 // 25 MiB
	for range n {
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.Space.All()[0].DeadLetters(), Values: []any{"job", "g.0", "code", "C", "payload", large},
		}).Err())
	}
	q := groups.DeadLetterQuery{Limit: 1000}
	first, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
	require.NoError(t, err)
	require.Len(t, first.DeadLetters, 64)
	q.Cursor = first.Cursor
	second, err := w.Store.DeadLetters(stagetest.Trusted(t), q)
	require.NoError(t, err)
	require.Len(t, second.DeadLetters, n-64)
	require.Empty(t, second.Cursor)

	none, err := w.Store.DeadLetters(stagetest.Trusted(t), groups.DeadLetterQuery{Limit: 1000, Code: "X"})
	require.NoError(t, err)
	require.Equal(t, 64, none.Scanned)
}

// TestStatsOfRoles: Stats names each role, also those without a live process, but the role broker
// only if it has one.
func TestStatsOfRoles(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	var stages []string // the roles of the processes in Stats.Stages, which has no workers
	roles := func() []api.RoleStatus {
		st, err := w.Store.Stats(stagetest.Trusted(t))
		require.NoError(t, err)
		stages = nil
		for _, s := range st.Stages {
			stages = append(stages, s.Role)
		}
		return st.Roles
	}
	none := []api.RoleStatus{
		{Role: "ingest"}, {Role: "fetcher"}, {Role: "dispatcher"}, {Role: "worker"}, {Role: "aggregator"}, {Role: "watcher"},
	}
	require.Equal(t, none, roles())
	for id, role := range map[string]string{"f1": "fetcher", "f2": "fetcher", "w1": "watcher"} {
		require.NoError(t, presence.PublishStage(t.Context(), w.Conn, w.Space, api.StageStatus{ID: id, Role: role}))
	}
	require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space,
		presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "k1"}}))
	_, err := presence.PublishBroker(t.Context(), w.Conn, w.Space, api.StageStatus{ID: "b1", Role: "broker"})
	require.NoError(t, err)
	require.Equal(t, []api.RoleStatus{
		{Role: "ingest"}, {Role: "fetcher", Processes: 2}, {Role: "dispatcher"}, {Role: "worker", Processes: 1},
		{Role: "aggregator"}, {Role: "watcher", Processes: 1}, {Role: "broker", Processes: 1},
	}, roles())
	require.Equal(t, []string{"fetcher", "fetcher", "watcher", "broker"}, stages)
}
