package guard

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// sizes counts in Redis, for a pool, all its members, its free ones, and the hashes of members.
func sizes(t *testing.T, rdb redis.UniversalClient, base string) [3]int64 {
	t.Helper()
	hashes := map[string]bool{} // SCAN may return a key twice
	it := rdb.Scan(t.Context(), 0, base+"m:*", 1000).Iterator()
	for it.Next(t.Context()) {
		hashes[it.Val()] = true
	}
	require.NoError(t, it.Err())
	return [3]int64{
		rdb.ZCard(t.Context(), base+"members").Val(), rdb.ZCard(t.Context(), base+"free").Val(),
		int64(len(hashes)),
	}
}

// TestLargePool declares a pool of 10,000 members, which takes several script calls, and then the
// pool with only its first three: the others are removed, but m9999, which is lent, stays,
// disabled, until its release.
func TestLargePool(t *testing.T) {
	t.Parallel()
	rdb, c := newTestClient(t, redistest.Server(t).URL(), "t:")
	base := keyspace.GuardBase("t:", "pool", "p")
	spec := Spec{}
	for i := range 10_000 {
		spec.Members = append(spec.Members, Member{ID: fmt.Sprint("m", i)})
	}
	p, err := c.Pool(t.Context(), "p", spec)
	require.NoError(t, err)
	require.Equal(t, [3]int64{10_000, 10_000, 10_000}, sizes(t, rdb, base))
	view, err := p.Inspect(t.Context())
	require.NoError(t, err)
	require.Len(t, view.Members, 10_000)

	l, err := p.TryAcquire(t.Context(), On("m9999"))
	require.NoError(t, err)
	spec.Members = spec.Members[:3]
	_, err = c.Pool(t.Context(), "p", spec)
	require.NoError(t, err)
	require.Equal(t, [3]int64{4, 3, 4}, sizes(t, rdb, base), "the member that is lent remains")
	_, err = p.TryAcquire(t.Context(), On("m9999"))
	var denied *DeniedError
	require.ErrorAs(t, err, &denied)
	require.Equal(t, Disabled, denied.Reason)
	require.NoError(t, l.Release(t.Context(), Success))
	require.Equal(t, [3]int64{3, 3, 3}, sizes(t, rdb, base))
	_, err = p.TryAcquire(t.Context(), On("m9999"))
	require.ErrorIs(t, err, ErrUnknownMember)
}

// TestRev: without Spec.Rev the newest declaration of a pool wins; with it, only a declaration with
// a higher Rev replaces the stored one.
func TestRev(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		declare := func(rev int64, members ...string) []string {
			spec := Spec{Rev: rev, Lease: time.Duration(len(members)) * time.Second}
			for _, id := range members {
				spec.Members = append(spec.Members, Member{ID: id})
			}
			p, err := c.Pool(t.Context(), "p", spec)
			require.NoError(t, err)
			view, err := p.Inspect(t.Context())
			require.NoError(t, err)
			var ids []string
			for _, m := range view.Members {
				ids = append(ids, m.ID)
			}
			return ids
		}
		require.Equal(t, []string{"a"}, declare(0, "a"))
		require.Equal(t, []string{"a", "b"}, declare(0, "a", "b"), "the newest wins")
		require.Equal(t, []string{"c"}, declare(7, "c"), "a higher number")
		require.Equal(t, []string{"c"}, declare(7, "a", "b"), "the same number, another spec")
		require.Equal(t, []string{"c"}, declare(6, "a"), "a lower number")
		require.Equal(t, []string{"d"}, declare(8, "d"))
		require.Equal(t, []string{"e"}, declare(0, "e"), "without a number")
	})
}

// TestOverrides: a member may have a limit, a breaker and a concurrency of its own, instead of
// those of the pool's spec.
func TestOverrides(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		one := PerWindow(1, time.Hour)
		p, err := c.Pool(t.Context(), "p", Spec{
			Rate: PerWindow(5, time.Hour), Breaker: BreakerPolicy{Failures: 1, OpenFor: time.Hour, Successes: 1},
			Members: []Member{
				{ID: "slow", Rate: &one}, {ID: "wide", Concurrency: 2}, {ID: "tough", Breaker: &BreakerPolicy{}},
				{ID: "free", Rate: &Rate{}, Concurrency: Unbounded},
			},
		})
		require.NoError(t, err)
		try := func(member string) Reason {
			_, err := p.TryAcquire(t.Context(), On(member))
			var denied *DeniedError
			if errors.As(err, &denied) {
				return denied.Reason
			}
			require.NoError(t, err)
			return ""
		}
		fail := func(member string) {
			l, err := p.TryAcquire(t.Context(), On(member))
			require.NoError(t, err)
			require.NoError(t, l.Release(t.Context(), Failure))
		}
		fail("tough")
		require.Equal(t, Reason(""), try("tough"), "it has no breaker")
		require.Equal(t, Busy, try("tough"))
		require.Equal(t, Reason(""), try("wide"))
		require.Equal(t, Reason(""), try("wide"))
		require.Equal(t, Busy, try("wide"))
		l, err := p.TryAcquire(t.Context(), On("slow"))
		require.NoError(t, err)
		require.NoError(t, l.Release(t.Context(), Success))
		require.Equal(t, RateLimited, try("slow"))
		for range 7 {
			require.Equal(t, Reason(""), try("free"))
		}
		fail("free")
		require.Equal(t, CircuitOpen, try("free"))
	})
}

