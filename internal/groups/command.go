package groups

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Seal says that no more jobs come to a group or, with total, none after that many.
func (s *Store) Seal(ctx context.Context, group string, total *int64) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		_, err := ledger.Seal(ctx, s.conn.Cmd, p, group, total)
		return err
	}, func(g ledger.GroupState) bool { return g.Sealed || total != nil && g.Announced })
}

// Cancel ends a group at once. Before it returns, it also moves the group's unfinished jobs to
// cancelled. If it fails or this process dies before that is done, the watcher does it.
func (s *Store) Cancel(ctx context.Context, group string) (api.Accepted, error) {
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) error {
		if err := ledger.Cancel(ctx, s.conn.Cmd, p, group); err != nil {
			return err
		}
		for {
			if more, err := ledger.Sweep(ctx, s.conn.Cmd, p, group); err != nil || !more {
				return err
			}
		}
	}, func(g ledger.GroupState) bool { return g.Status == api.StatusCancelled })
}

// Retry opens the next round of an ended group: its failed jobs run again. The watcher moves the
// jobs.
func (s *Store) Retry(ctx context.Context, group string) (api.Accepted, error) {
	round, request := 0, rand.Text() // the random request id lets the script recognize a repeated call
	return s.command(ctx, group, func(ctx context.Context, p keyspace.Partition) (err error) {
		round, err = ledger.Reopen(ctx, s.conn.Cmd, p, group, request)
		return err
	}, func(g ledger.GroupState) bool { return g.Round >= round })
}

// command applies a command to a group. applied reports whether a group's state shows the command's
// effect; with WaitReplicas, command checks by it that no failover has lost the effect. do is
// repeated while Redis does not answer.
func (s *Store) command(
	ctx context.Context, group string,
	do func(context.Context, keyspace.Partition) error,
	applied func(ledger.GroupState) bool,
) (api.Accepted, error) {
	p, _, err := s.locateGroup(ctx, group)
	if err != nil {
		return api.Accepted{}, err
	}
	if err := retryUnavailable(ctx, func(ctx context.Context) error { return do(ctx, p) }); err != nil {
		return api.Accepted{}, apiError(err)
	}
	if err := s.awaitDurable(ctx, p, groupSatisfies(p, group, applied)); err != nil {
		return api.Accepted{}, apiError(err)
	}
	statuses, err := ledger.Statuses(ctx, s.conn.Cmd, p, []string{group})
	if err != nil {
		return api.Accepted{}, apiError(err)
	}
	if statuses[0] == "" {
		return api.Accepted{}, fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	}
	return api.Accepted{ID: group, Status: statuses[0]}, nil
}
