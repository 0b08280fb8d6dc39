package guard

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestGivenUpCallsLeaveNothing: 100 calls of TryLock get contexts that end after 100 µs, and each
// lease is released. At most 15 s later no lock has a lease in Redis.
func TestGivenUpCallsLeaveNothing(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
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
	t.Parallel()
	url, prefix := redistest.Shared(t)
	_, c := newTestClient(t, url, prefix)
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

// TestRefusedDeclarationChangesNothing: after a declaration of a pool is refused, its member can
// still be lent.
func TestRefusedDeclarationChangesNothing(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	_, c := newTestClient(t, url, prefix)
	p, err := c.Pool(t.Context(), "p", Spec{Members: []Member{{ID: "a"}}})
	require.NoError(t, err)
	_, err = c.Pool(t.Context(), "p", Spec{Members: []Member{{ID: "a"}}, Concurrency: -7})
	require.ErrorIs(t, err, ErrInvalid)
	l, err := p.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Release(t.Context(), Success))
}

func TestMistakesOfSpecsAreNamed(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	_, c := newTestClient(t, url, prefix)
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
	t.Parallel()
	url, prefix := redistest.Shared(t)
	_, c := newTestClient(t, url, prefix)
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
	t.Parallel()
	url, prefix := redistest.Shared(t)
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
	t.Parallel()
	url, prefix := redistest.Shared(t)
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
	t.Parallel()
	url, prefix := redistest.Shared(t)
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
