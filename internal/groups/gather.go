package groups

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// Small appends to a partition that come at the same time are stored together, a script a group. Each keeps its own
// request id and is accepted or refused by itself.

// appending is an append that shares a call with others.
type appending struct {
	group, tenant string
	jobs          []messages.Job
	origin        Origin
	request       lua.Request // its jobs are nil until they have their places in traces
	err           error
}

// small says whether a script can take all jobs.
func small(jobs []messages.Job) bool {
	return len(jobs) > 0 && len(jobs) <= lua.MaxAppend && weight(jobs) <= lua.MaxAppendBytes
}

func weight(jobs []messages.Job) (bytes int) {
	for i := range jobs {
		bytes += len(jobs[i].Payload)
	}
	return bytes
}

// addSmall stores an append together with others. What it does for a message of the stream is little, since many wait here at once;
// who carries the call out does the rest.
func (s *Store) addSmall(ctx context.Context, p keyspace.Partition, one *appending, remembered string) error {
	if !one.origin.Published {
		one.request.Jobs = s.trace(ctx, one.tenant, one.group, one.jobs, one.origin)
	}
	return outward(complete(ctx, func(ctx context.Context) error {
		err := s.gathers[p.Index()].join(ctx, one, func(ctx context.Context, all []*appending) { s.appendAll(ctx, p, all) })
		if err != nil {
			return err
		}
		if one.err != nil {
			return one.err
		}
		return s.durable(ctx, p, applied(remembered, one.request.ID))
	}))
}

// appendAll stores appends in as few calls as a script's bounds allow, all calls at once.
func (s *Store) appendAll(ctx context.Context, p keyspace.Partition, all []*appending) {
	for _, a := range all {
		if a.request.Jobs == nil {
			a.request.Jobs = s.trace(ctx, a.tenant, a.group, a.jobs, a.origin)
		}
	}
	calls := share(all)
	var others sync.WaitGroup
	for _, call := range calls[1:] {
		others.Go(func() { s.appendShared(ctx, p, call) })
	}
	s.appendShared(ctx, p, calls[0])
	others.Wait()
}

// share divides appends, which are not none, among calls: of one group each, and no more than a script can take.
func share(all []*appending) (calls [][]*appending) {
	type open struct{ call, jobs, bytes int }
	latest := make(map[string]open)
	for _, a := range all {
		o, known := latest[a.group]
		bytes := weight(a.jobs)
		o.jobs += len(a.jobs)
		o.bytes += bytes
		if !known || o.jobs > lua.MaxAppend || o.bytes > lua.MaxAppendBytes {
			o = open{len(calls), len(a.jobs), bytes}
			calls = append(calls, nil)
		}
		calls[o.call] = append(calls[o.call], a)
		latest[a.group] = o
	}
	return calls
}

// appendShared carries a call out and tells each append its fate.
func (s *Store) appendShared(ctx context.Context, p keyspace.Partition, call []*appending) {
	err := s.appendMany(ctx, p, call)
	var refused redis.Error
	switch {
	case err == nil:
	case len(call) > 1 && errors.As(err, &refused) && !redisx.IsUnavailable(err) && !redisx.IsOOM(err):
		for _, a := range call { // one that Redis can't take is not to be in the way of the others
			a.err = s.appendMany(ctx, p, []*appending{a})
		}
	default:
		for _, a := range call {
			a.err = err
		}
	}
}

// appendMany returns an error when the call failed as a whole, and otherwise sets those of the appends.
func (s *Store) appendMany(ctx context.Context, p keyspace.Partition, call []*appending) error {
	requests := make([]lua.Request, len(call))
	for i, a := range call {
		requests[i] = a.request
	}
	return insist(ctx, func(ctx context.Context) error {
		results, err := lua.AppendMany(ctx, s.appender, p, call[0].group, messages.MaxTotal, requests)
		if err != nil {
			return err
		}
		for i, a := range call {
			a.err = results[i].Err
		}
		return nil
	})
}

const (
	ownersAge = time.Second // since groups are forgotten, and their ids taken by others
	maxOwners = 10_000
)

// owners remembers whose the groups are that were asked for of late, since appends to one group come in numbers. What it knows may be out of
// date: whoever finds no group where it says must ask again.
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

// withOwner calls use with the partition and the tenant of a group, which it may remember. When use finds no group there, it is called
// again with what Redis says now.
func (s *Store) withOwner(ctx context.Context, group string, use func(p keyspace.Partition, tenant string) error) error {
	if tenant, known := s.owners.get(group); known {
		if err := use(s.space.OfTenant(tenant), tenant); !errors.Is(err, api.ErrNotFound) {
			return err
		}
	}
	p, tenant, err := s.locate(ctx, group)
	if err != nil {
		return err
	}
	s.owners.put(group, tenant)
	return use(p, tenant)
}
