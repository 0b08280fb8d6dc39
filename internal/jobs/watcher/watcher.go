// Package watcher is the role that publishes an event for each state that a group enters, and moves
// groups which the scripts start and reduce have not moved. It also completes cancellations and
// reopenings that another process left unfinished, fails jobs of types that no worker serves,
// deletes data whose retention is over, and audits the data.
//
// Several watcher processes may run. For each partition one of them is the leader and does all the
// work; a leader lease with a fencing number makes Redis refuse to delete groups for a process that
// has lost its leadership. Moving a group needs none: a transition depends on the group alone.
package watcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/callbacks"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/operations"
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
	Guards             *guard.Client // measures what Redis knows of guards; nil: nothing
	// Operations carries out operations on many groups; nil: they wait for another process.
	Operations *operations.Runner
	// Callbacks tell tenants' endpoints of events; without keys another process does.
	Callbacks callbacks.Config
}

// Retention says how long data is kept, by kind. 0 or less: for ever.
type Retention struct {
	Groups      time.Duration // from the group's end; its results end with it
	Results     time.Duration // the lines of results, from the group's end
	MessageIDs  time.Duration // ids of applied messages, from their arrival
	DeadLetters time.Duration // dead letters, and rejected messages of the ingest stream
	Events      time.Duration // events in the stream events, from their publication
	Callbacks   time.Duration // dead callbacks
}

const (
	// leaderLease is the length of a leader lease. After a leader has died, another process leads
	// within leaderLease + leaderRenew.
	leaderLease = 5 * time.Second
	// leaderRenew is the time between two renewals of the leader lease. A process that does not
	// lead asks for the lease as often.
	leaderRenew = time.Second
	// handOverPause is how long a watcher that has handed over a partition does not ask for it: the
	// others ask every leaderRenew.
	handOverPause = 3 * leaderRenew
	// idle is the longest wait when there is nothing to do. A wake token ends it earlier.
	idle = time.Second
	// measureEvery is the time between two updates of the queue gauges.
	measureEvery = 2 * time.Second
	// measureGuardsEvery is the time between two updates of the metrics of guards.
	measureGuardsEvery = 15 * time.Second
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

	callbacks *telemetry.CallbackMetrics
}

// New returns the watcher of a process. It publishes events through events.
func New(p stage.Process, cfg Config, store *groups.Store, events message.Publisher) *Watcher {
	metrics := telemetry.NewWatcherMetrics(p.Tel.Meter)
	w := &Watcher{
		Process: p,
		cfg:     cfg,
		metrics: metrics,
		store:   store,
		events:  events,
		open:    newOpenViolations(metrics, cfg.Audit.OtherLaws),

		callbacks: telemetry.NewCallbackMetrics(p.Tel.Meter),
	}
	w.cfg.Callbacks.Metrics = w.callbacks
	return w
}

// Run works until ctx ends, then gives up the leader leases, so that another process can lead at
// once. It logs the errors of its loops and goes on after them; so it returns nil.
func (w *Watcher) Run(ctx context.Context) error {
	r := w.Runner()
	var partitions []*partition
	var loops []*partitionLoop
	for _, p := range w.Space.All() {
		part := &partition{
			Watcher: w, Partition: p, log: w.Tel.Log.With("partition", p.Index()),
			failures: make(chan failureReduction, maxFailureReductions),
		}
		partitions = append(partitions, part)
		loop := &partitionLoop{
			partition:   part,
			advancer:    advancer{partition: part},
			outbox:      outbox{partition: part},
			maintenance: maintenance{partition: part},
		}
		loops = append(loops, loop)
		r.Loop("watch", p.Wake("watcher"), loop.step)
		// Slow work has loops of its own, so that it delays no group's next state.
		r.Loop("unserved types", "", (&unservedTypes{partition: part}).step)
		r.Loop("reduce failures", "", part.reduceFailures)
	}
	w.metrics.ObserveLeader(func() []bool {
		leads := make([]bool, len(partitions))
		for i, part := range partitions {
			leads[i] = part.leads() != 0
		}
		return leads
	})
	r.Every("queue gauges", measureEvery, partitions[0].measure)
	if w.cfg.Guards != nil {
		r.Every("guard gauges", measureGuardsEvery, partitions[0].measureGuards)
	}
	r.Every("busiest tenants", time.Second, findBusiest(partitions))
	if w.cfg.Operations != nil {
		r.Loop("operations", "", partitions[0].operate)
		r.Every("forget operations", maintenanceInterval, w.cfg.Operations.Forget)
	}
	if w.cfg.Callbacks.Keys != nil {
		callbacks.NewSender(w.Process, w.cfg.Callbacks, w.store).Add(r)
	}
	w.addAudits(r, partitions)
	r.ReportAlive("watcher", w.store.Reducers())
	r.OnStop(func(ctx context.Context) {
		for _, loop := range loops {
			loop.drain(ctx)
		}
	})
	r.OnStop(func(ctx context.Context) {
		for _, p := range w.Space.All() {
			_, _ = ledger.Lead(ctx, w.Conn.Cmd, p, w.ID, 0) // after an error, the lease ends by itself
		}
	})
	return r.Run(ctx)
}

