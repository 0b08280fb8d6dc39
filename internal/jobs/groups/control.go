package groups

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Seal closes a group for further jobs: at once or, with total, as soon as it has total jobs.
func (s *Store) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		_, err := ledger.Seal(ctx, s.conn.Cmd, p, group, total)
		return err
	}, func(g ledger.GroupState) bool { return g.Sealed || total != nil && g.Announced })
}

// Cancel ends a group at once. Before it returns, it also moves the group's unfinished jobs, also
// those in flight, to cancelled. If it fails or this process dies before that is done, the watcher
// does it.
func (s *Store) Cancel(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		if err := ledger.Cancel(ctx, s.conn.Cmd, p, group); err != nil {
			return err
		}
		for {
			more, steps, err := ledger.Sweep(ctx, s.conn.Cmd, p, group)
			for _, step := range steps {
				s.tel.RecordStep(ctx, p.Group(group), telemetry.JobStep(step))
			}
			if err != nil || !more {
				return err
			}
		}
	}, func(g ledger.GroupState) bool { return g.Status == api.StatusCancelled })
}

// CancelJob ends a job that no worker has taken, as cancelled, and returns it. Twice: a job that was
// cancelled alone is returned again. It returns api.ErrConflict for a job that is in flight or has
// ended.
func (s *Store) CancelJob(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	if ordinal < 0 || ordinal >= messages.MaxTotal {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	_, err := s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) (err error) {
		for range maxTries {
			var steps []ledger.JobStep
			steps, err = ledger.CancelJob(ctx, s.conn.Cmd, p, group, ordinal)
			for _, step := range steps {
				s.tel.RecordStep(ctx, p.Group(group), telemetry.JobStep(step))
			}
			if !errors.Is(err, ledger.ErrJobMoved) {
				return err
			}
		}
		return err
	}, func(g ledger.GroupState) bool { return g.Status != "" })
	if err != nil {
		return api.Job{}, err
	}
	return s.Job(ctx, group, ordinal)
}

// Retry opens the next round of a completed or failed group, in which all or the chosen failed jobs
// run again. The watcher makes these jobs waiting afterwards.
func (s *Store) Retry(ctx context.Context, group string, choice api.RetryChoice) (api.Accepted, error) {
	round, request := 0, rand.Text() // the random request id lets the script recognize a repeated call
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) (err error) {
		round, err = ledger.Reopen(ctx, s.conn.Cmd, p, group, request, ledger.RetryChoice(choice))
		return err
	}, func(g ledger.GroupState) bool { return g.Round >= round })
}

// Pause stops a group: its jobs in flight finish, and no other job of it starts.
func (s *Store) Pause(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.Pause(ctx, s.conn.Cmd, p, ledger.PauseGroup, group)
	}, func(g ledger.GroupState) bool { return g.Paused })
}

// Resume undoes Pause.
func (s *Store) Resume(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.Resume(ctx, s.conn.Cmd, p, ledger.PauseGroup, group)
	}, func(g ledger.GroupState) bool { return !g.Paused })
}

// command runs do, which sends a command to a group, and repeats it while Redis does not answer. It
// returns the group's status and counts afterwards. applied reports whether a group's state shows
// the command's effect; with WaitReplicas, command uses it to check that no failover has lost the
// effect.
func (s *Store) command(
	ctx context.Context, group string,
	do func(context.Context, keyspace.Partition) error,
	applied func(ledger.GroupState) bool,
) (api.Accepted, error) {
	p, _, err := s.findGroup(ctx, group)
	if err != nil {
		return api.Accepted{}, err
	}
	if err := retryUnavailable(ctx, func(ctx context.Context) error { return do(ctx, p) }); err != nil {
		return api.Accepted{}, apiError(err)
	}
	if err := s.awaitReplicas(ctx, p, groupSatisfies(p, group, applied)); err != nil {
		return api.Accepted{}, apiError(err)
	}
	var now []ledger.Progress
	if err := retryUnavailable(ctx, func(ctx context.Context) (err error) {
		now, err = ledger.ReadProgress(ctx, s.conn.Cmd, []ledger.GroupRef{{Partition: p, ID: group}})
		return err
	}); err != nil {
		return api.Accepted{}, apiError(err)
	}
	if now[0].Status == "" {
		return api.Accepted{}, fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	}
	return api.Accepted{ID: group, Status: now[0].Status, Counts: now[0].Counts}, nil
}

