package worker

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor"
)

// slotPool holds the slots of a worker process, and the started tasks that wait for one. A slot is
// a goroutine that runs one task at a time. freeCapacity bounds the waiting tasks: while enough of
// them wait, the process reads no jobs.
type slotPool struct {
	goroutines sync.WaitGroup // of all slots, also closed ones, but not of abandoned ones

	mu       sync.Mutex  // guards the fields below, and those of all slots
	change   sync.Cond   // signalled when an idle slot should look again
	serve    func(*slot) // what the goroutine of a slot runs; nil until start
	size     int         // number of wanted slots
	closed   bool        // the pool opens no more slots and accepts no tasks
	blocked  bool        // isolation wants the process for itself: slots begin no task
	slots    []*slot     // the open slots; a closed one is not here, even if a task runs in it
	idle     int         // slots that wait in next
	waiting  []*task     // oldest first
	batches  []*batchType
	admit    func(*batch) // obtains the pass of a batch that was withdrawn for it
	due      []*batch     // oldest first
	active   int          // tasks and batches that run in slots
	calls    int          // batches among them
	isolated *task        // the suspect that runs now, outside the slots
}

// slot is guarded by the mutex of its pool.
type slot struct {
	closed bool
	task   *task  // the task that runs in the slot, or nil
	batch  *batch // the batch that runs in the slot, or nil
}

func newSlotPool(size int) *slotPool {
	s := &slotPool{size: size}
	s.change.L = &s.mu
	return s
}

// sizeAndActive returns how many slots the pool is to have, and how many jobs run now, an isolated
// suspect included. After a resize to fewer slots, and while the pool closes, more jobs may run.
func (s *slotPool) sizeAndActive() (size, active int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isolated != nil {
		return s.size, s.active + 1
	}
	return s.size, s.active
}

// start opens the slots. Each calls serve in a goroutine; serve runs what next returns, until that
// is nil, and then calls goroutines.Done. For a slot whose task was abandoned, replaceSlot has
// called Done, and serve must only return.
func (s *slotPool) start(serve func(*slot)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serve = serve
	s.adjust()
}

// resize sets the number of slots to n. New slots open at once, or at start; a surplus slot closes
// when its job ends, or at once if it has none. After close, resize does nothing.
func (s *slotPool) resize(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.size = n
		s.adjust()
	}
}

// close makes each slot end after its job, and does not wait for that. It returns the waiting
// tasks, which the caller must release.
func (s *slotPool) close() []*task {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.size = true, 0
	s.adjust()
	return append(s.takeWaiting(), s.takeGathered()...)
}

// adjust opens or closes slots until there are as many as size says. Before start it does nothing.
// The caller holds the lock.
func (s *slotPool) adjust() {
	if s.serve == nil {
		return
	}
	for len(s.slots) < s.size {
		sl := &slot{}
		s.slots = append(s.slots, sl)
		s.goroutines.Add(1)
		go s.serve(sl)
	}
	for _, surplus := range s.slots[s.size:] {
		surplus.closed = true
	}
	s.slots = slices.Delete(s.slots, s.size, len(s.slots))
	s.change.Broadcast()
}

// block makes the slots begin no further task until unblock. It returns the waiting tasks, which
// the caller must release.
func (s *slotPool) block() []*task {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocked = true
	return append(s.takeWaiting(), s.takeGathered()...)
}

// unblock lets the slots begin tasks again.
func (s *slotPool) unblock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocked = false
	s.change.Broadcast()
}

// takeWaiting removes and returns the waiting tasks. The caller holds the lock.
func (s *slotPool) takeWaiting() []*task {
	tasks := s.waiting
	s.waiting = nil
	return tasks
}

// add appends tasks to the waiting ones, and wakes one idle slot for each of them. It returns false
// while the pool is blocked or closed: then the caller must release the tasks.
func (s *slotPool) add(tasks []*task) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocked || s.closed {
		return false
	}
	s.waiting = append(s.waiting, tasks...)
	for range min(s.idle, len(tasks)) {
		s.change.Signal()
	}
	return true
}

// next says that slot sl has ended its task or batch, and returns its next one, the one that has
// waited longest; it waits until there is one. It returns nil as soon as the slot is closed, even if
// tasks wait.
func (s *slotPool) next(sl *slot) (*task, *batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sl.batch != nil {
		s.calls--
	}
	if sl.task != nil || sl.batch != nil {
		s.active--
		sl.task, sl.batch = nil, nil
	}
	var b *batch
	for !sl.closed {
		if b = nil; !s.blocked && len(s.batches) > 0 {
			for b = s.firstBatch(); b != nil && b.of.gate != nil && b.pass == nil; b = s.firstBatch() {
				s.withdraw(b)
				b.of.gated++
				go s.admit(b)
			}
		}
		if !s.blocked && (len(s.waiting) > 0 || b != nil) {
			break
		}
		s.idle++
		s.change.Wait()
		s.idle--
	}
	switch {
	case sl.closed:
		s.change.Signal() // this slot may have consumed the signal of another one
		return nil, nil
	case b != nil && (len(s.waiting) == 0 || b.oldest.Before(s.waiting[0].startedAt)):
		s.take(b)
		// The tasks become active here: isolation, which blocks the pool first, then waits for them.
		b.of.w.held.move(stateGathering, stateAdmitted, b.tasks...)
		sl.batch = b
		s.calls++
	default:
		sl.task = s.waiting[0]
		s.waiting[0] = nil
		s.waiting = s.waiting[1:]
	}
	s.active++
	return sl.task, sl.batch
}