// TestLimitChanges: a new rate of the same limiter kind keeps the permits that were spent. A
// limiter of another kind begins with the permits that are left, but at most with its own number.
func TestLimitChanges(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		left := func(rate Rate) int64 {
			p, err := c.Pool(t.Context(), "p", Spec{Members: []Member{{ID: "a"}}, Rate: rate})
			require.NoError(t, err)
			view, err := p.Inspect(t.Context())
			require.NoError(t, err)
			return *view.Members[0].Left
		}
		require.Equal(t, int64(10), left(PerWindow(10, time.Hour)))
		p, err := c.Pool(t.Context(), "p", Spec{Members: []Member{{ID: "a"}}, Rate: PerWindow(10, time.Hour)})
		require.NoError(t, err)
		for range 4 {
			l, err := p.TryAcquire(t.Context())
			require.NoError(t, err)
			require.NoError(t, l.Release(t.Context(), Success))
		}
		require.Equal(t, int64(6), left(PerWindow(10, time.Hour)))
		require.Equal(t, int64(1), left(PerWindow(5, time.Hour)), "4 are spent")
		require.Equal(t, int64(8), left(PerWindow(12, time.Hour)))
		require.Equal(t, int64(8), left(Bucket(20, time.Hour)), "the minimum of both")
		require.Equal(t, int64(3), left(PerWindow(3, time.Hour)), "the minimum of both")
		require.Equal(t, int64(3), left(Bucket(30, time.Hour)))
	})
}

// TestNoPublish: if the Redis user may not publish, locks and pools fail with ErrNoPublish, and
// nothing is written. Limiters, which publish nothing, work.
func TestNoPublish(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	admin := server.Client()
	for name, rules := range map[string][]string{
		"command": {"+@all", "-publish", "&*"},
		"channel": {"+@all", "resetchannels", "&other:*"},
	} {
		t.Run(name, func(t *testing.T) {
			args := []any{"ACL", "SETUSER", name, "on", ">secret", "~*"}
			for _, r := range rules {
				args = append(args, r)
			}
			require.NoError(t, admin.Do(t.Context(), args...).Err())
			url := strings.Replace(server.URL(), "redis://", "redis://"+name+":secret@", 1)
			_, c := newTestClient(t, url, name+":")
			_, err := c.Lock("l").TryLock(t.Context())
			require.ErrorIs(t, err, ErrNoPublish)
			_, err = c.Pool(t.Context(), "p", Spec{Members: []Member{{ID: "a"}}})
			require.ErrorIs(t, err, ErrNoPublish)
			require.Empty(t, admin.Keys(t.Context(), name+":guard:{*").Val(), "no guard was written")
			d, err := c.Limiter("l", PerWindow(1, time.Second)).Take(t.Context(), "k", 1)
			require.NoError(t, err, "a limiter needs no channel")
			require.True(t, d.Allowed)
		})
	}
}