// measure updates the gauges of ready jobs, of non-ready jobs, and of the backlog of each type,
// which count the jobs of all partitions. It is called for partition 0 alone, and only the leader
// of that partition shows these gauges, so that their sum over all processes is right. It also
// stores the figures as a sample of the history, unless the present period of 10 s has one.
func (p *partition) measure(ctx context.Context) error {
	if _, leads := p.leadership(); !leads {
		p.metrics.HideQueues()
		p.callbacks.HideCounts()
		return nil
	}
	at, err := p.store.Now(ctx)
	if err != nil {
		return err
	}
	st, err := p.store.Stats(ctx)
	if err != nil {
		return err
	}
	sizes := telemetry.QueueSizes{Rejected: st.Rejected, MemoryRatio: backpressure.Ratio(st.Memory)}
	if sizes.Outbox, err = ledger.OutboxSize(ctx, p.Conn.Cmd, p.Space); err != nil {
		return err
	}
	var unserved int64
	backlog, runnable := make(map[string]int, len(st.Types)), make(map[string]int, len(st.Types))
	for _, t := range st.Types {
		sizes.Ready += int(t.Ready)
		sizes.NonReady += int(t.NonReady)
		backlog[t.Type], runnable[t.Type] = int(t.Backlog), int(t.Runnable)
		if t.Workers == 0 {
			unserved += t.Backlog
		}
	}
	p.metrics.SetUnserved(unserved)
	p.metrics.SetQueues(sizes, backlog, runnable)
	if n, err := p.store.CountCallbacks(ctx); err == nil {
		var oldest time.Duration
		if !n.Oldest.IsZero() {
			oldest = at.Sub(n.Oldest)
		}
		p.callbacks.SetCounts(n.Pending, n.Dead, oldest)
	}
	return p.store.Record(ctx, at, st)
}

// measureGuards updates those metrics of guards that are computed from Redis. As with measure, only
// the leader of partition 0 shows them.
func (p *partition) measureGuards(ctx context.Context) error {
	if _, leads := p.leadership(); !leads {
		p.cfg.Guards.StopMeasuring()
		return nil
	}
	return p.cfg.Guards.Measure(ctx)
}

// partition is the state that all work on one partition shares: whether this process leads the
// partition, and by which fencing number. Only the goroutine of the partition's loop uses the
// fields that change, except for ledSince.
type partition struct {
	*Watcher
	keyspace.Partition
	log       *slog.Logger
	fence     int64 // the fencing number of our leader lease; 0: this process does not lead
	renewedAt time.Time
	// ledSince is when the current leadership began, in Unix nanoseconds; 0: this process does not
	// lead.
	ledSince atomic.Int64
	// lead has the fencing number, and when the lease ends by this process's clock, for other
	// goroutines.
	lead atomic.Pointer[lease]
	// renewals is the last known value of the counter of leader-lease renewals in Redis (see
	// countRenewal); 0: not read yet.
	renewals int64
	// unannounced are violations of the law durability whose events are not published yet.
	unannounced []api.Violation
	// failures are the reductions of many failed jobs that wait for the loop that does them.
	failures    chan failureReduction
	held        sync.Map  // ids of dirty groups, and until when they are left alone
	noLeadUntil time.Time // this process has handed over the partition (see advancer.handOver)
	oomLoggedAt time.Time // when the log last said that Redis has no memory left
}

// logOOM logs that some work waits until Redis has memory again, at most once in ten minutes.
func (p *partition) logOOM(err error) {
	if time.Since(p.oomLoggedAt) > 10*time.Minute {
		p.oomLoggedAt = time.Now()
		p.log.Warn("redis has no memory left, some work has to wait", "error", err)
	}
}

// endsStep reports whether err concerns the whole partition: the leadership or the connection is
// lost, or ctx has ended. Other work of the step would fail as well.
func endsStep(ctx context.Context, err error) bool {
	return errors.Is(err, ledger.ErrFenced) || call.IsUnavailable(err) || ctx.Err() != nil
}

