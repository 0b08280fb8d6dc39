package worker

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// MaxCount is the largest number of slots of one worker process.
const MaxCount = 10000

// slotPool is the set of slots of a worker process. A slot is a goroutine that runs one job at a
// time.
type slotPool struct {
	w         *Worker
	mu        sync.Mutex
	serveSlot func(*slot)    // the goroutine of a slot; nil until the pool starts
	closed    bool           // the pool opens no more slots
	slots     []*slot        // the open slots; a closed one is not here, even if a job runs in it
	wg        sync.WaitGroup // goroutines of all slots, also closed ones, but not of abandoned ones

	// number of wanted slots; number of jobs that run, an isolated suspect included
	size, active atomic.Int64
	isolated     atomic.Pointer[task] // the suspect that runs now, outside the slots
}

type slot struct {
	quit   chan struct{}        // closed when the slot is to end
	closed atomic.Bool          // quit is closed
	task   atomic.Pointer[task] // the task that runs in the slot, or nil
}

func newSlotPool(w *Worker, size int) *slotPool {
	s := &slotPool{w: w}
	s.size.Store(int64(size))
	return s
}

// sizeAndActive returns how many slots the pool is to have, and how many jobs run now, an isolated
// suspect included. After a resize to fewer slots, and while the pool closes, more jobs may run.
func (s *slotPool) sizeAndActive() (size, active int) {
	return int(s.size.Load()), int(s.active.Load())
}

// start opens the slots. Their jobs run under ctx.
func (s *slotPool) start(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serveSlot = func(sl *slot) { s.serve(ctx, sl) }
	s.adjust()
}

// resize sets the number of slots to n, and wakes the feeds. New slots open at once, or at start; a
// surplus slot closes when its job ends. After close, resize does nothing.
func (s *slotPool) resize(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.size.Store(int64(n))
	s.adjust()
	s.w.held.notify()
}

// close makes each slot end after its job, and does not wait for that. The pool opens no more
// slots, and its wanted size is 0.
func (s *slotPool) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.size.Store(0)
	s.adjust()
}

// adjust opens or closes slots until there are as many as size says. Before start it does nothing.
// The caller holds the lock.
func (s *slotPool) adjust() {
	if s.serveSlot == nil {
		return
	}
	n := int(s.size.Load())
	for len(s.slots) < n {
		sl := &slot{quit: make(chan struct{})}
		s.slots = append(s.slots, sl)
		s.wg.Add(1)
		go s.serveSlot(sl)
	}
	for len(s.slots) > n {
		last := s.slots[len(s.slots)-1]
		s.slots = s.slots[:len(s.slots)-1]
		last.closed.Store(true)
		close(last.quit)
	}
	s.w.slotQueue.wake()
}

// serve runs tasks from the slot queue in slot sl until the slot is closed or abandoned. Jobs run
// under ctx. While isolation blocks the slots, serve waits with its next task; if the slot is
// closed meanwhile, it releases the task. It also releases a task whose group was cancelled, or
// whose lease was lost, before it began.
func (s *slotPool) serve(ctx context.Context, sl *slot) {
	for t := s.w.slotQueue.next(sl); t != nil; t = s.w.slotQueue.next(sl) {
		passed := s.w.isolation.waitUnblocked(sl.quit)
		if !t.taken.CompareAndSwap(false, true) {
			continue // the watchdog has released it, because it waited too long
		}
		if !passed || t.ctx.stopCause() != nil {
			t.feed.release([]*task{t})
			continue
		}
		sl.task.Store(t)
		s.active.Add(1)
		if !s.w.runTask(ctx, t) {
			return // replaceSlot has removed this slot from the pool
		}
		s.active.Add(-1)
		sl.task.Store(nil)
	}
	s.wg.Done()
}

// runningIDs returns the ids of at most n jobs that run now, the isolated suspect first. It leaves
// out the last jobs of closed slots.
func (s *slotPool) runningIDs(n int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := []string{}
	add := func(t *task) {
		if t != nil && len(ids) < n {
			ids = append(ids, t.Group+"."+strconv.FormatInt(t.Ordinal, 10))
		}
	}
	add(s.isolated.Load())
	for _, sl := range s.slots {
		add(sl.task.Load())
	}
	return ids
}

// meanRunningTime returns how long the jobs that run now, in the first 100 slots, have run on
// average. It returns 0 while a slot is free. now is a time of monotonicNow.
func (s *slotPool) meanRunningTime(now int64) time.Duration {
	if size, active := s.sizeAndActive(); active < size {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sum, n := int64(0), int64(0)
	for _, sl := range s.slots[:min(len(s.slots), 100)] {
		if t := sl.task.Load(); t != nil {
			if began := t.runStart.Load(); began != 0 {
				sum += now - began
				n++
			}
		}
	}
	return time.Duration(sum / max(1, n))
}

// replaceSlot removes the slot of a task that was abandoned, and opens a new slot if the pool has
// too few then. The old slot's goroutine ends when the processor returns. replaceSlot does nothing
// for a suspect, which runs in no slot.
func (s *slotPool) replaceSlot(t *task) {
	if t.suspect() {
		return // a suspect runs outside the slots
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active.Add(-1)
	s.wg.Done()
	s.slots = slices.DeleteFunc(s.slots, func(sl *slot) bool { return sl.task.Load() == t })
	s.adjust()
}
