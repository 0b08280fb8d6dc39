package groups_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// eachFailure calls yield for the failures of group g that q selects, until yield returns an error.
// q has no limit, so that one call reads all.
func eachFailure(ctx context.Context, w *stagetest.World, q messages.FailureQuery, yield func(api.Failure) error) error {
	_, err := w.Store.Failures(ctx, "g", q, yield)
	return err
}

// withFailures creates group g of n jobs, all ended. The jobs with the ordinals 0, every, 2*every
// and so on have failed, with the codes REFUSED and GONE in turn; the others are done and reduced.
func withFailures(t testing.TB, n, every int) *stagetest.World {
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 1)
	ctx, p := stagetest.Trusted(t), w.Space.OfTenant(w.Group("g").Tenant)
	states, records := make([]byte, 0, 2*n), map[string]string{}
	for i := range n {
		if i%every > 0 {
			states = append(states, "A!"...)
			continue
		}
		states = append(states, "F!"...)
		code := []string{"REFUSED", "GONE"}[i/every%2]
		records[fmt.Sprint(i)] = fmt.Sprintf(`{"ordinal":%d,"code":%q,"error":"host mx%d.example.com said %d","attempts":1,"at":1700000000000}`+"\n", i, code, i, i)
	}
	require.NoError(t, w.Conn.Cmd.Set(ctx, p.States("g"), states, 0).Err())
	require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Failures("g"), records).Err())
	refused := (len(records) + 1) / 2
	require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Codes("g"), "REFUSED", refused, "GONE", len(records)/2, "OLD", 0).Err())
	return w
}

func TestFailuresArePaged(t *testing.T) {
	t.Parallel()
	w := withFailures(t, 12_000, 2)
	pages := func(q messages.FailureQuery) (ordinals []int64, calls int) {
		for {
			found := 0
			next, err := w.Store.Failures(stagetest.Trusted(t), "g", q, func(f api.Failure) error {
				found++
				ordinals = append(ordinals, f.Ordinal)
				return nil
			})
			require.NoError(t, err)
			require.LessOrEqual(t, found, q.Limit)
			calls++
			if q.Cursor = next; next == "" {
				return ordinals, calls
			}
		}
	}
	all, calls := pages(messages.FailureQuery{Limit: 1000})
	require.Len(t, all, 6000)
	require.Equal(t, 7, calls)
	for i, ordinal := range all {
		require.Equal(t, int64(2*i), ordinal)
	}
	gone, _ := pages(messages.FailureQuery{Limit: 7, Code: "GONE"})
	require.Len(t, gone, 3000)
	require.Equal(t, []int64{2, 6, 10}, gone[:3])
	none, calls := pages(messages.FailureQuery{Limit: 7, Code: "OTHER"})
	require.Empty(t, none)
	require.Equal(t, 2, calls, "one call looks at 5,000 records")

	found := 0
	require.NoError(t, eachFailure(stagetest.Trusted(t), w, messages.FailureQuery{Code: "GONE"}, func(api.Failure) error { found++; return nil }))
	require.Equal(t, 3000, found)
	for _, cursor := range []string{"x", "-1", "10000001"} {
		_, err := w.Store.Failures(stagetest.Trusted(t), "g", messages.FailureQuery{Limit: 1, Cursor: cursor}, nil)
		require.ErrorContains(t, err, "cursor", cursor)
	}
}

