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

// task is one attempt of a job in this process, from its read to its reported outcome. The embedded
// Job is what the ready entry says; the other fields are this process's own.
//
// A task has one owner at a time: the feed that reads it, then the slot (or isolation) that runs
// it, then the goroutine that reports it. Only the owner may use the fields, except those whose
// comment allows more. The feed and isolation give the task away with add; the goroutine that
// changes outcomeSet to true becomes its owner, sets the outcome and gives it to the reporter. The
// lease renewal, the watchdog and drain see all tracked tasks; they read the fields that are set
// before track, and those whose comment allows it.
type task struct {
	ledger.Job
	entryID         string            // id of the job's entry in the ready stream
	currentAttempt  int               // attempt that Redis knows the job under; Job.Attempt until the start
	terms           ledger.GroupTerms // tenant and retries, as the group sets them, and the job's timeout
	feed            *partitionFeed
	proc            processor.Processor
	loadedPayload   string    // what the processor gets: Job.Payload or the one from its own key
	separatePayload bool      // the payload is stored in a key of its own
	inFlight        bool      // Redis has marked the job as in flight
	startedAt       time.Time // when Redis marked the job as in flight, by this process's clock
	lastError       *processor.AttemptError
	removed         chan struct{} // of a suspect: closed when the task is not held any more

	// Only of a gated type.
	gate           *gate
	pass           processor.Pass // from Admit until the outcome is set; or nil
	admitErr       error          // an error of Admit that decides about the job instead of Process
	stopAdmission  context.CancelCauseFunc
	waitsForPass   atomic.Bool // Admit runs; the goroutine that changes it to false becomes the owner
	countedAsAhead atomic.Bool // counted in gate.ahead

	place int // 1 + index in the list of tracked tasks; 0: not there. Guarded by heldTasks.mu

	// Any goroutine may use these.
	runStart   atomic.Int64 // time of monotonicNow; 0 before the processor is called
	outcomeSet atomic.Bool  // who changes it to true owns the task, and sets the outcome
	ctx        jobContext   // the processor's context

	// Set when the job ends or is released.
	verdict      processor.Verdict
	result       []byte        // JSON of what the processor returned
	runTime      time.Duration // how long the processor ran
	released     bool          // the job is given back: its processor's result or error does not count
	processTrace string        // trace context that the next step's span follows
}

// size returns about how many bytes the task's outcome takes in a script call.
func (t *task) size() int { return len(t.result) + len(t.Queued) + len(t.verdict.Message) }

// stop ends the processor's context, now or as soon as it begins, and the task's wait for a pass. A
// suspect's wait goes on: it ends with the contexts of admitAlone and Admit.
func (t *task) stop(cause error) {
	t.ctx.stop(cause)
	if t.stopAdmission != nil {
		t.stopAdmission(cause)
	}
}

// forStart returns a task for the start of t's job, with t's pass. t must not be tracked any more:
// the start changes fields that the lease renewal and the watchdog may still read of t.
func (t *task) forStart() *task {
	n := &task{
		Job: t.Job, entryID: t.entryID, currentAttempt: t.Attempt, feed: t.feed, proc: t.proc,
		loadedPayload: t.loadedPayload, separatePayload: t.separatePayload, removed: t.removed,
		gate: t.gate, pass: t.pass, admitErr: t.admitErr,
	}
	n.countedAsAhead.Store(t.countedAsAhead.Swap(false))
	t.pass = nil
	return n
}

// returnPass gives the task's pass back, if it has one. Only the task's owner calls it.
func (t *task) returnPass(err error) {
	if t.pass == nil {
		return
	}
	pass := t.pass
	t.pass = nil
	defer func() {
		if r := recover(); r != nil {
			_ = t.feed.panicked(t, r)
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
	// Any goroutine may use the counters. They are not guarded by mu, because they change with each
	// job.
	count      atomic.Int64 // number of held tasks
	unfinished atomic.Int64 // held tasks without an outcome: they run or will run
	waiting    atomic.Int64 // held tasks that wait for a pass: not suspects, and not unfinished
	// resumeAt is the number of unfinished tasks at which, or below which, the feeds are notified,
	// once; -1: no notification is wanted
	resumeAt atomic.Int64

	mu      sync.Mutex // guards the fields below
	tracked []*task
	changed chan struct{} // closed and replaced by notify
}

func newHeldTasks() *heldTasks {
	h := &heldTasks{changed: make(chan struct{})}
	h.resumeAt.Store(-1)
	return h
}

// reserve counts n tasks that were just read: as held until remove, and as unfinished until
// markFinished or beginWait.
func (h *heldTasks) reserve(n int) {
	h.count.Add(int64(n))
	h.unfinished.Add(int64(n))
}

// active returns the number of held tasks that do not wait for a pass.
func (h *heldTasks) active() int { return int(h.count.Load() - h.waiting.Load()) }

// beginWait records that n unfinished tasks wait for a pass now; endWait ends the wait of one.
func (h *heldTasks) beginWait(n int) {
	h.waiting.Add(int64(n))
	h.markFinished(n)
}

func (h *heldTasks) endWait() {
	h.unfinished.Add(1)
	h.waiting.Add(-1)
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

// untrack removes a task from the tracked ones. It stays counted as held.
func (h *heldTasks) untrack(t *task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(t)
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

// markFinished records that n tasks are no longer unfinished: they have an outcome, are stale, or
// begin to wait for a pass. When at most resumeAt tasks are unfinished, it notifies the feeds, once
// for each call of setResumeAt.
func (h *heldTasks) markFinished(n int) {
	// markFinished writes unfinished before it reads resumeAt; setResumeAt writes resumeAt before
	// it reads unfinished. So at least one of the two sees what the other has written.
	unfinished, resumeAt := h.unfinished.Add(-int64(n)), h.resumeAt.Load()
	if unfinished <= resumeAt && h.resumeAt.CompareAndSwap(resumeAt, -1) {
		h.notify()
	}
}

// setResumeAt asks for one notification as soon as at most n tasks are unfinished; if that is so
// already, it notifies at once. A negative n asks for none. The n of the last call counts, also if
// another feed has made it; a notification wakes all feeds.
func (h *heldTasks) setResumeAt(n int) {
	h.resumeAt.Store(int64(n))
	if h.unfinished.Load() <= int64(n) {
		h.notify()
	}
}

// remove stops holding tasks: their outcome was reported or can't be reported, or they were stale.
// It notifies the feeds, and those who wait for the end of a suspect among the tasks.
func (h *heldTasks) remove(tasks []*task) {
	h.mu.Lock()
	for _, t := range tasks {
		h.drop(t)
		if t.removed != nil {
			close(t.removed)
		}
	}
	h.mu.Unlock()
	h.count.Add(-int64(len(tasks)))
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
		if h.count.Load() == 0 {
			return true
		}
		select {
		case <-changed:
		case <-expired:
			return h.count.Load() == 0
		}
	}
}

// tasks returns the tracked tasks.
func (h *heldTasks) tasks() []*task {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.tracked)
}
