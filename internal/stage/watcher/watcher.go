// Package watcher is the role that moves groups through their states, announces that, and keeps
// house: it settles what others left half done, ends jobs that nobody can run, and forgets what is
// past its retention. One watcher leads a partition at a time, under a lease with a fencing number.
package watcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config is what the role can be told.
type Config struct {
	Interval           time.Duration // between looks at all open groups
	NoProcessorTimeout time.Duration // a type that no live worker served for so long: its jobs fail
	Retention          Retention
	Audit              Audit
}

// Retention is how long things are kept. 0 is for ever.
type Retention struct {
	Groups, Results, MessageIDs, DeadLetters, Events time.Duration
}

const (
	leaderLease         = 5 * time.Second
	leaderRenew         = time.Second
	idle                = time.Second // it is woken when there is something to do
	measureEvery        = 2 * time.Second
	maintenanceInterval = 10 * time.Second
)

// Watcher is one process's watcher, for all partitions.
type Watcher struct {
	cfg     Config
	conn    *redisx.Conn
	space   keyspace.Space
	tel     *telemetry.Telemetry
	metrics *telemetry.WatcherMetrics
	id      string
	store   *groups.Store
	events  message.Publisher
	open    *openViolations
}

// New returns a watcher named id, which publishes to events.
func New(
	cfg Config, conn *redisx.Conn, space keyspace.Space, tel *telemetry.Telemetry,
	id string, store *groups.Store, events message.Publisher,
) *Watcher {
	metrics := telemetry.NewWatcherMetrics(tel.Meter)
	return &Watcher{
		cfg:     cfg,
		conn:    conn,
		space:   space,
		tel:     tel,
		metrics: metrics,
		id:      id,
		store:   store,
		events:  events,
		open:    newOpenViolations(metrics),
	}
}

// Run watches until ctx ends, then lets another lead.
func (w *Watcher) Run(ctx context.Context) error {
	runs := []func(context.Context) error{func(ctx context.Context) error {
		return stage.Every(ctx, w.tel.Log, "queue gauges", measureEvery, w.measure)
	}}
	var partitions []*partitionLoop
	for _, p := range w.space.All() {
		pl := &partitionLoop{Watcher: w, p: p, log: w.tel.Log.With("partition", p.Index())}
		partitions = append(partitions, pl)
		loop := stage.Loop{Name: "watch", Conn: w.conn, Wake: p.Wake("watcher"), Log: w.tel.Log}
		runs = append(runs, func(ctx context.Context) error { return loop.Run(ctx, pl.step) })
	}
	err := stage.RunAll(ctx, append(runs, w.auditRuns(partitions)...)...)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for _, p := range w.space.All() {
		_, _ = ledger.Lead(end, w.conn.Cmd, p, w.id, 0)
	}
	return err
}

// measure shows how much lies where.
func (w *Watcher) measure(ctx context.Context) error {
	st, err := w.store.Stats(ctx)
	if err != nil {
		return err
	}
	var ready, nonReady int
	backlog := make(map[string]int, len(st.Types))
	for _, t := range st.Types {
		ready += int(t.Ready)
		nonReady += int(t.NonReady)
		backlog[t.Type] = int(t.Backlog)
	}
	w.metrics.SetQueues(ready, nonReady, backlog)
	return nil
}

// partitionLoop is the loop's state for one partition.
type partitionLoop struct {
	*Watcher
	p                keyspace.Partition
	log              *slog.Logger
	fence            int64 // 0: another leads
	ledSince         time.Time
	unservedSince    map[string]time.Time // types whose jobs this process has seen waiting without a worker
	renewedAt        time.Time
	cursor           uint64 // of the look at all open groups; 0: none is going on
	reconciledAt     time.Time
	maintainedAt     time.Time
	resultsExpiredTo float64   // groups that ended until then (ms) have lost their results
	oomLoggedAt      time.Time // that Redis's memory is full was said
	leadSinceNanos   atomic.Int64
	renewals         int64           // renewals of the lead that Redis has counted; 0: not known
	unannounced      []api.Violation // of the law durability, not announced yet
}

// step leads, if it may, and does what is to be done.
func (p *partitionLoop) step(ctx context.Context) (time.Duration, error) {
	if err := p.keepLead(ctx); err != nil {
		return 0, err
	}
	if p.fence == 0 {
		return 0, redisx.Sleep(ctx, leaderRenew) // not woken: the tokens are for who leads
	}
	worked, err := p.work(ctx)
	if errors.Is(err, ledger.ErrFenced) {
		p.fence = 0
		p.publishLead()
		return 0, nil
	}
	if call.IsOOM(err) { // what could be done was done, and more may be asked for soon
		p.logOOM(err)
		return idle, nil
	}
	if err != nil || worked {
		return 0, err
	}
	return idle, nil
}

// logOOM says now and then that something has to wait for memory.
func (p *partitionLoop) logOOM(err error) {
	if time.Since(p.oomLoggedAt) > 10*time.Minute {
		p.oomLoggedAt = time.Now()
		p.log.Warn("redis's memory is full, some work waits for room", "error", err)
	}
}

