package audit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// hard is a require.TestingT for goroutines other than the test's: a failure ends the goroutine by a panic that run catches.
type hard struct{}

type failure2 string

func (hard) Errorf(format string, args ...any) { panic(failure2(fmt.Sprintf(format, args...))) }
func (hard) FailNow()                          { panic(failure2("failed")) }

// churn moves jobs through a world by all scripts at once, until it is stopped.
type churn struct {
	*world
	tenants, types []string

	mu     sync.Mutex
	groups []string
	moves  int
}

// run starts the movers and returns what stops them and tells how many moves they made.
func (c *churn) run(t *testing.T) (stop func() int) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	problems := make(chan any, 100)
	mover := func(step func(*rand.Rand)) {
		wg.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					problems <- p
				}
			}()
			for r := rand.New(rand.NewPCG(1, rand.Uint64())); ctx.Err() == nil; {
				step(r)
				c.mu.Lock()
				c.moves++
				c.mu.Unlock()
			}
		})
	}
	for _, p := range c.space.All() {
		mover(c.producer(p))
		mover(c.fetcher(p))
		mover(c.dispatcher(p))
		mover(c.worker(p, "c1"))
		mover(c.worker(p, "c2"))
		mover(c.aggregator(p, "1"))
		mover(c.aggregator(p, "2"))
		mover(c.watcher(p))
	}
	stop = sync.OnceValue(func() int {
		cancel()
		wg.Wait()
		close(problems)
		for p := range problems {
			require.Fail(t, "a mover has failed", "%v", p)
		}
		return c.moves
	})
	t.Cleanup(func() { stop() })
	return stop
}

// may accepts answers that say that a group has moved on meanwhile.
func (c *churn) may(err error) {
	if err != nil && !errors.Is(err, api.ErrNotFound) && !errors.Is(err, api.ErrSealed) && !errors.Is(err, api.ErrConflict) {
		require.NoError(c, err)
	}
}

// some is a random group of a partition, "" while there is none.
func (c *churn) some(p keyspace.Partition, r *rand.Rand) string {
	ids, err := c.c.ZRange(c.ctx, p.Groups(), 0, -1).Result()
	c.ok(err)
	if len(ids) == 0 {
		return ""
	}
	return ids[r.IntN(len(ids))]
}

func (c *churn) producer(p keyspace.Partition) func(*rand.Rand) {
	n := 0
	return func(r *rand.Rand) {
		if open := c.c.ZCard(c.ctx, p.Open()).Val(); open < 8 {
			n++
			tenant := c.tenants[r.IntN(len(c.tenants))]
			if c.space.OfTenant(tenant) != p {
				return
			}
			fields := []string{"aggregate", aggregates, "failure_threshold", "0.3"}
			if r.IntN(4) == 0 {
				fields = append(fields, "run_at", strconv.FormatInt(time.Now().Add(20*time.Millisecond).UnixMilli(), 10))
			}
			c.create(fmt.Sprintf("g%d-%d", p.Index(), n), tenant, c.types[r.IntN(len(c.types))], fields...)
		}
		id := c.some(p, r)
		if id == "" {
			return
		}
		all := jobs(1+r.IntN(40), func(j *lua.NewJob) {
			j.Type = c.types[r.IntN(len(c.types))]
			switch r.IntN(20) {
			case 0:
				large(j)
			case 1:
				j.RunAt = time.Now().Add(30 * time.Millisecond)
			}
		})
		if c.c.HGet(c.ctx, p.Load(all[0].Type), "waiting").Val() < "400" {
			_, err := lua.Append(c.ctx, c.c, p, lua.AppendArgs{Group: id, Limit: 1e7, Jobs: all})
			c.may(err)
		}
		if r.IntN(10) == 0 {
			_, err := lua.Seal(c.ctx, c.c, p, id, nil)
			c.may(err)
		}
	}
}

func (c *churn) fetcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		limit := noLimit
		if r.IntN(2) == 0 {
			limit = lua.Limit{Window: 5 * time.Millisecond, Permits: 20}
		}
		c.admit(p, c.types[r.IntN(len(c.types))], 30, limit)
		_, _, err := lua.Schedule(c.ctx, c.c, p, 10)
		c.ok(err)
	}
}

func (c *churn) dispatcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.promote(p, c.types...)
		if r.IntN(5) == 0 {
			_, err := lua.Reclaim(c.ctx, c.c, p, c.types[r.IntN(len(c.types))], time.Duration(r.IntN(5))*time.Millisecond, 20, 3)
			c.ok(err)
		}
	}
}

