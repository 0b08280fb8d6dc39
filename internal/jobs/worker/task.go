package worker

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/processor"
)

// state is where a task is on its way through the process. Only heldTasks.move changes it, and all
// numbers of tasks with it:
//
//	read ──────────────────────► running ──► ended ──► gone
//	  └──► admitting ──► admitted ──┘          ▲
//	           └───────────────────────────────┘
//
// Of a batch type, gathering takes the place of admitting.
//
// A task also goes from read or admitted to ended, when it is released before it runs, and to gone,
// when Redis says that its entry is stale.
//
// A task has one owner at a time: the feed that reads it, isolation if it is a suspect, the
// goroutine that waits for its pass, the slot that runs it, and the feed's reporter. Only the owner
// may change the task; it gives the task away with slotPool.add, isolation.add or reportQueue.add.
// Two moves are contests: drain may end a task that is admitting, and the watchdog and drain may end
// one that is running, before Admit or Process returns to the owner. Who makes the move owns the
// task from then on, and sets its outcome; the other one must leave the task alone.
type state uint32

// The states are bits, so that a number can count several of them. The zero state is that of a task
// that is not counted yet.
const (
	stateRead      state = 1 << iota // waits for its start, for isolation, or for a slot
	stateAdmitting                   // of a gated type: Admit runs
	stateGathering                   // of a batch type: waits for further jobs of its batch, or for a slot
	stateAdmitted                    // of a gated type: like read, with its pass; of a batch type: in its slot
	stateRunning                     // its processor runs
	stateEnded                       // has an outcome, which is being reported
	stateGone                        // reported, or was stale
)

// number counts the tasks that are in one of the states of a set.
type number struct {
	states state
	n      atomic.Int64
}

func (c *number) value() int { return int(c.n.Load()) }

// moved counts that n tasks have moved from one state to another, and returns the change.
func (c *number) moved(from, to state, n int) (change int) {
	switch was, is := c.states&from != 0, c.states&to != 0; {
	case is && !was:
		change = n
	case was && !is:
		change = -n
	default:
		return 0
	}
	c.n.Add(int64(change))
	return change
}

// task is one attempt of a job in this process, from its read to its reported outcome. The embedded
// Job is what the ready entry says; the other fields are this process's own.
//
// Only the task's owner (see state) may use the fields, except those whose comment allows more. The
// lease renewal, the watchdog and drain see all tracked tasks; they read the fields that are set
// before track, and the terms and runStart of a task that is running.
type task struct {
	ledger.Job
	entryID         string            // id of the job's entry in the ready stream
	currentAttempt  int               // attempt that Redis knows the job under; Job.Attempt until the start
	terms           ledger.GroupTerms // tenant and retries, as the group sets them, and the job's timeout
	feed            *feed
	proc            processor.Processor
	loadedPayload   string    // what the processor gets: Job.Payload or the one from its own key
	separatePayload bool      // the payload is stored in a key of its own
	inFlight        bool      // Redis has marked the job as in flight
	startedAt       time.Time // when Redis marked the job as in flight, by this process's clock
	lastError       *processor.AttemptError
	removed         chan struct{} // of a suspect: closed when the task is gone

	// Only of a gated type.
	gate          *gate
	pass          processor.Pass // from Admit until the outcome is set; or nil
	admitErr      error          // an error of Admit that decides about the job instead of Process
	stopAdmission context.CancelCauseFunc

	// Only of a batch type.
	batchType *batchType
	call      *batch // the call that the task is part of; nil: it runs alone. Set before track

	place int // 1 + index in the list of tracked tasks; 0: not there. Guarded by heldTasks.mu

	// Any goroutine may use these.
	state atomic.Uint32 // a state; see heldTasks.move
	ctx   jobContext    // the processor's context

	runStart int64 // when the task began to run, a time of monotonicNow; 0: it did not

	// Set when the job ends or is released.
	verdict      processor.Verdict
	result       []byte        // JSON of what the processor returned
	runTime      time.Duration // how long the processor ran
	released     bool          // the job is given back: its processor's result or error does not count
	processTrace string        // trace context that the next step's span follows
	deadReason   string        // of a job that is reported as failed: why, a constant Dead… of telemetry
}

func (t *task) currentState() state { return state(t.state.Load()) }

// size returns about how many bytes the task's outcome takes in a script call.
func (t *task) size() int { return len(t.result) + len(t.Queued) + len(t.verdict.Message) }

// stop ends the processor's context, now or as soon as it begins, and the task's wait for a pass. A
// suspect's wait goes on: it ends with the contexts of admitAlone and Admit.
func (t *task) stop(cause error) {
	if t.ctx.stop(cause) && t.call != nil {
		t.call.stop(cause)
	}
	if t.stopAdmission != nil {
		t.stopAdmission(cause)
	}
}

// forStart returns a task that takes t's place, with t's pass and in t's state, for the start of the
// job. t must not be tracked any more: the start changes fields that the lease renewal may still
// read of t, and a renewal of t's attempt must not stop the attempt that starts.
func (t *task) forStart() *task {
	n := &task{
		Job: t.Job, entryID: t.entryID, currentAttempt: t.Attempt, terms: t.terms, feed: t.feed, proc: t.proc,
		loadedPayload: t.loadedPayload, separatePayload: t.separatePayload, removed: t.removed,
		gate: t.gate, pass: t.pass, admitErr: t.admitErr, batchType: t.batchType,
	}
	n.state.Store(t.state.Swap(uint32(stateGone)))
	t.pass = nil
	return n
}

