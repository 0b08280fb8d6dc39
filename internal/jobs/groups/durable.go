package groups

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// This file confirms submissions, appends and commands on groups: a write is confirmed when at
// least REDIS_WAIT_REPLICAS replicas have it. A write that is not confirmed may still exist. Its
// client is told to repeat the request, which is harmless.

// writeCheck is a function that adds to a pipeline the reads that find out whether a write still
// exists on its master. After the pipeline has run, present reports whether it does.
type writeCheck func(redis.Pipeliner) (present func() bool)

// errWriteLost says that a failover has lost a write.
var errWriteLost = errors.New("a failover has lost what was written")

func writeLost(p keyspace.Partition) error {
	return fmt.Errorf("%w: %w to partition %d: repeat it", api.ErrUnavailable, errWriteLost, p.Index())
}

// queued is the context of commands that are added to a pipeline. It has no effect: the context
// with which the pipeline runs counts.
var queued = context.Background()

// requestsStored returns the writeCheck of appends: reads that tell whether partition p still has
// all these request ids. If one is missing, a failover has lost that append.
func requestsStored(p keyspace.Partition, requests ...string) writeCheck {
	return func(pipe redis.Pipeliner) func() bool { return ledger.QueueRequests(queued, pipe, p, requests...) }
}

// groupBelongsTo returns a writeCheck that reports whether this tenant owns a group. p is the
// partition of the group's id, which may differ from that of its tenant.
func groupBelongsTo(p keyspace.Partition, group, tenant string) writeCheck {
	return func(pipe redis.Pipeliner) func() bool {
		owner := ledger.QueueOwner(queued, pipe, p, group)
		return func() bool { return owner() == tenant }
	}
}

// bothChecks returns a writeCheck that reports whether the writes of both a and b exist. Both must
// be writes to the same master.
func bothChecks(a, b writeCheck) writeCheck {
	return func(pipe redis.Pipeliner) func() bool {
		a, b := a(pipe), b(pipe)
		return func() bool { return a() && b() }
	}
}

// groupSatisfies returns a writeCheck that reports whether a group exists in p, and holds returns
// true for its state.
func groupSatisfies(p keyspace.Partition, group string, holds func(ledger.GroupState) bool) writeCheck {
	return func(pipe redis.Pipeliner) func() bool {
		read := ledger.QueueGroupState(queued, pipe, p, group)
		return func() bool {
			g, ok := read()
			return ok && holds(g)
		}
	}
}

// durability waits until replicas have what was written.
type durability struct {
	*access
	waiters []*replicaWaiter // by partition
}

// awaitSubmission waits until the replicas have a submitted group with its jobs, and the record of
// its tenant under the group's id, which may be on another master.
func (s *durability) awaitSubmission(ctx context.Context, p keyspace.Partition, g *messages.SubmitGroup) error {
	registry := s.space.OfGroup(g.ID)
	owner := groupBelongsTo(registry, g.ID, g.Tenant)
	stored := groupSatisfies(p, g.ID, func(now ledger.GroupState) bool {
		return now.Submitted || len(g.Jobs) == 0 && (now.Sealed || !endsWithoutJobs(g))
	})
	if registry.Index() == p.Index() {
		return s.await(ctx, p, bothChecks(owner, stored))
	}
	if err := s.await(ctx, registry, owner); err != nil {
		return err
	}
	return s.await(ctx, p, stored)
}

// await waits until WaitReplicas replicas of a partition have what was written to it. It returns
// api.ErrReplicas when too few have it within WaitTimeout, and errWriteLost when check finds that
// the write no longer exists on the master. With WaitReplicas 0 it does nothing.
func (s *durability) await(ctx context.Context, p keyspace.Partition, check writeCheck) error {
	if s.cfg.WaitReplicas == 0 {
		return nil
	}
	c := s.waiters[p.Index()]
	w := &replicaWait{check: check}
	if err := c.batcher.Do(ctx, func(ctx context.Context, all []*replicaWait) {
		c.waitForReplicas(ctx, s.access, p, all)
	}, w); err != nil {
		return err
	}
	if w.err == nil && !w.present() {
		return writeLost(p)
	}
	return w.err
}

// replicaWaiter waits for the replicas of a partition. Calls that arrive during one wait share the
// next.
type replicaWaiter struct {
	batcher *redisx.Batcher[*replicaWait]
	lagging atomic.Bool // it was logged that too few replicas have the writes, and they still have not
}

// replicaWait is one caller's part of a shared wait.
type replicaWait struct {
	check   writeCheck
	present func() bool
	err     error
}

// newBatchers returns a batcher for each partition.
func newBatchers[T any](space keyspace.Space) []*redisx.Batcher[T] {
	all := make([]*redisx.Batcher[T], space.Partitions())
	for i := range all {
		all[i] = redisx.NewBatcher[T](0)
	}
	return all
}

func newReplicaWaiters(space keyspace.Space) []*replicaWaiter {
	all := make([]*replicaWaiter, space.Partitions())
	for i, waits := range newBatchers[*replicaWait](space) {
		all[i] = &replicaWaiter{batcher: waits}
	}
	return all
}

func (c *replicaWaiter) waitForReplicas(ctx context.Context, s *access, p keyspace.Partition, all []*replicaWait) {
	var replicas int
	err := retryUnavailable(ctx, func(ctx context.Context) (err error) {
		replicas, err = s.conn.AwaitReplicas(ctx, p.Waited(), s.cfg.WaitReplicas, s.cfg.WaitTimeout,
			func(pipe redis.Pipeliner) {
				for _, one := range all {
					one.present = one.check(pipe)
				}
			})
		return err
	})
	if err == nil && replicas < s.cfg.WaitReplicas {
		err = fmt.Errorf("%w: %d replicas have what was written to partition %d, %d must have it",
			api.ErrReplicas, replicas, p.Index(), s.cfg.WaitReplicas)
	}
	c.logLag(s, err)
	for _, one := range all {
		one.err = err
	}
}

// logLag logs a warning when too few replicas have the writes, and a message when they have caught
// up. Repeated errors are logged once, until the replicas have caught up.
func (c *replicaWaiter) logLag(s *access, err error) {
	switch {
	case errors.Is(err, api.ErrUnavailable) && !c.lagging.Swap(true):
		s.tel.Log.Warn("replicas lag: nothing is accepted until they have what was written", "error", err)
	case err == nil && c.lagging.Swap(false):
		s.tel.Log.Info("replicas have what was written again")
	}
}
