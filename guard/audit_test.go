package guard

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// auditedPool is a pool whose keys in Redis a test damages. Its members: a and b are lent, c is
// lent as a probe of a half-open breaker, d is free, e is cooling, f is off.
type auditedPool struct {
	c    *Client
	rdb  redis.UniversalClient
	base string
	held map[string]*Lease // by member
}

func newAuditedPool(t *testing.T, url, prefix string) *auditedPool {
	_, c := newTestClient(t, url, prefix)
	t.Cleanup(func() { c.renewer.loseAll() }) // so that Close does not wait for them
	p := &auditedPool{c: c, rdb: c.rdb, base: keyspace.GuardBase(prefix, kindPool, "p"), held: map[string]*Lease{}}
	ctx := t.Context()
	var members []Member
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		members = append(members, Member{ID: id})
	}
	pool, err := c.Pool(ctx, "p", Spec{
		Members: members, Rate: PerWindow(1000, time.Hour), Breaker: BreakerPolicy{Failures: 5, OpenFor: time.Millisecond, Successes: 2},
	})
	require.NoError(t, err)
	require.NoError(t, c.Control(ctx, "p", "c", Open))
	for _, id := range []string{"a", "b", "c"} {
		var l *Lease
		require.Eventually(t, func() bool {
			l, err = pool.TryAcquire(ctx, On(id))
			return err == nil
		}, 10*time.Second, time.Millisecond)
		p.held[id] = l
	}
	require.True(t, p.held["c"].Probe())
	l, err := pool.TryAcquire(ctx, On("e"))
	require.NoError(t, err)
	require.NoError(t, l.Release(ctx, Throttled(time.Hour)))
	require.NoError(t, c.Control(ctx, "p", "f", Disable))
	return p
}

func (p *auditedPool) lose(t *testing.T, id string) {
	require.NoError(t, p.rdb.ZRem(t.Context(), p.base+"free", id).Err())
	require.NoError(t, p.rdb.ZRem(t.Context(), p.base+"cooling", id).Err())
}

// TestAuditFindsAndRepairs damages a pool in 19 ways: Audit reports each by its law and changes
// nothing. After Repair, Audit finds nothing, and a second Repair changes nothing.
func TestAuditFindsAndRepairs(t *testing.T) {
	t.Parallel()
	type edit func(ctx context.Context, p *auditedPool) error
	do := func(args ...any) edit {
		return func(ctx context.Context, p *auditedPool) error {
			command := slices.Clone(args)
			command[1] = p.base + command[1].(string)
			return p.rdb.Do(ctx, command...).Err()
		}
	}
	lease := func(member string) edit {
		return func(ctx context.Context, p *auditedPool) error {
			return p.rdb.HDel(ctx, p.base+"lease", p.held[member].call).Err()
		}
	}
	for name, test := range map[string]struct {
		damage edit
		law    string
		want   []string // parts of the details
		left   string   // list and member: where the member is after the repair
	}{
		"free and cooling":   {do("ZADD", "cooling", 1, "d"), LawState, []string{"d is free and cooling"}, "free d"},
		"neither":            {do("ZREM", "free", "d"), LawState, []string{"d could be lent"}, "free d"},
		"cooling, lost":      {do("ZREM", "cooling", "e"), LawState, []string{"e could be lent"}, "cooling e"},
		"off, free":          {do("ZADD", "free", 1, "f"), LawState, []string{"f is off"}, ""},
		"busy, free":         {do("ZADD", "free", 1, "a"), LawState, []string{"a has no lease left"}, ""},
		"busy, cooling":      {do("ZADD", "cooling", 9e15, "a"), LawState, []string{"a has no lease left"}, ""},
		"not a member":       {do("ZADD", "free", 1, "ghost"), LawState, []string{"ghost is free or cooling"}, ""},
		"not there":          {do("ZADD", "members", 1, "ghost"), LawState, []string{"ghost is on the list"}, ""},
		"removed, remains":   {do("HSET", "m:f", "off", "R"), LawState, []string{"f was removed"}, ""},
		"too many leases":    {do("HSET", "m:a", "h", 7), LawHeld, []string{"a counts 7 leases, but has 1"}, ""},
		"leases of nobody":   {do("HSET", "m:d", "h", -1), LawHeld, []string{"d counts -1 leases, but has 0"}, "free d"},
		"too few probes":     {do("HSET", "m:c", "p", 0), LawHeld, []string{"c counts 0 probes of its breaker, but has 1"}, ""},
		"too many probes":    {do("HSET", "m:d", "p", 2), LawHeld, []string{"d counts 2 probes"}, "free d"},
		"no lease":           {lease("b"), LawHeld, []string{"has an end of its lease, but no lease", "b counts 1 leases, but has 0"}, "free b"},
		"a lease of nothing": {do("HSET", "lease", "x", "5|ghost|0|0|c|5|1"), LawHeld, []string{"call x has no end"}, ""},
		"no end": {func(ctx context.Context, p *auditedPool) error {
			return p.rdb.ZRem(ctx, p.base+"leases", p.held["a"].call).Err()
		}, LawHeld, []string{"has no end"}, ""},
		"an unreadable lease": {func(ctx context.Context, p *auditedPool) error {
			return p.rdb.HSet(ctx, p.base+"lease", p.held["a"].call, "nonsense").Err()
		}, LawHeld, []string{"but no lease", "a counts 1 leases, but has 0"}, "free a"},
		"nobody waits":     {do("ZADD", "queue", 1, "x"), LawQueue, []string{"call x stands in the queue"}, ""},
		"not in the queue": {do("HSET", "waiters", "x", "client|99999999999999"), LawQueue, []string{"call x waits"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			redistest.Stores(t, func(t *testing.T, url, prefix string) {
				p := newAuditedPool(t, url, prefix)
				ctx := t.Context()
				found, err := p.c.Audit(ctx, "pool/p")
				require.NoError(t, err)
				require.Empty(t, found, "an undamaged guard keeps the laws")

				require.NoError(t, test.damage(ctx, p))
				before := dump(t, p)
				found, err = p.c.Audit(ctx, "p")
				require.NoError(t, err)
				require.Equal(t, before, dump(t, p), "the audit changes nothing")
				require.Len(t, found, len(test.want), "%v", found)
				for i, f := range found {
					require.Equal(t, "pool/p", f.Guard)
					require.Equal(t, test.law, f.Law)
					require.Contains(t, f.Detail, test.want[i])
				}

				repaired, err := p.c.Repair(ctx, "p")
				require.NoError(t, err)
				for _, f := range found {
					require.Contains(t, repaired, f)
				}
				found, err = p.c.Audit(ctx, "p")
				require.NoError(t, err)
				require.Empty(t, found)
				after := dump(t, p)
				again, err := p.c.Repair(ctx, "p")
				require.NoError(t, err)
				require.Empty(t, again)
				require.Equal(t, after, dump(t, p), "a repeated repair changes nothing")
				if list, member, ok := strings.Cut(test.left, " "); ok {
					require.NoError(t, p.rdb.ZScore(ctx, p.base+list, member).Err(), "%s must be %s", member, list)
				}
			})
		})
	}
}

