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
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

// panicTB is the part of a testing.TB that a World needs. Its failures panic, because only the
// test's own goroutine may call FailNow.
type panicTB struct{ tb }

func (panicTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (panicTB) FailNow()                          { panic("failed") }

// Churn is a load for tests of the audit. Its movers call the scripts by which the roles move jobs
// and groups, with random jobs, until it is stopped.
type Churn struct {
	*World
	Tenants, Types []string
	Moves          atomic.Int64 // how many steps the movers have made
	groups         atomic.Int64 // how many groups were created
}

// mover is one process of a role in a Churn. It moves the jobs of one partition; name is its name
// as a consumer.
type mover struct {
	*Churn
	p    keyspace.Partition
	name string
	step func(mover)
	r    *rand.Rand
}

// NewChurn returns a Churn on the data of w. It creates groups of these tenants and
// types. Half of the tenants begin with a bound of jobs in flight.
func NewChurn(w *World, tenants, types []string) *Churn {
	for _, tenant := range tenants[len(tenants)/2:] {
		w.OK(ledger.SetTenant(w.Context(), w.C, w.Space.OfTenant(tenant), tenant, ledger.TenantSettings{InFlight: new(int64(30))}))
	}
	moving := *w
	moving.tb = panicTB{w.tb}
	return &Churn{World: &moving, Tenants: tenants, Types: types}
}

// Run starts the movers: each in a goroutine of its own, so that they call scripts at the same
// time, or, with inTurns, all in one. It returns a function that stops them and returns their
// failures.
func (c *Churn) Run(ctx context.Context, inTurns bool) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var movers []mover
	for _, p := range c.Space.All() {
		movers = append(movers,
			mover{Churn: c, p: p, step: mover.producer}, mover{Churn: c, p: p, step: mover.fetcher},
			mover{Churn: c, p: p, step: mover.dispatcher}, mover{Churn: c, p: p, step: mover.watcher},
			mover{Churn: c, p: p, step: mover.worker, name: "c1"},
			mover{Churn: c, p: p, step: mover.worker, name: "c2"},
			mover{Churn: c, p: p, step: mover.aggregator, name: "1"},
			mover{Churn: c, p: p, step: mover.aggregator, name: "2"})
	}
	crews := [][]mover{movers}
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
				for _, m := range crew {
					m.r = r
					m.step(m)
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

// may fails the mover (see panicTB) for an error, except for errors that mean that another mover
// has changed the group in between.
func (c *Churn) may(_ any, err error) {
	if err != nil && !errors.Is(err, api.ErrNotFound) && !errors.Is(err, api.ErrSealed) &&
		!errors.Is(err, api.ErrConflict) {
		require.NoError(c, err)
	}
}

// some returns the id of a random group that the Churn has created in the partition; "" if there is
// none.
func (m mover) some() string {
	ids, err := m.C.ZRange(m.Context(), m.p.Groups(), 0, -1).Result()
	m.OK(err)
	ids = slices.DeleteFunc(ids, func(id string) bool { return !strings.HasPrefix(id, "g") })
	if len(ids) == 0 {
		return ""
	}
	return ids[m.r.IntN(len(ids))]
}

// typ returns a random type.
func (m mover) typ() string { return m.Types[m.r.IntN(len(m.Types))] }

func (m mover) producer() {
	if open := m.C.ZCard(m.Context(), m.p.Open()).Val(); open < 8 {
		tenant := m.Tenants[m.r.IntN(len(m.Tenants))]
		if m.Space.OfTenant(tenant) != m.p {
			return
		}
		fields := []string{"aggregate", aggregates, "failure_threshold", "0.3"}
		if n := m.r.IntN(6); n < 4 {
			fields = append(fields, "tags", fmt.Sprintf("m=%d\nn=%d", n%2, n))
		}
		if m.r.IntN(4) == 0 {
			at := time.Now().Add(20 * time.Millisecond)
			fields = append(fields, "run_at", strconv.FormatInt(at.UnixMilli(), 10))
		}
		m.Create(fmt.Sprintf("g%d", m.groups.Add(1)), tenant, m.typ(), fields...)
	}
	id := m.some()
	if id == "" {
		return
	}
	all := Jobs(1+m.r.IntN(40), func(j *ledger.NewJob) {
		j.Type = m.typ()
		switch m.r.IntN(20) {
		case 0:
			large(j)
		case 1:
			j.RunAt = new(time.Now().Add(30 * time.Millisecond))
		}
	})
	if waiting, _ := m.C.HGet(m.Context(), m.p.Load(all[0].Type), "waiting").Int64(); waiting < 400 {
		m.may(ledger.Append(m.Context(), m.C, m.p, ledger.AppendArgs{Group: id, Limit: 1e7, Jobs: all}))
	}
	if m.r.IntN(10) == 0 {
		m.may(ledger.Seal(m.Context(), m.C, m.p, id, nil))
	}
}

func (m mover) fetcher() {
	limit := NoLimit
	if m.r.IntN(2) == 0 {
		limit = limittest.Limit{Meter: ledger.Meter{Window: 5 * time.Millisecond}, Permits: 20}
	}
	m.Admit(m.p, m.typ(), 30, limit)
	_, _, err := ledger.Schedule(m.Context(), m.C, m.p, 10)
	m.OK(err)
}

func (m mover) dispatcher() {
	m.promote(m.p, m.Types...)
	if m.r.IntN(5) == 0 {
		typ, lease := m.typ(), time.Duration(m.r.IntN(5))*time.Millisecond
		m.did(ledger.Reclaim(m.Context(), m.C, m.p, typ, lease, 20, 3, m.r.IntN(2) == 0))
	}
}

func (m mover) worker() {
	typ := m.typ()
	read := m.Read(m.p, typ, m.name, 20)
	if n := m.r.IntN(len(read) + 1); m.r.IntN(3) == 0 {
		m.back(m.p, typ, ledger.OutcomeUnstarted, 0, read[:n]...)
		read = read[n:]
	}
	started := m.Start(m.p, typ, read)
	if m.r.IntN(10) == 0 {
		started = append(started, m.Start(m.p, typ, started)...) // delivered once more
	}
	for _, j := range started {
		switch m.r.IntN(13) {
		case 0:
			m.back(m.p, typ, ledger.OutcomeFailed, 0, j)
		case 1:
			m.back(m.p, typ, ledger.OutcomeRetry, time.Duration(m.r.IntN(20))*time.Millisecond, j)
		case 2:
			m.back(m.p, typ, ledger.OutcomeThrottled, 5*time.Millisecond, j)
		case 3:
			m.back(m.p, typ, ledger.OutcomeReleased, 0, j)
		case 4:
			m.back(m.p, typ, ledger.OutcomeDeferred, 5*time.Millisecond, j)
		case 5: // the worker dies
		default:
			m.Done(m.p, typ, j)
		}
	}
}

func (m mover) aggregator() {
	m.consumers(m.p.ResultStream(), keyspace.GroupAggregator)
	for _, e := range m.fresh(m.p.ResultStream(), keyspace.GroupAggregator, m.name, int64(1+m.r.IntN(20))) {
		id := e.Values["g"].(string)
		if m.C.Exists(m.Context(), m.p.Group(id)).Val() == 1 {
			m.reduceEntry(m.p, m.name, e)
			continue
		}
		m.did(ledger.Reduce(m.Context(), m.C, m.p,
			ledger.ReduceArgs{Group: id, Partial: m.name, Entries: []string{e.ID}}))
	}
}

// watcher is a step of the watcher role. It also cancels and reopens groups, and changes the bounds of
// tenants, as operators do, while the watcher's scripts work on them.
func (m mover) watcher() {
	if tenant := m.Tenants[m.r.IntN(len(m.Tenants))]; m.r.IntN(20) == 0 && m.Space.OfTenant(tenant) == m.p {
		var set ledger.TenantSettings
		if n := m.r.Int64N(60); n > 0 {
			set.InFlight = &n
		}
		m.OK(ledger.SetTenant(m.Context(), m.C, m.p, tenant, set))
	}
	fence, id := m.lead(m.p), m.some()
	if id == "" {
		return
	}
	if m.r.IntN(10) == 0 {
		m.may(nil, ledger.Cancel(m.Context(), m.C, m.p, id))
		if m.r.IntN(2) == 0 {
			m.may(ledger.Reopen(m.Context(), m.C, m.p, id, "", ledger.RetryChoice{}))
		}
	}
	for _, id := range append(m.C.SMembers(m.Context(), m.p.Dirty()).Val(), id) {
		m.complete(sweep, m.p, id)
		m.complete(ledger.Requeue, m.p, id)
		m.did(ledger.Advance(m.Context(), m.C, m.p, id))
	}
	if old := m.C.ZRange(m.Context(), m.p.Ended(), 0, -20).Val(); len(old) > 0 && m.idle(old[0]) {
		m.OK(ledger.Expire(m.Context(), m.C, m.p, old[0], fence, m.r.IntN(2) == 0))
		if m.C.Exists(m.Context(), m.p.Group(old[0])).Val() == 0 {
			m.OK(m.C.Del(m.Context(), m.Space.OfGroup(old[0]).Owner(old[0])).Err())
		}
	}
}

// idle reports whether the streams have no entry of the ended group id any more. The Churn deletes
// only such groups, because in production the retention is longer than entries stay in the streams.
func (m mover) idle(id string) bool {
	if strings.ContainsAny(m.C.Get(m.Context(), m.p.States(id)).Val(), "D") {
		return false
	}
	for _, typ := range m.Types {
		for _, e := range m.C.XRange(m.Context(), m.p.Ready(typ), "-", "+").Val() {
			if strings.HasPrefix(ledger.MessageBlob(e.Values), id+"|") {
				return false
			}
		}
	}
	return true
}