func TestFailureSummary(t *testing.T) {
	t.Parallel()
	w := withFailures(t, 24_000, 2)
	sum, err := w.Store.FailureSummary(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	require.Equal(t, []int64{12_000, 5000}, []int64{sum.Total, sum.Seen})
	require.Len(t, sum.Codes, 2)
	require.Equal(t, []string{"GONE", "REFUSED"}, []string{sum.Codes[0].Code, sum.Codes[1].Code})
	sampled := int64(0)
	for _, code := range sum.Codes {
		require.EqualValues(t, 6000, code.Count)
		require.Len(t, code.Fingerprints, 1)
		f := code.Fingerprints[0]
		require.Equal(t, "host <host> said <n>", f.Text)
		require.EqualValues(t, 6000, f.Count)
		require.Len(t, f.Samples, 5)
		require.Equal(t, fmt.Sprintf("host mx%[1]d.example.com said %[1]d", f.Samples[0].Ordinal), f.Samples[0].Error)
		sampled += f.Sampled
	}
	require.Equal(t, sum.Seen, sampled)

	ctx := auth.With(t.Context(), auth.Principal{Role: auth.Reader})
	require.False(t, auth.SeesPayloads(ctx))
	sum, err = w.Store.FailureSummary(ctx, "g")
	require.NoError(t, err)
	require.Equal(t, api.FailureSummary{Total: 12_000, Codes: []api.FailureCode{
		{Code: "GONE", Count: 6000, Fingerprints: []api.FailureFingerprint{}},
		{Code: "REFUSED", Count: 6000, Fingerprints: []api.FailureFingerprint{}},
	}}, sum)
	_, err = w.Store.FailureSummary(stagetest.Trusted(t), "none")
	require.ErrorIs(t, err, api.ErrNotFound)
}

// TestFailureSummaryIsReadOnce: repeated calls of FailureSummary read the failed jobs once, until
// their number changes. A caller may change the summary that it got.
func TestFailureSummaryIsReadOnce(t *testing.T) {
	t.Parallel()
	w := withFailures(t, 100, 2)
	g, err := w.Store.Group(stagetest.Trusted(t), "g")
	require.NoError(t, err)
	p := w.Space.OfTenant(g.Tenant)
	summary := func() api.FailureSummary {
		sum, err := w.Store.FailureSummary(stagetest.Trusted(t), "g")
		require.NoError(t, err)
		return sum
	}
	first := summary()
	require.EqualValues(t, 50, first.Seen)
	first.Codes[0].Fingerprints[0].Samples[0].Error = "changed"
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), p.Failures("g")).Err())
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			sum, err := w.Store.FailureSummary(stagetest.Trusted(t), "g")
			if err != nil || sum.Seen != 50 || sum.Codes[0].Fingerprints[0].Samples[0].Error == "changed" {
				t.Errorf("got %+v, error %v", sum, err)
			}
		})
	}
	callers.Wait()
	require.NoError(t, w.Conn.Cmd.HIncrBy(t.Context(), p.Codes("g"), "GONE", 1).Err())
	changed := summary()
	require.Equal(t, []int64{51, 0}, []int64{changed.Total, changed.Seen})
}

// TestJobMap: 8 concurrent calls of JobMap get 7 buckets each, and change them; the next call still
// has the right counts. A group of 3 jobs has one bucket a job.
func TestJobMap(t *testing.T) {
	t.Parallel()
	w := withFailures(t, 100_003, 10)
	ctx := stagetest.Trusted(t)
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			m, err := w.Store.JobMap(ctx, "g", 7)
			if err != nil || len(m.Buckets) != 7 {
				t.Errorf("got %d buckets, error %v", len(m.Buckets), err)
				return
			}
			m.Buckets[0].From = 99 // the values are the caller's
		})
	}
	callers.Wait()
	m, err := w.Store.JobMap(ctx, "g", 7)
	require.NoError(t, err)
	require.EqualValues(t, 100_003, m.Jobs)
	at, done, failed := int64(0), int64(0), int64(0)
	for _, b := range m.Buckets {
		require.Equal(t, at, b.From)
		require.Equal(t, b.To-b.From+1, b.Done+b.Failed)
		at, done, failed = b.To+1, done+b.Done, failed+b.Failed
	}
	require.Equal(t, []int64{100_003, 90_002, 10_001}, []int64{at, done, failed})
	_, err = w.Store.JobMap(ctx, "none", 7)
	require.ErrorIs(t, err, api.ErrNotFound)

	w.Jobs("small", "T", 3)
	m, err = w.Store.JobMap(ctx, "small", 1000)
	require.NoError(t, err)
	require.Len(t, m.Buckets, 3)
	require.Equal(t, api.MapBucket{From: 2, To: 2, Waiting: 1}, m.Buckets[2])
}

// TestJobMapOfALargeGroup: the job map of a million jobs, whose states are read in several round
// trips, has the right counts.
func TestJobMapOfALargeGroup(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	ctx, p := stagetest.Trusted(t), w.Space.OfTenant(w.Group("g").Tenant)
	states := strings.Repeat(string(ledger.Done)+"!", 700_001) + strings.Repeat(string(ledger.Failed)+"!", 299_999)
	require.NoError(t, w.Conn.Cmd.Set(ctx, p.States("g"), states, 0).Err())
	m, err := ledger.ReadJobMap(ctx, w.Conn.Cmd, p, "g", 10)
	require.NoError(t, err)
	require.EqualValues(t, 1_000_000, m.Jobs)
	for i, b := range m.Buckets {
		want := api.MapBucket{From: int64(i) * 100_000, To: int64(i+1)*100_000 - 1, Done: 100_000}
		switch {
		case i == 7:
			want.Done, want.Failed = 1, 99_999
		case i > 7:
			want.Done, want.Failed = 0, 100_000
		}
		require.Equal(t, want, b)
	}
}

func BenchmarkFailureSummary(b *testing.B) {
	w := withFailures(b, 10_000, 2)
	for b.Loop() {
		_, err := w.NewStore(groups.Config{}).FailureSummary(stagetest.Trusted(b), "g") // which has read nothing yet
		require.NoError(b, err)
	}
}

