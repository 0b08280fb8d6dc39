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
type isolation struct {
	w *Worker

	mu           sync.Mutex
	suspects     []*task       // read and held, but not started; by losses
	running      bool          // they run: no more are taken
	slotsBlocked atomic.Bool   // no job of a slot may begin; set under the lock
	changed      chan struct{} // closed and replaced at each change
	searchPause  time.Duration // before the next look for more

	readLimit   atomic.Int64 // entries that may be read at once; 0: as many as there is room for
	limitedRead sync.Mutex   // of cautious readers
}

func newIsolation(w *Worker) *isolation { return &isolation{w: w, changed: make(chan struct{})} }

// cautiously calls read with how many entries it may take at most, 0 for no bound, and learns
// whether there were suspects. They come in crowds, since a worker that dies leaves many: after
// one, entries are read one by one, and twice as many each time that there was none. So hardly one
// is read in vain, and a crowd's suspects follow one another in a process that is empty already.
func (s *isolation) withReadLimit(read func(most int) (suspects bool, err error)) error {
	most := s.readLimit.Load()
	if most > 0 {
		s.limitedRead.Lock()
		defer s.limitedRead.Unlock()
		most = s.readLimit.Load()
	}
	suspects, err := read(int(most))
	switch {
	case suspects && err == nil:
		s.readLimit.Store(1)
	case most >= maxBatch && err == nil:
		s.readLimit.CompareAndSwap(most, 0)
	case err == nil:
		s.readLimit.CompareAndSwap(most, 2*most)
	}
	return err
}

// take takes a suspect that is to run alone, if it may wait here.
func (s *isolation) add(t *task) bool {
	s.mu.Lock()
	repeated := t.Losses > 1 && len(s.suspects) > 0 && s.suspects[len(s.suspects)-1].Losses > 1
	if s.running || repeated || len(s.suspects) == maxSuspects {
		s.mu.Unlock()
		return false
	}
	at, _ := slices.BinarySearchFunc(s.suspects, t, func(a, b *task) int { return cmp.Compare(a.Losses, b.Losses) })
	s.suspects = slices.Insert(s.suspects, at, t)
	s.notify()
	s.mu.Unlock()
	s.w.held.notify() // what is held is not all to be waited for now
	return true
}

// busy says whether suspects run or wait: then the process takes in nothing else.
func (s *isolation) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slotsBlocked.Load() || len(s.suspects) > 0
}

// more says whether more suspects may come while what runs is waited for, and when to look for them
// again: ever less often, since what is none is read in vain.
func (s *isolation) nextSearch() (pause time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || len(s.suspects) == 0 || len(s.suspects) == maxSuspects {
		return 0, false
	}
	s.searchPause = max(50*time.Millisecond, 2*s.searchPause)
	return s.searchPause, true
}

// change wakes who waits; the lock is held.
func (s *isolation) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until ok, under the lock, and says whether it came to that before quit.
func (s *isolation) waitFor(quit <-chan struct{}, condition func() bool) bool {
	for {
		s.mu.Lock()
		met, changed := condition(), s.changed
		s.mu.Unlock()
		if met {
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
func (s *isolation) waitUnblocked(quit <-chan struct{}) bool {
	return !s.slotsBlocked.Load() || s.waitFor(quit, func() bool { return !s.slotsBlocked.Load() })
}

// run serves suspects until ctx ends. Their jobs run under after.
func (s *isolation) run(ctx, workCtx context.Context) {
	blockSlots := func() bool { s.slotsBlocked.Store(len(s.suspects) > 0); return s.slotsBlocked.Load() }
	for ctx.Err() == nil && s.waitFor(ctx.Done(), blockSlots) {
		if s.emptyProcess(ctx) {
			for t := s.nextSuspect(); t != nil && ctx.Err() == nil; t = s.nextSuspect() {
				s.runAlone(ctx, workCtx, t)
			}
		}
		s.unblock()
	}
}

func (s *isolation) unblock() {
	s.mu.Lock()
	s.slotsBlocked.Store(false)
	s.running, s.searchPause = false, 0
	s.notify()
	s.mu.Unlock()
	s.w.held.notify() // there may be room again
}

func (s *isolation) nextSuspect() *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.suspects) == 0 {
		return nil
	}
	t := s.suspects[0]
	s.suspects = s.suspects[1:]
	return t
}

// empty hands back what has not begun, and waits until the outcomes of all that runs have been
// reported too.
func (s *isolation) emptyProcess(ctx context.Context) bool {
	for _, t := range s.w.held.tasks() {
		if !t.suspect() && t.taken.CompareAndSwap(false, true) {
			t.feed.release([]*task{t})
		}
	}
	for {
		changed := s.w.held.nextChange()
		s.mu.Lock()
		s.running = int(s.w.held.count.Load()) <= len(s.suspects)
		empty := s.running
		s.mu.Unlock()
		if empty {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// runAlone starts a suspect only now: one that is in flight has been alone. It returns when its
// outcome was reported.
func (s *isolation) runAlone(ctx, workCtx context.Context, t *task) {
	p := t.feed
	p.held.untrack(t)
	if ctx.Err() != nil || t.ctx.stopCause() != nil {
		p.release([]*task{t})
		return
	}
	// Who has just looked at what is held may still read the one that waited.
	t = &task{Job: t.Job, entryID: t.entryID, currentAttempt: t.Attempt, feed: p, proc: t.proc, removed: t.removed}
	started, err := p.startTasks(ctx, t.Type, []*task{t})
	if err != nil {
		p.release([]*task{t})
		return
	}
	if len(started) == 0 {
		return // stale, and let go
	}
	p.held.track(started)
	if p.loadPayloads(ctx, started) != nil {
		p.release(started)
		return
	}
	slots := s.w.slots
	slots.isolated.Store(t)
	slots.active.Add(1)
	go s.w.runTask(workCtx, t)
	select {
	case <-t.removed:
	case <-workCtx.Done():
	}
	slots.active.Add(-1)
	slots.isolated.Store(nil)
}