// keepLead asks for the lead, or keeps it.
func (p *partitionLoop) keepLead(ctx context.Context) error {
	if p.fence != 0 && time.Since(p.renewedAt) <= leaderRenew {
		return nil
	}
	fence, err := ledger.Lead(ctx, p.conn.Cmd, p.p, p.id, leaderLease)
	if err != nil {
		return err
	}
	if fence != p.fence {
		p.ledSince = time.Now()
	}
	p.fence, p.renewedAt = fence, time.Now()
	p.publishLead()
	if fence == 0 {
		return nil
	}
	return p.countRenewal(ctx)
}

// work does a piece of everything that is due, so that nothing starves however much there is of the
// rest. It says whether there was something.
func (p *partitionLoop) work(ctx context.Context) (bool, error) {
	worked, errs := false, error(nil)
	for _, piece := range []func(context.Context) (bool, error){p.advanceDirty, p.announce, p.reconcile, p.maintain} {
		some, err := piece(ctx)
		if errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || ctx.Err() != nil {
			return false, err
		}
		// While memory is full some pieces fail; the others may be those that free it.
		errs, worked = errors.Join(errs, err), worked || some
	}
	return worked, errs
}

// groupBatch is how many groups one step looks at.
const groupBatch = 100

// advanceDirty moves the dirty groups.
func (p *partitionLoop) advanceDirty(ctx context.Context) (bool, error) {
	ids, err := p.conn.Cmd.SRandMemberN(ctx, p.p.Dirty(), groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("look for groups to move: %w", err)
	}
	return len(ids) > 0, p.advanceAll(ctx, ids)
}

// advanceAll settles what is half done of these groups and lets them advance. While memory is full
// some stay dirty; the others advance all the same.
func (p *partitionLoop) advanceAll(ctx context.Context, ids []string) error {
	unsettled, err := p.unsettled(ctx, ids)
	if err != nil {
		return err
	}
	var oom error
	advance := func(id string, unsettled bool) error {
		err := p.advanceGroup(ctx, id, unsettled)
		if call.IsOOM(err) {
			oom, err = err, nil
		}
		return err
	}
	for _, id := range ids {
		if err := advance(id, unsettled[id]); err != nil {
			return err
		}
	}
	// A group that was cancelled or reopened in the meantime may not be dirty any more.
	unsettledNow, err := p.unsettled(ctx, ids)
	if err != nil {
		return err
	}
	for id := range unsettledNow {
		if unsettled[id] {
			continue
		}
		if err := advance(id, true); err != nil {
			return err
		}
	}
	return oom
}

// unsettled says which groups' cancellation or reopening is not settled.
func (p *partitionLoop) unsettled(ctx context.Context, ids []string) (map[string]bool, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	fields := make([]*redis.SliceCmd, len(ids))
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			fields[i] = pipe.HMGet(ctx, p.p.Group(id), "sweep", "requeue")
		}
		return nil
	})
	if err != nil && (call.IsUnavailable(err) || ctx.Err() != nil) {
		return nil, fmt.Errorf("look for half done groups: %w", err)
	}
	unsettled := map[string]bool{}
	for i, id := range ids {
		if v := fields[i].Val(); len(v) == 2 && (v[0] != nil || v[1] != nil) { // an error is met when it moves
			unsettled[id] = true
		}
	}
	return unsettled, nil
}

// advanceGroup lets a group advance, after what is half done of it is settled. A group that spoils
// its own turn stays behind and holds up nobody.
func (p *partitionLoop) advanceGroup(ctx context.Context, id string, unsettled bool) error {
	if unsettled {
		if err := p.settle(ctx, id); err != nil {
			return err
		}
	}
	if _, err := ledger.Advance(ctx, p.conn.Cmd, p.p, id, p.fence); err != nil {
		return p.skipGroup(ctx, id, err)
	}
	return nil
}

func (p *partitionLoop) settle(ctx context.Context, id string) error {
	for _, chunk := range []func() (bool, error){
		func() (bool, error) { return ledger.Sweep(ctx, p.conn.Cmd, p.p, id) },
		func() (bool, error) { return ledger.Requeue(ctx, p.conn.Cmd, p.p, id) },
	} {
		for more := true; more; {
			var err error
			if more, err = chunk(); err != nil {
				return p.skipGroup(ctx, id, err)
			}
			if err := p.keepLead(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *partitionLoop) skipGroup(ctx context.Context, id string, err error) error {
	if errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || call.IsOOM(err) || ctx.Err() != nil {
		return err
	}
	p.log.Warn("group can't be moved, looking again at the next round", "group", id, "error", err)
	return p.conn.Cmd.SRem(ctx, p.p.Dirty(), id).Err()
}

// reconcile looks at every open group now and then, in case a group was not marked dirty: a page a
// time.
func (p *partitionLoop) reconcile(ctx context.Context) (bool, error) {
	if p.cursor == 0 && time.Since(p.reconciledAt) <= p.cfg.Interval {
		return false, nil
	}
	page, next, err := p.conn.Cmd.ZScan(ctx, p.p.Open(), p.cursor, "", groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("look at open groups: %w", err)
	}
	ids := make([]string, 0, len(page)/2)
	for i := 0; i < len(page); i += 2 {
		ids = append(ids, page[i])
	}
	if err := p.advanceAll(ctx, ids); err != nil {
		return false, err
	}
	p.cursor, p.reconciledAt = next, time.Now()
	return next != 0, nil
}
