package groups_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
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
