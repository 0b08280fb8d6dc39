// Package groups is the store of bulk actions. It stores submissions, carries out commands, and
// returns views of groups, jobs, tenants and queues. It hides in which partition a group is, how
// large submissions are split, and how repeated requests are recognized. Ingest, the watcher and
// the HTTP API use it. The context of a call has its principal (package auth): what belongs to
// another tenant does not exist for it.
package groups

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
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
	MaxBacklog          int64   // most jobs that wait, are non-ready or ready; 0: no limit
	MaxMemoryRatio      float64 // part of Redis's maxmemory up to which jobs are accepted; 0: no limit
	KeepIdempotencyKeys time.Duration
	Meter               ledger.Meter
	Configured          api.ConfiguredLimits // the global limits of the process's environment, for views
	RequireTenant       bool                 // refuses a group that names no tenant
	FairPolicy          bool                 // FAIR_QUEUE_POLICY=fair, under which groups have no base priority

	Callbacks    Callbacks
	WaitReplicas int           // how many replicas must confirm a write; 0: none
	WaitTimeout  time.Duration // the longest wait for the replicas
}

// Store gives access to all groups of an installation.
type Store struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	reducers *reducer.Registry
	appender redis.Cmdable // for submissions, appends and the tenants of groups

	backpressure *backpressure.Controller
	metrics      *telemetry.SubmissionMetrics
	served       *presence.Served // the types that workers serve
	groupLocks   keyedMutex
	// owners has the tenants of groups that were asked for recently, because a group often gets many
	// appends in a short time. An entry may be out of date: a caller that finds no group in that
	// tenant's partition must ask Redis.
	owners     *redisx.Cache[string, string]
	batchers   []*redisx.Batcher[*pendingAppend] // by partition
	submitters []*redisx.Batcher[*submission]    // by partition
	waiters    []*replicaWaiter                  // by partition

	summaries recent[failureReading] // by tenant and group
	maps      recent[api.JobMap]     // by tenant, group and number of buckets
	slow      *redisx.Cache[string, slowStats]
	delays    startDelays
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
	limits := backpressure.Config{MaxBacklog: cfg.MaxBacklog, MaxMemoryRatio: cfg.MaxMemoryRatio}
	return &Store{
		cfg: cfg, conn: conn, space: space, tel: tel, reducers: reducers, appender: appender,
		backpressure: backpressure.New(limits, conn, space),
		metrics:      telemetry.NewSubmissionMetrics(tel.Meter),
		served:       presence.NewServed(conn, space),
		// A second is short because groups are deleted, and another tenant may then use the id.
		owners:     redisx.NewCache[string, string](time.Second, 10_000),
		batchers:   newBatchers[*pendingAppend](space),
		submitters: newBatchers[*submission](space),
		waiters:    newReplicaWaiters(space),
		summaries:  recent[failureReading]{kept: redisx.NewCache[string, failureReading](summaryAge, maxKeptSummaries)},
		maps:       recent[api.JobMap]{kept: redisx.NewCache[string, api.JobMap](mapAge, maxKeptMaps)},
		slow:       redisx.NewCache[string, slowStats](slowAge, 1),
	}
}

// Reducers returns the names of the reducers that this process has.
func (s *Store) Reducers() []string { return s.reducers.Ops() }

// findGroup does the same as locateGroup, and tries again while Redis does not answer.
func (s *Store) findGroup(ctx context.Context, group string) (p keyspace.Partition, tenant string, err error) {
	err = retryUnavailable(ctx, func(ctx context.Context) (err error) {
		p, tenant, err = s.locateGroup(ctx, group)
		return err
	})
	return p, tenant, err
}

