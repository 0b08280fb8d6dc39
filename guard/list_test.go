package guard

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestListOfGuards(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix+"[x]*:")
		ctx := t.Context()
		_, other := newTestClient(t, url, prefix+"[x]y:") // its name would match an unescaped pattern
		require.NoError(t, other.Lock("other").Do(ctx, release))

		want := []string{"breaker/b", "lock/l", "pool/p", "semaphore/s"}
		_, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}, {ID: "b"}, {ID: "c"}}})
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "a", Disable))
		l, err := c.use(kindPool, "p", nil).acquire(ctx, acquireConfig{member: "b"})
		require.NoError(t, err)
		require.NoError(t, c.Lock("l").Do(ctx, release))
		require.NoError(t, c.Semaphore("s", 3).Do(ctx, release))
		done, err := c.Breaker("b", BreakerPolicy{Failures: 1, OpenFor: time.Hour, Successes: 1}).Allow(ctx)
		require.NoError(t, err)
		done(Failure)
		hosts := c.PerKey("hosts", Spec{})
		var keys []string
		for i := range 25 {
			keys = append(keys, fmt.Sprintf("key/hosts/h%02d", i))
			require.NoError(t, hosts.For(fmt.Sprintf("H%02d", i)).Do(ctx, release))
		}

		for _, limit := range []int{1, 3, 7, 1000} {
			require.Equal(t, want, listAll(t, c, Query{Limit: limit}), limit)
			require.Equal(t, keys, listAll(t, c, Query{Kind: "key", Limit: limit}), limit)
		}
		require.Equal(t, []string{"pool/p"}, listAll(t, c, Query{Kind: "pool"}))
		names, err := c.Guards(ctx, false)
		require.NoError(t, err)
		require.Equal(t, want, names)
		names, err = c.Guards(ctx, true)
		require.NoError(t, err)
		require.Len(t, names, len(want)+len(keys))

		page, err := c.List(ctx, Query{Kind: "pool"})
		require.NoError(t, err)
		require.Equal(t, []api.GuardSummary{{
			Name: "pool/p", Rev: 1, Members: 3, Free: 1, Leases: 1,
			Counters: map[string]int64{"granted": 1, "denied": 0, "queued": 0, "expired": 0, "stale": 0, "lost": 0},
		}}, page.Guards)
		require.NoError(t, l.Release(ctx, Success))

		for _, bad := range []Query{{Kind: "pools"}, {Cursor: "x"}, {Cursor: "1.2"}, {Cursor: "-1.2."}, {Cursor: "1.x."}} {
			_, err := c.List(ctx, bad)
			require.ErrorIs(t, err, ErrInvalid, bad)
		}
		page, err = c.List(ctx, Query{Cursor: "7.0."}) // of a cluster that had more masters
		require.NoError(t, err)
		require.Equal(t, api.GuardList{Guards: []api.GuardSummary{}}, page)
	})
}

func listAll(t *testing.T, c *Client, q Query) (names []string) {
	t.Helper()
	for {
		page, err := c.List(t.Context(), q)
		require.NoError(t, err)
		require.LessOrEqual(t, len(page.Guards), max(q.Limit, fewListed*boolInt(q.Limit == 0)))
		for _, g := range page.Guards {
			names = append(names, g.Name)
		}
		if q.Cursor = page.Cursor; q.Cursor == "" {
			slices.Sort(names)
			return names
		}
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestControlErrors(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		_, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}})
		require.NoError(t, err)
		require.ErrorIs(t, c.Control(ctx, "none", "a", Disable), ErrUnknownGuard)
		require.ErrorIs(t, c.Control(ctx, "p", "b", Disable), ErrUnknownMember)
		require.ErrorIs(t, c.Control(ctx, "pool/p", "a", Open), ErrNoBreaker)
		for _, name := range []string{"", "/p", "pools/p", "pool/", "pool/a/b", "key/p", "key/p/", "a b"} {
			require.ErrorIs(t, c.Control(ctx, name, "a", Disable), ErrInvalid, name)
		}
		require.ErrorIs(t, c.Control(ctx, "p", "a b", Disable), ErrInvalid)
		require.ErrorIs(t, c.Control(ctx, "p", "a", "stop"), ErrInvalid)
		for _, do := range []Action{Disable, Disable, Enable, Enable, TakeBack} {
			require.NoError(t, c.Control(ctx, "p", "a", do))
		}
		require.Empty(t, c.meter.labels["none"], "a name that operators give is no label")
	})
}

// sendings is a hook of the Redis client that counts what is sent, a pipeline once, and takes its
// time.
type sendings struct{ n atomic.Int64 }

func (s *sendings) count() {
	s.n.Add(1)
	time.Sleep(5 * time.Millisecond)
}

func (s *sendings) DialHook(next redis.DialHook) redis.DialHook { return next }
func (s *sendings) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.count()
		return next(ctx, cmd)
	}
}
func (s *sendings) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		s.count()
		return next(ctx, cmds)
	}
}

// TestListReadsGuardsTogether: a page of guards costs much fewer round trips than it has guards.
func TestListReadsGuardsTogether(t *testing.T) {
	t.Parallel()
	// A server of its own: a SCAN on the shared one finds keys twice while its table grows.
	rdb, c := newTestClient(t, redistest.Server(t).URL(), "")
	const guards = 250
	for i := range guards {
		require.NoError(t, c.Lock(fmt.Sprint("l", i)).Do(t.Context(), release))
	}
	_, err := c.List(t.Context(), Query{Limit: 1}) // loads the script
	require.NoError(t, err)
	seen := &sendings{}
	rdb.AddHook(seen)
	page, err := c.List(t.Context(), Query{Limit: guards})
	require.NoError(t, err)
	require.Len(t, page.Guards, guards)
	require.Less(t, seen.n.Load(), int64(guards/2))
}