// setTasks sets which tasks of a batch were started.
func (s *slotPool) setTasks(b *batch, tasks []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.tasks = tasks
}

// singles returns how many slots run no batch.
func (s *slotPool) singles() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(0, s.size-s.calls)
}

// replaceSlot removes the slot of a task that was abandoned, and opens a new slot if the pool has
// too few then. The old slot's goroutine ends when the processor returns. replaceSlot does nothing
// for a suspect, which runs in no slot, nor for further tasks of a batch; it returns false for these.
func (s *slotPool) replaceSlot(t *task) (first bool) {
	if t.suspect() {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := t.call; b != nil {
		if b.replaced {
			return false
		}
		b.replaced = true
		s.calls--
	}
	s.active--
	s.goroutines.Done()
	s.slots = slices.DeleteFunc(s.slots, func(sl *slot) bool {
		return sl.task == t || sl.batch != nil && sl.batch == t.call
	})
	s.adjust()
	return true
}

// setIsolated records which suspect runs now, outside the slots; nil: none.
func (s *slotPool) setIsolated(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isolated = t
}

// takeOverdue removes and returns the tasks that have waited for a slot for maxSlotWait or longer,
// and that would wait as long again if each job ran for runTime. While slots are free, it returns
// none: then the waiting tasks run soon. It leaves out tasks of gated types, because few of them
// wait, and each has got a pass; but if the pool has no slots, it returns them too, so that their
// passes come back.
func (s *slotPool) takeOverdue(runTime time.Duration, now time.Time) (overdue []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active < s.size {
		return nil
	}
	soon := int64(s.size) * int64(maxSlotWait) / int64(max(runTime, time.Microsecond))
	soon = min(soon, int64(len(s.waiting)))
	stay := s.waiting[:soon]
	for _, t := range s.waiting[soon:] {
		if t.gate != nil && s.size > 0 || now.Sub(t.startedAt) < maxSlotWait {
			stay = append(stay, t)
		} else {
			overdue = append(overdue, t)
		}
	}
	clear(s.waiting[len(stay):])
	s.waiting = stay
	soon = int64(s.size) * int64(maxSlotWait) / int64(max(runTime, time.Microsecond))
	for i := len(s.due) - 1; i >= 0 && int64(i) >= soon; i-- {
		b := s.due[i]
		if now.Sub(b.oldest) >= b.of.options.Wait+maxSlotWait && (b.pass == nil || s.size == 0) {
			overdue = append(overdue, b.tasks...)
			go b.returnPass(errNotStarted)
			s.take(b)
		}
	}
	return overdue
}

// running returns the ids of at most n jobs that run now, the isolated suspect first, and since
// when each has been in flight. It leaves out the last jobs of closed slots.
func (s *slotPool) running(n int) (ids []string, since map[string]time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids, since = []string{}, map[string]time.Time{}
	add := func(t *task) {
		if t != nil && len(ids) < n {
			id := t.Group + "." + strconv.FormatInt(t.Ordinal, 10)
			ids, since[id] = append(ids, id), t.startedAt.Truncate(time.Millisecond).UTC()
		}
	}
	add(s.isolated)
	for _, sl := range s.slots {
		add(sl.task)
		if sl.batch != nil {
			for _, t := range sl.batch.tasks {
				if t.currentState() == stateRunning {
					add(t)
				}
			}
		}
	}
	return ids, since
}

// meanRunningTime returns how long the jobs that run now, in the first 100 slots, have run on
// average. It returns 0 while a slot is free. now is a time of monotonicNow.
func (s *slotPool) meanRunningTime(now int64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active < s.size {
		return 0
	}
	sum, n := int64(0), int64(0)
	for _, sl := range s.slots[:min(len(s.slots), 100)] {
		t := sl.task
		if sl.batch != nil && len(sl.batch.tasks) > 0 {
			t = sl.batch.tasks[0]
		}
		if t != nil && t.currentState() == stateRunning {
			sum += now - t.runStart
			n++
		}
	}
	return time.Duration(sum / max(1, n))
}

// maxSlotWait is how long a started job waits for a slot before the worker may release it for other
// processes. It releases the job only if the job would wait as long again (see takeOverdue): such
// jobs were prefetched because jobs were quick.
const maxSlotWait = 200 * time.Millisecond

// watchdogInterval is the time between two calls of watch.
const watchdogInterval = 100 * time.Millisecond

// cancelInterval is how often a worker checks whether the groups of its jobs were cancelled. The
// contexts of these jobs must end within a second.
const cancelInterval = 400 * time.Millisecond

// watch is one pass of the watchdog; Every calls it each watchdogInterval. It abandons jobs whose
// processor has ignored the job's timeout for AbandonDelay, so that they don't block a
// slot. It releases started jobs that wait too long for a slot (see takeOverdue). It returns nil.
func (w *Worker) watch(context.Context) error {
	release(w.slots.takeOverdue(w.expectedRunTime(), time.Now())...)
	now := monotonicNow()
	for _, t := range w.held.tasks() {
		if t.currentState() != stateRunning {
			continue
		}
		limit := t.terms.JobTimeout
		if time.Duration(now-t.runStart) < limit+AbandonDelay(limit) {
			continue
		}
		end := TimeoutError(limit)
		if w.hasShortTimeout(t) {
			end = context.Canceled
		}
		w.abandon(t, end, func() {
			t.verdict = processor.Classify(TimeoutError(limit))
			t.processTrace = t.Trace
		})
	}
	return nil
}

// abandon takes a running task from its processor: it returns the task's pass with the given error,
// sets the task's outcome with the function outcome and queues its report. A new slot replaces the
// one that the processor blocks, unless the pool is to have fewer. It does nothing when the task
// is not running.
func (w *Worker) abandon(t *task, attempt error, outcome func()) {
	if !w.held.move(stateRunning, stateEnded, t) {
		return
	}
	t.runTime = time.Duration(monotonicNow() - t.runStart)
	t.share()
	outcome()
	t.returnPass(attempt)
	if t.call != nil {
		t.call.returnPass(attempt)
	}
	if w.slots.replaceSlot(t) {
		w.Tel.Log.Warn("abandoned a processor that ignores the end of its context",
			"type", t.Type, "group", t.Group, "ordinal", t.Ordinal, "attempt", t.currentAttempt)
	}
	t.feed.reports.add(t)
}

// expectedRunTime returns how long a job is expected to run: the mean of recent jobs, or the mean
// of the jobs that run now where that is longer. So when jobs turn slow, the process soon
// prefetches fewer of them.
func (w *Worker) expectedRunTime() time.Duration {
	return max(w.meanRunTime.value(), w.slots.meanRunningTime(monotonicNow()))
}

// renewLeases renews the leases of all tracked tasks (see heldTasks), and of those that gather. It ends the context of a job
// without an outcome whose lease was lost. It returns at the first error; the next call renews the
// leases that this one did not reach.
func (w *Worker) renewLeases(ctx context.Context) error {
	type readyStream struct {
		partition keyspace.Partition
		typ       string
	}
	byStream := map[readyStream][]*task{}
	tracked := w.held.tasks()
	attempts := map[*task]int{}
	for _, t := range tracked {
		attempts[t] = t.currentAttempt
	}
	for _, t := range append(tracked, w.slots.gathered()...) {
		key := readyStream{t.feed.partition, t.Type}
		byStream[key] = append(byStream[key], t)
	}
	for key, tasks := range byStream {
		for chunk := range slices.Chunk(tasks, maxBatch) {
			jobs := make([]ledger.Held, len(chunk))
			for i, t := range chunk {
				attempt, started := attempts[t]
				if !started {
					attempt = t.Attempt
				}
				jobs[i] = ledger.Held{
					Entry:   t.entryID,
					Group:   t.Group,
					Ordinal: t.Ordinal,
					Attempt: attempt,
					Known:   t.currentState() >= stateEnded || t.ctx.stopCause() != nil,
				}
			}
			lost, err := ledger.Renew(ctx, w.Conn.Cmd, key.partition, key.typ, w.ID, jobs)
			if err != nil {
				return err
			}
			for _, i := range lost {
				if !jobs[i].Known {
					w.metrics.LeasesLost(1)
				}
				switch _, started := attempts[chunk[i]]; {
				case chunk[i].currentState() >= stateEnded:
				case started:
					chunk[i].stop(errLeaseLost)
				default:
					chunk[i].ctx.stop(errLeaseLost) // a slot may be setting the call of what gathered
				}
			}
		}
	}
	return nil
}

// stopCancelled ends the contexts of tracked jobs whose group was cancelled or no longer exists. It
// returns at the first error; the next call checks all jobs again.
func (w *Worker) stopCancelled(ctx context.Context) error {
	byGroup := map[keyspace.Partition]map[string][]*task{}
	for _, t := range w.held.tasks() {
		groups := byGroup[t.feed.partition]
		if groups == nil {
			groups = map[string][]*task{}
			byGroup[t.feed.partition] = groups
		}
		groups[t.Group] = append(groups[t.Group], t)
	}
	for p, groups := range byGroup {
		ids := slices.Collect(maps.Keys(groups))
		statuses, err := ledger.Statuses(ctx, w.Conn.Cmd, p, ids)
		if err != nil {
			return err
		}
		for i, status := range statuses {
			if status != "" && status != api.StatusCancelled {
				continue
			}
			for _, t := range groups[ids[i]] {
				t.stop(errCancelled)
			}
		}
	}
	return nil
}
