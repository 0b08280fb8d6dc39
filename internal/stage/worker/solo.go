package worker

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A suspect is a job that has lost a worker before: it may be the one that kills them. It is
// started and run alone in its process, so that the next crash hits nobody else, and counts
// against it alone.
func (t *task) suspect() bool { return t.Losses > 0 }

// maxSuspects is how many suspects wait in a process. All but one of them have lost a single
// worker: most of these were only beside the one that kills.
const maxSuspects = 16

// solo lets suspects run, one after the other, while the process holds nothing else: no job of a
// slot begins meanwhile, and what else is read goes back. Those that have lost the fewest workers
// run first, so that a job that kills again takes none of the others' time.
type solo struct {
	w *Worker

	mu      sync.Mutex
	waiting []*task       // read and held, but not started; by losses
	running bool          // they run: no more are taken
	closed  atomic.Bool   // no job of a slot may begin; set under the lock
	changed chan struct{} // closed and replaced at each change
	pause   time.Duration // before the next look for more

	caution atomic.Int64 // entries that may be read at once; 0: as many as there is room for
	turn    sync.Mutex   // of cautious readers
}

func newSolo(w *Worker) *solo { return &solo{w: w, changed: make(chan struct{})} }

// cautiously calls read with how many entries it may take at most, 0 for no bound, and learns
// whether there were suspects. They come in crowds, since a worker that dies leaves many: after
// one, entries are read one by one, and twice as many each time that there was none. So hardly one
// is read in vain, and a crowd's suspects follow one another in a process that is empty already.
func (s *solo) cautiously(read func(most int) (suspects bool, err error)) error {
	most := s.caution.Load()
	if most > 0 {
		s.turn.Lock()
		defer s.turn.Unlock()
		most = s.caution.Load()
	}
	suspects, err := read(int(most))
	switch {
	case suspects && err == nil:
		s.caution.Store(1)
	case most >= maxBatch && err == nil:
		s.caution.CompareAndSwap(most, 0)
	case err == nil:
		s.caution.CompareAndSwap(most, 2*most)
	}
	return err
}

// take takes a suspect that is to run alone, if it may wait here.
func (s *solo) take(t *task) bool {
	s.mu.Lock()
	killer := t.Losses > 1 && len(s.waiting) > 0 && s.waiting[len(s.waiting)-1].Losses > 1
	if s.running || killer || len(s.waiting) == maxSuspects {
		s.mu.Unlock()
		return false
	}
	at, _ := slices.BinarySearchFunc(s.waiting, t, func(a, b *task) int { return cmp.Compare(a.Losses, b.Losses) })
	s.waiting = slices.Insert(s.waiting, at, t)
	s.change()
	s.mu.Unlock()
	s.w.held.signal() // what is held is not all to be waited for now
	return true
}

// busy says whether suspects run or wait: then the process takes in nothing else.
func (s *solo) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed.Load() || len(s.waiting) > 0
}

// more says whether more suspects may come while what runs is waited for, and when to look for them
// again: ever less often, since what is none is read in vain.
func (s *solo) more() (pause time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || len(s.waiting) == 0 || len(s.waiting) == maxSuspects {
		return 0, false
	}
	s.pause = max(50*time.Millisecond, 2*s.pause)
	return s.pause, true
}

// change wakes who waits; the lock is held.
func (s *solo) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until ok, under the lock, and says whether it came to that before quit.
func (s *solo) await(quit <-chan struct{}, ok func() bool) bool {
	for {
		s.mu.Lock()
		fine, changed := ok(), s.changed
		s.mu.Unlock()
		if fine {
			return true
		}
		select {
		case <-changed:
		case <-quit:
			return false
		}
	}
}

// pass waits until jobs of slots may begin.
func (s *solo) pass(quit <-chan struct{}) bool {
	return !s.closed.Load() || s.await(quit, func() bool { return !s.closed.Load() })
}

// run serves suspects until ctx ends. Their jobs run under after.
func (s *solo) run(ctx, after context.Context) {
	some := func() bool { s.closed.Store(len(s.waiting) > 0); return s.closed.Load() }
	for ctx.Err() == nil && s.await(ctx.Done(), some) {
		if s.empty(ctx) {
			for t := s.pop(); t != nil && ctx.Err() == nil; t = s.pop() {
				s.runAlone(ctx, after, t)
			}
		}
		s.open()
	}
}

func (s *solo) open() {
	s.mu.Lock()
	s.closed.Store(false)
	s.running, s.pause = false, 0
	s.change()
	s.mu.Unlock()
	s.w.held.signal() // there may be room again
}

func (s *solo) pop() *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) == 0 {
		return nil
	}
	t := s.waiting[0]
	s.waiting = s.waiting[1:]
	return t
}

// empty hands back what has not begun, and waits until the outcomes of all that runs have been
// reported too.
func (s *solo) empty(ctx context.Context) bool {
	for _, t := range s.w.held.all() {
		if !t.suspect() && t.taken.CompareAndSwap(false, true) {
			t.part.handBack([]*task{t})
		}
	}
	for {
		freed := s.w.held.freed()
		s.mu.Lock()
		s.running = int(s.w.held.n.Load()) <= len(s.waiting)
		alone := s.running
		s.mu.Unlock()
		if alone {
			return true
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return false
		}
	}
}

// runAlone starts a suspect only now: one that is in flight has been alone. It returns when its
// outcome was reported.
func (s *solo) runAlone(ctx, after context.Context, t *task) {
	p := t.part
	p.held.untrack(t)
	if ctx.Err() != nil || t.ctx.stopped() != nil {
		p.handBack([]*task{t})
		return
	}
	// Who has just looked at what is held may still read the one that waited.
	t = &task{Job: t.Job, entry: t.entry, attempt: t.Attempt, part: p, proc: t.proc, settled: t.settled}
	started, err := p.start(ctx, t.Type, []*task{t})
	if err != nil {
		p.handBack([]*task{t})
		return
	}
	if len(started) == 0 {
		return // stale, and let go
	}
	p.held.track(started)
	if p.loadPayloads(ctx, started) != nil {
		p.handBack(started)
		return
	}
	slots := s.w.slots
	slots.alone.Store(t)
	slots.active.Add(1)
	go s.w.run(after, t)
	select {
	case <-t.settled:
	case <-after.Done():
	}
	slots.active.Add(-1)
	slots.alone.Store(nil)
}
