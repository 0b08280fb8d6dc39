package groups

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Append adds jobs to a group. Repeated with the same request id, it adds nothing and succeeds.
func (s *Store) Append(ctx context.Context, group string, jobs []messages.Job, request string, o Origin) error {
	return s.appendToGroup(ctx, &pendingAppend{
		group:         group,
		jobs:          jobs,
		requestPrefix: "a#" + group + "#" + request + "#",
		origin:        o,
	})
}

// AppendEntry adds the jobs of an entry of the ingest stream; entry is its id, message the
// producer's own id for it, "" when it has none.
func (s *Store) AppendEntry(
	ctx context.Context, group string, jobs []messages.Job, entry, message string, o Origin,
) error {
	request := "m#" + message + "#" // apart from those of HTTP, whose ids producers choose as well
	if message == "" {
		request = ledger.EntryRequest(entry) + "#"
	}
	return s.appendToGroup(ctx, &pendingAppend{
		group:         group,
		jobs:          jobs,
		requestPrefix: request,
		byEntry:       message == "",
		origin:        o,
	})
}

// pendingAppend is jobs that are to be added to a group.
type pendingAppend struct {
	group, tenant string
	jobs          []messages.Job
	requestPrefix string // what the ids of its pieces begin with
	byEntry       bool   // it is named after an entry of the ingest stream
	origin        Origin

	newJobs []ledger.NewJob // the jobs, once they have their places in traces
	err     error           // of a call that was shared
}

// requestsKey is the key of p that knows which requests were applied.
func (a *pendingAppend) requestsKey(p keyspace.Partition) string {
	if a.byEntry {
		return p.Entries()
	}
	return p.Messages()
}

func (a *pendingAppend) bytes() (n int) {
	for i := range a.jobs {
		n += len(a.jobs[i].Payload)
	}
	return n
}

// fitsOnePiece says whether one piece holds all jobs.
func (a *pendingAppend) fitsOnePiece() bool {
	return len(a.jobs) > 0 && len(a.jobs) <= ledger.MaxAppend && a.bytes() <= ledger.MaxAppendBytes
}

// firstRequest is the id of the first piece.
func (a *pendingAppend) firstRequest() string { return a.requestPrefix + "0" }

func (s *Store) appendToGroup(ctx context.Context, a *pendingAppend) error {
	if err := s.backpressure.Check(ctx, len(a.jobs)); err != nil {
		return apiError(err)
	}
	tenant, known := s.tenants.get(a.group)
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
	s.tenants.put(a.group, tenant)
	a.tenant = tenant
	return s.appendToPartition(ctx, p, a)
}

func (s *Store) appendToPartition(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	switch {
	case !a.fitsOnePiece():
		return apiError(s.appendPieces(ctx, p, a))
	case s.cfg.WaitReplicas == 0:
		return apiError(s.appendInBatch(ctx, p, a)) // as many wait here at once, their stacks are to be small
	}
	return apiError(retryLost(ctx, func(ctx context.Context) error {
		if err := s.appendInBatch(ctx, p, a); err != nil {
			return err
		}
		return s.awaitDurable(ctx, p, requestsStored(a.requestsKey(p), a.firstRequest()))
	}))
}

func (s *Store) appendPieces(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	pieces := s.splitPieces(ctx, a.tenant, a.group, a.jobs, a.requestPrefix, a.origin)
	requests := make([]string, len(pieces))
	for i := range pieces {
		requests[i] = pieces[i].Request
	}
	return retryLost(ctx, func(ctx context.Context) error {
		if err := s.storePieces(ctx, p, pieces); err != nil {
			return err
		}
		return s.awaitDurable(ctx, p, requestsStored(a.requestsKey(p), requests...))
	})
}

// Small appends to a partition that come at the same time are stored together, a script a group.
// Each keeps its own request id and is accepted or refused by itself.

// appendInBatch stores a together with others. Who carries the call out also gives messages of the
// stream their places in traces.
func (s *Store) appendInBatch(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	if !a.origin.Published {
		a.newJobs = s.traceJobs(ctx, a.tenant, a.group, a.jobs, a.origin)
	}
	err := s.appendBatchers[p.Index()].do(ctx, a, func(ctx context.Context, all []*pendingAppend) {
		s.storeAppends(ctx, p, all)
	})
	if err != nil {
		return err
	}
	return a.err
}

// storeAppends stores appends in as few calls as a script's bounds allow, all calls at once.
func (s *Store) storeAppends(ctx context.Context, p keyspace.Partition, all []*pendingAppend) {
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

// splitCalls divides appends, which are not none, among calls: of one group each, and no more than
// a script can take.
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

// storeCall carries a call out and tells each append its fate.
func (s *Store) storeCall(ctx context.Context, p keyspace.Partition, appends []*pendingAppend) {
	err := s.storeRequests(ctx, p, appends)
	var refused redis.Error
	switch {
	case err == nil:
	case len(appends) > 1 && errors.As(err, &refused) && !call.IsUnavailable(err) && !call.IsOOM(err):
		for _, a := range appends { // one that Redis can't take is not to be in the way of the others
			a.err = s.storeRequests(ctx, p, []*pendingAppend{a})
		}
	default:
		for _, a := range appends {
			a.err = err
		}
	}
}

// storeRequests returns an error when the call failed as a whole, and otherwise sets those
// of the appends.
func (s *Store) storeRequests(ctx context.Context, p keyspace.Partition, appends []*pendingAppend) error {
	requests := make([]ledger.Request, len(appends))
	for i, a := range appends {
		requests[i] = ledger.Request{ID: a.firstRequest(), Jobs: a.newJobs}
	}
	lock, err := s.groupLocks.lock(ctx, appends[0].group)
	if err != nil {
		return err
	}
	defer s.groupLocks.unlock(lock)
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
	tenantCacheMaxAge  = time.Second // since groups are forgotten, and their ids taken by others
	tenantCacheMaxSize = 10_000
)

// tenantCache remembers whose the groups are that were asked for of late, since appends to one
// group come in numbers. What it knows may be out of date: whoever finds no group where it
// says must ask again.
type tenantCache struct {
	mu      sync.Mutex
	byGroup map[string]string // by group
	since   time.Time
}

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
