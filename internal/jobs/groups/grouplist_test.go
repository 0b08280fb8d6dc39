package groups_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestListIsFiltered(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 4)
	ctx := stagetest.Trusted(t)
	submit := func(id, tenant, typ string, created int64, jobs ...messages.Job) {
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Tenant: tenant, Type: typ, Jobs: jobs}, now)
		require.NoError(t, err)
		p := w.Space.OfTenant(tenant)
		for _, key := range []string{p.Groups(), p.GroupsOf(tenant)} {
			require.NoError(t, w.Conn.Cmd.ZAdd(ctx, key, redis.Z{Score: float64(created), Member: id}).Err())
		}
	}
	submit("promo-1", "acme", "T", 1000)
	submit("promo-2", "globex", "U", 2000)
	submit("mail-1", "acme", "U", 3000, messages.Job{Type: "T", Payload: []byte("1")})
	submit("mail-2", "initech", "T", 4000)
	_, err := w.Store.Pause(ctx, "promo-2")
	require.NoError(t, err)
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.Space.OfTenant("acme").Group("mail-1"), "failed", 1).Err())
	yes, no := true, false
	for name, c := range map[string]struct {
		query groups.ListQuery
		want  []string
	}{
		"type, also of a job":           {groups.ListQuery{Type: "T"}, []string{"mail-2", "mail-1", "promo-1"}},
		"unknown type":                  {groups.ListQuery{Type: "X"}, nil},
		"paused":                        {groups.ListQuery{Paused: &yes}, []string{"promo-2"}},
		"not paused":                    {groups.ListQuery{Paused: &no}, []string{"mail-2", "mail-1", "promo-1"}},
		"with failed jobs":              {groups.ListQuery{FailedJobs: &yes}, []string{"mail-1"}},
		"without failed jobs":           {groups.ListQuery{FailedJobs: &no}, []string{"mail-2", "promo-2", "promo-1"}},
		"prefix":                        {groups.ListQuery{Prefix: "promo"}, []string{"promo-2", "promo-1"}},
		"whole id":                      {groups.ListQuery{Prefix: "mail-1"}, []string{"mail-1"}},
		"since":                         {groups.ListQuery{Since: time.UnixMilli(2000)}, []string{"mail-2", "mail-1", "promo-2"}},
		"since within a millisecond":    {groups.ListQuery{Since: time.UnixMilli(2000).Add(time.Microsecond)}, []string{"mail-2", "mail-1", "promo-2"}},
		"since, by status":              {groups.ListQuery{Since: time.UnixMilli(3000), Status: created}, []string{"mail-2", "mail-1"}},
		"since, by status and a tenant": {groups.ListQuery{Since: time.UnixMilli(3000), Status: created, Tenant: "acme"}, []string{"mail-1"}},
		"all":                           {groups.ListQuery{Type: "T", Paused: &no, Prefix: "m", Status: created, Since: time.UnixMilli(1), Tenant: "acme"}, []string{"mail-1"}},
	} {
		for limit := range 4 {
			c.query.Limit, c.query.Cursor = limit+1, ""
			var ids []string
			for {
				page, err := w.Store.Groups(ctx, c.query)
				require.NoError(t, err, name)
				for _, g := range page.Groups {
					ids = append(ids, g.ID)
				}
				if c.query.Cursor = page.Cursor; page.Cursor == "" {
					break
				}
			}
			require.Equal(t, c.want, ids, "%s, pages of %d", name, limit+1)
		}
	}
}

// TestListByStatus: the list of FAILED groups begins with the group that failed last, and leaves
// out one whose status has changed since. Lists without a status and of CREATED groups refuse its
// cursor.
func TestListByStatus(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 1)
	ctx, p := stagetest.Trusted(t), w.Space.Partition(0)
	for i := range 5 {
		id := fmt.Sprint("g", i)
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Type: "T"}, now)
		require.NoError(t, err)
		require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Group(id), "status", "FAILED").Err())
		require.NoError(t, w.Conn.Cmd.ZAdd(ctx, p.Failed(), redis.Z{Score: float64(100 - i), Member: id}).Err())
	}
	require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Group("g1"), "status", "CREATED").Err(), "it was retried meanwhile")
	page, err := w.Store.Groups(ctx, groups.ListQuery{Status: api.StatusFailed, Limit: 2})
	require.NoError(t, err)
	require.Equal(t, []string{"g0", "g2"}, []string{page.Groups[0].ID, page.Groups[1].ID})
	require.Equal(t, 3, page.Scanned)
	next, err := w.Store.Groups(ctx, groups.ListQuery{Status: api.StatusFailed, Limit: 9, Cursor: page.Cursor})
	require.NoError(t, err)
	require.Len(t, next.Groups, 2)
	for _, q := range []groups.ListQuery{{Limit: 2, Cursor: page.Cursor}, {Limit: 2, Status: created, Cursor: page.Cursor}} {
		_, err = w.Store.Groups(ctx, q)
		var invalid *messages.ValidationError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "cursor", invalid.Fields[0].Field)
	}
}

const created = api.StatusCreated

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
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 64)
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
	for q := (groups.ListQuery{Limit: 20}); ; {
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
