package worker

import (
	"context"
	"sync"
	"sync/atomic"
)

// A suspect is a job that has lost a worker before: it may be the one that kills them. It is started and run alone in its
// process, so that the next crash hits nobody else, and counts against it alone.
func (t *task) suspect() bool { return t.Losses > 0 }

// solo lets suspects run while the process holds nothing else: no job of a slot begins meanwhile, and what is read goes back. It takes
// one at a time: of those that wait in a process, all would wait for another lease when the first one kills it.
type solo struct {
	w *Worker

	mu      sync.Mutex
	next    *task         // read and held, but not started
	closed  atomic.Bool   // no job of a slot may begin; set under the lock
	changed chan struct{} // closed and replaced at each change

	caution atomic.Int64 // entries that may be read at once; 0: as many as there is room for
	turn    sync.Mutex   // of cautious readers
}

func newSolo(w *Worker) *solo { return &solo{w: w, changed: make(chan struct{})} }

// cautiously calls read with how many entries it may take at most, 0 for no bound, and learns whether there were suspects. They come in crowds, since a
// worker that dies leaves many: after one, entries are read one by one, and twice as many each time that there was none. So hardly one is
// read in vain, and a crowd's suspects follow one another in a process that is empty already.
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

// take takes a suspect that is to run next, unless there is one.
func (s *solo) take(t *task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil || s.closed.Load() {
		return false
	}
	s.next = t
	s.change()
	return true
}

// busy says whether a suspect runs or is to run next: then the process takes in nothing.
func (s *solo) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed.Load() || s.next != nil
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
	some := func() bool { s.closed.Store(s.next != nil); return s.closed.Load() }
	for ctx.Err() == nil && s.await(ctx.Done(), some) {
		if s.empty(ctx) {
			if t := s.pop(); t != nil {
				s.runAlone(ctx, after, t)
			}
		}
		s.open()
	}
}

func (s *solo) open() {
	s.mu.Lock()
	s.closed.Store(false)
	s.change()
	s.mu.Unlock()
	s.w.held.signal() // there may be room again
}

func (s *solo) pop() *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.next
	s.next = nil
	return t
}

// empty hands back what has not begun, and waits until the outcomes of all that runs have been reported too.
func (s *solo) empty(ctx context.Context) bool {
	for _, t := range s.w.held.all() {
		if !t.suspect() && t.taken.CompareAndSwap(false, true) {
			t.part.handBack([]*task{t})
		}
	}
	for {
		freed := s.w.held.freed()
		if s.w.held.n.Load() <= 1 { // that one
			return true
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return false
		}
	}
}

// runAlone starts a suspect only now: one that is in flight has been alone. It returns when its outcome was reported.
func (s *solo) runAlone(ctx, after context.Context, t *task) {
	p := t.part
	p.held.untrack(t) // who looks at what is held finds it again when it has started
	if ctx.Err() != nil || t.stopped() != nil {
		p.handBack([]*task{t})
		return
	}
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
