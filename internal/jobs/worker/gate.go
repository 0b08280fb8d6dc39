package worker

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
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
	typ     string
	proc    processor.Gated
	limited processor.Limited // nil: the processor does not say what is available
	broken  sync.Once         // logs that Availability has panicked

	waiting  number // tasks that wait for a pass
	ahead    number // those, and the ones that wait for a slot after Admit
	admitted number // tasks that wait for a slot after Admit, or run
}

func newGate(w *Worker, typ string, proc processor.Gated) *gate {
	limited, _ := proc.(processor.Limited)
	g := &gate{w: w, typ: typ, proc: proc, limited: limited}
	g.waiting.states = stateAdmitting
	g.ahead.states = stateAdmitting | stateAdmitted
	g.admitted.states = stateAdmitted | stateRunning
	return g
}

// availability returns what the processor says is available. If it does not say, or panics,
// everything is.
func (g *gate) availability() (a processor.Availability) {
	unknown := processor.Availability{Free: -1, PerSecond: math.Inf(1)}
	if g.limited == nil {
		return unknown
	}
	defer func() {
		if r := recover(); r != nil {
			a = unknown
			g.broken.Do(func() {
				g.w.Tel.Log.Error("the method Availability panicked, which is logged once", "type", g.typ,
					"panic", panicText(r), "at", panickedAt())
			})
		}
	}()
	return g.limited.Availability()
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
	least := leastAhead - g.ahead.value()
	if len(w.ungated) > 0 && w.admittedTasks() >= size {
		least = 0
	}
	return max(least, capacity-g.waiting.value()), longPause
}

// admittedTasks returns how many tasks of gated types run, or wait for a slot after Admit.
func (w *Worker) admittedTasks() int {
	n := 0
	for _, g := range w.gates {
		n += g.admitted.value()
	}
	return n
}

// admit calls the processor's Admit for a task that is admitting, moves the task on, and calls then,
// also if Admit ends the goroutine. ok says that the job is to be started, with its pass or with an
// error of Admit that decides about it. Otherwise the task has ended: it was deferred, or was stopped
// and is released. If drain has taken the task meanwhile, the pass goes back unused.
func (g *gate) admit(ctx context.Context, t *task, then func(ok bool)) {
	var a admission
	defer func() { then(g.settle(ctx, t, a)) }()
	g.callAdmit(ctx, t, &a)
}

// admission is what Admit has returned.
type admission struct {
	pass    processor.Pass
	err     error // only a guard may call its methods
	verdict processor.Verdict
	whole   bool // Admit has returned, and verdict is set
}

func (g *gate) settle(ctx context.Context, t *task, a admission) (start bool) {
	next, stopped := stateAdmitted, ctx.Err() != nil
	if a.verdict.Kind == processor.Defer && !t.suspect() {
		a.verdict.After += g.jitter()
	}
	if stopped || a.verdict.Kind == processor.Defer {
		next = stateEnded
	}
	if !g.w.held.move(stateAdmitting, next, t) {
		t.returnUnused(a.pass)
		return false
	}
	t.pass, t.admitErr = a.pass, a.err
	if next == stateAdmitted {
		return true
	}
	if stopped {
		t.released = true
	} else {
		t.verdict = a.verdict
	}
	defer t.feed.reports.add(t)
	t.returnPass(errNotStarted)
	return false
}

// callAdmit calls Admit, for at most the timeout of the job's type, and sets a. A panic, and the end
// of the goroutine, become an error. A job whose payload is lost needs no pass. For a sampled job,
// callAdmit records the wait as a span.
func (g *gate) callAdmit(ctx context.Context, t *task, a *admission) {
	if t.loadedPayload == "" {
		return
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
		if r := recover(); r != nil || !a.whole {
			t.returnUnused(a.pass)
			*a = admission{err: g.w.panicked(t, r)}
			a.verdict = processor.Classify(a.err)
		}
	}()
	a.pass, a.err = g.proc.Admit(ctx, t.job())
	a.verdict, a.whole = processor.Classify(a.err), true
}

const maxJitter = time.Minute

