package worker

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// leastAhead is how many jobs of a gated type a process lets wait for a pass or a slot, even if
// none is free now; see capacity for the exceptions. They wait in the guard's queue, so the process
// gets its share of the passes. While jobs with a pass fill all slots, a process that also serves
// ungated types reads none ahead: otherwise jobs of the ungated types would never find a free slot.
const leastAhead = 2

// gate is the state of one gated type that the feeds of all partitions share: its processor, and
// how many of its jobs wait for a pass or a slot.
type gate struct {
	w       *Worker
	proc    processor.Gated
	limited processor.Limited // nil: the processor does not say what is available
	waiting atomic.Int64      // jobs, but suspects, that wait for a pass
	ahead   atomic.Int64      // jobs that wait for a pass or, after Admit, for a slot
}

func newGate(w *Worker, proc processor.Gated) *gate {
	limited, _ := proc.(processor.Limited)
	return &gate{w: w, proc: proc, limited: limited}
}

func (g *gate) availability() processor.Availability {
	if g.limited == nil {
		return processor.Availability{Free: -1, PerSecond: math.Inf(1)}
	}
	return g.limited.Availability()
}

// gatedFeed reads the ready stream of one gated type in one partition. Each job waits for a pass
// before it is started, and is deferred if Admit says so.
type gatedFeed struct {
	*partitionFeed
	typ  string
	gate *gate

	mu       sync.Mutex
	admitted []*task // have a pass and are to be started
	starting bool    // a goroutine starts admitted tasks
}

// step reads one batch of entries and lets each of their jobs wait for a pass, in a goroutine of
// its own. If the process should read no more jobs now, step only waits until that may have
// changed. It always returns 0 as the time to wait.
func (g *gatedFeed) step(ctx context.Context) (time.Duration, error) {
	changed := g.held.nextChange()
	n, pause := g.gate.capacity()
	if n <= 0 {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		return 0, nil
	}
	return 0, g.readEntries(ctx, []string{g.typ}, n, g.admitEntries)
}

// longPause is the longest pause of a gated feed before it computes its capacity again.
const longPause = time.Second

// capacity returns how many more jobs of the gated type this process may read. If n ≤ 0, the
// process may read none before one of its tasks has ended or the pause is over.
//
// A process reads as many jobs as will soon get a pass and a slot, and at least so many that
// leastAhead jobs wait for one of both. It reads none while the processor names a later time of the
// next pass, while the process has no slots, or while isolation is busy.
func (g *gate) capacity() (n int, pause time.Duration) {
	w := g.w
	size, _ := w.slots.sizeAndActive()
	if size == 0 || w.isolation.busy() {
		return 0, longPause
	}
	a := g.availability()
	if a.Free == 0 {
		if pause := time.Until(a.Next); pause > 0 {
			return 0, min(pause, longPause)
		}
	}
	capacity, resumeAt := w.freeCapacity()
	if capacity <= 0 {
		w.held.setResumeAt(resumeAt)
	}
	if a.Free >= 0 {
		capacity = min(capacity, a.Free)
	}
	least := leastAhead - int(g.ahead.Load())
	if len(w.ungated) > 0 && w.admittedTasks() >= size {
		least = 0
	}
	return max(least, capacity-int(g.waiting.Load())), longPause
}

// admittedTasks returns how many tasks of gated types run in slots, or wait for a slot after Admit.
func (w *Worker) admittedTasks() int {
	n := w.slots.runningGated()
	for _, g := range w.gates {
		n += int(g.ahead.Load() - g.waiting.Load())
	}
	return n
}

// admitEntries starts a goroutine for the job of each entry, which waits for a pass. Suspects
// and entries that can't be used are treated as by startEntries.
func (g *gatedFeed) admitEntries(ctx context.Context, typ string, entries []stream.Entry) (suspects bool) {
	tasks, suspects := g.takeEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return suspects
	}
	if g.loadPayloads(ctx, tasks) != nil {
		g.release(tasks...)
		return suspects
	}
	g.gate.ahead.Add(int64(len(tasks)))
	g.gate.waiting.Add(int64(len(tasks)))
	g.held.beginWait(len(tasks))
	for _, t := range tasks {
		t.waitsForPass.Store(true)
		t.countedAsAhead.Store(true)
		var admitCtx context.Context
		admitCtx, t.stopAdmission = context.WithCancelCause(ctx)
		g.held.track(t)
		go g.awaitPass(ctx, admitCtx, t)
	}
	return suspects
}

// awaitPass waits until Admit returns, and has the task started. It defers the task if Admit's
// error says so, and releases it if it was stopped. Any other error of Admit becomes the outcome of
// the task, which is started with it. admitCtx ends when the task is stopped; ctx ends only when
// the process stops.
func (g *gatedFeed) awaitPass(ctx, admitCtx context.Context, t *task) {
	defer t.stopAdmission(nil)
	pass, err := g.gate.admit(admitCtx, t)
	if !t.takePass(pass, err) {
		return
	}
	switch {
	case admitCtx.Err() != nil:
		t.endWait()
		g.release(t)
	case processor.Classify(err).Kind == processor.Defer:
		g.deferTask(t, err)
	default:
		g.start(ctx, t)
	}
}

// takePass stores in the task the pass and the error that Admit has returned, and returns true. If
// drain has taken the task meanwhile, because the process stops, takePass returns the pass unused
// to the processor and returns false.
func (t *task) takePass(pass processor.Pass, err error) bool {
	owner := t.waitsForPass.CompareAndSwap(true, false)
	if owner {
		t.pass, t.admitErr = pass, err
	} else if pass != nil {
		pass.Return(errNotStarted)
	}
	return owner
}