// TestTimesToLive: the keys of a lock with leases of 10 s live for 35 to 70 s more, after each
// step. The keys of a breaker that is open for 3 h live for 4 h, those of a key guard for its
// window of 2 h or longer. Example.org and example.ORG are one key guard.
func TestTimesToLive(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		rdb, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		within := func(kind, name string, low, high time.Duration) {
			t.Helper()
			base := keyspace.GuardBase(prefix, kind, name)
			keys, err := redistest.Keys(ctx, rdb, base+"*")
			require.NoError(t, err)
			require.NotEmpty(t, keys)
			for _, key := range keys {
				ttl := rdb.PTTL(ctx, key).Val()
				require.True(t, low <= ttl && ttl <= high, "%s lives for %v, not %v to %v", key, ttl, low, high)
			}
		}
		k := c.Lock("k", TTL(10*time.Second))
		l, err := k.TryLock(ctx)
		require.NoError(t, err)
		within("lock", "k", 65*time.Second, 70*time.Second)
		guard := keyspace.GuardBase(prefix, "lock", "k") + "guard"
		keys, err := redistest.Keys(ctx, rdb, strings.TrimSuffix(guard, "guard")+"*")
		require.NoError(t, err)
		for _, key := range keys {
			require.NoError(t, rdb.PExpire(ctx, key, 38*time.Second).Err())
		}
		_, err = k.TryLock(ctx)
		require.ErrorIs(t, err, ErrDenied)
		within("lock", "k", 65*time.Second, 70*time.Second) // less than lease + 30 s were left

		waited := make(chan error, 1)
		go func() {
			next, err := k.Lock(ctx)
			if err == nil {
				err = next.Release(ctx, Neutral)
			}
			waited <- err
		}()
		require.Eventually(t, func() bool {
			return rdb.Exists(ctx, strings.TrimSuffix(guard, "guard")+"clients").Val() == 1
		}, patience, time.Millisecond)
		within("lock", "k", 60*time.Second, 70*time.Second)
		require.NoError(t, l.Release(ctx, Neutral))
		require.NoError(t, <-waited)
		within("lock", "k", 35*time.Second, 70*time.Second)

		b := c.Breaker("b", BreakerPolicy{Failures: 1, OpenFor: 3 * time.Hour, Successes: 1})
		done, err := b.Allow(ctx)
		require.NoError(t, err)
		done(Failure)
		within("breaker", "b", 3*time.Hour+59*time.Minute, 4*time.Hour)

		p := c.PerKey("h", Spec{Rate: PerWindow(1, 2*time.Hour), Concurrency: Unbounded})
		l, err = p.For("Example.org").TryAcquire(ctx)
		require.NoError(t, err)
		require.NoError(t, l.Release(ctx, Success))
		within("key", "h/example.org", 2*time.Hour, 2*time.Hour+time.Minute)
		_, err = p.For("example.ORG").TryAcquire(ctx)
		require.ErrorIs(t, err, ErrDenied)
	})
}

// TestLateAndUnknown: a client whose clock was set to 1 µs, so that Redis refuses its call as late,
// repeats the call and gets a lease. After FLUSHALL, a call declares the pool again and gets a
// higher fence.
func TestLateAndUnknown(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		rdb, c := newTestClient(t, url, "t:")
		ctx := t.Context()
		p, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}})
		require.NoError(t, err)
		p.g.clock.set(1) // as if the last reply were very old
		l, err := p.TryAcquire(ctx)
		require.NoError(t, err)
		require.Greater(t, p.g.clock.validUntil(), int64(1e15))

		require.NoError(t, rdb.FlushAll(ctx).Err())
		next, err := p.Acquire(ctx)
		require.NoError(t, err)
		require.Greater(t, next.Fence(), l.Fence())
		require.NoError(t, next.Release(ctx, Success))
		require.NoError(t, l.Release(ctx, Success), "it is gone, which is no error")
		_, err = p.TryAcquire(ctx, On("b"))
		require.ErrorIs(t, err, ErrUnknownMember)
	})
}

// TestQueue: calls get the member in the order in which they came. A call that gives up leaves the
// queue.
func TestQueue(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		rdb, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		p, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}, MaxQueue: 3})
		require.NoError(t, err)
		first, err := p.Acquire(ctx)
		require.NoError(t, err)
		queue := keyspace.GuardBase(prefix, "pool", "p") + "queue"
		queued := func(n int64) {
			t.Helper()
			require.Eventually(t, func() bool { return rdb.ZCard(ctx, queue).Val() == n }, patience, time.Millisecond)
		}
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				err := p.Do(ctx, func(_ context.Context, l *Lease) error {
					mu.Lock()
					defer mu.Unlock()
					order = append(order, i)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
			queued(int64(i) + 1)
		}
		limited, cancel := context.WithCancel(ctx)
		left := make(chan error, 1)
		go func() {
			_, err := p.Acquire(limited)
			left <- err
		}()
		queued(3)
		_, err = p.Acquire(ctx)
		require.ErrorIs(t, err, ErrQueueFull)
		var denied *DeniedError
		_, err = p.TryAcquire(ctx)
		require.ErrorAs(t, err, &denied)
		require.Equal(t, Queued, denied.Reason)
		cancel()
		require.ErrorIs(t, <-left, context.Canceled)
		queued(2)
		_, err = p.Acquire(ctx, MaxWait(20*time.Millisecond))
		require.ErrorIs(t, err, ErrWaitTimeout)
		queued(2)
		view, err := p.Inspect(ctx)
		require.NoError(t, err)
		require.Equal(t, int64(2), view.Queue.Length)
		require.NoError(t, first.Release(ctx, Success))
		wg.Wait()
		require.Equal(t, []int{0, 1}, order)
	})
}

