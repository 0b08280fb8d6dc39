package worker

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// suspect reports whether the job was in flight when a worker process died. Such a job may have
// killed the process. So it runs alone in its process: the next crash then hits no other job, and
// the job alone is blamed for it.
func (t *task) suspect() bool { return t.Losses > 0 }

// maxSuspects is the largest number of suspects that wait in a process. At most one of them has
// lost more than one worker process. Each of the others has lost one; most of these only ran beside
// the job that killed the process.
const maxSuspects = 16

// isolation runs suspects one after the other, each while the process holds no other started job:
// meanwhile no slot begins a job, and other jobs that are read are released. Suspects that have
// lost the fewest worker processes run first, so that a job that kills again does not delay the
// others.
type isolation struct {
	w *Worker

	mu           sync.Mutex
	suspects     []*task       // suspects that wait, not started yet; fewest losses first
	running      bool          // suspects run now; isolation accepts no further ones
	slotsBlocked atomic.Bool   // slots may begin no job; written under mu
	changed      chan struct{} // closed and replaced at each change of the fields above
	searchPause  time.Duration // until the next read that looks for more suspects

	readLimit   atomic.Int64 // entries that one read may deliver; 0: no limit
	limitedRead sync.Mutex   // held by a read while readLimit is set
}

func newIsolation(w *Worker) *isolation { return &isolation{w: w, changed: make(chan struct{})} }

// withReadLimit calls read with the number of entries that it may read at most (0: no limit); read
// returns whether suspects were among them. Suspects come in groups, because a dead worker leaves
// many. So a read with a suspect sets the limit to 1, and each limited read without one doubles it,
// until it reaches maxBatch and ends. While there is a limit, the partitions read one after the
// other: others wait. So the process reads few suspects that it must release; each release costs
// the suspect an attempt. An error of read changes no limit and is returned.
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

// add queues a suspect to run alone and returns true. It returns false, and the caller must release
// the suspect, while suspects run, when maxSuspects wait, or when the suspect and a waiting one
// have both lost more than one worker process.
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
	s.w.held.notify() // feeds wait for capacity; they must look for more suspects now
	return true
}

// busy reports whether suspects wait or run. The process then starts no other jobs.
func (s *isolation) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slotsBlocked.Load() || len(s.suspects) > 0
}

// nextSearch says in ok whether this process should look for more suspects now: it does so while
// the suspects that it has wait for running jobs to end. pause is the time until it should look
// again. Each call that returns true doubles the pause, because the process must release all other
// jobs that it finds.
func (s *isolation) nextSearch() (pause time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || len(s.suspects) == 0 || len(s.suspects) == maxSuspects {
		return 0, false
	}
	s.searchPause = max(50*time.Millisecond, 2*s.searchPause)
	return s.searchPause, true
}

// notify wakes the goroutines in waitFor. The caller holds the lock.
func (s *isolation) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// waitFor waits until condition, which it calls under the lock, returns true; then it returns true.
// It returns false when quit is closed first.
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

// waitUnblocked waits until slots may begin jobs and returns true. It returns false when quit is
// closed first.
func (s *isolation) waitUnblocked(quit <-chan struct{}) bool {
	return !s.slotsBlocked.Load() || s.waitFor(quit, func() bool { return !s.slotsBlocked.Load() })
}

// run runs suspects as they come, until ctx ends; it leaves suspects that still wait then to drain.
// Their processors run under workCtx, which outlives ctx.
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

// unblock lets slots begin jobs, isolation accept suspects, and the feeds read jobs again.
func (s *isolation) unblock() {
	s.mu.Lock()
	s.slotsBlocked.Store(false)
	s.running, s.searchPause = false, 0
	s.notify()
	s.mu.Unlock()
	s.w.held.notify() // feeds may have free capacity again
}

// nextSuspect removes and returns the suspect with the fewest losses, or nil if none waits.
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

// emptyProcess releases the tasks that no slot has begun, and waits until all outcomes are reported
// and the process holds only waiting suspects. Then it sets running, so that isolation accepts no
// further suspects, and returns true. It returns false when ctx ends first.
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

// runAlone starts and runs the suspect t, and returns when its outcome is reported, or when workCtx
// ends. It releases the suspect, and returns at once, if ctx has ended, if its group was cancelled,
// if its lease was lost, or if it can't be started. It starts the suspect only now, not earlier, so
// that a suspect that is in flight at a crash has certainly run alone.
func (s *isolation) runAlone(ctx, workCtx context.Context, t *task) {
	p := t.feed
	p.held.untrack(t)
	if ctx.Err() != nil || t.ctx.stopCause() != nil {
		p.release([]*task{t})
		return
	}
	// The lease renewal or the watchdog may still read the old task, so a new one takes its place.
	t = &task{Job: t.Job, entryID: t.entryID, currentAttempt: t.Attempt, feed: p, proc: t.proc, removed: t.removed}
	started, err := p.startTasks(ctx, t.Type, []*task{t})
	if err != nil {
		p.release([]*task{t})
		return
	}
	if len(started) == 0 {
		return // the job was stale; startTasks has dropped it
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
