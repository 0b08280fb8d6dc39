package groups

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Delete deletes a group and all that Redis holds of its jobs: payloads, results, failures, dead
// letters, events and callbacks. One that has not ended is cancelled first; what workers report of its
// running jobs is stale. After an error the caller can repeat it.
func (s *Store) Delete(ctx context.Context, group string) (api.Deletion, error) {
	p, tenant, err := s.findGroup(ctx, group)
	if err != nil {
		return api.Deletion{}, err
	}
	if _, err := s.Cancel(ctx, group); err != nil && !errors.Is(err, api.ErrConflict) && !errors.Is(err, api.ErrNotFound) {
		return api.Deletion{}, err
	}
	events, created, err := ledger.GroupEvents(ctx, s.conn.Cmd, p, group)
	if err != nil {
		return api.Deletion{}, apiError(err)
	}
	forget := func(ctx context.Context) error {
		return ledger.ForgetGroup(ctx, s.conn.Cmd, s.space, p, group, events, created)
	}
	for _, step := range []func(context.Context) error{
		forget,
		func(ctx context.Context) error { return ledger.DeleteGroup(ctx, s.conn.Cmd, p, group) },
		forget, // because a watcher may have published an event that it had read before
		func(ctx context.Context) error { return ledger.ReleaseID(ctx, s.conn.Cmd, s.space, p, group, tenant) },
	} {
		if err := retryUnavailable(ctx, step); err != nil {
			return api.Deletion{}, apiError(err)
		}
	}
	return api.Deletion{ID: group, Deleted: true}, nil
}

const (
	// groupsPerErasure is about how many groups one call of Erase looks at, and erasureTime after which
	// time it looks at no more.
	groupsPerErasure = 500
	erasureTime      = 5 * time.Second
)

// Erase deletes what is kept of the jobs of a tenant that have a key, such as a person's address: it
// cancels those that wait, and empties the records of those that have ended. One call looks at a bounded
// number of groups; cursor is that of the last call. Jobs that can't be erased yet are in Left.
func (s *Store) Erase(ctx context.Context, tenant, key, cursor string) (api.Erasure, error) {
	e := api.Erasure{Tenant: tenant, Left: []api.ErasureLeft{}}
	if err := checkTenant(ctx, tenant); err != nil {
		return e, err
	}
	at, err := uint64(0), error(nil)
	if cursor != "" {
		if at, err = strconv.ParseUint(cursor, 10, 64); err != nil || at == 0 {
			return e, badCursor()
		}
	}
	p := s.space.OfTenant(tenant)
	for until := time.Now().Add(erasureTime); e.Groups < groupsPerErasure && time.Now().Before(until); {
		found, next, err := ledger.FindKeys(ctx, s.conn.Cmd, p, tenant, key, at, 50)
		if err != nil {
			return e, apiError(err)
		}
		for _, k := range found {
			e.Groups++
			if err := s.eraseIn(ctx, p, k, key, &e); err != nil {
				return e, apiError(fmt.Errorf("erase in group %s: %w", k.Group, err))
			}
		}
		if at = next; at == 0 && e.Groups == 0 && cursor == "" {
			_, err = s.Tenant(ctx, tenant)
			return e, err
		}
		if at == 0 {
			return e, nil
		}
	}
	e.Next = strconv.FormatUint(at, 10)
	return e, nil
}

// eraseIn erases the jobs of a group that have the key. Without an index of keys, those that have ended
// are found by their records, and those that wait are not.
func (s *Store) eraseIn(ctx context.Context, p keyspace.Partition, k ledger.GroupKey, key string, e *api.Erasure) error {
	if k.Unique {
		if k.Ordinal < 0 {
			return nil
		}
		return s.eraseJob(ctx, p, k.Group, k.Ordinal, key, e)
	}
	ended, err := ledger.EndedWithKey(ctx, s.conn.Cmd, p, k.Group, key)
	if err != nil {
		return err
	}
	for _, ordinal := range ended {
		if err := s.eraseJob(ctx, p, k.Group, ordinal, "", e); err != nil {
			return err
		}
	}
	if k.Open {
		e.Left = append(e.Left, api.ErasureLeft{Group: k.Group, Reason: api.LeftNoIndex})
	}
	return nil
}

func (s *Store) eraseJob(ctx context.Context, p keyspace.Partition, group string, ordinal int64, key string, e *api.Erasure) error {
	var err error
	for range maxTries {
		if err = ledger.EraseJob(ctx, s.conn.Cmd, p, group, ordinal, key); !errors.Is(err, ledger.ErrJobMoved) {
			break
		}
		_, _ = s.CancelJob(ctx, group, ordinal) // if it waits
	}
	switch {
	case err == nil:
		e.Erased++
	case errors.Is(err, api.ErrConflict): // a worker has it, or its result is being reduced
		e.Left = append(e.Left, api.ErasureLeft{Group: group, Ordinal: &ordinal, Reason: api.LeftRunning})
	case errors.Is(err, api.ErrNotFound):
	default:
		return err
	}
	return nil
}
