package worker

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

// reportTimeout is how long a stopping process tries to report its last outcomes.
const reportTimeout = 5 * time.Second

// abandonDelay is how long after its timeout a processor that ignores the end of its context is
// abandoned. If the timeout is shorter than abandonDelay, the delay is as long as the timeout.
const abandonDelay = time.Second

// maxSlotWait is how long a started job waits for a slot before the worker may release it for other
// processes. It releases the job only if the job would wait as long again (see overdue).
const maxSlotWait = 200 * time.Millisecond

// watchdog works until ctx ends. It abandons jobs whose processor ignores the end of its context,
// so that they don't block a slot. It releases jobs that wait too long for a slot.
func (w *Worker) watchdog(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case at := <-tick.C:
			tasks, now := w.held.tasks(), monotonicNow()
			w.releaseOverdue(tasks, at)
			for _, t := range tasks {
				began, limit := t.runStart.Load(), t.timeout(w.cfg.JobTimeout)
				if began == 0 || time.Duration(now-began) < limit+min(abandonDelay, limit) {
					continue
				}
				w.abandon(t, func() {
					t.verdict = processor.Classify(timeoutError(limit))
					t.processTrace = t.Trace
				})
			}
		}
	}
}

// abandon takes a running task from its processor: it sets the task's outcome with the function
// outcome and queues its report. A new slot replaces the one that the processor blocks, unless the
// pool is to have fewer. It does nothing when the task has an outcome already.
func (w *Worker) abandon(t *task, outcome func()) {
	if !t.outcomeSet.CompareAndSwap(false, true) {
		return
	}
	t.runTime = time.Duration(monotonicNow() - t.runStart.Load())
	outcome()
	w.tel.Log.Warn("abandoned a processor that ignores the end of its context",
		"type", t.Type, "group", t.Group, "ordinal", t.Ordinal, "attempt", t.currentAttempt)
	w.slots.replaceSlot(t)
	t.feed.queueReport(t)
}

// expectedRunTime returns how long a job is expected to run: the mean of recent jobs, or the mean
// of the jobs that run now where that is longer. So when jobs turn slow, the process soon
// prefetches fewer of them. It returns 0 before the first job has ended.
func (w *Worker) expectedRunTime() time.Duration {
	d := w.meanRunTime.value()
	if d == 0 {
		return 0
	}
	return max(d, w.slots.meanRunningTime(monotonicNow()))
}

// releaseOverdue releases those of tasks that wait for a slot and will not get one soon (see
// overdue). They were prefetched because jobs were quick. It releases no suspects, and nothing
// while slots are free.
func (w *Worker) releaseOverdue(tasks []*task, now time.Time) {
	size, active := w.slots.sizeAndActive()
	runTime := max(w.meanRunTime.value(), w.slots.meanRunningTime(monotonicNow()))
	switch {
	case w.isolation.busy():
		runTime = math.MaxInt64 // how long a suspect will run is not known
	case active < size:
		return // slots are free, so the waiting tasks run soon
	}
	waiting := make([]*task, 0, len(tasks))
	for _, t := range tasks {
		if !t.taken.Load() && !t.outcomeSet.Load() && !t.suspect() {
			waiting = append(waiting, t)
		}
	}
	for _, t := range overdue(waiting, size, runTime, now) {
		if t.taken.CompareAndSwap(false, true) {
			t.feed.release([]*task{t})
		}
	}
}

// overdue returns those of the waiting tasks that have waited for maxSlotWait or longer, and that
// will wait as long again if each of the size slots needs runTime for a job. It reorders waiting.
func overdue(waiting []*task, size int, runTime time.Duration, now time.Time) []*task {
	slices.SortFunc(waiting, func(a, b *task) int { return cmp.Compare(a.startOrder, b.startOrder) })
	startable := int64(size) * int64(maxSlotWait) / int64(max(runTime, time.Microsecond))
	rest := waiting[min(startable, int64(len(waiting))):]
	return slices.DeleteFunc(rest, func(t *task) bool { return now.Sub(t.startedAt) < maxSlotWait })
}

// drain empties the process. It releases the waiting jobs at once and lets running jobs finish
// within Config.Grace. Then it ends their contexts, and after abandonDelay abandons and releases
// those that still run. It waits until all outcomes are reported. If that takes longer than
// reportTimeout, it calls stopReporting, which ends all calls to Redis.
func (w *Worker) drain(stopReporting func()) {
	w.slots.close()
	for t := w.isolation.nextSuspect(); t != nil; t = w.isolation.nextSuspect() {
		t.feed.release([]*task{t})
	}
	for _, t := range w.slotQueue.clear() {
		t.feed.release([]*task{t})
	}
	if w.held.waitEmpty(w.cfg.Grace) {
		return
	}
	w.tel.Log.Warn("grace period is over, cancelling running jobs", "jobs", w.slots.active.Load())
	for _, t := range w.held.tasks() {
		t.ctx.stop(errShutdown)
	}
	if w.held.waitEmpty(abandonDelay) {
		return
	}
	for _, t := range w.held.tasks() {
		if t.runStart.Load() != 0 {
			w.abandon(t, func() { t.released = true })
		}
	}
	if !w.held.waitEmpty(reportTimeout) {
		stopReporting() // Redis is away; the dispatcher will reclaim the jobs
		w.held.waitEmpty(time.Minute)
	}
}