// TestTakeBack: an operator ends the lease of a member. Its holder learns that, and the ctx of the
// function that Pool.Do runs ends with ErrLost.
func TestTakeBack(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		p, err := c.Pool(ctx, "p", Spec{Members: []Member{{ID: "a"}}, Lease: 300 * time.Millisecond})
		require.NoError(t, err)
		err = p.Do(ctx, func(ctx context.Context, l *Lease) error {
			require.NoError(t, c.Control(ctx, "p", "a", TakeBack))
			select {
			case <-ctx.Done():
			case <-time.After(patience):
				t.Error("the holder has not learned it")
			}
			require.ErrorIs(t, context.Cause(ctx), ErrLost)
			return nil
		})
		require.NoError(t, err)
		require.ErrorIs(t, c.Control(ctx, "p", "b", Disable), ErrUnknownMember)
		require.ErrorIs(t, c.Control(ctx, "p", "a", Open), ErrNoBreaker, "it has no breaker")
		require.NoError(t, c.Control(ctx, "p", "a", Disable))
		_, err = p.Acquire(ctx)
		var denied *DeniedError
		require.ErrorAs(t, err, &denied)
		require.Equal(t, Disabled, denied.Reason)
		names, err := c.Guards(ctx, true)
		require.NoError(t, err)
		require.Equal(t, []string{"pool/p"}, names)
		health := c.Health(ctx)
		require.True(t, health.Healthy, "%+v", health)
	})
}

// TestTakeBackOfManyLeases: TakeBack ends all 400 leases of a member that is not declared any more,
// and none of another one's. One call of its script looks at 200 leases.
func TestTakeBackOfManyLeases(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		spec := Spec{Members: []Member{{ID: "a"}}, Concurrency: Unbounded}
		p, err := c.Pool(ctx, "p", spec)
		require.NoError(t, err)
		for range 400 {
			_, err := p.TryAcquire(ctx)
			require.NoError(t, err)
		}
		spec.Members = []Member{{ID: "b"}}
		p, err = c.Pool(ctx, "p", spec)
		require.NoError(t, err)
		_, err = p.TryAcquire(ctx)
		require.NoError(t, err)
		require.NoError(t, c.Control(ctx, "p", "a", TakeBack))
		g, err := c.Inspect(ctx, "p")
		require.NoError(t, err)
		held := map[string]int64{}
		for _, m := range g.Members {
			held[m.ID] = m.Held
		}
		require.EqualValues(t, 400, g.Counters["lost"])
		require.Zero(t, held["a"])
		require.EqualValues(t, 1, held["b"])
	})
}

// TestBreaker: a breaker opens after failures in a row, lets one probe through, and closes.
func TestBreaker(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		b := c.Breaker("b", BreakerPolicy{Failures: 2, OpenFor: 100 * time.Millisecond, Successes: 1})
		broken := errors.New("broken")
		for range 2 {
			require.ErrorIs(t, b.Do(ctx, func(context.Context) error { return broken }), broken)
		}
		_, err := b.Allow(ctx)
		var denied *DeniedError
		require.ErrorAs(t, err, &denied)
		require.Equal(t, CircuitOpen, denied.Reason)
		var done func(Outcome)
		require.Eventually(t, func() bool {
			done, err = b.Allow(ctx)
			return err == nil
		}, patience, 10*time.Millisecond)
		_, err = b.Allow(ctx)
		require.ErrorIs(t, err, ErrDenied, "one probe at a time")
		done(Success)
		require.NoError(t, b.Do(ctx, func(context.Context) error { return nil }))
	})
}

