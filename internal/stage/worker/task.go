package worker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor"
)

// task is one attempt of a job in this process, from its read to its reported outcome. The embedded
// Job is what the ready entry says; the other fields are this process's own.
type task struct {
	ledger.Job
	entryID         string            // id of the job's entry in the ready stream
	currentAttempt  int               // attempt that Redis knows the job under; Job.Attempt until the start
	terms           ledger.GroupTerms // tenant, timeout and retries, as the group sets them
	feed            *partitionFeed
	proc            processor.Processor
	loadedPayload   string        // what the processor gets: Job.Payload or the one from its own key
	separatePayload bool          // the payload is stored in a key of its own
	inFlight        bool          // Redis has marked the job as in flight
	startedAt       time.Time     // when Redis marked the job as in flight, by this process's clock
	startOrder      int64         // position among all jobs that this process started
	taken           atomic.Bool   // set by the slot that runs the task, or by what releases it
	removed         chan struct{} // of a suspect: closed when the task is not held any more

	prev, next *task // neighbours in the list of held tasks
	tracked    bool  // the task is in that list

	// Set while the job runs.
	runStart   atomic.Int64 // time of monotonicNow; 0 before the processor is called
	outcomeSet atomic.Bool  // who changes it to true sets the outcome and queues the report
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

// timeout returns how long the task may run: what its group says, or else fallback.
func (t *task) timeout(fallback time.Duration) time.Duration {
	if t.terms.JobTimeout > 0 {
		return t.terms.JobTimeout
	}
	return fallback
}

// heldTasks are the tasks that this process has read and whose outcome is not reported yet. Leases
// are renewed for the tracked ones among them, which are those that were started and the suspects
// that wait.
type heldTasks struct {
	mu         sync.Mutex
	head       *task        // first of the tracked tasks, a doubly linked list
	count      atomic.Int64 // number of held tasks
	unfinished atomic.Int64 // held tasks without an outcome: they run or will run
	// feeds are notified once when unfinished falls to resumeAt or below; -1: not
	resumeAt atomic.Int64
	changed  chan struct{} // closed and replaced by notify
}

func newHeldTasks() *heldTasks {
	h := &heldTasks{changed: make(chan struct{})}
	h.resumeAt.Store(-1)
	return h
}

// reserve counts n tasks that were just read. Each of them is counted until remove.
func (h *heldTasks) reserve(n int) {
	h.count.Add(int64(n))
	h.unfinished.Add(int64(n))
}

// track adds tasks to the list, so that their leases are renewed.
func (h *heldTasks) track(tasks []*task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range tasks {
		t.tracked, t.prev, t.next = true, nil, h.head
		if h.head != nil {
			h.head.prev = t
		}
		h.head = t
	}
}

// untrack removes a task from the list. It stays counted as held.
func (h *heldTasks) untrack(t *task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unlink(t)
}

// unlink removes a task from the list, if it is there. The caller holds the lock.
func (h *heldTasks) unlink(t *task) {
	if !t.tracked {
		return
	}
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		h.head = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	}
	t.tracked, t.prev, t.next = false, nil, nil
}

// markFinished says that n tasks have an outcome now. When at most resumeAt tasks are unfinished,
// it notifies the feeds, once for each setResumeAt.
func (h *heldTasks) markFinished(n int) {
	// This writes unfinished before it reads resumeAt; setResumeAt writes resumeAt before it reads
	// unfinished. So at least one of the two sees what the other has written.
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
		h.unlink(t)
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
	var out []*task
	for t := h.head; t != nil; t = t.next {
		out = append(out, t)
	}
	return out
}

// streamKey names the ready stream of a partition and a type.
type streamKey struct {
	partition keyspace.Partition
	typ       string
}

// byStream sorts tasks into their ready streams.
func byStream(tasks []*task) map[streamKey][]*task {
	out := map[streamKey][]*task{}
	for _, t := range tasks {
		k := streamKey{t.feed.partition, t.Type}
		out[k] = append(out[k], t)
	}
	return out
}

// movingAverage is an exponential moving average of durations. Each new duration has the weight
// 1/16.
type movingAverage struct{ nanoseconds atomic.Int64 }

func (e *movingAverage) add(d time.Duration) {
	old := e.nanoseconds.Load()
	if old == 0 {
		e.nanoseconds.Store(max(1, int64(d)))
		return
	}
	e.nanoseconds.Store(max(1, old+(int64(d)-old)/16))
}

// value returns the average, 0 before the first duration.
func (e *movingAverage) value() time.Duration { return time.Duration(e.nanoseconds.Load()) }