// locateGroup returns the partition and the tenant of a group. It returns the same api.ErrNotFound
// for an unknown group and for one whose tenant is not the principal's.
func (s *Store) locateGroup(ctx context.Context, group string) (keyspace.Partition, string, error) {
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

// countRejected counts a request with n jobs if backpressure has refused it. A message of a stream is
// not turned away: it stays there and is delivered again.
func (s *Store) countRejected(err error, n int, o Origin) {
	var full *api.BackpressureError
	if !o.Published && errors.As(err, &full) {
		s.metrics.Rejected(n)
	}
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

// errNoPrincipal is the error for a context without a principal, which is a mistake in the program:
// a caller without a key must use auth.Trust.
var errNoPrincipal = errors.New("the call has no principal")

func caller(ctx context.Context) (auth.Principal, error) {
	p, ok := auth.From(ctx)
	if !ok {
		return p, errNoPrincipal
	}
	return p, nil
}

// callFor returns the principal of a call, and the call's tenant. named is the tenant that the call
// names; "" if it names none. It returns api.ErrTenant if the principal may not act for that
// tenant.
func callFor(ctx context.Context, named string) (p auth.Principal, tenant string, err error) {
	if p, err = caller(ctx); err != nil {
		return p, "", err
	}
	tenant, ok := p.TenantFor(named)
	switch {
	case !ok && p.KeyID != "" && p.Tenant != "":
		return p, "", &api.OtherTenantError{Named: named, Own: p.Tenant}
	case !ok: // such as a stream of one tenant, which has no key
		return p, "", api.ErrTenant
	}
	return p, tenant, nil
}

// ownTenant returns the only tenant whose data the principal of a call may see; "" for a principal
// that may see the data of all tenants. It returns api.ErrNotAllowed if the principal may see none.
func ownTenant(ctx context.Context) (string, error) {
	p, err := caller(ctx)
	switch {
	case err != nil:
		return "", err
	case p.Tenant == "" || p.Tenant == auth.AllTenants:
		if !p.Owns("") { // its role may not see the data of tenants at all
			return "", api.ErrNotAllowed
		}
		return "", nil
	}
	return p.Tenant, nil
}

// checkTenant returns the error for an unknown tenant if the principal of the call may not see this
// tenant.
func checkTenant(ctx context.Context, tenant string) error {
	p, err := caller(ctx)
	if err == nil && !p.Owns(tenant) {
		err = unknownTenant(tenant)
	}
	return err
}

func unknownTenant(tenant string) error {
	return &api.NotFoundError{Text: "tenant " + tenant + ": has neither groups nor settings"}
}

// idempotencyScope returns a prefix for idempotency keys before they are hashed. With it each
// tenant has keys of its own; all principals without a tenant share theirs.
func idempotencyScope(p auth.Principal, tenant string) string {
	if p.Tenant == "" {
		return ""
	}
	return cmp.Or(tenant, p.Tenant) + "\x00"
}

// maxConcurrent is the most calls of one request to Redis at the same time, such as of a list or of
// all partitions.
const maxConcurrent = 8

// concurrently calls do with each index below n, up to maxConcurrent at the same time. It returns
// the first error, which ends the contexts of the others.
func concurrently(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(maxConcurrent)
	for i := range n {
		calls.Go(func() error { return do(ctx, i) })
	}
	return calls.Wait()
}

// shareOf returns how many items to read from each partition to find the first `most` of all
// partitions with near certainty: the mean, and four times its standard deviation, because tenants
// are spread by a hash. All partitions together read about most + 4√(most × partitions) items, and
// 4 for each partition.
func shareOf(most, partitions int) int {
	mean := float64(most) / float64(partitions)
	return min(most+1, int(mean+4*math.Sqrt(mean))+4)
}

// recent is a cache of values that were read of groups, for a short time. Concurrent calls for the
// same key share one read.
type recent[T any] struct {
	kept    *redisx.Cache[string, T]
	reading keyedMutex // by the same keys
}

// get returns the cached value of a key, if it is not too old and good returns true for it;
// otherwise it calls read and caches the value. The value is shared: the caller must not change it.
func (r *recent[T]) get(ctx context.Context, key string, good func(T) bool, read func() (T, error)) (T, error) {
	lock, err := r.reading.lock(ctx, key)
	if err != nil {
		var none T
		return none, err
	}
	defer r.reading.unlock(lock)
	if v, _, ok := r.kept.Get(key); ok && good(v) {
		return v, nil
	}
	v, err := read()
	if err == nil {
		r.kept.Put(key, v)
	}
	return v, err
}

// keyedMutex is a set of mutexes, one for each key. With group ids as keys, the appends of this
// process to one group run one after the other. So each append but the first knows the group's
// next ordinal, unless another process appends too, and can compose the jobs' blobs for the script.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*groupLock
}

type groupLock struct {
	free        chan struct{} // holds a token while the lock is free
	nextOrdinal int64         // ordinal of the group's next job, as far as this process knows
	users       int           // goroutines that hold the lock or wait for it
}

// maxUnusedLocks is the number of locks, used and unused ones, from which on a keyedMutex removes
// the unused ones before it adds another.
const maxUnusedLocks = 10_000

// lock waits for the lock of the key group until ctx ends. Without an error, the caller must call
// unlock.
func (l *keyedMutex) lock(ctx context.Context, group string) (*groupLock, error) {
	l.mu.Lock()
	if l.locks == nil {
		l.locks = make(map[string]*groupLock)
	}
	a := l.locks[group]
	if a == nil {
		l.removeUnused()
		a = &groupLock{free: make(chan struct{}, 1)}
		a.free <- struct{}{}
		l.locks[group] = a
	}
	a.users++
	l.mu.Unlock()
	select {
	case <-a.free:
		return a, nil
	case <-ctx.Done():
		l.mu.Lock()
		a.users--
		l.mu.Unlock()
		return nil, ctx.Err()
	}
}

func (l *keyedMutex) unlock(a *groupLock) {
	a.free <- struct{}{}
	l.mu.Lock()
	a.users--
	l.mu.Unlock()
}

// removeUnused removes all unused locks if there are maxUnusedLocks locks. l.mu must be held.
func (l *keyedMutex) removeUnused() {
	if len(l.locks) < maxUnusedLocks {
		return
	}
	for group, a := range l.locks {
		if a.users == 0 {
			delete(l.locks, group)
		}
	}
}
