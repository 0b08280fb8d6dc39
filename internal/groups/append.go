package groups

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// appends adds jobs to groups that exist.
type appends struct {
	*access
	backpressure *backpressure.Controller
	pieces       *pieces
	durability   *durability
	owners       tenantCache
	batchers     []*batcher[*pendingAppend] // by partition
}

// Append adds jobs to a group. A repeated call with the same request id adds nothing and succeeds.
// While too many jobs wait, Append returns an *api.BackpressureError, for a repeated call too.
func (s *appends) Append(ctx context.Context, group string, jobs []messages.Job, request string, o Origin) error {
	prefix := "a#" + group + "#" + request + "#"
	return s.appendToGroup(ctx, &pendingAppend{group: group, jobs: jobs, requestPrefix: prefix, origin: o})
}

// AppendEntry adds the jobs of an entry of the ingest stream. entry is the entry's id. message is
// the id that the producer gave the message; "" when it gave none. An entry or message that was
// added before adds nothing and succeeds. Backpressure is as for Append.
func (s *appends) AppendEntry(
	ctx context.Context, group string, jobs []messages.Job, entry, message string, o Origin,
) error {
	prefix := "m#" + message + "#" // another prefix than that of HTTP requests, because producers choose both ids
	if message == "" {
		prefix = ledger.EntryRequest(entry) + "#"
	}
	return s.appendToGroup(ctx, &pendingAppend{group: group, jobs: jobs, requestPrefix: prefix, origin: o})
}

// pendingAppend holds jobs that are to be added to a group.
type pendingAppend struct {
	group, tenant string
	jobs          []messages.Job
	requestPrefix string // the request ids of the pieces begin with it
	origin        Origin

	newJobs []ledger.NewJob // the jobs with their trace contexts
	err     error           // of the call that stored this append with others
}

func (a *pendingAppend) bytes() (n int) {
	for i := range a.jobs {
		n += len(a.jobs[i].Payload)
	}
	return n
}

// fitsOnePiece reports whether one call of the script can take all jobs.
func (a *pendingAppend) fitsOnePiece() bool {
	return len(a.jobs) > 0 && len(a.jobs) <= ledger.MaxAppend && a.bytes() <= ledger.MaxAppendBytes
}

// firstRequest returns the request id of the first piece.
func (a *pendingAppend) firstRequest() string { return a.requestPrefix + "0" }

func (s *appends) appendToGroup(ctx context.Context, a *pendingAppend) error {
	if err := s.backpressure.Check(ctx, len(a.jobs)); err != nil {
		return apiError(err)
	}
	tenant, known := s.owners.get(a.group)
	if known {
		a.tenant = tenant
		if err := s.appendToPartition(ctx, s.space.OfTenant(tenant), a); !errors.Is(err, api.ErrNotFound) {
			return err
		}
	}
	p, tenant, err := s.locateGroup(ctx, a.group)
	if err != nil {
		return err
	}
	s.owners.put(a.group, tenant)
	a.tenant = tenant
	return s.appendToPartition(ctx, p, a)
}

func (s *appends) appendToPartition(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	switch {
	case !a.fitsOnePiece():
		return apiError(s.appendPieces(ctx, p, a))
	case s.cfg.WaitReplicas == 0:
		// Thousands of goroutines may wait here. Without the closure of retryLost their stacks stay
		// small.
		return apiError(s.appendInBatch(ctx, p, a))
	}
	return apiError(retryLost(ctx, func(ctx context.Context) error {
		if err := s.appendInBatch(ctx, p, a); err != nil {
			return err
		}
		return s.durability.await(ctx, p, requestsStored(p, a.firstRequest()))
	}))
}

func (s *appends) appendPieces(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	pieces := s.pieces.split(ctx, a.tenant, a.group, a.jobs, a.requestPrefix, a.origin)
	requests := make([]string, len(pieces))
	for i := range pieces {
		requests[i] = pieces[i].Request
	}
	return retryLost(ctx, func(ctx context.Context) error {
		if err := s.pieces.store(ctx, p, pieces); err != nil {
			return err
		}
		return s.durability.await(ctx, p, requestsStored(p, requests...))
	})
}

// Small appends to a partition that arrive at the same time are stored together, with one script
// call per group. Each keeps its own request id, and is accepted or refused on its own.

