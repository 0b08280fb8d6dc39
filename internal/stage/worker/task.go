package worker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor"
)

// task is one attempt in this process, from its start to its settled outcome.
type task struct {
	ledger.Job
	entryID         string
	currentAttempt  int // the one to report under
	terms           ledger.GroupTerms
	feed            *partitionFeed
	proc            processor.Processor
	loadedPayload   string
	separatePayload bool          // the payload lies in a key of its own
	inFlight        bool          // Redis has it in flight
	startedAt       time.Time     // when it was
	startOrder      int64         // its place in the line for a slot
	taken           atomic.Bool   // by a slot, or by who hands it back
	removed         chan struct{} // of a suspect: closed when it is held no more

	prev, next *task // among those that are held
	tracked    bool

	// While it runs:
	runStart   atomic.Int64 // by clock; 0 before
	outcomeSet atomic.Bool  // whoever sets it reports the outcome
	ctx        jobContext

	// How it ended:
	verdict      processor.Verdict
	result       []byte // JSON
	runTime      time.Duration
	released     bool   // it ended without an outcome
	processTrace string // for the reduce span
}

// size is what the task's outcome weighs on its way to Redis, in bytes, roughly.
func (t *task) size() int { return len(t.result) + len(t.Queued) + len(t.verdict.Message) }

// timeout is how long the task may run.
func (t *task) timeout(fallback time.Duration) time.Duration {
	if t.terms.JobTimeout > 0 {
		return t.terms.JobTimeout
	}
	return fallback
}

// held are the tasks of this process that are not settled; leases are renewed for those that
// were started.
type heldTasks struct {
	mu         sync.Mutex
	head       *task         // of those that were started
	count      atomic.Int64  // all that were read
	unfinished atomic.Int64  // those of them that have not ended: they run, or wait to
	resumeAt   atomic.Int64  // that few open ones are waited for
	changed    chan struct{} // closed and replaced when some were let go, or more may be held
}

func newHeldTasks() *heldTasks {
	h := &heldTasks{changed: make(chan struct{})}
	h.resumeAt.Store(-1)
	return h
}

// reserve counts n tasks that were read; track then names those that were started.
func (h *heldTasks) reserve(n int) {
	h.count.Add(int64(n))
	h.unfinished.Add(int64(n))
}

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

// untrack keeps a task counted and out of sight.
func (h *heldTasks) untrack(t *task) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unlink(t)
}

// unlink takes a task out of the list; the lock is held.
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

// ended says that n tasks are not open any more.
func (h *heldTasks) markFinished(n int) {
	unfinished, resumeAt := h.unfinished.Add(-int64(n)), h.resumeAt.Load() // in this order: await writes the one and then reads the other
	if unfinished <= resumeAt && h.resumeAt.CompareAndSwap(resumeAt, -1) {
		h.notify()
	}
}

// await has a signal follow when no more than n tasks are open, which they were a moment ago; none
// where n is negative.
func (h *heldTasks) setResumeAt(n int) {
	h.resumeAt.Store(int64(n))
	if h.unfinished.Load() <= int64(n) {
		h.notify()
	}
}

// remove lets go of tasks that have ended.
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

// freed is closed at the next signal. Whoever waits for room asks for it before looking how
// much there is.
func (h *heldTasks) nextChange() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changed
}

// signal wakes everybody who waits: which partition has work is not known here.
func (h *heldTasks) notify() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
}

// empty waits until nothing is held any more, and tells whether it came to that in time.
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

// all are the tasks that were started and not settled.
func (h *heldTasks) tasks() []*task {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []*task
	for t := h.head; t != nil; t = t.next {
		out = append(out, t)
	}
	return out
}

// stream is where a task's entry lies.
type streamKey struct {
	partition keyspace.Partition
	typ       string
}

func byStream(tasks []*task) map[streamKey][]*task {
	out := map[streamKey][]*task{}
	for _, t := range tasks {
		k := streamKey{t.feed.partition, t.Type}
		out[k] = append(out[k], t)
	}
	return out
}

// ewma is a moving average of durations.
type movingAverage struct{ nanoseconds atomic.Int64 }

func (e *movingAverage) add(d time.Duration) {
	old := e.nanoseconds.Load()
	if old == 0 {
		e.nanoseconds.Store(max(1, int64(d)))
		return
	}
	e.nanoseconds.Store(max(1, old+(int64(d)-old)/16))
}

func (e *movingAverage) value() time.Duration { return time.Duration(e.nanoseconds.Load()) }