// returnPass gives the task's pass back, if it has one.
func (t *task) returnPass(err error) {
	if t.pass == nil {
		return
	}
	pass := t.pass
	t.pass = nil
	t.give(pass, err)
}

// returnUnused gives back a pass that the task has not taken; nil is none.
func (t *task) returnUnused(pass processor.Pass) {
	if pass != nil {
		t.give(pass, errNotStarted)
	}
}

// give gives a pass back. A panic of the pass is logged.
func (t *task) give(pass processor.Pass, err error) {
	defer func() {
		if r := recover(); r != nil {
			_ = t.feed.w.panicked(t, r)
		}
	}()
	pass.Return(err)
}

// errNotStarted is the error with which an unused pass is returned.
var errNotStarted = processor.Deferred(0, "the job was not started")

// heldTasks are the tasks that this process has read and whose outcome is not reported yet. Leases
// are renewed for the tracked ones among them, which are those that were started, the suspects that
// wait, and those that wait for a pass.
type heldTasks struct {
	// These have no lock, because they change with each job.
	all        number // all held tasks
	active     number // those that neither wait for a pass nor gather
	batched    number // of the active ones, those of batch types
	unfinished number // those that run, or will run without waiting for a pass; without batch types

	// resumeAt is the number of unfinished tasks at which, or below which, the feeds are notified,
	// once; -1: no notification is wanted
	resumeAt atomic.Int64

	mu      sync.Mutex // guards the fields below
	tracked []*task
	changed chan struct{} // closed and replaced by notify
}

func newHeldTasks() *heldTasks {
	h := &heldTasks{changed: make(chan struct{})}
	h.unfinished.states = stateRead | stateAdmitted | stateRunning
	h.active.states = h.unfinished.states | stateEnded
	h.batched.states = h.active.states
	h.all.states = h.active.states | stateAdmitting | stateGathering
	h.resumeAt.Store(-1)
	return h
}

// move moves tasks, which must be of one type, from one state to another. It changes every number
// of tasks accordingly, and notifies the feeds when at most resumeAt tasks are unfinished. It
// returns false if a task was not in the state from: then another goroutine owns the task, and move
// has left it alone.
func (h *heldTasks) move(from, to state, tasks ...*task) bool {
	n := 0
	for _, t := range tasks {
		if t.state.CompareAndSwap(uint32(from), uint32(to)) {
			n++
		}
	}
	if n == 0 {
		return len(tasks) == 0
	}
	h.all.moved(from, to, n)
	h.active.moved(from, to, n)
	if g := tasks[0].gate; g != nil {
		g.waiting.moved(from, to, n)
		g.ahead.moved(from, to, n)
		g.admitted.moved(from, to, n)
	}
	if tasks[0].batchType != nil {
		h.batched.moved(from, to, n)
	} else if h.unfinished.moved(from, to, n) < 0 {
		// unfinished is written before resumeAt is read; setResumeAt writes resumeAt before it reads
		// unfinished. So at least one of the two sees what the other has written.
		resumeAt := h.resumeAt.Load()
		if h.unfinished.n.Load() <= resumeAt && h.resumeAt.CompareAndSwap(resumeAt, -1) {
			h.notify()
		}
	}
	return n == len(tasks)
}

// setResumeAt asks for one notification as soon as at most n tasks are unfinished; if that is so
// already, it notifies at once. A negative n asks for none. The n of the last call counts, also if
// another feed has made it; a notification wakes all feeds.
func (h *heldTasks) setResumeAt(n int) {
	h.resumeAt.Store(int64(n))
	if h.unfinished.value() <= n {
		h.notify()
	}
}

// track adds tasks to the tracked ones, so that their leases are renewed.
func (h *heldTasks) track(tasks ...*task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range tasks {
		h.tracked = append(h.tracked, t)
		t.place = len(h.tracked)
	}
}

// untrack removes tasks from the tracked ones. They are still held.
func (h *heldTasks) untrack(tasks ...*task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range tasks {
		h.drop(t)
	}
}

// drop removes a task from the tracked ones, if it is there. The caller holds the lock.
func (h *heldTasks) drop(t *task) {
	if t.place == 0 {
		return
	}
	last := len(h.tracked) - 1
	moved := h.tracked[last]
	h.tracked[t.place-1], moved.place = moved, t.place
	h.tracked[last] = nil
	h.tracked, t.place = h.tracked[:last], 0
}

// remove stops holding tasks, which must be of one type and in one state: their outcome was reported
// or can't be reported, or they were stale. It notifies the feeds, and those who wait for the end of
// a suspect among the tasks.
func (h *heldTasks) remove(tasks []*task) {
	h.mu.Lock()
	for _, t := range tasks {
		h.drop(t)
		if t.removed != nil {
			close(t.removed)
		}
	}
	h.mu.Unlock()
	h.move(tasks[0].currentState(), stateGone, tasks...)
	h.notify()
}

// nextChange returns a channel that is closed at the next notification. A caller that waits for
// free capacity must call it before it looks at the capacity; otherwise it may miss a notification.
func (h *heldTasks) nextChange() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changed
}

// notify wakes the feeds of all partitions, because it is not known which of them has work, and all
// others who wait for nextChange.
func (h *heldTasks) notify() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
}

// waitEmpty waits until no task is held and returns true, or returns false after the time within.
func (h *heldTasks) waitEmpty(within time.Duration) bool {
	expired := time.After(within)
	for {
		changed := h.nextChange()
		if h.all.value() == 0 {
			return true
		}
		select {
		case <-changed:
		case <-expired:
			return h.all.value() == 0
		}
	}
}

// tasks returns the tracked tasks.
func (h *heldTasks) tasks() []*task {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.tracked)
}