// TestOutage: while Redis is away, calls are refused, allowed or limited locally, as the outage
// policy of their guard says.
func TestOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	_, c := newTestClient(t, server.URL(), "t:")
	ctx := t.Context()
	k, b := c.Lock("k"), c.Breaker("b", BreakerPolicy{Failures: 1, OpenFor: time.Second, Successes: 1})
	open, local := c.Limiter("o", PerWindow(1, time.Hour)), c.Limiter("l", PerWindow(1, time.Hour), OnOutage(Local(Bucket(2, time.Hour))))
	closed := c.Limiter("c", PerWindow(1, time.Hour), OnOutage(Closed))
	l, err := k.TryLock(ctx)
	require.NoError(t, err)
	require.NoError(t, l.Release(ctx, Neutral))
	server.Kill()
	_, err = k.TryLock(ctx)
	require.ErrorIs(t, err, ErrUnavailable)
	done, err := b.Allow(ctx)
	require.NoError(t, err)
	done(Success)
	for range 3 {
		d, err := open.Take(ctx, "x", 1)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		_, err = closed.Take(ctx, "x", 1)
		require.ErrorIs(t, err, ErrUnavailable)
	}
	for i := range 3 {
		d, err := local.Take(ctx, "x", 1)
		require.NoError(t, err)
		require.Equal(t, i < 2, d.Allowed)
	}
	require.False(t, c.Health(ctx).Healthy)
}

// TestMistakes: a bad name or number of tokens is an error. A bad spec gives one error, in a line,
// that names all six bad fields. After Close, calls fail with ErrClosed.
func TestMistakes(t *testing.T) {
	_, c := parallelClient(t)
	ctx := t.Context()
	_, err := c.Pool(ctx, "a b", Spec{Lease: time.Nanosecond, MaxQueue: -1, Rev: -1, Concurrency: -7})
	require.ErrorIs(t, err, ErrInvalid)
	for _, field := range []string{"name", "lease", "max queue", "rev", "concurrency", "members"} {
		require.ErrorContains(t, err, field)
	}
	require.NotContains(t, err.Error(), "\n")
	require.Equal(t, 6, strings.Count(err.Error(), "; invalid: ")+1, "%v", err)
	l := c.Limiter("l", Bucket(3, time.Minute))
	_, err = l.Take(ctx, "k", 4)
	require.ErrorIs(t, err, ErrTooManyTokens)
	_, err = l.Take(ctx, "k", 0)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = c.Lock("a/b").TryLock(ctx)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = c.Inspect(ctx, "nothing")
	require.ErrorIs(t, err, ErrUnknownGuard)
	require.NoError(t, c.Close(ctx))
	_, err = c.Lock("k").TryLock(ctx)
	require.ErrorIs(t, err, ErrClosed)
	_, err = l.Take(ctx, "k", 1)
	require.ErrorIs(t, err, ErrClosed)
}

// TestLimitersAreListed: operators see the limit of a limiter after its first Take, and its keys when
// they ask. What deals with members leaves limiters out. Of two calls, the first one registers.
func TestLimitersAreListed(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		rdb, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		l := c.Limiter("api", Bucket(300, time.Minute))
		for n := range mostKeys {
			_, err := l.Take(ctx, fmt.Sprintf("user-%03d", n), 1)
			require.NoError(t, err)
		}
		list, err := c.List(ctx, Query{})
		require.NoError(t, err)
		require.Len(t, list.Guards, 1)
		require.Equal(t, "limiter/api", list.Guards[0].Name)
		list, err = c.List(ctx, Query{Kind: "limiter"})
		require.NoError(t, err)
		require.Len(t, list.Guards, 1)
		v, err := c.Inspect(ctx, "limiter/api")
		require.NoError(t, err)
		require.Equal(t, "token", v.Spec.Limiter)
		require.EqualValues(t, 300, v.Spec.Permits)
		require.EqualValues(t, 60_000, v.Spec.WindowMS)
		require.Empty(t, v.Members)
		keys, more, err := c.Keys(ctx, "limiter/api")
		require.NoError(t, err)
		require.Len(t, keys, mostKeys)
		require.Equal(t, "user-007", keys[7])
		require.False(t, more)
		_, err = l.Take(ctx, "another user", 1)
		require.NoError(t, err)
		keys, more, err = c.Keys(ctx, "limiter/api")
		require.NoError(t, err)
		require.Len(t, keys, mostKeys, "no more, however many there are")
		require.True(t, more)

		names, err := c.Guards(ctx, true)
		require.NoError(t, err)
		require.Empty(t, names)
		require.NoError(t, c.Measure(ctx))
		require.ErrorIs(t, c.Control(ctx, "limiter/api", "1", Disable), ErrUnknownMember)

		key := l.g.keys[0] + "guard"
		ttl, err := rdb.PTTL(ctx, key).Result()
		require.NoError(t, err)
		require.Greater(t, ttl, registeredFor-time.Minute, "a limiter that is used no more is forgotten")
		require.NoError(t, rdb.Del(ctx, key).Err())
		_, err = l.Take(ctx, "user-001", 1)
		require.NoError(t, err)
		_, err = c.Inspect(ctx, "limiter/api")
		require.ErrorIs(t, err, ErrUnknownGuard, "a further call costs nothing")
	})
}