func (c *churn) worker(p keyspace.Partition, name string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		typ := c.types[r.IntN(len(c.types))]
		read := c.read(p, typ, name, 20)
		if n := r.IntN(len(read) + 1); r.IntN(3) == 0 {
			c.back(p, typ, lua.OutcomeUnstarted, 0, read[:n]...)
			read = read[n:]
		}
		started := c.start(p, typ, read)
		if r.IntN(10) == 0 {
			started = append(started, c.start(p, typ, started)...) // delivered once more
		}
		for _, j := range started {
			switch r.IntN(12) {
			case 0:
				c.back(p, typ, lua.OutcomeFailed, 0, j)
			case 1:
				c.back(p, typ, lua.OutcomeRetry, time.Duration(r.IntN(20))*time.Millisecond, j)
			case 2:
				c.back(p, typ, lua.OutcomeThrottled, 5*time.Millisecond, j)
			case 3:
				c.back(p, typ, lua.OutcomeReleased, 0, j)
			case 4: // the worker dies
			default:
				c.done(p, typ, j)
			}
		}
	}
}

func (c *churn) aggregator(p keyspace.Partition, slot string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.consumers(p.ResultStream(), keyspace.GroupAggregator)
		for _, m := range c.fresh(p.ResultStream(), keyspace.GroupAggregator, slot, int64(1+r.IntN(20))) {
			if id := m.Values["g"].(string); c.c.Exists(c.ctx, p.Group(id)).Val() == 1 {
				c.reduceEntry(p, slot, m)
				continue
			}
			_, err := lua.Reduce(c.ctx, c.c, p, lua.ReduceArgs{Group: m.Values["g"].(string), Slot: slot, Entries: []string{m.ID}})
			c.ok(err)
		}
	}
}

// watcher also does what people do to groups that its scripts are at work on.
func (c *churn) watcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		fence, err := lua.Lead(c.ctx, c.c, p, "w", time.Hour)
		c.ok(err)
		id := c.some(p, r)
		if id == "" {
			return
		}
		if r.IntN(10) == 0 {
			if err = lua.Cancel(c.ctx, c.c, p, id); r.IntN(2) == 0 {
				_, err = lua.Reopen(c.ctx, c.c, p, id)
			}
			c.may(err)
		}
		for _, id := range append(c.c.SMembers(c.ctx, p.Attention()).Val(), id) {
			for _, chunk := range []func(context.Context, redis.Cmdable, keyspace.Partition, string) (bool, error){lua.Sweep, lua.Requeue} {
				for more := true; more; {
					more, err = chunk(c.ctx, c.c, p, id)
					c.ok(err)
				}
			}
			_, err = lua.Advance(c.ctx, c.c, p, id, fence)
			c.ok(err)
		}
		if old := c.c.ZRange(c.ctx, p.Ended(), 0, -20).Val(); len(old) > 0 && c.idle(p, old[0]) {
			c.ok(lua.Expire(c.ctx, c.c, p, old[0], fence, r.IntN(2) == 0))
			if c.c.Exists(c.ctx, p.Group(old[0])).Val() == 0 {
				c.ok(c.c.Del(c.ctx, c.space.OfGroup(old[0]).Owner(old[0])).Err())
			}
		}
	}
}

// idle says whether an ended group has nothing in the streams any more. Retention is longer than anything stays there.
func (c *churn) idle(p keyspace.Partition, id string) bool {
	if strings.ContainsAny(c.c.Get(c.ctx, p.States(id)).Val(), "D") {
		return false
	}
	for _, typ := range c.types {
		for _, m := range c.c.XRange(c.ctx, p.Ready(typ), "-", "+").Val() {
			if strings.HasPrefix(m.Values[lua.Field].(string), id+"|") {
				return false
			}
		}
	}
	return true
}

// While jobs move through all scripts, an audit finds nothing; what is wrong meanwhile it finds nevertheless.
func TestAuditOfAMovingWorld(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		w := newWorld(t, url, prefix, 2)
		moving := *w
		moving.TestingT = hard{}
		c := &churn{world: &moving, tenants: []string{"a", "b", "c", "d", "e"}, types: []string{"T", "U"}}
		stop := c.run(t)
		var jobs int64
		for i := 0; i < 40 || jobs < 3000; i++ {
			r := w.audit(Options{batch: []int{0, 1000}[i%2]})
			require.Empty(t, r.Violations, "audit %d", i)
			jobs = max(jobs, r.Jobs)
		}
		moves := stop()
		r := w.audit(Options{})
		require.Empty(t, r.Violations)
		t.Logf("%d moves, %d groups and %d jobs at last", moves, r.Groups, r.Jobs)
	})
}
