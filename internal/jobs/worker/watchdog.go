package worker

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/attempt"
	"github.com/bulkaction/bulkaction/processor"
)

// reportTimeout is how long a stopping process tries to report its last outcomes.
const reportTimeout = 5 * time.Second

// abandonDelay is for a stopping process: how long after the end of its context a processor that
// ignores it is abandoned.
const abandonDelay = time.Second

// maxSlotWait is how long a started job waits for a slot before the worker may release it for other
// processes. It releases the job only if the job would wait as long again (see takeOverdue): such
// jobs were prefetched because jobs were quick.
const maxSlotWait = 200 * time.Millisecond

// watchdogInterval is the time between two calls of watch.
const watchdogInterval = 100 * time.Millisecond

// watch is one pass of the watchdog; Every calls it each watchdogInterval. It abandons jobs whose
// processor has ignored the job's timeout for attempt.AbandonDelay, so that they don't block a
// slot. It releases started jobs that wait too long for a slot (see takeOverdue). It returns nil.
func (w *Worker) watch(context.Context) error {
	releaseAll(w.slots.takeOverdue(w.expectedRunTime(), time.Now()))
	now := monotonicNow()
	for _, t := range w.held.tasks() {
		began, limit := t.runStart.Load(), t.terms.JobTimeout
		if began == 0 || time.Duration(now-began) < limit+attempt.AbandonDelay(limit) {
			continue
		}
		end := attempt.TimeoutError(limit)
		if w.hasShortTimeout(t) {
			end = context.Canceled
		}
		w.abandon(t, end, func() {
			t.verdict = processor.Classify(attempt.TimeoutError(limit))
			t.processTrace = t.Trace
		})
	}
	return nil
}

// abandon takes a running task from its processor: it returns the task's pass with the given error,
// sets the task's outcome with the function outcome and queues its report. A new slot replaces the
// one that the processor blocks, unless the pool is to have fewer. It does nothing when the task
// has an outcome already.
func (w *Worker) abandon(t *task, attempt error, outcome func()) {
	if !t.outcomeSet.CompareAndSwap(false, true) {
		return
	}
	t.runTime = time.Duration(monotonicNow() - t.runStart.Load())
	outcome()
	t.returnPass(attempt)
	w.Tel.Log.Warn("abandoned a processor that ignores the end of its context",
		"type", t.Type, "group", t.Group, "ordinal", t.Ordinal, "attempt", t.currentAttempt)
	w.slots.replaceSlot(t)
	t.feed.queueReport(t)
}

// expectedRunTime returns how long a job is expected to run: the mean of recent jobs, or the mean
// of the jobs that run now where that is longer. So when jobs turn slow, the process soon
// prefetches fewer of them.
func (w *Worker) expectedRunTime() time.Duration {
	return max(w.meanRunTime.value(), w.slots.meanRunningTime(monotonicNow()))
}

// drain empties the process. It releases the waiting jobs at once and lets running jobs finish
// within Config.Grace. Then it ends their contexts, and after abandonDelay abandons and releases
// those that still run. It waits until all outcomes are reported. If that takes longer than
// reportTimeout, it calls stopReporting, which ends all calls to Redis, and waits a minute at most
// for the reports to give up.
func (w *Worker) drain(stopReporting func()) {
	releaseAll(w.slots.close())
	w.isolation.releaseWaiting()
	if w.held.waitEmpty(w.cfg.Grace) {
		return
	}
	_, running := w.slots.sizeAndActive()
	w.Tel.Log.Warn("grace period is over, cancelling running jobs", "jobs", running)
	for _, t := range w.held.tasks() {
		t.stop(errShutdown)
	}
	if w.held.waitEmpty(abandonDelay) {
		return
	}
	for _, t := range w.held.tasks() {
		if t.waitsForPass.CompareAndSwap(true, false) { // Admit ignores the end of its context
			if !t.suspect() { // a suspect was not counted as waiting
				t.endWait()
			}
			t.feed.release(t)
		}
		if t.runStart.Load() != 0 {
			w.abandon(t, context.Canceled, func() { t.released = true })
		}
	}
	if !w.held.waitEmpty(reportTimeout) {
		stopReporting() // Redis is away; the dispatcher will reclaim the jobs
		w.held.waitEmpty(time.Minute)
	}
}