// TestOpenTimeIsOver: a breaker whose open time has passed is shown as half-open, and its member as
// free, although no call has changed them yet in Redis.
func TestOpenTimeIsOver(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		open := func(name string, openFor time.Duration) api.GuardMember {
			done, err := c.Breaker(name, BreakerPolicy{Failures: 1, OpenFor: openFor, Successes: 1}).Allow(ctx)
			require.NoError(t, err)
			done(Failure)
			v, err := c.Inspect(ctx, "breaker/"+name)
			require.NoError(t, err)
			return v.Members[0]
		}
		m := open("long", time.Hour)
		require.Equal(t, []string{"open", "cooling"}, []string{m.Breaker, m.State})
		require.Greater(t, time.Until(*m.OpenUntil), 50*time.Minute)
		open("short", 10*time.Millisecond)
		require.Eventually(t, func() bool {
			v, err := c.Inspect(ctx, "breaker/short")
			require.NoError(t, err)
			m = v.Members[0]
			return m.Breaker == "half_open"
		}, 10*time.Second, time.Millisecond)
		require.Equal(t, "free", m.State)
		require.Nil(t, m.OpenUntil)
		require.Nil(t, m.NextAt)
		l, err := c.List(ctx, Query{Kind: "breaker"})
		require.NoError(t, err)
		for _, g := range l.Guards {
			require.Equal(t, g.Name == "breaker/short", g.Free == 1, g.Name)
			require.Equal(t, g.Name == "breaker/long", g.Cooling == 1, g.Name)
		}
	})
}

// TestPolicyRemovedWhileOpen: a new declaration takes the breaker away from a member whose breaker
// is open. The member is not lent before the open time is over; then its breaker is closed for
// good.
func TestPolicyRemovedWhileOpen(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		spec := Spec{
			Members: []Member{{ID: "a"}},
			Breaker: BreakerPolicy{Failures: 1, OpenFor: 500 * time.Millisecond, Successes: 1},
		}
		p, err := c.Pool(ctx, "p", spec)
		require.NoError(t, err)
		l, err := p.TryAcquire(ctx)
		require.NoError(t, err)
		opened := time.Now()
		require.NoError(t, l.Release(ctx, Failure))
		spec.Breaker = BreakerPolicy{}
		p, err = c.Pool(ctx, "p", spec)
		require.NoError(t, err)
		l, err = p.Acquire(ctx) // waits for the rest of the time
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(opened), 500*time.Millisecond)
		require.False(t, l.Probe())
		require.NoError(t, l.Release(ctx, Failure))
		view, err := p.Inspect(ctx)
		require.NoError(t, err)
		require.Equal(t, "closed", view.Members[0].Breaker)
		require.Equal(t, "free", view.Members[0].State)
	})
}

// TestGivenUpCallsLeaveNothing: 100 calls of TryLock get contexts that end after 100 µs, and each
// lease is released. At most 15 s later no lock has a lease in Redis.
func TestGivenUpCallsLeaveNothing(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	rdb, c := newTestClient(t, url, prefix)
	const n = 100
	for i := range n {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Microsecond)
		if l, err := c.Lock(fmt.Sprint("l", i)).TryLock(ctx); err == nil {
			require.NoError(t, l.Release(t.Context(), Neutral))
		}
		cancel()
	}
	require.Eventually(t, func() bool {
		held := int64(0)
		for i := range n {
			held += rdb.ZCard(t.Context(), fmt.Sprintf("%sguard:{lock/l%d}:leases", prefix, i)).Val()
		}
		return held == 0
	}, patience/2, 10*time.Millisecond)
}

// TestCallsThatWereNotSentAreNotCancelled: after Redis was killed, 500 calls of Breaker.Allow
// succeed by the outage policy Open. Fewer than 50 leave a cancellation to repeat: the others were
// not sent.
func TestCallsThatWereNotSentAreNotCancelled(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	_, c := newTestClient(t, server.URL(), "")
	b := c.Breaker("b", BreakerPolicy{Failures: 3, OpenFor: time.Second, Successes: 1})
	require.NoError(t, b.Do(t.Context(), func(context.Context) error { return nil }))
	server.Kill()
	for range 500 {
		_, err := b.Allow(t.Context()) // outage policy Open
		require.NoError(t, err)
	}
	c.waits.mu.Lock()
	defer c.waits.mu.Unlock()
	require.Less(t, len(c.waits.cancelled), 50)
}

