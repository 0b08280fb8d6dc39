// Package watcher is the role that moves groups through their states and publishes an event for
// each move. It also completes cancellations and reopenings that another process left unfinished,
// fails jobs of types that no worker serves, deletes data whose retention is over, and audits the
// data.
//
// Several watcher processes may run. For each partition one of them is the leader and does all the
// work; a leader lease with a fencing number makes Redis refuse the steps of a process that has
// lost its leadership.
package watcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config configures a [Watcher].
type Config struct {
	// Interval is the time between two passes over all open groups. A pass advances groups that are
	// missing in the set of dirty groups.
	Interval time.Duration
	// NoProcessorTimeout is how long a type may have jobs and no live worker before its jobs fail
	// with code NO_PROCESSOR. 0: they wait for ever.
	NoProcessorTimeout time.Duration
	Retention          Retention
	Audit              Audit
}

// Retention says how long data is kept, by kind. 0 or less: for ever.
type Retention struct {
	Groups      time.Duration // from the group's end; its results end with it
	Results     time.Duration // the lines of results, from the group's end
	MessageIDs  time.Duration // ids of applied messages, from their arrival
	DeadLetters time.Duration // dead letters, and rejected messages of the ingest stream
	Events      time.Duration // events in the stream events, from their publication
}

const (
	// leaderLease is the length of a leader lease. After a leader has died, another process leads
	// within leaderLease + leaderRenew.
	leaderLease = 5 * time.Second
	// leaderRenew is the time between two renewals of the leader lease. A process that does not
	// lead asks for the lease as often.
	leaderRenew = time.Second
	// idle is the longest wait when there is nothing to do. A wake token ends it earlier.
	idle = time.Second
	// measureEvery is the time between two updates of the queue gauges.
	measureEvery = 2 * time.Second
	// maintenanceInterval is the longest time between two runs of the maintenance tasks.
	maintenanceInterval = 10 * time.Second
)

// Watcher runs the role in one process, for all partitions.
type Watcher struct {
	stage.Process
	cfg     Config
	metrics *telemetry.WatcherMetrics
	store   *groups.Store
	events  message.Publisher
	open    *openViolations
}

// New returns the watcher of a process. It publishes events through events.
func New(p stage.Process, cfg Config, store *groups.Store, events message.Publisher) *Watcher {
	metrics := telemetry.NewWatcherMetrics(p.Tel.Meter)
	return &Watcher{
		Process: p,
		cfg:     cfg,
		metrics: metrics,
		store:   store,
		events:  events,
		open:    newOpenViolations(metrics),
	}
}

// Run works until ctx ends, then gives up the leader leases, so that another process can lead at
// once. It logs the errors of its loops and goes on after them; so it returns nil.
func (w *Watcher) Run(ctx context.Context) error {
	r := w.Runner()
	r.Every("queue gauges", measureEvery, w.measure)
	var partitions []*partitionLoop
	for _, p := range w.Space.All() {
		pl := &partitionLoop{Watcher: w, p: p, log: w.Tel.Log.With("partition", p.Index())}
		partitions = append(partitions, pl)
		r.Loop("watch", p.Wake("watcher"), pl.step)
	}
	w.addAudits(r, partitions)
	r.OnStop(func(ctx context.Context) {
		for _, p := range w.Space.All() {
			_, _ = ledger.Lead(ctx, w.Conn.Cmd, p, w.ID, 0) // after an error, the lease ends by itself
		}
	})
	return r.Run(ctx)
}

// measure updates the gauges of ready jobs, of non-ready jobs, and of the backlog of each type.
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

// partitionLoop is the work on one partition and what it remembers between steps. Only its own
// goroutine uses the fields that change, except for leadSinceNanos, which the audit reads.
type partitionLoop struct {
	*Watcher
	p     keyspace.Partition
	log   *slog.Logger
	fence int64 // the fencing number of our leader lease; 0: this process does not lead
	// ledSince is when the current leadership began.
	ledSince  time.Time
	renewedAt time.Time
	// leadSinceNanos is ledSince in Unix nanoseconds for the audit's goroutines; 0: this process
	// does not lead. publishLead sets it.
	leadSinceNanos atomic.Int64
	// unservedSince holds the types that have jobs and no live worker, and since when this process
	// has seen that.
	unservedSince map[string]time.Time
	// cursor is where the pass over all open groups goes on (a ZSCAN cursor); 0: no pass has begun.
	cursor       uint64
	reconciledAt time.Time // when the last page of open groups was advanced
	maintainedAt time.Time // when the maintenance tasks last ran and left nothing to do
	// resultsExpiredTo is an end time (Unix ms): this process has deleted the results of groups
	// that ended up to then.
	resultsExpiredTo float64
	oomLoggedAt      time.Time // when the log last said that Redis has no memory left
	// renewals is the last known value of the counter of renewals in Redis; 0: not read yet.
	renewals int64
	// unannounced are violations of the law durability whose events are not published yet.
	unannounced []api.Violation
}

