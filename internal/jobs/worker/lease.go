package worker

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// cancelInterval is how often a worker checks whether the groups of its jobs were cancelled. The
// contexts of these jobs must end within a second.
const cancelInterval = 400 * time.Millisecond

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
					Known:   t.outcomeSet.Load() || t.ctx.stopCause() != nil,
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
				if !chunk[i].outcomeSet.Load() {
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