func TestLargeRevIsExact(t *testing.T) {
	_, c := parallelClient(t)
	for _, rev := range []int64{1790000000123456, 1790000000123498, 1 << 53} {
		name := fmt.Sprint("p", rev)
		_, err := c.Pool(t.Context(), name, Spec{Rev: rev - 1, Members: []Member{{ID: "a"}, {ID: "b"}}})
		require.NoError(t, err)
		p, err := c.Pool(t.Context(), name, Spec{Rev: rev, Members: []Member{{ID: "b"}, {ID: "c"}}})
		require.NoError(t, err)
		v, err := p.Inspect(t.Context())
		require.NoError(t, err)
		require.Equal(t, rev, v.Rev)
		require.Len(t, v.Members, 2)
	}
	_, err := c.Pool(t.Context(), "p", Spec{Rev: 1<<53 + 1, Members: []Member{{ID: "a"}}})
	require.ErrorContains(t, err, "rev 9007199254740993: must be 0 to 9007199254740992")
}

func TestMistakesOfSpecsAreNamed(t *testing.T) {
	_, c := parallelClient(t)
	for want, p := range map[string]*Pool{
		"0 leases at once: must be 1 to 1000000":  c.Semaphore("none", 0),
		"-1 leases at once: must be 1 to 1000000": c.Semaphore("all", -1),
		"concurrency -7: must be 1 to 1000000":    c.PerKey("h", Spec{Concurrency: -7}).For("k"),
	} {
		_, err := p.TryAcquire(t.Context())
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, want)
	}
}

// TestShorterLeaseIsRenewed: a lock is lent for a minute and released. Then it is lent for 3 s, and
// this lease is renewed: its end moves on.
func TestShorterLeaseIsRenewed(t *testing.T) {
	_, c := parallelClient(t)
	l, err := c.Lock("x", TTL(time.Minute)).TryLock(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Release(t.Context(), Neutral))
	l, err = c.Lock("x", TTL(3*time.Second)).TryLock(t.Context())
	require.NoError(t, err)
	first := l.Until()
	require.Eventually(t, func() bool { return l.Until().After(first) }, patience, 10*time.Millisecond)
	require.NoError(t, l.Release(t.Context(), Neutral))
}

// TestKeysOutliveSpentPermits: after each of three calls of a key guard, the key of its member
// lives for longer than the spent permit counts, with five rates. After each call, the test cuts
// the times to live of all keys to half the time of new keys, and 10 s.
func TestKeysOutliveSpentPermits(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	rdb, c := newTestClient(t, url, prefix)
	for name, test := range map[string]struct {
		rate Rate
		live time.Duration // how long a spent permit counts
		ttl  time.Duration // of new keys
	}{
		"second": {PerWindow(10, time.Second), time.Second, time.Hour},
		"window": {PerWindow(10, 50*time.Minute), 50 * time.Minute, time.Hour},
		"day":    {PerWindow(10, 24*time.Hour), 24 * time.Hour, 24*time.Hour + time.Minute},
		"bucket": {Rate{Permits: 1, Window: time.Hour, Burst: 30}, 30 * time.Hour, 30*time.Hour + time.Minute},
		"ages":   {Rate{Permits: 1, Window: 24 * time.Hour, Burst: 1e9}, 364 * 24 * time.Hour, 365*24*time.Hour + time.Minute},
	} {
		key := c.PerKey(name, Spec{Rate: test.rate, Concurrency: Unbounded}).For("k")
		base := prefix + "guard:{key/" + name + "/k}:"
		for i := range 3 {
			_, err := key.TryAcquire(t.Context())
			require.NoError(t, err)
			ttl := rdb.PTTL(t.Context(), base+"m:1").Val()
			require.Greater(t, ttl, test.live, name)
			if i == 0 {
				require.InDelta(t, test.ttl, ttl, float64(time.Minute), name)
			}
			for _, k := range []string{"guard", "m:1", "members", "free", "leases", "lease"} {
				require.True(t, rdb.PExpire(t.Context(), base+k, test.ttl/2+10*time.Second).Val(), k)
			}
		}
	}
}

