package guard_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// patience is the longest time for which a test waits for something that must happen.
const patience = 30 * time.Second

// dial returns a Redis client with go-redis's default timeouts and retries, as most users of the
// package have it.
// dial returns a client of a server, or of a Cluster whose addresses are separated by commas.
func dial(t *testing.T, addr string) redis.UniversalClient {
	t.Helper()
	rdb := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: strings.Split(addr, ","), Protocol: 2, DisableIdentity: true})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

func dialURL(t *testing.T, url string) redis.UniversalClient {
	return dial(t, strings.Join(redistest.Options(t, url).Addrs, ","))
}

func newClient(t *testing.T, rdb redis.UniversalClient, prefix string) *guard.Client {
	t.Helper()
	c := guard.New(rdb, guard.Prefix(prefix))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

// TestFirstInFirstOut: calls get the lock in the order in which they came, over several clients,
// although calls between them are cancelled or time out, and a client between them dies.
func TestFirstInFirstOut(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		ctx := t.Context()
		var clients []*guard.Client
		for range 3 {
			clients = append(clients, newClient(t, dialURL(t, url), prefix))
		}
		dying := dialURL(t, url)
		dead := newClient(t, dying, prefix)
		first, err := clients[0].Lock("l").TryLock(ctx)
		require.NoError(t, err)

		queued := func(n int) {
			require.Eventually(t, func() bool {
				v, err := clients[0].Inspect(ctx, "lock/l")
				return err == nil && v.Queue.Length == int64(n)
			}, patience, time.Millisecond)
		}
		var mu sync.Mutex
		var order []int
		var fences []int64
		var waiting sync.WaitGroup
		cancelled, cancel := context.WithCancel(ctx)
		const calls = 12
		n := 0
		for i := range calls {
			waiting.Go(func() {
				switch i % 4 {
				case 1: // cancelled
					_, err := clients[i%3].Lock("l").Lock(cancelled)
					require.ErrorIs(t, err, context.Canceled)
				case 2: // its process dies
					_, err := dead.Lock("l", guard.LockMaxWait(4*time.Second)).Lock(ctx)
					require.Error(t, err)
				default:
					l, err := clients[i%3].Lock("l").Lock(ctx)
					require.NoError(t, err)
					mu.Lock()
					order, fences = append(order, i), append(fences, l.Fence())
					mu.Unlock()
					require.NoError(t, l.Release(ctx, guard.Neutral))
				}
			})
			n++
			queued(n)
		}
		require.NoError(t, dying.Close())
		cancel()
		queued(calls - calls/4)
		require.NoError(t, first.Release(ctx, guard.Neutral))
		waiting.Wait()
		require.Equal(t, []int{0, 3, 4, 7, 8, 11}, order)
		require.True(t, slices.IsSorted(fences), "%v", fences)
		require.Greater(t, fences[0], first.Fence())
	})
}

