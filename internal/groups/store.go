// Package groups is what can be done with bulk actions and seen of them: it stores
// submissions, takes commands, and shows groups, jobs and queues. It hides where a group lies,
// how large submissions are cut, and what makes a repeated request harmless. Ingest and the
// HTTP API stand on it.
package groups

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// Config is what the store can be told.
type Config struct {
	MaxBacklog           int64   // jobs that are not ended, of all groups; 0 is no limit
	MaxMemoryRatio       float64 // of Redis's maxmemory, beyond which nothing is accepted; 0 is no limit
	KeepIdempotencyKeys  time.Duration
	Rate                 ledger.Rate
	Limiter, LimiterMode string // for show

	WaitReplicas int           // that must have what is accepted; 0 waits for none
	WaitTimeout  time.Duration // for them
}

// Store knows every group of an installation.
type Store struct {
	cfg            Config
	conn           *redisx.Conn
	space          keyspace.Space
	tel            *telemetry.Telemetry
	reducers       *reducer.Registry
	backpressure   *backpressure.Controller
	tenants        tenantCache
	groupLocks     keyedMutex
	appender       redis.Cmdable              // gathers concurrent commands of submissions and appends
	appendBatchers []*batcher[*pendingAppend] // by partition
	replicaWaiters []*replicaWaiter           // by partition
}

// New returns a store; appends go through appender, which may gather concurrent calls (nil: conn).
func New(
	cfg Config, conn *redisx.Conn, space keyspace.Space,
	tel *telemetry.Telemetry, reducers *reducer.Registry, appender redis.Cmdable,
) *Store {
	if appender == nil {
		appender = conn.Cmd
	}
	return &Store{
		cfg: cfg, conn: conn, space: space, tel: tel, reducers: reducers, appender: appender,
		backpressure: backpressure.New(
			backpressure.Config{MaxBacklog: cfg.MaxBacklog, MaxMemoryRatio: cfg.MaxMemoryRatio}, conn, space),
		appendBatchers: newBatchers[*pendingAppend](space), replicaWaiters: newReplicaWaiters(space),
	}
}

// locateGroup finds the partition of a group and its tenant.
func (s *Store) locateGroup(ctx context.Context, group string) (keyspace.Partition, string, error) {
	tenant, err := s.appender.Get(ctx, s.space.OfGroup(group).Owner(group)).Result()
	if errors.Is(err, redis.Nil) {
		return keyspace.Partition{}, "", fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	}
	if err != nil {
		return keyspace.Partition{}, "", apiError(fmt.Errorf("find group %s: %w", group, err))
	}
	return s.space.OfTenant(tenant), tenant, nil
}

// apiError says what a failure means to whoever asked.
func apiError(err error) error {
	switch {
	case err == nil:
		return nil
	case call.IsOOM(err):
		return &api.BackpressureError{RetryAfter: 5 * time.Second, Reason: "Redis is out of memory"}
	case call.IsUnavailable(err), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	return err
}

// retryTime is how long a request tries to get an answer out of Redis before it gives up.
const retryTime = 5 * time.Second

// retryUnavailable repeats a step that is harmless when repeated, while Redis does not answer.
func retryUnavailable(ctx context.Context, step func(context.Context) error) error {
	return retryWhile(ctx, call.IsUnavailable, step)
}

// retryLost takes all steps again, from the first on, when a failover in between has lost what one
// of them did. Those whose effect is there change nothing.
func retryLost(ctx context.Context, steps func(context.Context) error) error {
	return retryWhile(ctx, func(err error) bool { return errors.Is(err, errWriteLost) }, steps)
}

func retryWhile(ctx context.Context, retryable func(error) bool, step func(context.Context) error) error {
	backoff := redisx.Backoff{Min: 10 * time.Millisecond, Max: 500 * time.Millisecond}
	deadline := time.Now().Add(retryTime)
	for {
		err := step(ctx)
		if err == nil || !retryable(err) || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		if redisx.Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

// number reads a hash field's value; one that is not there is 0.
func number(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}
