package worker

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor"
)

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
	outcome()
	t.returnPass(attempt)
	w.Tel.Log.Warn("abandoned a processor that ignores the end of its context",
		"type", t.Type, "group", t.Group, "ordinal", t.Ordinal, "attempt", t.currentAttempt)
	w.slots.replaceSlot(t)
	t.feed.reports.add(t)
}

// expectedRunTime returns how long a job is expected to run: the mean of recent jobs, or the mean
// of the jobs that run now where that is longer. So when jobs turn slow, the process soon
// prefetches fewer of them.
func (w *Worker) expectedRunTime() time.Duration {
	return max(w.meanRunTime.value(), w.slots.meanRunningTime(monotonicNow()))
}

// renewLeases renews the leases of all tracked tasks (see heldTasks). It ends the context of a job
// without an outcome whose lease was lost. It returns at the first error; the next call renews the
// leases that this one did not reach.
func (w *Worker) renewLeases(ctx context.Context) error {
	type readyStream struct {
		partition keyspace.Partition
		typ       string
	}
	byStream := map[readyStream][]*task{}
	for _, t := range w.held.tasks() {
		key := readyStream{t.feed.partition, t.Type}
		byStream[key] = append(byStream[key], t)
	}
	for key, tasks := range byStream {
		for chunk := range slices.Chunk(tasks, maxBatch) {
			jobs := make([]ledger.Held, len(chunk))
			for i, t := range chunk {
				jobs[i] = ledger.Held{
					Entry:   t.entryID,
					Group:   t.Group,
					Ordinal: t.Ordinal,
					Attempt: t.currentAttempt,
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
				if chunk[i].currentState() < stateEnded {
					chunk[i].stop(errLeaseLost)
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