// TestRedisAway: while Redis is suspended, each guard follows its outage policy, and a call with a
// short deadline fails. Afterwards the pool and a limiter work again.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	c := newClient(t, dial(t, server.Addr()), "g:")
	ctx := t.Context()
	open := c.Limiter("open", guard.Bucket(1, time.Hour))
	closed := c.Limiter("closed", guard.Bucket(1, time.Hour), guard.OnOutage(guard.Closed))
	local := c.Limiter("local", guard.Bucket(100, time.Hour), guard.OnOutage(guard.Local(guard.Bucket(2, time.Hour))))
	breaker := c.Breaker("b", guard.BreakerPolicy{Failures: 1, OpenFor: time.Hour, Successes: 1})
	pool, err := c.Pool(ctx, "p", guard.Spec{Members: []guard.Member{{ID: "a"}}})
	require.NoError(t, err)
	lock := c.Lock("l")
	_, err = open.Take(ctx, "k", 1)
	require.NoError(t, err)

	server.Suspend()
	short := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		return f(ctx)
	}
	// Wait until a call has found out that Redis is away. From then on, the limiter open allows
	// calls at once.
	require.Eventually(t, func() bool {
		_, err := open.Take(ctx, "k", 1)
		return err == nil
	}, patience, time.Millisecond)
	for range 5 {
		d, err := open.Take(ctx, "k", 1)
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	err = short(func(ctx context.Context) error { _, err := lock.TryLock(ctx); return err })
	require.Error(t, err)
	var wg sync.WaitGroup
	wg.Go(func() { _, err := closed.Take(ctx, "k", 1); require.ErrorIs(t, err, guard.ErrUnavailable) })
	wg.Go(func() { _, err := lock.TryLock(ctx); require.ErrorIs(t, err, guard.ErrUnavailable) })
	wg.Go(func() { _, err := pool.Acquire(ctx); require.ErrorIs(t, err, guard.ErrUnavailable) })
	wg.Go(func() {
		allowed := 0
		for range 5 {
			d, err := local.Take(ctx, "k", 1)
			require.NoError(t, err)
			if d.Allowed {
				allowed++
			} else {
				require.Positive(t, d.RetryAfter)
			}
		}
		require.Equal(t, 2, allowed)
	})
	wg.Go(func() {
		for range 3 {
			done, err := breaker.Allow(ctx)
			require.NoError(t, err)
			done(guard.Failure)
		}
	})
	wg.Wait()

	server.Resume()
	require.Eventually(t, func() bool {
		l, err := pool.TryAcquire(ctx)
		if err != nil {
			return false
		}
		return l.Release(ctx, guard.Success) == nil
	}, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		d, err := open.Take(ctx, "k", 1)
		return err == nil && !d.Allowed
	}, patience, 10*time.Millisecond, "the limit holds again")
}

// TestLostReplies: with 5% of Redis's replies lost, no rate limit is exceeded, no member is lent
// twice at once, and all leases end.
func TestLostReplies(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	proxy, err := redisproc.NewProxy(server.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	ctx := t.Context()
	// The window is longer than any lease is held; up to two seconds of that may pass before a
	// grant is claimed.
	const members, permits, window, span = 4, 200, 3 * time.Second, 5 * time.Second
	spec := guard.Spec{Rate: guard.PerWindow(permits, window), Lease: 500 * time.Millisecond, MaxWait: 2 * time.Second}
	for i := range members {
		spec.Members = append(spec.Members, guard.Member{ID: fmt.Sprint("m", i)})
	}
	var pools []*guard.Pool
	for range 4 {
		p, err := newClient(t, dial(t, proxy.Addr()), "g:").Pool(ctx, "p", spec)
		require.NoError(t, err)
		pools = append(pools, p)
	}
	proxy.DropReplies(0.05, rand.New(rand.NewPCG(1, 2)))

	type use struct{ from, to time.Time }
	var mu sync.Mutex
	uses := map[string][]use{}
	var holders [members]atomic.Int32
	var wg sync.WaitGroup
	ends := time.Now().Add(span)
	for _, p := range pools {
		for range 4 {
			wg.Go(func() {
				for time.Now().Before(ends) {
					l, err := p.Acquire(ctx)
					if err != nil {
						continue
					}
					from := time.Now()
					i := l.Member()[1] - '0'
					select {
					case <-l.Lost():
					default:
						require.EqualValues(t, 1, holders[i].Add(1), "two holders of %s", l.Member())
						holders[i].Add(-1)
					}
					mu.Lock()
					uses[l.Member()] = append(uses[l.Member()], use{from, time.Now()})
					mu.Unlock()
					_ = l.Release(ctx, guard.Success)
				}
			})
		}
	}
	wg.Wait()
	require.Positive(t, proxy.Dropped())
	proxy.Heal()
	total := 0
	for member, all := range uses {
		total += len(all)
		slices.SortFunc(all, func(a, b use) int { return a.from.Compare(b.from) })
		for i := permits; i < len(all); i++ {
			// from and to are when a lease began and ended. The downstream API sees the call
			// between them.
			require.GreaterOrEqual(t, all[i].to.Sub(all[i-permits].from), window, "more than %d calls of %s", permits, member)
		}
	}
	require.Positive(t, total)
	admin := newClient(t, dial(t, server.Addr()), "g:")
	require.Eventually(t, func() bool {
		// A call whose reply was lost may still stand in the queue or hold a member. It is removed
		// once it has expired, and by the next call only.
		if l, err := pools[0].TryAcquire(ctx, guard.On("m0")); err == nil {
			_ = l.Release(ctx, guard.Success)
		}
		v, err := admin.Inspect(ctx, "p")
		if err != nil || v.Queue.Length > 0 {
			return false
		}
		for _, m := range v.Members {
			if m.Held > 0 {
				return false
			}
		}
		return true
	}, patience, 20*time.Millisecond)
}

// TestFlush: after FLUSHALL, the Client declares its pools again and puts its waiting calls into
// the queue again; fences keep growing.
func TestFlush(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := t.Context()
		rdb := dialURL(t, url)
		c := newClient(t, rdb, "g:")
		p, err := c.Pool(ctx, "p", guard.Spec{Members: []guard.Member{{ID: "a"}}, Lease: time.Second})
		require.NoError(t, err)
		before, err := p.Acquire(ctx)
		require.NoError(t, err)
		got := make(chan *guard.Lease, 1)
		go func() {
			l, err := p.Acquire(ctx)
			if err == nil {
				got <- l
			}
		}()
		require.Eventually(t, func() bool {
			v, err := p.Inspect(ctx)
			return err == nil && v.Queue.Length == 1
		}, patience, time.Millisecond)
		require.NoError(t, rdb.FlushAll(ctx).Err())
		select {
		case after := <-got:
			require.Greater(t, after.Fence(), before.Fence())
			require.NoError(t, after.Release(ctx, guard.Success))
		case <-time.After(patience):
			require.Fail(t, "the waiting call got no lease")
		}
		select {
		case <-before.Lost():
		case <-time.After(patience):
			require.Fail(t, "the holder did not learn that its lease is lost")
		}
		require.NoError(t, before.Release(ctx, guard.Success), "already gone")
	})
}