// endWait lowers the numbers of tasks that wait for a pass by one, in the gate and in heldTasks: t
// waits no more, and counts as unfinished again.
func (t *task) endWait() {
	t.gate.waiting.Add(-1)
	t.feed.held.endWait()
}

// leaveQueue lowers the counter gate.ahead by one: the task waits neither for a pass nor for a slot
// any more. A second call for a task does nothing.
func (t *task) leaveQueue() {
	if t.countedAsAhead.CompareAndSwap(true, false) {
		t.gate.ahead.Add(-1)
	}
}

// admit calls the processor's Admit, for at most the timeout of the job's type, and turns a panic
// into an error. A job whose payload is lost needs no pass. For a sampled job, it records the wait
// as a span.
func (g *gate) admit(ctx context.Context, t *task) (pass processor.Pass, err error) {
	if t.loadedPayload == "" {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, g.w.cfg.timeoutOf(t.Type))
	defer cancel()
	if t.Trace != "" {
		var span trace.Span
		ctx, span = g.w.Tel.StartJob(ctx, telemetry.JobSpan{
			Parent: t.Trace, Name: "admit " + t.Type, Kind: trace.SpanKindInternal,
		}, nil)
		defer span.End()
	}
	defer func() {
		if r := recover(); r != nil {
			err = g.w.panicked(t, r)
		}
	}()
	return g.proc.Admit(ctx, t.job())
}

// deferTask ends the attempt of a task that was not started, with err, a processor.Deferred error.
// Many tasks may be deferred for the same time. So that they don't come back together, each waits
// longer by a random time; see jitter.
func (g *gatedFeed) deferTask(t *task, err error) {
	t.verdict = processor.Classify(err)
	t.verdict.After += g.gate.jitter()
	t.endWait()
	t.finishUnstarted()
}

// finishUnstarted queues the report of a task that was not started and has a verdict.
func (t *task) finishUnstarted() {
	t.leaveQueue()
	t.outcomeSet.Store(true)
	t.feed.queueReport(t)
}

// maxJitter is the longest time that jitter returns.
const maxJitter = time.Minute

// jitter returns a random time, at most as long as the jobs of this type in this process that wait
// for a pass need to get one each, and a minute at most.
func (g *gate) jitter() time.Duration {
	span := maxJitter
	if per := g.availability().PerSecond; per > 0 {
		seconds := min(float64(g.waiting.Load())/per, maxJitter.Seconds())
		span = time.Duration(seconds * float64(time.Second))
	}
	return time.Duration(rand.Int64N(int64(span) + 1))
}

// start starts a task that has got its pass. Only one goroutine of a feed starts tasks: a call that
// comes meanwhile adds its task to that goroutine's next batch and returns.
func (g *gatedFeed) start(ctx context.Context, t *task) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.admitted = append(g.admitted, t)
	if g.starting {
		return
	}
	g.starting = true
	for len(g.admitted) > 0 {
		n := min(len(g.admitted), maxBatch)
		batch := slices.Clone(g.admitted[:n])
		g.admitted = slices.Delete(g.admitted, 0, n)
		g.mu.Unlock()
		g.startAdmitted(ctx, batch)
		g.mu.Lock()
	}
	g.starting = false
}

// startAdmitted starts tasks that have got their passes, and gives them to the slots. It releases
// those that were stopped or that it can't start, and all of them while isolation is busy.
func (g *gatedFeed) startAdmitted(ctx context.Context, tasks []*task) {
	defer g.held.notify() // the feeds may read more
	admitted := make([]*task, 0, len(tasks))
	for _, t := range tasks {
		t.endWait()
		g.held.untrack(t)
		if t.ctx.stopCause() != nil {
			g.release(t)
			continue
		}
		admitted = append(admitted, t.forStart())
	}
	// startAdmitted asks isolation.busy after endWait, which makes the tasks count as active.
	// Isolation becomes busy first and counts the active tasks then. So no task starts beside a
	// suspect.
	if len(admitted) == 0 || g.isolation.busy() {
		g.release(admitted...)
		return
	}
	slices.SortFunc(admitted, byJob)
	started, err := g.startTasks(ctx, g.typ, admitted)
	if err != nil {
		g.release(admitted...)
		return
	}
	g.held.track(started...)
	if !g.slots.add(started) {
		g.release(started...)
	}
}

// admitAlone waits for the pass of a suspect, which isolation runs. It returns true if the suspect
// can be started, with a pass or with an error of Admit as its outcome. It returns false if the
// suspect is deferred or released; then it returns when that is reported, or when ctx ends.
func (g *gate) admitAlone(ctx context.Context, t *task) bool {
	err := t.feed.loadPayloads(ctx, []*task{t})
	if err == nil {
		t.waitsForPass.Store(true)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			pass, err := g.admit(ctx, t)
			t.takePass(pass, err)
		}()
		select {
		case <-ended:
		case <-t.removed: // the process stops, and drain has released the task
			return false
		}
	}
	switch {
	case err != nil:
		t.feed.release(t)
	case processor.Classify(t.admitErr).Kind == processor.Defer:
		t.verdict = processor.Classify(t.admitErr)
		t.finishUnstarted()
	default:
		return true
	}
	select {
	case <-t.removed:
	case <-ctx.Done():
	}
	return false
}
