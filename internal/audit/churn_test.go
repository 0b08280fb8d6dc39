package audit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// hard fails with a panic, because a goroutine other than the test's may not call FailNow.
type hard struct{ tb }

func (hard) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (hard) FailNow()                          { panic("failed") }

// churn moves jobs through a world with all scripts at the same time, until it is stopped.
type churn struct {
	*world
	tenants, types []string
	moves          atomic.Int64
}

// run starts the movers, in one goroutine each or in turns in a single one. It returns a function
// that stops them and returns their failures.
func (c *churn) run(ctx context.Context, inTurns bool) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var movers []func(*rand.Rand)
	for _, p := range c.space.All() {
		movers = append(movers, c.producer(p), c.fetcher(p), c.dispatcher(p), c.worker(p, "c1"), c.worker(p, "c2"),
			c.aggregator(p, "1"), c.aggregator(p, "2"), c.watcher(p))
	}
	crews := [][]func(*rand.Rand){movers}
	if !inTurns {
		crews = slices.Collect(slices.Chunk(movers, 1))
	}
	var wg sync.WaitGroup
	failures := make([]error, len(crews))
	for i, crew := range crews {
		wg.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					failures[i] = fmt.Errorf("a mover has failed: %v", p)
				}
			}()
			for r := rand.New(rand.NewPCG(1, uint64(i))); ctx.Err() == nil; {
				for _, step := range crew {
					step(r)
					c.moves.Add(1)
				}
			}
		})
	}
	return sync.OnceValue(func() error {
		cancel()
		wg.Wait()
		return errors.Join(failures...)
	})
}

// may accepts errors that say that another mover has changed the group in between.
func (c *churn) may(err error) {
	if err != nil && !errors.Is(err, api.ErrNotFound) && !errors.Is(err, api.ErrSealed) && !errors.Is(err, api.ErrConflict) {
		require.NoError(c, err)
	}
}

// some returns a random group that the churn has created in a partition; "" if there is none.
func (c *churn) some(p keyspace.Partition, r *rand.Rand) string {
	ids, err := c.c.ZRange(c.Context(), p.Groups(), 0, -1).Result()
	c.ok(err)
	ids = slices.DeleteFunc(ids, func(id string) bool { return !strings.HasPrefix(id, "g") })
	if len(ids) == 0 {
		return ""
	}
	return ids[r.IntN(len(ids))]
}

func (c *churn) producer(p keyspace.Partition) func(*rand.Rand) {
	n := 0
	return func(r *rand.Rand) {
		if open := c.c.ZCard(c.Context(), p.Open()).Val(); open < 8 {
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
		all := jobs(1+r.IntN(40), func(j *ledger.NewJob) {
			j.Type = c.types[r.IntN(len(c.types))]
			switch r.IntN(20) {
			case 0:
				large(j)
			case 1:
				j.RunAt = time.Now().Add(30 * time.Millisecond)
			}
		})
		if waiting, _ := c.c.HGet(c.Context(), p.Load(all[0].Type), "waiting").Int64(); waiting < 400 {
			_, err := ledger.Append(c.Context(), c.c, p, ledger.AppendArgs{Group: id, Limit: 1e7, Jobs: all})
			c.may(err)
		}
		if r.IntN(10) == 0 {
			_, err := ledger.Seal(c.Context(), c.c, p, id, nil)
			c.may(err)
		}
	}
}

func (c *churn) fetcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		limit := noLimit
		if r.IntN(2) == 0 {
			limit = ledger.Limit{Window: 5 * time.Millisecond, Permits: 20}
		}
		c.admit(p, c.types[r.IntN(len(c.types))], 30, limit)
		_, _, err := ledger.Schedule(c.Context(), c.c, p, 10)
		c.ok(err)
	}
}

func (c *churn) dispatcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.promote(p, c.types...)
		if r.IntN(5) == 0 {
			_, err := ledger.Reclaim(c.Context(), c.c, p, c.types[r.IntN(len(c.types))], time.Duration(r.IntN(5))*time.Millisecond, 20, 3)
			c.ok(err)
		}
	}
}

func (c *churn) worker(p keyspace.Partition, name string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		typ := c.types[r.IntN(len(c.types))]
		read := c.read(p, typ, name, 20)
		if n := r.IntN(len(read) + 1); r.IntN(3) == 0 {
			c.back(p, typ, ledger.OutcomeUnstarted, 0, read[:n]...)
			read = read[n:]
		}
		started := c.start(p, typ, read)
		if r.IntN(10) == 0 {
			started = append(started, c.start(p, typ, started)...) // delivered once more
		}
		for _, j := range started {
			switch r.IntN(12) {
			case 0:
				c.back(p, typ, ledger.OutcomeFailed, 0, j)
			case 1:
				c.back(p, typ, ledger.OutcomeRetry, time.Duration(r.IntN(20))*time.Millisecond, j)
			case 2:
				c.back(p, typ, ledger.OutcomeThrottled, 5*time.Millisecond, j)
			case 3:
				c.back(p, typ, ledger.OutcomeReleased, 0, j)
			case 4: // the worker dies
			default:
				c.done(p, typ, j)
			}
		}
	}
}

