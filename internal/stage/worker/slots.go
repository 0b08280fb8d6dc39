package worker

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// MaxCount is the most jobs that one process runs side by side.
const MaxCount = 10000

// slots are the goroutines that run jobs.
type slotPool struct {
	w         *Worker
	mu        sync.Mutex
	serveSlot func(*slot) // serves jobs in a slot, under the context that they run under; nil until the pool starts
	closed    bool
	slots     []*slot
	wg        sync.WaitGroup // of the slots that were not given up

	size, active atomic.Int64
	isolated     atomic.Pointer[task] // a suspect, which runs in no slot
}

type slot struct {
	quit   chan struct{}
	closed atomic.Bool // quit is
	task   atomic.Pointer[task]
}

func newSlotPool(w *Worker, size int) *slotPool {
	s := &slotPool{w: w}
	s.size.Store(int64(size))
	return s
}

// sizes are how many jobs can run at once, and how many do.
func (s *slotPool) sizeAndActive() (size, active int) {
	return int(s.size.Load()), int(s.active.Load())
}

// start opens the slots, whose jobs run under ctx.
func (s *slotPool) start(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serveSlot = func(sl *slot) { s.serve(ctx, sl) }
	s.adjust()
}

// resize opens slots at once, and closes them as their jobs end.
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

// close ends the slots as their jobs end. None is opened any more.
func (s *slotPool) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.size.Store(0)
	s.adjust()
}

// fit opens or closes slots; the lock is held.
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

func (s *slotPool) serve(ctx context.Context, sl *slot) {
	for t := s.w.slotQueue.next(sl); t != nil; t = s.w.slotQueue.next(sl) {
		passed := s.w.isolation.waitUnblocked(sl.quit)
		if !t.taken.CompareAndSwap(false, true) {
			continue // it waited too long, and was handed back
		}
		if !passed || t.ctx.stopCause() != nil {
			t.feed.release([]*task{t})
			continue
		}
		sl.task.Store(t)
		s.active.Add(1)
		if !s.w.runTask(ctx, t) {
			return // replace has counted this slot out
		}
		s.active.Add(-1)
		sl.task.Store(nil)
	}
	s.wg.Done()
}

// current are ids of jobs that run now, at most n.
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

// age is how long the running jobs have run on average, of some hundred at most; 0 while a
// slot is free.
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

// replace gives up a slot whose job does not end, and opens another in its place.
func (s *slotPool) replaceSlot(t *task) {
	if t.suspect() {
		return // it has none
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active.Add(-1)
	s.wg.Done()
	s.slots = slices.DeleteFunc(s.slots, func(sl *slot) bool { return sl.task.Load() == t })
	s.adjust()
}