// TestKeysOutliveLeasesAndThrottling: the renewal of a lease of 10 minutes gives its lock's keys,
// which had a minute left, a longer time to live than the lease. The keys of a semaphore whose
// lease ended as throttled for 20 minutes live for longer than that.
func TestKeysOutliveLeasesAndThrottling(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	rdb, c := newTestClient(t, url, prefix)
	_, newer := newTestClient(t, url, prefix)
	outlive := func(base string, least time.Duration, keys ...string) {
		for _, key := range keys {
			require.Greater(t, rdb.PTTL(t.Context(), prefix+"guard:{"+base+"}:"+key).Val(), least, key)
		}
	}
	l, err := c.Lock("x", TTL(10*time.Minute)).TryLock(t.Context())
	require.NoError(t, err)
	_, err = newer.Lock("x", TTL(time.Second)).TryLock(t.Context())
	require.ErrorIs(t, err, ErrDenied)
	for _, key := range []string{"guard", "m:1", "leases", "lease", "members"} {
		rdb.PExpire(t.Context(), prefix+"guard:{lock/x}:"+key, time.Minute)
	}
	require.True(t, c.renewer.renewSome(l.g, l.length, []*Lease{l}))
	outlive("lock/x", 10*time.Minute, "guard", "m:1", "leases", "lease", "members")

	s := c.Semaphore("s", 1)
	l, err = s.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Release(t.Context(), Throttled(20*time.Minute)))
	outlive("semaphore/s", 20*time.Minute, "guard", "m:1", "cooling", "members")
}

// TestCloseLeavesQueues: ten times, a client with five calls in the queue of a lock is closed. When
// Close returns, the queue is empty.
func TestCloseLeavesQueues(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	rdb, holder := newTestClient(t, url, prefix)
	_, err := holder.Lock("x").TryLock(t.Context())
	require.NoError(t, err)
	queue := prefix + "guard:{lock/x}:queue"
	for range 10 {
		c := New(rdb, Prefix(prefix))
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() { _, _ = c.Lock("x").Lock(t.Context()) })
		}
		require.Eventually(t, func() bool { return rdb.ZCard(t.Context(), queue).Val() == 5 }, patience, time.Millisecond)
		require.NoError(t, c.Close(t.Context()))
		require.Zero(t, rdb.ZCard(t.Context(), queue).Val())
		calls.Wait()
	}
}

// TestAHeartbeatEndsNoLeaseThatItsCallHolds: after a call has got a lock, the test delivers the
// grant to the client once more, as a heartbeat may do. The lease is still held.
func TestAHeartbeatEndsNoLeaseThatItsCallHolds(t *testing.T) {
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		lock := c.Lock("k")
		lease, err := lock.Lock(t.Context())
		require.NoError(t, err)

		c.waits.deliver(lease.call, answer{verdict: "GRANTED", fence: lease.fence}, time.Now())
		_, other := newTestClient(t, url, prefix)
		_, err = other.Lock("k").TryLock(t.Context())
		require.ErrorIs(t, err, ErrDenied, "the lease is held")
		require.NoError(t, lease.Release(t.Context(), Neutral))
	})
}

// patience is the longest time for which a test waits for something that must happen. A healthy run
// needs a fraction of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial))
}

// parallelClient is newTestClient on the shared Redis, for a parallel test.
func parallelClient(t *testing.T) (redis.UniversalClient, *Client) {
	t.Helper()
	url, prefix := redistest.Parallel(t)
	return newTestClient(t, url, prefix)
}

func newTestClient(t *testing.T, url, prefix string, opts ...Option) (redis.UniversalClient, *Client) {
	t.Helper()
	o := redistest.Options(t, url)
	o.DialerRetries = 1 // a server that is away is away
	rdb := redis.NewUniversalClient(o)
	c := New(rdb, append([]Option{Prefix(prefix)}, opts...)...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond) // leases may be held
		defer cancel()
		_ = c.Close(ctx)
		_ = rdb.Close()
	})
	return rdb, c
}

// TestLayoutOfGuards: a Client stops to work when another version has announced a layout of the
// guards that it can't read, and goes on when the announcement is taken back.
func TestLayoutOfGuards(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	rdb, c := newTestClient(t, url, prefix)
	limiter := c.Limiter("l", PerWindow(1000, time.Second))
	try := func() error { _, err := limiter.Take(t.Context(), "k", 1); return err }
	require.NoError(t, try())
	key := prefix + "guard:layout"
	require.Equal(t, "1", rdb.HGet(t.Context(), key, "guards").Val())
	require.NoError(t, rdb.HSet(t.Context(), key, "guards", "1+").Err())
	require.Eventually(t, func() bool { return errors.Is(try(), ErrSetup) }, time.Minute, 10*time.Millisecond)
	require.ErrorContains(t, try(), "run a later version, which reads layout 2")
	require.NoError(t, rdb.HSet(t.Context(), key, "guards", "1").Err())
	require.Eventually(t, func() bool { return try() == nil }, time.Minute, 10*time.Millisecond)
}