// PauseTenant stops a tenant: its jobs in flight finish, and no other job of it starts. The tenant
// need not exist.
func (s *Store) PauseTenant(ctx context.Context, tenant string) error {
	if err := checkTenant(ctx, tenant); err != nil {
		return err
	}
	return s.setPaused(ctx, ledger.Pause, ledger.PauseTenant, tenant, s.space.OfTenant(tenant))
}

// ResumeTenant undoes PauseTenant.
func (s *Store) ResumeTenant(ctx context.Context, tenant string) error {
	if err := checkTenant(ctx, tenant); err != nil {
		return err
	}
	return s.setPaused(ctx, ledger.Resume, ledger.PauseTenant, tenant, s.space.OfTenant(tenant))
}

// PauseType stops a job type: its jobs in flight finish, and no other job of it starts. After an
// error it may be paused in some partitions: the caller can repeat it.
func (s *Store) PauseType(ctx context.Context, typ string) error {
	return s.setPaused(ctx, ledger.Pause, ledger.PauseType, typ, s.space.All()...)
}

// ResumeType undoes PauseType. After an error the caller can repeat it.
func (s *Store) ResumeType(ctx context.Context, typ string) error {
	return s.setPaused(ctx, ledger.Resume, ledger.PauseType, typ, s.space.All()...)
}

type pauseOrResume func(context.Context, redis.Cmdable, keyspace.Partition, ledger.Pausable, string) error

func (s *Store) setPaused(
	ctx context.Context, do pauseOrResume, what ledger.Pausable, id string, parts ...keyspace.Partition,
) error {
	return apiError(concurrently(ctx, len(parts), func(ctx context.Context, i int) error {
		return retryUnavailable(ctx, func(ctx context.Context) error {
			return do(ctx, s.conn.Cmd, parts[i], what, id)
		})
	}))
}

// This file confirms submissions, appends and commands on groups: a write is confirmed when at
// least REDIS_WAIT_REPLICAS replicas have it. A write that is not confirmed may still exist. Its
// client is told to repeat the request, which is harmless.

// writeCheck is a function that adds to a pipeline the reads that find out whether a write still
// exists on its master. After the pipeline has run, present reports whether it does.
type writeCheck func(redis.Pipeliner) (present func() bool)

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

// awaitSubmission waits until the replicas have a submitted group with its jobs, and the record of
// its tenant under the group's id, which may be on another master.
func (s *Store) awaitSubmission(ctx context.Context, p keyspace.Partition, g *messages.SubmitGroup) error {
	registry := s.space.OfGroup(g.ID)
	owner := groupBelongsTo(registry, g.ID, g.Tenant)
	stored := groupSatisfies(p, g.ID, func(now ledger.GroupState) bool {
		return now.Submitted || len(g.Jobs) == 0 && (now.Sealed || !endsWithoutJobs(g))
	})
	if registry.Index() == p.Index() {
		return s.awaitReplicas(ctx, p, bothChecks(owner, stored))
	}
	if err := s.awaitReplicas(ctx, registry, owner); err != nil {
		return err
	}
	return s.awaitReplicas(ctx, p, stored)
}

// awaitReplicas waits until WaitReplicas replicas of a partition have what was written to it. It returns
// api.ErrReplicas when too few have it within WaitTimeout, and errWriteLost when check finds that
// the write no longer exists on the master. With WaitReplicas 0 it does nothing.
func (s *Store) awaitReplicas(ctx context.Context, p keyspace.Partition, check writeCheck) error {
	if s.cfg.WaitReplicas == 0 {
		return nil
	}
	c := s.waiters[p.Index()]
	w := &replicaWait{check: check}
	if err := c.batcher.Do(ctx, func(ctx context.Context, all []*replicaWait) {
		c.waitForReplicas(ctx, s, p, all)
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

func (c *replicaWaiter) waitForReplicas(ctx context.Context, s *Store, p keyspace.Partition, all []*replicaWait) {
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
func (c *replicaWaiter) logLag(s *Store, err error) {
	switch {
	case errors.Is(err, api.ErrUnavailable) && !c.lagging.Swap(true):
		s.tel.Log.Warn("replicas lag: nothing is accepted until they have what was written", "error", err)
	case err == nil && c.lagging.Swap(false):
		s.tel.Log.Info("replicas have what was written again")
	}
}
