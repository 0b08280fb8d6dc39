package worker

import (
	"context"
	"sync"
	"sync/atomic"
)

// suspect reports whether the job was in flight when a worker process died. Such a job may have
// killed the process. So it runs alone in its process: the next crash then hits no other job, and
// the job alone is blamed for it.
func (t *task) suspect() bool { return t.Losses > 0 }

// isolation runs one suspect at a time, while the process holds no other started job: meanwhile no
// slot begins a job, and other jobs that are read are released. It refuses a second suspect: other
// processes can run that one at the same time, and if the first one kills this process, the second
// one need not wait for the end of a lease.
type isolation struct {
	w        *Worker
	waiting  chan *task  // holds the suspect until run takes it
	occupied atomic.Bool // a suspect waits or runs

	readLimit   atomic.Int64 // entries that one read may deliver; 0: no limit
	limitedRead sync.Mutex   // held by a read while readLimit is set
}

func newIsolation(w *Worker) *isolation { return &isolation{w: w, waiting: make(chan *task, 1)} }

// withReadLimit calls read with the most entries that it may read (0: no limit); read returns
// whether suspects were among them. Suspects come in groups, because a dead worker leaves many. So
// a read with a suspect sets the limit to 1, and each limited read without a suspect doubles it;
// from maxBatch on there is no limit. While there is a limit, the partitions read one after the
// other. So the process reads few suspects that it must release, each of which loses an attempt by
// that. An error of read changes no limit and is returned.
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

// add gives isolation a suspect to run and returns true. While isolation has a suspect already, add
// returns false, and the caller must release the new one.
func (s *isolation) add(t *task) bool {
	if !s.occupied.CompareAndSwap(false, true) {
		return false
	}
	s.waiting <- t // does not block: run takes the task before it clears occupied
	return true
}

// busy reports whether a suspect waits or runs. The process then starts no other jobs.
func (s *isolation) busy() bool { return s.occupied.Load() }

// releaseWaiting releases the suspect that was added and that run has not taken yet, if there is
// one.
func (s *isolation) releaseWaiting() {
	select {
	case t := <-s.waiting:
		release(t)
	default:
	}
}

// run runs the suspects that add gives, one after the other, until ctx ends. Their processors run
// under workCtx, which outlives ctx. A suspect that is not started when ctx ends is released, by
// run or by drain.
func (s *isolation) run(ctx, workCtx context.Context) {
	for {
		var t *task
		select {
		case t = <-s.waiting:
		case <-ctx.Done():
			return
		}
		// The tasks that no slot has begun go back.
		release(s.w.slots.block()...)
		if !s.awaitEmptyProcess(ctx) {
			release(t)
			return
		}
		s.runAlone(ctx, workCtx, t)
		s.w.slots.unblock()
		s.occupied.Store(false)
		s.w.held.notify() // feeds may have free capacity again
	}
}

// awaitEmptyProcess waits until all outcomes are reported and the process holds at most the waiting
// suspect and tasks that wait for a pass, and returns true. It returns false when ctx ends first.
func (s *isolation) awaitEmptyProcess(ctx context.Context) bool {
	for {
		changed := s.w.held.nextChange()
		if s.w.held.active.value() <= 1 {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// runAlone starts and runs the suspect t, if its type is gated after it has a pass. It returns when
// its outcome is reported, or when workCtx ends. It releases the suspect, and returns at once, if
// ctx has ended, if its group was cancelled, if its lease was lost, or if it can't be started. It
// starts the suspect only now, not earlier, so that a suspect that is in flight at a crash has
// certainly run alone.
func (s *isolation) runAlone(ctx, workCtx context.Context, t *task) {
	f, held := t.feed, s.w.held
	if t.gate != nil && !t.gate.admitAlone(ctx, t) {
		return
	}
	held.untrack(t)
	if ctx.Err() != nil || t.ctx.stopCause() != nil {
		release(t)
		return
	}
	t = t.forStart()
	started, err := f.startTasks(ctx, t.Type, []*task{t})
	if err != nil {
		release(t)
		return
	}
	if len(started) == 0 {
		return // the job was stale; startTasks has dropped it
	}
	held.track(started...)
	if f.loadPayloads(ctx, started) != nil {
		release(started...)
		return
	}
	s.w.slots.setIsolated(t)
	go s.w.runTask(workCtx, t, new(bool))
	select {
	case <-t.removed:
	case <-workCtx.Done():
	}
	s.w.slots.setIsolated(nil)
}