// dump returns all keys of the guard.
func dump(t *testing.T, p *auditedPool) map[string]any {
	t.Helper()
	all := map[string]any{}
	ctx := t.Context()
	keys, err := redistest.Keys(ctx, p.rdb, p.base+"*")
	require.NoError(t, err)
	for _, key := range keys {
		if kind := p.rdb.Type(ctx, key).Val(); kind == "hash" {
			all[key] = p.rdb.HGetAll(ctx, key).Val()
		} else {
			all[key] = p.rdb.ZRangeWithScores(ctx, key, 0, -1).Val()
		}
	}
	return all
}

// TestRepairServesTheQueue removes the free member d from the key free, so that it is neither free
// nor cooling. Repair gives it to the call that waits for a member.
func TestRepairServesTheQueue(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		p := newAuditedPool(t, url, prefix)
		ctx := t.Context()
		p.lose(t, "d")
		granted := make(chan *Lease, 1)
		go func() {
			l, err := (&Pool{p.c.use(kindPool, "p", nil)}).Acquire(ctx)
			if err == nil {
				granted <- l
			}
			close(granted)
		}()
		require.Eventually(t, func() bool {
			return p.rdb.ZCard(ctx, p.base+"queue").Val() == 1
		}, 10*time.Second, time.Millisecond)
		found, err := p.c.Audit(ctx, "p")
		require.NoError(t, err)
		require.Len(t, found, 1)
		_, err = p.c.Repair(ctx, "p")
		require.NoError(t, err)
		l := <-granted
		require.NotNil(t, l)
		require.Equal(t, "d", l.Member())
		require.NoError(t, l.Release(ctx, Neutral))
	})
}

// TestAuditReadsAllPages: of a pool of 450 members, which Audit reads in pages, it finds all four
// that are neither free nor cooling, and Repair frees them. A guard that was never used has no
// violation, and a bad name is an error.
func TestAuditReadsAllPages(t *testing.T) {
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		ctx := t.Context()
		var members []Member
		for i := range 450 {
			members = append(members, Member{ID: "m" + string(rune('0'+i/100)) + string(rune('0'+i/10%10)) + string(rune('0'+i%10))})
		}
		_, err := c.Pool(ctx, "large", Spec{Members: members})
		require.NoError(t, err)
		base := keyspace.GuardBase(prefix, kindPool, "large")
		for _, id := range []string{"m000", "m199", "m200", "m449"} {
			require.NoError(t, c.rdb.ZRem(ctx, base+"free", id).Err())
		}
		found, err := c.Audit(ctx, "large")
		require.NoError(t, err)
		require.Len(t, found, 4)
		repaired, err := c.Repair(ctx, "large")
		require.NoError(t, err)
		require.Len(t, repaired, 4)
		require.EqualValues(t, 450, c.rdb.ZCard(ctx, base+"free").Val())
		none, err := c.Audit(ctx, "never-used")
		require.NoError(t, err)
		require.Empty(t, none)
		_, err = c.Audit(ctx, "pool/a b")
		require.ErrorIs(t, err, ErrInvalid)
	})
}