// jitter returns a random time, at most as long as the jobs of this type in this process that wait
// for a pass need to get one each, and a minute at most. A deferred job waits longer by this time,
// because many may be deferred for the same time and must not come back together.
func (g *gate) jitter() time.Duration {
	span := maxJitter
	if per := g.availability().PerSecond; per > 0 {
		seconds := min(float64(g.waiting.value())/per, maxJitter.Seconds())
		span = time.Duration(seconds * float64(time.Second))
	}
	return time.Duration(rand.Int64N(int64(span) + 1))
}

// admitAlone waits for the pass of a suspect, which isolation runs. It returns true if the suspect
// can be started, with a pass or with an error of Admit as its outcome. It returns false if the
// suspect is deferred or released; then it returns when that is reported, or when ctx ends.
func (g *gate) admitAlone(ctx context.Context, t *task) bool {
	if t.feed.loadPayloads(ctx, []*task{t}) != nil {
		release(t)
	} else {
		g.w.held.move(stateRead, stateAdmitting, t)
		admitted := make(chan bool, 1)
		go g.admit(ctx, t, func(ok bool) { admitted <- ok })
		select {
		case ok := <-admitted:
			if ok {
				return true
			}
		case <-t.removed: // the process stops, and drain has released the task
			return false
		}
	}
	select {
	case <-t.removed:
	case <-ctx.Done():
	}
	return false
}

// gatedFeed reads the ready stream of one gated type in one partition. Each job waits for a pass
// before it is started, and is deferred if Admit says so.
type gatedFeed struct {
	feed *feed
	gate *gate

	mu       sync.Mutex
	admitted []*task // have a pass and are to be started
	starting bool    // a goroutine starts admitted tasks
}

// step reads one batch of entries and lets each of their jobs wait for a pass, in a goroutine of
// its own. If the process should read no more jobs now, step only waits until that may have
// changed. It always returns 0 as the time to wait.
func (g *gatedFeed) step(ctx context.Context) (time.Duration, error) {
	changed := g.gate.w.held.nextChange()
	n, pause := g.gate.capacity()
	if n <= 0 {
		await(ctx, changed, pause)
		return 0, nil
	}
	_, err := g.feed.readEntries(ctx, []string{g.gate.typ}, n, g.gate.w.cfg.Block, g.admitEntries)
	return 0, err
}

// await waits until changed is closed, the pause is over, or ctx ends.
func await(ctx context.Context, changed <-chan struct{}, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// admitEntries starts a goroutine for the job of each entry, which waits for a pass and has the job
// started. Suspects and entries that can't be used are treated as by startEntries.
func (g *gatedFeed) admitEntries(ctx context.Context, typ string, entries []stream.Entry) (suspects bool) {
	tasks, suspects := g.feed.takeEntries(ctx, typ, entries)
	if len(tasks) == 0 {
		return suspects
	}
	if g.feed.loadPayloads(ctx, tasks) != nil {
		release(tasks...)
		return suspects
	}
	held := g.gate.w.held
	held.move(stateRead, stateAdmitting, tasks...)
	if g.gate.w.isolation.busy() {
		held.notify() // the process may be empty for the suspect now
	}
	for _, t := range tasks {
		var admitCtx context.Context
		admitCtx, t.stopAdmission = context.WithCancelCause(ctx) // ends when the task is stopped
		held.track(t)
		go func() {
			defer t.stopAdmission(nil)
			g.gate.admit(admitCtx, t, func(ok bool) {
				if ok {
					g.start(ctx, t)
				}
			})
		}()
	}
	return suspects
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
	w, f := g.gate.w, g.feed
	defer w.held.notify() // the feeds may read more
	admitted := make([]*task, 0, len(tasks))
	for _, t := range tasks {
		w.held.untrack(t)
		if t.ctx.stopCause() != nil {
			release(t)
			continue
		}
		admitted = append(admitted, t.forStart())
	}
	// startAdmitted asks isolation.busy after the tasks have become active, by their move to
	// admitted. Isolation becomes busy first and counts the active tasks then. So no task starts
	// beside a suspect.
	if len(admitted) == 0 || w.isolation.busy() {
		release(admitted...)
		return
	}
	slices.SortFunc(admitted, byJob)
	started, err := f.startTasks(ctx, g.gate.typ, admitted)
	if err != nil {
		release(admitted...)
		return
	}
	w.held.track(started...)
	if !w.slots.add(started) {
		release(started...)
	}
}