// partitionLoop asks for the leadership of one partition and, while this process leads it, advances
// its groups, publishes its outbox and does its maintenance. Only its own goroutine uses these
// three parts. Audits have loops of their own.
type partitionLoop struct {
	*partition
	advancer    advancer
	outbox      outbox
	maintenance maintenance
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
		p.setFence(0)
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

// drain advances dirty groups and publishes their events until there are none, ctx ends or a call
// fails: when a whole installation stops, a group whose jobs have ended ends.
func (p *partitionLoop) drain(ctx context.Context) {
	for worked := p.fence != 0; worked && ctx.Err() == nil; {
		advanced, err := p.advancer.advanceDirty(ctx)
		if err != nil {
			return
		}
		published, err := p.outbox.publishAll(ctx)
		if err != nil {
			return
		}
		worked = advanced || published
	}
}

// work does one piece of each kind of work, so that a large amount of one kind can't delay the
// others. It returns whether any piece has found work, or has more to do. Errors of single pieces
// are joined, because a piece that fails while Redis has no memory left must not stop one that
// frees memory. If the leadership or the connection is lost, or ctx has ended, work returns at
// once.
func (p *partitionLoop) work(ctx context.Context) (bool, error) {
	worked, errs := false, error(nil)
	for _, piece := range []func(context.Context) (bool, error){
		p.advancer.advanceDirty, p.outbox.publishAll, p.advancer.reconcile, p.maintenance.run,
	} {
		some, err := piece(ctx)
		if endsStep(ctx, err) {
			return false, err
		}
		errs, worked = errors.Join(errs, err), worked || some
	}
	return worked, errs
}

// keepLead renews the leader lease, or asks for it if this process does not lead. A leader sends no
// command if its last renewal is at most leaderRenew ago. Afterwards fence says whether this
// process leads. Each renewal is also counted in Redis (see countRenewal).
func (p *partition) keepLead(ctx context.Context) error {
	if p.fence != 0 && time.Since(p.renewedAt) <= leaderRenew || time.Now().Before(p.noLeadUntil) {
		return nil
	}
	asked := time.Now()
	fence, err := ledger.Lead(ctx, p.Conn.Cmd, p.Partition, p.ID, leaderLease)
	if err != nil {
		return err
	}
	p.renewedAt = time.Now()
	p.setFence(fence)
	p.lead.Store(&lease{fence, asked.Add(leaderLease)})
	if fence == 0 {
		return nil
	}
	return p.countRenewal(ctx)
}

// setFence stores the fencing number of this process's leader lease; 0: this process does not lead.
// A new number also stores now as the begin of the leadership; 0 deletes the begin.
func (p *partition) setFence(fence int64) {
	switch {
	case fence == 0:
		p.ledSince.Store(0)
	case fence != p.fence:
		p.ledSince.Store(time.Now().UnixNano())
	}
	p.fence = fence
}

// leadership returns when the current leadership began; ok is false if this process does not lead.
// Any goroutine may call it.
func (p *partition) leadership() (since time.Time, ok bool) {
	at := p.ledSince.Load()
	return time.Unix(0, at), at != 0
}

// lease is a leader lease; that of another process has the fencing number 0.
type lease struct {
	fence int64
	until time.Time
}

// leads returns the fencing number while this process is certain to lead, otherwise 0. Any goroutine
// may call it.
func (p *partition) leads() int64 {
	if l := p.lead.Load(); l != nil && time.Now().Before(l.until) {
		return l.fence
	}
	return 0
}

// operate does one step of an operation on many groups, if this process leads partition 0.
func (p *partition) operate(ctx context.Context) (time.Duration, error) {
	if p.leads() == 0 {
		return leaderRenew, nil
	}
	began := time.Now()
	worked, err := p.cfg.Operations.Step(ctx, p.leads)
	switch {
	case errors.Is(err, ledger.ErrFenced):
		return leaderRenew, nil
	case call.IsOOM(err):
		p.log.Warn("redis has no memory left, operations have to wait", "error", err)
		return 10 * idle, nil
	case err != nil || worked:
		return operations.Rest(began), err
	}
	return idle, nil
}

// countRenewal adds one to the counter of leader-lease renewals in Redis and checks that no earlier
// renewal was lost. The leader renews its lease about once a second, and the counter outlives a
// change of leader. If it is smaller than expected, Redis has lost writes that it had confirmed:
// its append-only file was cut, or a lagging replica became master. Each such loss is a violation
// of the law durability; if it can't be published, later calls try again.
func (p *partition) countRenewal(ctx context.Context) error {
	n, err := ledger.CountRenewal(ctx, p.Conn.Cmd, p.Partition)
	switch {
	case call.IsOOM(err):
		return nil // the next renewal is counted when Redis has memory again
	case err != nil:
		return err
	}
	if lost := p.renewals + 1 - n; p.renewals > 0 && lost > 0 {
		found := api.Violation{
			Law: audit.LawDurability, Partition: p.Index(),
			Detail: fmt.Sprintf("redis lost about %s of confirmed writes and is at renewal %d: "+
				"what was submitted in that time must be submitted again; bulkaction audit --receipts names it",
				time.Duration(lost)*leaderRenew, n),
		}
		p.unannounced = append(p.unannounced, found)
		p.open.addDurability(found)
	}
	p.renewals = n
	p.unannounced = slices.DeleteFunc(p.unannounced, func(v api.Violation) bool {
		err := p.publishViolation(ctx, violationID(v), v)
		if err != nil {
			p.log.Warn("publishing a violation failed, trying again", "law", v.Law, "error", err)
		}
		return err == nil
	})
	return nil
}