func (c *churn) aggregator(p keyspace.Partition, partial string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.consumers(p.ResultStream(), keyspace.GroupAggregator)
		for _, m := range c.fresh(p.ResultStream(), keyspace.GroupAggregator, partial, int64(1+r.IntN(20))) {
			if id := m.Values["g"].(string); c.c.Exists(c.Context(), p.Group(id)).Val() == 1 {
				c.reduceEntry(p, partial, m)
				continue
			}
			_, err := ledger.Reduce(c.Context(), c.c, p, ledger.ReduceArgs{Group: m.Values["g"].(string), Partial: partial, Entries: []string{m.ID}})
			c.ok(err)
		}
	}
}

// watcher also cancels and reopens groups, as operators do, while its scripts work on them.
func (c *churn) watcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		fence, err := ledger.Lead(c.Context(), c.c, p, "w", time.Hour)
		c.ok(err)
		id := c.some(p, r)
		if id == "" {
			return
		}
		if r.IntN(10) == 0 {
			if err = ledger.Cancel(c.Context(), c.c, p, id); r.IntN(2) == 0 {
				_, err = ledger.Reopen(c.Context(), c.c, p, id, "")
			}
			c.may(err)
		}
		for _, id := range append(c.c.SMembers(c.Context(), p.Dirty()).Val(), id) {
			for _, chunk := range []func(context.Context, redis.Cmdable, keyspace.Partition, string) (bool, error){ledger.Sweep, ledger.Requeue} {
				for more := true; more; {
					more, err = chunk(c.Context(), c.c, p, id)
					c.ok(err)
				}
			}
			_, err = ledger.Advance(c.Context(), c.c, p, id, fence)
			c.ok(err)
		}
		if old := c.c.ZRange(c.Context(), p.Ended(), 0, -20).Val(); len(old) > 0 && c.idle(p, old[0]) {
			c.ok(ledger.Expire(c.Context(), c.c, p, old[0], fence, r.IntN(2) == 0))
			if c.c.Exists(c.Context(), p.Group(old[0])).Val() == 0 {
				c.ok(c.c.Del(c.Context(), c.space.OfGroup(old[0]).Owner(old[0])).Err())
			}
		}
	}
}

// idle reports whether an ended group has no entry in the streams any more. Only such groups may
// expire: in production, retention is longer than entries stay in the streams.
func (c *churn) idle(p keyspace.Partition, id string) bool {
	if strings.ContainsAny(c.c.Get(c.Context(), p.States(id)).Val(), "D") {
		return false
	}
	for _, typ := range c.types {
		for _, m := range c.c.XRange(c.Context(), p.Ready(typ), "-", "+").Val() {
			if strings.HasPrefix(ledger.MessageBlob(m.Values), id+"|") {
				return false
			}
		}
	}
	return true
}

// While all scripts move jobs, an audit finds no false violation, and it finds a true one.
func TestAuditOfAMovingWorld(t *testing.T) {
	audits, size := map[string]int{"redis": 15, "miniredis": 6}, map[string]int{"redis": 1500, "miniredis": 100}
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		_, server, _ := strings.Cut(t.Name(), "/")
		w := newWorld(t, url, prefix, 2)
		moving := *w
		moving.tb = hard{t}
		c := &churn{world: &moving, tenants: []string{"a", "b", "c", "d", "e"}, types: []string{"T", "U"}}
		for i, tenant := range c.tenants { // more than one page
			id := "g" + tenant
			w.create(id, tenant, c.types[i%2])
			w.append(id, jobs(size[server], ofType(c.types[i%2])))
			w.append(id, jobs(size[server], later))
		}
		stop := c.run(t.Context(), server == "miniredis") // miniredis doesn't share its time fairly among connections
		t.Cleanup(func() { _ = stop() })
		for i := 0; i < audits[server] || c.moves.Load() < 250; i++ {
			r := w.audit(Options{stateBytes: []int{0, 1000}[i%2]})
			require.Empty(t, r.Violations, "audit %d", i)
		}

		p := w.space.OfTenant("a")
		w.create("broken", "a", "V")
		w.append("broken", jobs(3))
		w.ok(w.c.LPop(w.Context(), p.Queue("broken", "V")).Err())
		for range 3 {
			require.Contains(t, summary(w.audit(Options{})), of(LawLocation, "broken", 0))
		}
		require.NoError(t, stop())
		require.Equal(t, []string{of(LawLocation, "broken", 0)}, summary(w.audit(Options{})))
		t.Logf("%d moves", c.moves.Load())
	})
}