// TestHolderDies: the holder of a lock with leases of 1 s loses its connection to Redis. A call of
// another client, which waits, gets the lock.
func TestHolderDies(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		ctx := t.Context()
		dying := dialURL(t, url)
		_, err := newClient(t, dying, prefix).Lock("l", guard.TTL(time.Second)).TryLock(ctx)
		require.NoError(t, err)
		require.NoError(t, dying.Close()) // no renewal reaches Redis any more
		c := newClient(t, dialURL(t, url), prefix)
		l, err := c.Lock("l", guard.TTL(time.Second)).Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, l.Release(ctx, guard.Neutral))
	})
}

// TestLeasesAreRenewed: a lease of 3 s is still held after 7 s, and is lost when an operator takes
// it back. The next lease of the lock has a higher fence.
func TestLeasesAreRenewed(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		ctx := t.Context()
		c := newClient(t, dialURL(t, url), prefix)
		lock := c.Lock("l", guard.TTL(3*time.Second)) // a busy machine may delay a renewal
		l, err := lock.TryLock(ctx)
		require.NoError(t, err)
		<-time.After(7 * time.Second)
		select {
		case <-l.Lost():
			require.Fail(t, "lost")
		default:
		}
		_, err = lock.TryLock(ctx)
		require.ErrorIs(t, err, guard.ErrDenied)
		require.NoError(t, c.Control(ctx, "lock/l", "1", guard.TakeBack))
		select {
		case <-l.Lost():
		case <-time.After(patience):
			require.Fail(t, "the holder did not learn that its lease was taken back")
		}
		next, err := lock.TryLock(ctx)
		require.NoError(t, err)
		require.Greater(t, next.Fence(), l.Fence())
		require.NoError(t, next.Release(ctx, guard.Neutral))
	})
}

