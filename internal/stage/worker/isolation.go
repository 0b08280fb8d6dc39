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
	w       *Worker
	arrived chan struct{} // gets a token when a suspect is added

	mu          sync.Mutex    // guards the next three fields
	suspects    []*task       // suspects that wait, not started yet; fewest losses first
	running     bool          // suspects run now; isolation accepts no further ones
	searchPause time.Duration // until the next read that looks for more suspects

	readLimit   atomic.Int64 // entries that one read may deliver; 0: no limit
	limitedRead sync.Mutex   // held by a read while readLimit is set
}

func newIsolation(w *Worker) *isolation { return &isolation{w: w, arrived: make(chan struct{}, 1)} }

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
	s.mu.Unlock()
	select {
	case s.arrived <- struct{}{}:
	default:
	}
	s.w.held.notify() // feeds wait for capacity; they must look for more suspects now
	return true
}

// busy reports whether suspects wait or run. The process then starts no other jobs.
func (s *isolation) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running || len(s.suspects) > 0
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

// run runs suspects as they come, until ctx ends; it leaves suspects that still wait then to drain.
// Their processors run under workCtx, which outlives ctx.
func (s *isolation) run(ctx, workCtx context.Context) {
	for {
		select {
		case <-s.arrived:
		case <-ctx.Done():
			return
		}
		if !s.busy() {
			continue // an earlier round has run the suspect
		}
		// The tasks that no slot has begun go back.
		releaseAll(s.w.slots.block())
		if s.awaitEmptyProcess(ctx) {
			for t := s.nextSuspect(); t != nil; t = s.nextSuspect() {
				s.runAlone(ctx, workCtx, t)
			}
		}
		s.w.slots.unblock()
		s.mu.Lock()
		s.running, s.searchPause = false, 0
		s.mu.Unlock()
		s.w.held.notify() // feeds may have free capacity again
	}
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

// awaitEmptyProcess waits until all outcomes are reported and the process holds only waiting
// suspects. Then it sets running, so that isolation accepts no further suspects, and returns true.
// It returns false when ctx ends first.
func (s *isolation) awaitEmptyProcess(ctx context.Context) bool {
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
		p.release(t)
		return
	}
	// The lease renewal or the watchdog may still read the old task, so a new one takes its place.
	t = &task{Job: t.Job, entryID: t.entryID, currentAttempt: t.Attempt, feed: p, proc: t.proc, removed: t.removed}
	started, err := p.startTasks(ctx, t.Type, []*task{t})
	if err != nil {
		p.release(t)
		return
	}
	if len(started) == 0 {
		return // the job was stale; startTasks has dropped it
	}
	p.held.track(started...)
	if p.loadPayloads(ctx, started) != nil {
		p.release(started...)
		return
	}
	s.w.slots.setIsolated(t)
	go s.w.runTask(workCtx, t)
	select {
	case <-t.removed:
	case <-workCtx.Done():
	}
	s.w.slots.setIsolated(nil)
}