// BenchmarkJobMap reads the states of a million jobs.
func BenchmarkJobMap(b *testing.B) {
	w := stagetest.Shared(b)
	w.Jobs("g", "T", 1)
	ctx, p := stagetest.Trusted(b), w.Space.OfTenant(w.Group("g").Tenant)
	require.NoError(b, w.Conn.Cmd.Set(ctx, p.States("g"), strings.Repeat("A!", 1_000_000), 0).Err())
	for b.Loop() {
		m, err := ledger.ReadJobMap(ctx, w.Conn.Cmd, p, "g", 500)
		require.NoError(b, err)
		require.EqualValues(b, 1_000_000, m.Jobs)
	}
}

// BenchmarkFailedGroups reads the first page of the failed groups, which are every tenth of 100,000
// groups.
func BenchmarkFailedGroups(b *testing.B) {
	url, prefix := redistest.Shared(b)
	w := stagetest.New(b, url, prefix, 16)
	ctx := stagetest.Trusted(b)
	for i := range 16 {
		p := w.Space.Partition(i)
		_, err := w.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for j := range 100_000 / 16 {
				id, at := fmt.Sprint("g", i, ".", j), redis.Z{Score: float64(j)}
				at.Member = id
				pipe.ZAdd(ctx, p.Groups(), at)
				pipe.ZAdd(ctx, p.Ended(), at)
				if j%10 == 0 {
					pipe.ZAdd(ctx, p.Failed(), at)
					pipe.HSet(ctx, p.Group(id), "id", id, "status", "FAILED", "tenant", "t", "accepted", 10, "failed", 10)
				}
			}
			return nil
		})
		require.NoError(b, err)
	}
	for b.Loop() {
		l, err := w.Store.Groups(ctx, messages.ListQuery{Status: api.StatusFailed, Limit: 50})
		require.NoError(b, err)
		require.Len(b, l.Groups, 50)
	}
}

func TestListIsFiltered(t *testing.T) {
	w := stagetest.Parallel(t, 4)
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
		query messages.ListQuery
		want  []string
	}{
		"type, also of a job":           {messages.ListQuery{Type: "T"}, []string{"mail-2", "mail-1", "promo-1"}},
		"unknown type":                  {messages.ListQuery{Type: "X"}, nil},
		"paused":                        {messages.ListQuery{Paused: &yes}, []string{"promo-2"}},
		"not paused":                    {messages.ListQuery{Paused: &no}, []string{"mail-2", "mail-1", "promo-1"}},
		"with failed jobs":              {messages.ListQuery{FailedJobs: &yes}, []string{"mail-1"}},
		"without failed jobs":           {messages.ListQuery{FailedJobs: &no}, []string{"mail-2", "promo-2", "promo-1"}},
		"prefix":                        {messages.ListQuery{Prefix: "promo"}, []string{"promo-2", "promo-1"}},
		"whole id":                      {messages.ListQuery{Prefix: "mail-1"}, []string{"mail-1"}},
		"since":                         {messages.ListQuery{Since: time.UnixMilli(2000)}, []string{"mail-2", "mail-1", "promo-2"}},
		"since within a millisecond":    {messages.ListQuery{Since: time.UnixMilli(2000).Add(time.Microsecond)}, []string{"mail-2", "mail-1", "promo-2"}},
		"since, by status":              {messages.ListQuery{Since: time.UnixMilli(3000), Status: created}, []string{"mail-2", "mail-1"}},
		"since, by status and a tenant": {messages.ListQuery{Since: time.UnixMilli(3000), Status: created, Tenant: "acme"}, []string{"mail-1"}},
		"all":                           {messages.ListQuery{Type: "T", Paused: &no, Prefix: "m", Status: created, Since: time.UnixMilli(1), Tenant: "acme"}, []string{"mail-1"}},
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
	w := stagetest.Parallel(t, 1)
	ctx, p := stagetest.Trusted(t), w.Space.Partition(0)
	for i := range 5 {
		id := fmt.Sprint("g", i)
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Type: "T"}, now)
		require.NoError(t, err)
		require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Group(id), "status", "FAILED").Err())
		require.NoError(t, w.Conn.Cmd.ZAdd(ctx, p.Failed(), redis.Z{Score: float64(100 - i), Member: id}).Err())
	}
	require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Group("g1"), "status", "CREATED").Err(), "it was retried meanwhile")
	page, err := w.Store.Groups(ctx, messages.ListQuery{Status: api.StatusFailed, Limit: 2})
	require.NoError(t, err)
	require.Equal(t, []string{"g0", "g2"}, []string{page.Groups[0].ID, page.Groups[1].ID})
	require.Equal(t, 3, page.Scanned)
	next, err := w.Store.Groups(ctx, messages.ListQuery{Status: api.StatusFailed, Limit: 9, Cursor: page.Cursor})
	require.NoError(t, err)
	require.Len(t, next.Groups, 2)
	for _, q := range []messages.ListQuery{{Limit: 2, Cursor: page.Cursor}, {Limit: 2, Status: created, Cursor: page.Cursor}} {
		_, err = w.Store.Groups(ctx, q)
		var invalid *messages.ValidationError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "cursor", invalid.Fields[0].Field)
	}
}

const created = api.StatusCreated
