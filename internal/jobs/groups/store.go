// Package groups is the store of bulk actions. It stores submissions, carries out commands, and
// returns views of groups, jobs, tenants and queues. It hides in which partition a group is, how
// large submissions are split, and how repeated requests are recognized. Ingest, the watcher and
// the HTTP API use it. The context of a call has its principal (package auth): what belongs to
// another tenant does not exist for it.
package groups

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/why"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/reducer"
)

// Config configures the store.
type Config struct {
	MaxBacklog           int64   // most jobs that wait, are non-ready or ready; 0: no limit
	MaxMemoryRatio       float64 // part of Redis's maxmemory up to which jobs are accepted; 0: no limit
	KeepIdempotencyKeys  time.Duration
	Rate                 ledger.Rate
	Limiter, LimiterMode string // names of the limiter and of the share mode, for views only

	WaitReplicas int           // how many replicas must confirm a write; 0: none
	WaitTimeout  time.Duration // the longest wait for the replicas
}

// Store gives access to all groups of an installation. It consists of parts, each of which has one
// duty.
type Store struct {
	*submissions
	*appends
	*commands
	*tenants
	*views
	*failures
	*jobMaps
	*stats
}

// New returns a store. Submissions, appends and the look-up of a group's tenant use the Redis
// client appender, which may combine concurrent calls; with nil they use conn.
func New(
	cfg Config, conn *redisx.Conn, space keyspace.Space,
	tel *telemetry.Telemetry, reducers *reducer.Registry, appender redis.Cmdable,
) *Store {
	if appender == nil {
		appender = conn.Cmd
	}
	all := &access{cfg: cfg, conn: conn, space: space, tel: tel, reducers: reducers, appender: appender}
	limits := backpressure.Config{MaxBacklog: cfg.MaxBacklog, MaxMemoryRatio: cfg.MaxMemoryRatio}
	controller := backpressure.New(limits, conn, space)
	durable := &durability{access: all, waiters: newReplicaWaiters(space)}
	store := &pieces{access: all}
	tenants := &tenants{all}
	return &Store{
		submissions: &submissions{
			access: all, backpressure: controller, pieces: store, durability: durable,
			served: presence.NewServed(conn, space),
		},
		appends: &appends{
			access: all, backpressure: controller, pieces: store, durability: durable,
			batchers: newBatchers[*pendingAppend](space),
		},
		commands: &commands{access: all, durability: durable},
		tenants:  tenants,
		views:    &views{access: all, tenants: tenants, explainer: why.New(conn, space, cfg.Rate)},
		failures: newFailures(all),
		jobMaps:  newJobMaps(all),
		stats:    &stats{all},
	}
}

// access is what all parts of the store share: the connection to Redis, and where a group is.
type access struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	reducers *reducer.Registry
	appender redis.Cmdable // for submissions, appends and the tenants of groups
}

// partitionLimit returns the global rate limit in the form in which one partition applies it.
func (s *access) partitionLimit(p keyspace.Partition) ledger.Limit {
	return s.cfg.Rate.Of(p.Index(), s.space.Partitions())
}

// findGroup does the same as locateGroup, and tries again while Redis does not answer.
func (s *access) findGroup(ctx context.Context, group string) (p keyspace.Partition, tenant string, err error) {
	err = retryUnavailable(ctx, func(ctx context.Context) (err error) {
		p, tenant, err = s.locateGroup(ctx, group)
		return err
	})
	return p, tenant, err
}

// locateGroup returns the partition and the tenant of a group. It returns the same api.ErrNotFound
// for an unknown group and for one whose tenant is not the principal's.
func (s *access) locateGroup(ctx context.Context, group string) (keyspace.Partition, string, error) {
	p, err := caller(ctx)
	if err != nil {
		return keyspace.Partition{}, "", err
	}
	tenant, err := ledger.GroupOwner(ctx, s.appender, s.space.OfGroup(group), group)
	if err != nil {
		return keyspace.Partition{}, "", apiError(err)
	}
	if !p.Owns(tenant) {
		return keyspace.Partition{}, "", ledger.UnknownGroup(group)
	}
	return s.space.OfTenant(tenant), tenant, nil
}

// apiError converts Redis's errors "out of memory" and "does not answer", and an exceeded deadline,
// to the errors of package api for them. It returns other errors unchanged.
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

// retryTime is for how long a step of a request is retried.
const retryTime = 5 * time.Second

// retryUnavailable retries step while Redis does not answer, for retryTime, and returns its last
// error. step must be harmless when repeated.
func retryUnavailable(ctx context.Context, step func(context.Context) error) error {
	return redisx.RetryWhile(ctx, retryTime, call.IsUnavailable, step)
}

// retryLost retries all steps from the first one when a failover has lost the effect of a step, for
// at most retryTime. A repeated step whose effect still exists must change nothing.
func retryLost(ctx context.Context, steps func(context.Context) error) error {
	return redisx.RetryWhile(ctx, retryTime, func(err error) bool { return errors.Is(err, errWriteLost) }, steps)
}
