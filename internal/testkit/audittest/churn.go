package audittest

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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// panicTB fails with a panic, because a goroutine other than the test's may not call FailNow.
type panicTB struct{ tb }

func (panicTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (panicTB) FailNow()                          { panic("failed") }

// Churn moves jobs through a world with all scripts at the same time, until it is stopped.
type Churn struct {
	*World
	Tenants, Types []string
	Moves          atomic.Int64 // how many steps were made
}

// NewChurn returns a churn of a world with these tenants and types.
func NewChurn(w *World, tenants, types []string) *Churn {
	moving := *w
	moving.tb = panicTB{w.tb}
	return &Churn{World: &moving, Tenants: tenants, Types: types}
}

// Run starts the movers, in one goroutine each or in turns in a single one. It returns a function
// that stops them and returns their failures.
func (c *Churn) Run(ctx context.Context, inTurns bool) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var movers []func(*rand.Rand)
	for _, p := range c.Space.All() {
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
					c.Moves.Add(1)
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
func (c *Churn) may(err error) {
	if err != nil && !errors.Is(err, api.ErrNotFound) && !errors.Is(err, api.ErrSealed) &&
		!errors.Is(err, api.ErrConflict) {
		require.NoError(c, err)
	}
}

// some returns a random group that the churn has created in a partition; "" if there is none.
func (c *Churn) some(p keyspace.Partition, r *rand.Rand) string {
	ids, err := c.C.ZRange(c.Context(), p.Groups(), 0, -1).Result()
	c.OK(err)
	ids = slices.DeleteFunc(ids, func(id string) bool { return !strings.HasPrefix(id, "g") })
	if len(ids) == 0 {
		return ""
	}
	return ids[r.IntN(len(ids))]
}

func (c *Churn) producer(p keyspace.Partition) func(*rand.Rand) {
	n := 0
	return func(r *rand.Rand) {
		if open := c.C.ZCard(c.Context(), p.Open()).Val(); open < 8 {
			n++
			tenant := c.Tenants[r.IntN(len(c.Tenants))]
			if c.Space.OfTenant(tenant) != p {
				return
			}
			fields := []string{"aggregate", aggregates, "failure_threshold", "0.3"}
			if r.IntN(4) == 0 {
				at := time.Now().Add(20 * time.Millisecond)
				fields = append(fields, "run_at", strconv.FormatInt(at.UnixMilli(), 10))
			}
			c.Create(fmt.Sprintf("g%d-%d", p.Index(), n), tenant, c.Types[r.IntN(len(c.Types))], fields...)
		}
		id := c.some(p, r)
		if id == "" {
			return
		}
		all := Jobs(1+r.IntN(40), func(j *ledger.NewJob) {
			j.Type = c.Types[r.IntN(len(c.Types))]
			switch r.IntN(20) {
			case 0:
				large(j)
			case 1:
				j.RunAt = time.Now().Add(30 * time.Millisecond)
			}
		})
		if waiting, _ := c.C.HGet(c.Context(), p.Load(all[0].Type), "waiting").Int64(); waiting < 400 {
			_, err := ledger.Append(c.Context(), c.C, p, ledger.AppendArgs{Group: id, Limit: 1e7, Jobs: all})
			c.may(err)
		}
		if r.IntN(10) == 0 {
			_, err := ledger.Seal(c.Context(), c.C, p, id, nil)
			c.may(err)
		}
	}
}

func (c *Churn) fetcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		limit := NoLimit
		if r.IntN(2) == 0 {
			limit = ledger.Limit{Window: 5 * time.Millisecond, Permits: 20}
		}
		c.Admit(p, c.Types[r.IntN(len(c.Types))], 30, limit)
		_, _, err := ledger.Schedule(c.Context(), c.C, p, 10)
		c.OK(err)
	}
}

func (c *Churn) dispatcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.promote(p, c.Types...)
		if r.IntN(5) == 0 {
			typ, lease := c.Types[r.IntN(len(c.Types))], time.Duration(r.IntN(5))*time.Millisecond
			c.did(ledger.Reclaim(c.Context(), c.C, p, typ, lease, 20, 3))
		}
	}
}

func (c *Churn) worker(p keyspace.Partition, name string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		typ := c.Types[r.IntN(len(c.Types))]
		read := c.Read(p, typ, name, 20)
		if n := r.IntN(len(read) + 1); r.IntN(3) == 0 {
			c.back(p, typ, ledger.OutcomeUnstarted, 0, read[:n]...)
			read = read[n:]
		}
		started := c.Start(p, typ, read)
		if r.IntN(10) == 0 {
			started = append(started, c.Start(p, typ, started)...) // delivered once more
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
				c.Done(p, typ, j)
			}
		}
	}
}

func (c *Churn) aggregator(p keyspace.Partition, partial string) func(*rand.Rand) {
	return func(r *rand.Rand) {
		c.consumers(p.ResultStream(), keyspace.GroupAggregator)
		for _, m := range c.fresh(p.ResultStream(), keyspace.GroupAggregator, partial, int64(1+r.IntN(20))) {
			id := m.Values["g"].(string)
			if c.C.Exists(c.Context(), p.Group(id)).Val() == 1 {
				c.reduceEntry(p, partial, m)
				continue
			}
			c.did(ledger.Reduce(c.Context(), c.C, p,
				ledger.ReduceArgs{Group: id, Partial: partial, Entries: []string{m.ID}}))
		}
	}
}

// watcher also cancels and reopens groups, as operators do, while its scripts work on them.
func (c *Churn) watcher(p keyspace.Partition) func(*rand.Rand) {
	return func(r *rand.Rand) {
		fence, id := c.lead(p), c.some(p, r)
		if id == "" {
			return
		}
		if r.IntN(10) == 0 {
			err := ledger.Cancel(c.Context(), c.C, p, id)
			if r.IntN(2) == 0 {
				_, err = ledger.Reopen(c.Context(), c.C, p, id, "")
			}
			c.may(err)
		}
		for _, id := range append(c.C.SMembers(c.Context(), p.Dirty()).Val(), id) {
			c.complete(ledger.Sweep, p, id)
			c.complete(ledger.Requeue, p, id)
			c.did(ledger.Advance(c.Context(), c.C, p, id, fence))
		}
		if old := c.C.ZRange(c.Context(), p.Ended(), 0, -20).Val(); len(old) > 0 && c.idle(p, old[0]) {
			c.OK(ledger.Expire(c.Context(), c.C, p, old[0], fence, r.IntN(2) == 0))
			if c.C.Exists(c.Context(), p.Group(old[0])).Val() == 0 {
				c.OK(c.C.Del(c.Context(), c.Space.OfGroup(old[0]).Owner(old[0])).Err())
			}
		}
	}
}

// idle reports whether an ended group has no entry in the streams any more. Only such groups may
// expire: in production, retention is longer than entries stay in the streams.
func (c *Churn) idle(p keyspace.Partition, id string) bool {
	if strings.ContainsAny(c.C.Get(c.Context(), p.States(id)).Val(), "D") {
		return false
	}
	for _, typ := range c.Types {
		for _, m := range c.C.XRange(c.Context(), p.Ready(typ), "-", "+").Val() {
			if strings.HasPrefix(ledger.MessageBlob(m.Values), id+"|") {
				return false
			}
		}
	}
	return true
}
