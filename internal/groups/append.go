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
	return s.add(ctx, &appending{group: group, jobs: jobs, request: "a#" + group + "#" + request + "#", origin: o})
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
	return s.add(ctx, &appending{group: group, jobs: jobs, request: request, entry: message == "", origin: o})
}

// appending is jobs that are to be added to a group.
type appending struct {
	group, tenant string
	jobs          []messages.Job
	request       string // what the ids of its pieces begin with
	entry         bool   // it is named after an entry of the ingest stream
	origin        Origin

	fresh []ledger.NewJob // the jobs, once they have their places in traces
	err   error           // of a call that was shared
}

// remembered is the key of p that knows which requests were applied.
func (a *appending) remembered(p keyspace.Partition) string {
	if a.entry {
		return p.Entries()
	}
	return p.Messages()
}

func (a *appending) bytes() (n int) {
	for i := range a.jobs {
		n += len(a.jobs[i].Payload)
	}
	return n
}

// small says whether one piece holds all jobs.
func (a *appending) small() bool {
	return len(a.jobs) > 0 && len(a.jobs) <= ledger.MaxAppend && a.bytes() <= ledger.MaxAppendBytes
}

// first is the id of the first piece.
func (a *appending) first() string { return a.request + "0" }

func (s *Store) add(ctx context.Context, a *appending) error {
	if err := s.backpressure.Check(ctx, len(a.jobs)); err != nil {
		return outward(err)
	}
	tenant, known := s.owners.get(a.group)
	if known {
		a.tenant = tenant
		if err := s.addTo(ctx, s.space.OfTenant(tenant), a); !errors.Is(err, api.ErrNotFound) {
			return err
		}
	}
	p, tenant, err := s.locate(ctx, a.group)
	if err != nil {
		return err
	}
	s.owners.put(a.group, tenant)
	a.tenant = tenant
	return s.addTo(ctx, p, a)
}

func (s *Store) addTo(ctx context.Context, p keyspace.Partition, a *appending) error {
	switch {
	case !a.small():
		return outward(s.addLarge(ctx, p, a))
	case s.cfg.WaitReplicas == 0:
		return outward(s.gather(ctx, p, a)) // as many wait here at once, their stacks are to be small
	}
	return outward(complete(ctx, func(ctx context.Context) error {
		if err := s.gather(ctx, p, a); err != nil {
			return err
		}
		return s.durable(ctx, p, applied(a.remembered(p), a.first()))
	}))
}

func (s *Store) addLarge(ctx context.Context, p keyspace.Partition, a *appending) error {
	pieces := s.cut(ctx, a.tenant, a.group, a.jobs, a.request, a.origin)
	requests := make([]string, len(pieces))
	for i := range pieces {
		requests[i] = pieces[i].Request
	}
	return complete(ctx, func(ctx context.Context) error {
		if err := s.store(ctx, p, pieces); err != nil {
			return err
		}
		return s.durable(ctx, p, applied(a.remembered(p), requests...))
	})
}

// Small appends to a partition that come at the same time are stored together, a script a group.
// Each keeps its own request id and is accepted or refused by itself.

// gather stores a together with others. Who carries the call out also gives messages of the stream
// their places in traces.
func (s *Store) gather(ctx context.Context, p keyspace.Partition, a *appending) error {
	if !a.origin.Published {
		a.fresh = s.trace(ctx, a.tenant, a.group, a.jobs, a.origin)
	}
	err := s.gathers[p.Index()].join(ctx, a, func(ctx context.Context, all []*appending) { s.appendAll(ctx, p, all) })
	if err != nil {
		return err
	}
	return a.err
}

// appendAll stores appends in as few calls as a script's bounds allow, all calls at once.
func (s *Store) appendAll(ctx context.Context, p keyspace.Partition, all []*appending) {
	for _, a := range all {
		if a.fresh == nil {
			a.fresh = s.trace(ctx, a.tenant, a.group, a.jobs, a.origin)
		}
	}
	calls := share(all)
	var others sync.WaitGroup
	for _, batch := range calls[1:] {
		others.Go(func() { s.appendShared(ctx, p, batch) })
	}
	s.appendShared(ctx, p, calls[0])
	others.Wait()
}

// share divides appends, which are not none, among calls: of one group each, and no more than a
// script can take.
func share(all []*appending) (calls [][]*appending) {
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

// appendShared carries a call out and tells each append its fate.
func (s *Store) appendShared(ctx context.Context, p keyspace.Partition, batch []*appending) {
	err := s.appendMany(ctx, p, batch)
	var refused redis.Error
	switch {
	case err == nil:
	case len(batch) > 1 && errors.As(err, &refused) && !call.IsUnavailable(err) && !call.IsOOM(err):
		for _, a := range batch { // one that Redis can't take is not to be in the way of the others
			a.err = s.appendMany(ctx, p, []*appending{a})
		}
	default:
		for _, a := range batch {
			a.err = err
		}
	}
}

// appendMany returns an error when the call failed as a whole, and otherwise sets those
// of the appends.
func (s *Store) appendMany(ctx context.Context, p keyspace.Partition, batch []*appending) error {
	requests := make([]ledger.Request, len(batch))
	for i, a := range batch {
		requests[i] = ledger.Request{ID: a.first(), Jobs: a.fresh}
	}
	lane, err := s.lanes.enter(ctx, batch[0].group)
	if err != nil {
		return err
	}
	defer s.lanes.leave(lane)
	return insist(ctx, func(ctx context.Context) error {
		results, err := ledger.AppendMany(ctx, s.appender, p, batch[0].group, messages.MaxTotal, lane.next, requests)
		if err != nil {
			return err
		}
		for i, a := range batch {
			if a.err = results[i].Err; a.err == nil && !results[i].Duplicate {
				lane.next = results[i].First + results[i].N
			}
		}
		return nil
	})
}

const (
	ownersAge = time.Second // since groups are forgotten, and their ids taken by others
	maxOwners = 10_000
)

// owners remembers whose the groups are that were asked for of late, since appends to one
// group come in numbers. What it knows may be out of date: whoever finds no group where it
// says must ask again.
type owners struct {
	mu     sync.Mutex
	tenant map[string]string // by group
	since  time.Time
}

func (o *owners) get(group string) (tenant string, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.since) > ownersAge || len(o.tenant) >= maxOwners {
		o.tenant, o.since = make(map[string]string), time.Now()
	}
	tenant, known = o.tenant[group]
	return tenant, known
}

func (o *owners) put(group, tenant string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.tenant != nil {
		o.tenant[group] = tenant
	}
}
