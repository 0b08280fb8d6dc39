package worker

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

// reportTime is how long a stopping process tries to report its last outcomes.
const reportTimeout = 5 * time.Second

// A processor that ignores the end of its context is given up after this, on top of the
// job's timeout.
const abandonDelay = time.Second

// lateAfter is how long a started job may wait for a slot before another process is to have it.
const maxSlotWait = 200 * time.Millisecond

// watchdog reports jobs whose processor ignores its context, so that they hold up nothing but
// themselves, and hands back what waits too long for a slot.
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

// abandon reports a running task in its processor's stead.
func (w *Worker) abandon(t *task, outcome func()) {
	if !t.outcomeSet.CompareAndSwap(false, true) {
		return
	}
	t.runTime = time.Duration(monotonicNow() - t.runStart.Load())
	outcome()
	w.tel.Log.Warn("processor ignores the end of its context, went on without it",
		"type", t.Type, "group", t.Group, "ordinal", t.Ordinal, "attempt", t.currentAttempt)
	w.slots.replaceSlot(t)
	t.feed.queueReport(t)
}

// pace is how long a job takes: as the last ones did, or longer where all that run now have. So
// jobs that turn slow are not taken in advance as if they were quick.
func (w *Worker) expectedRunTime() time.Duration {
	d := w.meanRunTime.value()
	if d == 0 {
		return 0
	}
	return max(d, w.slots.meanRunningTime(monotonicNow()))
}

// handBackLate releases what was started in the belief that it would run soon, and has not.
func (w *Worker) releaseOverdue(tasks []*task, now time.Time) {
	size, active := w.slots.sizeAndActive()
	runTime := max(w.meanRunTime.value(), w.slots.meanRunningTime(monotonicNow()))
	switch {
	case w.isolation.busy():
		runTime = math.MaxInt64 // nobody knows when the suspect's turn is over
	case active < size:
		return // they are about to run
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

// late are those of the waiting who have waited too long and will for as long again, where jobs
// take so long on average.
func overdue(waiting []*task, size int, runTime time.Duration, now time.Time) []*task {
	slices.SortFunc(waiting, func(a, b *task) int { return cmp.Compare(a.startOrder, b.startOrder) })
	startable := int64(size) * int64(maxSlotWait) / int64(max(runTime, time.Microsecond))
	rest := waiting[min(startable, int64(len(waiting))):]
	return slices.DeleteFunc(rest, func(t *task) bool { return now.Sub(t.startedAt) < maxSlotWait })
}

// drain lets running jobs finish within the grace period, and hands back the rest.
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
		stopReporting() // Redis is away: the dispatcher takes the jobs back after a lease
		w.held.waitEmpty(time.Minute)
	}
}