// step renews or asks for the leadership and, if this process leads, does one piece of each kind of
// work. It returns how long to wait before the next step; 0 means that there is more work. If
// another process leads, step itself waits for leaderRenew and returns 0. That Redis has no memory
// left is no error: step logs it, and returns the longest wait.
func (p *partitionLoop) step(ctx context.Context) (time.Duration, error) {
	if err := p.keepLead(ctx); err != nil {
		return 0, err
	}
	if p.fence == 0 {
		// Wake tokens are for the leader, so this process does not wait for one.
		return 0, redisx.Sleep(ctx, leaderRenew)
	}
	worked, err := p.work(ctx)
	if errors.Is(err, ledger.ErrFenced) {
		p.fence = 0
		p.publishLead()
		return 0, nil
	}
	if call.IsOOM(err) { // some pieces of work have to wait until Redis has memory again
		p.logOOM(err)
		return idle, nil
	}
	if err != nil || worked {
		return 0, err
	}
	return idle, nil
}

// logOOM logs that some work waits until Redis has memory again, at most once in ten minutes.
func (p *partitionLoop) logOOM(err error) {
	if time.Since(p.oomLoggedAt) > 10*time.Minute {
		p.oomLoggedAt = time.Now()
		p.log.Warn("redis has no memory left, some work has to wait", "error", err)
	}
}

// keepLead renews the leader lease, or asks for it if this process does not lead. It sends no
// command if the last renewal is less than leaderRenew ago. Afterwards p.fence says whether this
// process leads. Each renewal is also counted in Redis (see countRenewal).
func (p *partitionLoop) keepLead(ctx context.Context) error {
	if p.fence != 0 && time.Since(p.renewedAt) <= leaderRenew {
		return nil
	}
	fence, err := ledger.Lead(ctx, p.Conn.Cmd, p.p, p.ID, leaderLease)
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

// work does one piece of each kind of work, so that a large amount of one kind can't delay the
// others. It returns whether any piece has found work, or has more to do. Errors of single pieces
// are joined, because a piece that fails while Redis has no memory left must not stop one that
// frees memory. If the leadership or the connection is lost, or ctx has ended, work returns at
// once.
func (p *partitionLoop) work(ctx context.Context) (bool, error) {
	worked, errs := false, error(nil)
	for _, piece := range []func(context.Context) (bool, error){p.advanceDirty, p.announce, p.reconcile, p.maintain} {
		some, err := piece(ctx)
		if errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || ctx.Err() != nil {
			return false, err
		}
		errs, worked = errors.Join(errs, err), worked || some
	}
	return worked, errs
}

// groupBatch is the largest number of groups that one step advances or expires.
const groupBatch = 100

// advanceDirty advances some dirty groups, chosen by chance. It returns whether there were any.
func (p *partitionLoop) advanceDirty(ctx context.Context) (bool, error) {
	ids, err := p.Conn.Cmd.SRandMemberN(ctx, p.p.Dirty(), groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read dirty groups: %w", err)
	}
	return len(ids) > 0, p.advanceAll(ctx, ids)
}

// advanceAll advances these groups, and first completes their cancellation or reopening if it is
// unfinished. A group that needs more memory than Redis has stays dirty, and the others advance all
// the same; the returned error then says that memory was missing.
func (p *partitionLoop) advanceAll(ctx context.Context, ids []string) error {
	unsettled, err := ledger.Unsettled(ctx, p.Conn.Cmd, p.p, ids)
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
	// A group that was cancelled or reopened since the first reading may no longer be dirty:
	// complete it now, since nobody else may do it.
	unsettledNow, err := ledger.Unsettled(ctx, p.Conn.Cmd, p.p, ids)
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

// advanceGroup moves a group through as many states as its counts allow. If its cancellation or
// reopening is unfinished, it is completed first. An error that concerns this group alone is logged
// and not returned, so that the other groups advance.
func (p *partitionLoop) advanceGroup(ctx context.Context, id string, unsettled bool) error {
	if unsettled {
		if err := p.settle(ctx, id); err != nil {
			return err
		}
	}
	if _, err := ledger.Advance(ctx, p.Conn.Cmd, p.p, id, p.fence); err != nil {
		return p.skipGroup(ctx, id, err)
	}
	return nil
}

// settle completes a group's cancellation (all its jobs become cancelled) or reopening (its failed
// jobs wait again) in chunks, and renews the leader lease between chunks.
func (p *partitionLoop) settle(ctx context.Context, id string) error {
	for _, chunk := range []func() (bool, error){
		func() (bool, error) { return ledger.Sweep(ctx, p.Conn.Cmd, p.p, id) },
		func() (bool, error) { return ledger.Requeue(ctx, p.Conn.Cmd, p.p, id) },
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

// skipGroup handles an error about one group. An error that concerns the whole partition is
// returned. Any other error is logged and the group is taken out of the dirty groups, so that it
// can't keep the watcher busy; the next pass over all open groups tries it again.
func (p *partitionLoop) skipGroup(ctx context.Context, id string, err error) error {
	if errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || call.IsOOM(err) || ctx.Err() != nil {
		return err
	}
	p.log.Warn("group can't be advanced, trying again in the next pass over open groups", "group", id, "error", err)
	return p.Conn.Cmd.SRem(ctx, p.p.Dirty(), id).Err()
}

// reconcile advances a page of the open groups. A pass over all of them begins Interval after the
// end of the last one: it finds groups that could advance and are missing in the set of dirty
// groups. reconcile returns whether more pages of this pass follow.
func (p *partitionLoop) reconcile(ctx context.Context) (bool, error) {
	if p.cursor == 0 && time.Since(p.reconciledAt) <= p.cfg.Interval {
		return false, nil
	}
	page, next, err := p.Conn.Cmd.ZScan(ctx, p.p.Open(), p.cursor, "", groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read open groups: %w", err)
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