// appendInBatch stores a together with other appends. The trace contexts of a published message are
// made by the goroutine that runs the batch.
func (s *appends) appendInBatch(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	if !a.origin.Published {
		a.newJobs = s.traceJobs(ctx, a.tenant, a.group, a.jobs, a.origin)
	}
	err := s.batchers[p.Index()].do(ctx, a, func(ctx context.Context, all []*pendingAppend) {
		s.storeAppends(ctx, p, all)
	})
	if err != nil {
		return err
	}
	return a.err
}

// storeAppends stores appends in as few script calls as possible. The calls run concurrently.
func (s *appends) storeAppends(ctx context.Context, p keyspace.Partition, all []*pendingAppend) {
	for _, a := range all {
		if a.newJobs == nil {
			a.newJobs = s.traceJobs(ctx, a.tenant, a.group, a.jobs, a.origin)
		}
	}
	calls := splitCalls(all)
	var others sync.WaitGroup
	for _, appends := range calls[1:] {
		others.Go(func() { s.storeCall(ctx, p, appends) })
	}
	s.storeCall(ctx, p, calls[0])
	others.Wait()
}

// splitCalls divides appends among script calls. A call has appends of one group only, and at most
// as many jobs and bytes as the script accepts. all must not be empty.
func splitCalls(all []*pendingAppend) (calls [][]*pendingAppend) {
	type open struct{ call, jobs, bytes int }
	latest := make(map[string]open)
	for _, a := range all {
		o, known := latest[a.group]
		bytes := a.bytes()
		o.jobs += len(a.jobs)
		o.bytes += bytes
		if !known || o.jobs > ledger.MaxAppend || o.bytes > ledger.MaxAppendBytes {
			o = open{len(calls), len(a.jobs), bytes}
			calls = append(calls, nil)
		}
		calls[o.call] = append(calls[o.call], a)
		latest[a.group] = o
	}
	return calls
}

// storeCall stores the appends of one script call and sets the error of each. If Redis refuses the
// call, it makes one call for each append.
func (s *appends) storeCall(ctx context.Context, p keyspace.Partition, appends []*pendingAppend) {
	err := s.storeRequests(ctx, p, appends)
	var refused redis.Error
	switch {
	case err == nil:
	case len(appends) > 1 && errors.As(err, &refused) && !call.IsUnavailable(err) && !call.IsOOM(err):
		// One append that Redis refuses must not fail the others.
		for _, a := range appends {
			a.err = s.storeRequests(ctx, p, []*pendingAppend{a})
		}
	default:
		for _, a := range appends {
			a.err = err
		}
	}
}

// storeRequests makes one script call for appends of one group. It waits for the group's lock, and
// repeats the call while Redis does not answer. It sets the error of each append, or returns an
// error when the call failed as a whole.
func (s *appends) storeRequests(ctx context.Context, p keyspace.Partition, appends []*pendingAppend) error {
	requests := make([]ledger.Request, len(appends))
	for i, a := range appends {
		requests[i] = ledger.Request{ID: a.firstRequest(), Jobs: a.newJobs}
	}
	lock, err := s.pieces.groupLocks.lock(ctx, appends[0].group)
	if err != nil {
		return err
	}
	defer s.pieces.groupLocks.unlock(lock)
	return retryUnavailable(ctx, func(ctx context.Context) error {
		results, err := ledger.AppendMany(ctx, s.appender, p, appends[0].group, messages.MaxTotal,
			lock.nextOrdinal, requests)
		if err != nil {
			return err
		}
		for i, a := range appends {
			if a.err = results[i].Err; a.err == nil && !results[i].Duplicate {
				lock.nextOrdinal = results[i].First + results[i].N
			}
		}
		return nil
	})
}

const (
	// tenantCacheMaxAge is short because groups are deleted, and another tenant may then use the
	// same group id.
	tenantCacheMaxAge  = time.Second
	tenantCacheMaxSize = 10_000
)

// tenantCache remembers the tenants of groups that were asked for recently, because a group often
// gets many appends in a short time. An entry may be out of date: a caller that finds no group in
// that tenant's partition must ask Redis.
type tenantCache struct {
	mu      sync.Mutex
	byGroup map[string]string // group id to tenant id
	since   time.Time         // when byGroup was last emptied
}

// get returns the tenant of a group, if it is known. It first empties a cache that is too old or
// full.
func (o *tenantCache) get(group string) (tenant string, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.since) > tenantCacheMaxAge || len(o.byGroup) >= tenantCacheMaxSize {
		o.byGroup, o.since = make(map[string]string), time.Now()
	}
	tenant, known = o.byGroup[group]
	return tenant, known
}

func (o *tenantCache) put(group, tenant string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byGroup != nil {
		o.byGroup[group] = tenant
	}
}
