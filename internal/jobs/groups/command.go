package groups

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// commands changes what groups, tenants and types may do.
type commands struct {
	*access
	durability *durability
}

// Seal closes a group for further jobs: at once or, with total, as soon as it has total jobs.
func (s *commands) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		_, err := ledger.Seal(ctx, s.conn.Cmd, p, group, total)
		return err
	}, func(g ledger.GroupState) bool { return g.Sealed || total != nil && g.Announced })
}

// Cancel ends a group at once. Before it returns, it also moves the group's unfinished jobs, also
// those in flight, to cancelled. If it fails or this process dies before that is done, the watcher
// does it.
func (s *commands) Cancel(ctx context.Context, group string) (api.Accepted, error) {
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

// Retry opens the next round of a completed or failed group, in which all or the chosen failed jobs
// run again. The watcher makes these jobs waiting afterwards.
func (s *commands) Retry(ctx context.Context, group string, choice api.RetryChoice) (api.Accepted, error) {
	round, request := 0, rand.Text() // the random request id lets the script recognize a repeated call
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) (err error) {
		round, err = ledger.Reopen(ctx, s.conn.Cmd, p, group, request, ledger.RetryChoice(choice))
		return err
	}, func(g ledger.GroupState) bool { return g.Round >= round })
}

// Pause stops a group: its jobs in flight finish, and no other job of it starts.
func (s *commands) Pause(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.Pause(ctx, s.conn.Cmd, p, ledger.PauseGroup, group)
	}, func(g ledger.GroupState) bool { return g.Paused })
}

// Resume undoes Pause.
func (s *commands) Resume(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		return ledger.Resume(ctx, s.conn.Cmd, p, ledger.PauseGroup, group)
	}, func(g ledger.GroupState) bool { return !g.Paused })
}

// command runs do, which sends a command to a group, and repeats it while Redis does not answer. It
// returns the group's status and counts afterwards. applied reports whether a group's state shows
// the command's effect; with WaitReplicas, command uses it to check that no failover has lost the
// effect.
func (s *commands) command(
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
	if err := s.durability.await(ctx, p, groupSatisfies(p, group, applied)); err != nil {
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
func (s *commands) PauseTenant(ctx context.Context, tenant string) error {
	if err := checkTenant(ctx, tenant); err != nil {
		return err
	}
	return s.setPaused(ctx, ledger.Pause, ledger.PauseTenant, tenant, s.space.OfTenant(tenant))
}

// ResumeTenant undoes PauseTenant.
func (s *commands) ResumeTenant(ctx context.Context, tenant string) error {
	if err := checkTenant(ctx, tenant); err != nil {
		return err
	}
	return s.setPaused(ctx, ledger.Resume, ledger.PauseTenant, tenant, s.space.OfTenant(tenant))
}

// PauseType stops a job type: its jobs in flight finish, and no other job of it starts. It does so
// in one partition after the other. After an error the caller can repeat it.
func (s *commands) PauseType(ctx context.Context, typ string) error {
	return s.setPaused(ctx, ledger.Pause, ledger.PauseType, typ, s.space.All()...)
}

// ResumeType undoes PauseType, in one partition after the other. After an error the caller can
// repeat it.
func (s *commands) ResumeType(ctx context.Context, typ string) error {
	return s.setPaused(ctx, ledger.Resume, ledger.PauseType, typ, s.space.All()...)
}

type pauseOrResume func(context.Context, redis.Cmdable, keyspace.Partition, ledger.Pausable, string) error

func (s *commands) setPaused(
	ctx context.Context, do pauseOrResume, what ledger.Pausable, id string, parts ...keyspace.Partition,
) error {
	for _, p := range parts {
		if err := retryUnavailable(ctx, func(ctx context.Context) error {
			return do(ctx, s.conn.Cmd, p, what, id)
		}); err != nil {
			return apiError(err)
		}
	}
	return nil
}