// TestClose: waiting calls leave the queue, Close waits for holders, and later calls are refused.
// If the ctx of Close ends first, the leases that are held are lost.
func TestClose(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		ctx := t.Context()
		c := newClient(t, dialURL(t, url), prefix)
		other := newClient(t, dialURL(t, url), prefix)
		l, err := c.Lock("l").TryLock(ctx)
		require.NoError(t, err)
		waited := make(chan error, 1)
		go func() { _, err := c.Lock("l").Lock(ctx); waited <- err }()
		require.Eventually(t, func() bool {
			v, err := c.Inspect(ctx, "lock/l")
			return err == nil && v.Queue.Length == 1
		}, patience, time.Millisecond)
		closed := make(chan error, 1)
		go func() { closed <- c.Close(ctx) }()
		require.ErrorIs(t, <-waited, guard.ErrClosed)
		select {
		case err := <-closed:
			require.Fail(t, "Close did not wait for the holder", "%v", err)
		default:
		}
		_, err = c.Lock("l").TryLock(ctx)
		require.ErrorIs(t, err, guard.ErrClosed)
		require.NoError(t, l.Release(ctx, guard.Neutral))
		require.NoError(t, <-closed)
		next, err := other.Lock("l").Lock(ctx)
		require.NoError(t, err)
		held, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, other.Close(held), context.DeadlineExceeded)
		select {
		case <-next.Lost():
		default:
			require.Fail(t, "Close leaves no lease")
		}
	})
}

// TestDo: the context of the function that Do calls ends when the lease is lost. An error and a
// panic of the function both count as a failure of the member.
func TestDo(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		ctx := t.Context()
		c := newClient(t, dialURL(t, url), prefix)
		p, err := c.Pool(ctx, "p", guard.Spec{
			Members: []guard.Member{{ID: "a"}}, Lease: 600 * time.Millisecond,
			Breaker: guard.BreakerPolicy{Failures: 2, OpenFor: time.Hour, Successes: 1},
		})
		require.NoError(t, err)
		mine := errors.New("mine")
		require.ErrorIs(t, p.Do(ctx, func(context.Context, *guard.Lease) error { return mine }), mine)
		require.NoError(t, p.Do(ctx, func(ctx context.Context, l *guard.Lease) error {
			require.NoError(t, c.Control(ctx, "p", "a", guard.TakeBack))
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), guard.ErrLost)
			return nil
		}))
		require.Panics(t, func() {
			_ = p.Do(ctx, func(context.Context, *guard.Lease) error { panic("mine") })
		})
		_, err = p.TryAcquire(ctx)
		var denied *guard.DeniedError
		require.ErrorAs(t, err, &denied)
		require.Equal(t, guard.CircuitOpen, denied.Reason)
	})
}

// TestCluster: on a Redis Cluster of three masters, 12 locks and 12 limiters work through two
// clients, and the call that waits for each lock gets it. The hash slot of the first lock moves
// meanwhile.
func TestCluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.ClusterWithReplicas(t, 3)
	ctx := t.Context()
	var clients []*guard.Client
	for range 2 {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{cluster.Masters[0].Addr()}})
		t.Cleanup(func() { _ = rdb.Close() })
		clients = append(clients, newClient(t, rdb, "g:"))
	}
	for i := range 12 {
		name := fmt.Sprint("lock", i)
		l, err := clients[0].Lock(name).TryLock(ctx)
		require.NoError(t, err)
		d, err := clients[1].Limiter(name, guard.PerWindow(1, time.Hour)).Take(ctx, "k", 1)
		require.NoError(t, err)
		require.True(t, d.Allowed)
		next := make(chan error, 1)
		go func() {
			l, err := clients[1].Lock(name).Lock(ctx)
			if err == nil {
				err = l.Release(ctx, guard.Neutral)
			}
			next <- err
		}()
		require.Eventually(t, func() bool {
			v, err := clients[0].Inspect(ctx, "lock/"+name)
			return err == nil && v.Queue.Length == 1
		}, patience, time.Millisecond)
		if i == 0 {
			slot := cluster.SlotOf("g:guard:{lock/" + name + "}:guard")
			from := cluster.MasterOf(slot)
			to := cluster.Masters[0]
			if to == from {
				to = cluster.Masters[1]
			}
			cluster.MoveSlot(slot, to)
		}
		require.Eventually(t, func() bool { return l.Release(ctx, guard.Neutral) == nil }, patience, 20*time.Millisecond)
		require.NoError(t, <-next)
	}
	names, err := clients[0].Guards(ctx, false)
	require.NoError(t, err)
	require.Len(t, names, 12)
}
