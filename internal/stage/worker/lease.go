package worker

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// cancelInterval is how often a worker checks whether the groups of its jobs were cancelled. The
// contexts of these jobs must end within a second.
const cancelInterval = 400 * time.Millisecond

// renewLeases renews the leases of all tracked tasks. It ends the context of a job whose lease was
// lost.
func (w *Worker) renewLeases(ctx context.Context) error {
	for key, tasks := range byStream(w.held.tasks()) {
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
			lost, err := ledger.Renew(ctx, w.conn.Cmd, key.partition, key.typ, w.id, jobs)
			if err != nil {
				return err
			}
			for _, i := range lost {
				if !jobs[i].Known {
					w.metrics.LeasesLost(1)
				}
				if !chunk[i].outcomeSet.Load() {
					chunk[i].ctx.stop(errLeaseLost)
				}
			}
		}
	}
	return nil
}

// stopCancelled ends the contexts of jobs whose group was cancelled or no longer exists.
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
		status := map[string]*redis.StringCmd{}
		_, err := w.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for g := range groups {
				status[g] = pipe.HGet(ctx, p.Group(g), "status")
			}
			return nil
		})
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		for g, tasks := range groups {
			if errors.Is(status[g].Err(), redis.Nil) || api.Status(status[g].Val()) == api.StatusCancelled {
				for _, t := range tasks {
					t.ctx.stop(errCancelled)
				}
			}
		}
	}
	return nil
}
