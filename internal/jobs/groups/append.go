package groups

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Append adds jobs to a group. A repeated call with the same request id, as long as that is
// remembered, adds only what is missing, and succeeds. If Append leaves out jobs because their keys
// are taken, it adds the others and returns an *api.KeysTakenError; so does the repeated call.
// While too many jobs wait, or Redis's memory is full, Append returns an *api.BackpressureError,
// for a repeated call too.
func (s *Store) Append(ctx context.Context, group string, jobs []messages.Job, request string, o Origin) (err error) {
	defer func() { s.countRejected(err, len(jobs), o) }()
	a := &pendingAppend{
		group:         group,
		jobs:          jobs,
		requestPrefix: "a#" + group + "#" + request + "#",
		origin:        o,
	}
	if err := s.appendToGroup(ctx, group, []*pendingAppend{a}); err != nil {
		return err
	}
	return a.result()
}

// EntryJobs holds the jobs of one entry of an ingest stream.
type EntryJobs struct {
	Stream  string // name of a further stream (keyspace.IngestOf); "" for the ingest stream
	Entry   string // id of the entry
	Message string // id that the producer gave the message; "" when it gave none
	Jobs    []messages.Job
	Origin  Origin
}

// AppendEntries adds the jobs of entries of an ingest stream to one group; small entries share
// script calls. It returns the error of each entry, nil for success. An entry or message that is
// remembered, because it was added before, adds nothing, and gets nil or its *api.KeysTakenError
// again. Backpressure is as for Append.
func (s *Store) AppendEntries(ctx context.Context, group string, entries []EntryJobs) []error {
	all := make([]*pendingAppend, len(entries))
	for i, e := range entries {
		all[i] = &pendingAppend{group: group, jobs: e.Jobs, requestPrefix: e.requestPrefix(), origin: e.Origin}
	}
	err := s.appendToGroup(ctx, group, all)
	errs := make([]error, len(all))
	for i, a := range all {
		if errs[i] = err; err == nil {
			errs[i] = a.result()
		}
	}
	return errs
}

// requestPrefix returns the prefix of the request ids of an entry's pieces: by the producer's
// message id, or else by the entry's id. A prefix of HTTP requests begins otherwise, because their
// clients choose ids, too. Ids of further ingest streams contain the stream's name, so that no
// producer can make messages of another stream look repeated; they are remembered as long as
// message ids.
func (e EntryJobs) requestPrefix() string {
	switch {
	case e.Stream != "" && e.Message != "":
		return "i#" + e.Stream + "#m#" + e.Message + "#"
	case e.Stream != "":
		return "i#" + e.Stream + "#e#" + e.Entry + "#"
	case e.Message != "":
		return "m#" + e.Message + "#"
	}
	return ledger.EntryRequest(e.Entry) + "#"
}

// pendingAppend holds jobs that are to be added to a group.
type pendingAppend struct {
	group, tenant string
	jobs          []messages.Job
	requestPrefix string // the request ids of the pieces begin with it
	origin        Origin

	newJobs []ledger.NewJob // the jobs with their trace contexts
	err     error           // why it was refused, or is not known to be stored
	skipped []int           // jobs that were left out because their keys are taken
}

func (a *pendingAppend) result() error {
	if a.err == nil && len(a.skipped) > 0 {
		return &api.KeysTakenError{Jobs: a.skipped}
	}
	return a.err
}

func (a *pendingAppend) fail(err error) { a.err = err }

func (a *pendingAppend) bytes() int { return payloadBytes(a.jobs) }

func payloadBytes(jobs []messages.Job) (n int) {
	for i := range jobs {
		n += len(jobs[i].Payload)
	}
	return n
}

// fitsOnePiece reports whether the append has jobs, and one call of the script append can store all
// of them.
func (a *pendingAppend) fitsOnePiece() bool {
	return len(a.jobs) > 0 && len(a.jobs) <= ledger.MaxAppend && a.bytes() <= ledger.MaxAppendBytes
}

// firstRequest returns the request id of the first piece.
func (a *pendingAppend) firstRequest() string { return a.requestPrefix + "0" }

// appendToGroup stores appends to one group and sets the error of each. It returns an error only
// when ctx ends or a batch panics. The caller must then not use the appends any more: they may
// still be stored.
func (s *Store) appendToGroup(ctx context.Context, group string, all []*pendingAppend) error {
	left := make([]*pendingAppend, 0, len(all))
	for _, a := range all {
		if a.err = apiError(s.backpressure.Check(ctx, len(a.jobs))); a.err == nil {
			left = append(left, a)
		}
	}
	who, err := caller(ctx)
	if err != nil {
		setErrors(left, err)
		return nil
	}
	if tenant, _, known := s.owners.Get(group); known && who.Owns(tenant) {
		if err := s.appendToPartition(ctx, s.space.OfTenant(tenant), tenant, left); err != nil {
			return apiError(err)
		}
		left = slices.DeleteFunc(left, func(a *pendingAppend) bool { return !errors.Is(a.err, api.ErrNotFound) })
	}
	if len(left) == 0 {
		return nil
	}
	p, tenant, err := s.findGroup(ctx, group)
	if err != nil {
		setErrors(left, err)
		return nil
	}
	s.owners.Put(group, tenant)
	return apiError(s.appendToPartition(ctx, p, tenant, left))
}

// failing is a request that gets its own error.
type failing interface{ fail(err error) }

func setErrors[T failing](all []T, err error) {
	for _, one := range all {
		one.fail(err)
	}
}

// appendToPartition stores appends to one group in the partition of its tenant and sets the error
// of each: small appends together, then the others one after the other. It returns an error under
// the same conditions as appendToGroup.
func (s *Store) appendToPartition(
	ctx context.Context, p keyspace.Partition, tenant string, all []*pendingAppend,
) error {
	small := make([]*pendingAppend, 0, len(all))
	for _, a := range all {
		if a.tenant = tenant; a.fitsOnePiece() {
			small = append(small, a)
		}
	}
	if len(small) > 0 {
		if err := s.appendInBatch(ctx, p, small); err != nil {
			return err
		}
	}
	for _, a := range all {
		if !a.fitsOnePiece() {
			a.err = s.appendPieces(ctx, p, a)
		}
		a.err = apiError(a.err)
	}
	return nil
}

func (s *Store) appendPieces(ctx context.Context, p keyspace.Partition, a *pendingAppend) error {
	pieces := s.splitPieces(ctx, a.tenant, a.group, a.jobs, a.requestPrefix, a.origin)
	requests := make([]string, len(pieces))
	for i := range pieces {
		requests[i] = pieces[i].Request
	}
	return retryLost(ctx, func(ctx context.Context) error {
		var err error
		if _, a.skipped, err = s.storePieces(ctx, p, pieces); err != nil {
			return err
		}
		return s.awaitReplicas(ctx, p, requestsStored(p, requests...))
	})
}

// The next functions store small appends: those that arrive for a partition while a batch runs are
// stored together, those for one group in one script call if it can take them. Each keeps its own
// request id, and is accepted or refused on its own.

// appendInBatch stores small appends in one batch with those of concurrent calls, and sets the
// error of each. With WaitReplicas it waits until the replicas have those that were accepted. For
// an HTTP request it makes the jobs' trace contexts itself, because the batch runs with the context
// of another caller. For a message of a stream (Origin.Published), storeAppends makes them in the
// batch. It returns an error under the same conditions as appendToGroup.
func (s *Store) appendInBatch(ctx context.Context, p keyspace.Partition, all []*pendingAppend) error {
	for _, a := range all {
		if !a.origin.Published {
			a.newJobs = s.newJobs(ctx, a.tenant, a.group, a.jobs, a.origin)
		}
	}
	store := func(ctx context.Context) error {
		return s.batchers[p.Index()].Do(ctx, func(ctx context.Context, all []*pendingAppend) {
			s.storeAppends(ctx, p, all)
		}, all...)
	}
	if s.cfg.WaitReplicas == 0 {
		return store(ctx) // without retryLost, because thousands of goroutines may wait here: their stacks stay small
	}
	var accepted []*pendingAppend
	var ended error
	err := retryLost(ctx, func(ctx context.Context) error {
		accepted = nil
		if ended = store(ctx); ended != nil {
			return ended
		}
		var requests []string
		for _, a := range all {
			if a.err == nil {
				accepted, requests = append(accepted, a), append(requests, a.firstRequest())
			}
		}
		if len(accepted) == 0 {
			return nil
		}
		return s.awaitReplicas(ctx, p, requestsStored(p, requests...))
	})
	if err != nil {
		setErrors(accepted, err)
	}
	return ended
}

// storeAppends is the body of a batch: it stores the appends in few script calls (see splitCalls),
// and sets the error of each. The script calls run concurrently. Before them it makes the trace
// contexts that are missing: those of jobs that came as messages of a stream.
func (s *Store) storeAppends(ctx context.Context, p keyspace.Partition, all []*pendingAppend) {
	for _, a := range all {
		if a.newJobs == nil {
			a.newJobs = s.newJobs(ctx, a.tenant, a.group, a.jobs, a.origin)
		}
	}
	storeCalls(splitCalls(all), func(appends []*pendingAppend) error { return s.storeRequests(ctx, p, appends) })
}

// storeCalls makes script calls concurrently; store makes one.
func storeCalls[T failing](calls [][]T, store func([]T) error) {
	var others sync.WaitGroup
	for i, items := range calls {
		if i < len(calls)-1 {
			others.Go(func() { storeCall(items, store) })
		} else {
			storeCall(items, store)
		}
	}
	others.Wait()
}

// splitCalls divides appends among script calls. A call has appends of one group only, and at most
// as many jobs and bytes of payloads as the script accepts. all must not be empty.
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

// storeCall makes one script call, which stores items, and sets their errors if it fails as a whole.
// If Redis refuses a call with several items, and not because it is out of memory or unavailable,
// storeCall makes one call for each.
func storeCall[T failing](items []T, store func([]T) error) {
	err := store(items)
	var refused redis.Error
	switch {
	case err == nil:
	case len(items) > 1 && errors.As(err, &refused) && !call.IsUnavailable(err) && !call.IsOOM(err):
		// One item that Redis refuses must not fail the others.
		for i := range items {
			storeCall(items[i:i+1], store)
		}
	default:
		setErrors(items, err)
	}
}

// storeRequests makes one script call for appends of one group. It sets the error of each append,
// or returns an error when the call failed as a whole.
func (s *Store) storeRequests(ctx context.Context, p keyspace.Partition, appends []*pendingAppend) error {
	group, requests := appends[0].group, make([]ledger.Request, len(appends))
	for i, a := range appends {
		requests[i] = ledger.Request{ID: a.firstRequest(), Jobs: a.newJobs}
	}
	return s.appendInTurn(ctx, group, func(ctx context.Context, lock *groupLock) error {
		results, err := ledger.AppendMany(ctx, s.appender, p, group, messages.MaxTotal, lock.nextOrdinal, requests)
		if err != nil {
			return err
		}
		for i, a := range appends {
			if a.err = results[i].Err; a.err == nil {
				lock.learn(results[i].AppendReply)
			}
			a.skipped = results[i].Skipped
		}
		return nil
	})
}

// splitPieces divides jobs into pieces, each with at most as many jobs as one call of the script
// append can store, and with its own request id: the prefix request and the piece's number from 0.
// It also starts the jobs' traces, and so records spans.
func (s *Store) splitPieces(
	ctx context.Context, tenant, group string, jobs []messages.Job, request string, o Origin,
) []ledger.AppendArgs {
	if len(jobs) == 0 {
		return nil
	}
	var pieces []ledger.AppendArgs
	for fresh := s.newJobs(ctx, tenant, group, jobs, o); len(fresh) > 0; {
		n, bytes := 0, 0
		for n < len(fresh) && n < ledger.MaxAppend && (n == 0 || bytes+len(fresh[n].Payload) <= ledger.MaxAppendBytes) {
			bytes += len(fresh[n].Payload)
			n++
		}
		pieces = append(pieces, ledger.AppendArgs{
			Group:   group,
			Limit:   messages.MaxTotal,
			Jobs:    fresh[:n],
			Request: request + strconv.Itoa(len(pieces)),
		})
		fresh = fresh[n:]
	}
	return pieces
}

// storePieces stores the pieces in order. now is the group's status before the first one, if that
// creates the group. skipped are the jobs that were left out because their keys are taken, by their
// index among all jobs of the pieces.
func (s *Store) storePieces(
	ctx context.Context, p keyspace.Partition, pieces []ledger.AppendArgs,
) (now api.Status, skipped []int, err error) {
	first := 0 // index of the piece's first job among all jobs
	for i, a := range pieces {
		var r ledger.AppendResult
		err := s.appendInTurn(ctx, a.Group, func(ctx context.Context, lock *groupLock) error {
			a.Next = lock.nextOrdinal
			results, err := ledger.Submit(ctx, s.appender, p, []ledger.AppendArgs{a})
			if err != nil {
				return err
			}
			if r = results[0]; r.Err == nil {
				lock.learn(r.AppendReply)
			}
			return r.Err
		})
		if err != nil {
			return "", nil, err
		}
		if i == 0 {
			now = r.Status
		}
		for _, n := range r.Skipped {
			skipped = append(skipped, first+n)
		}
		first += len(a.Jobs)
	}
	return now, skipped, nil
}

// appendInTurn runs step with the lock of a group, and repeats it while Redis does not answer, for
// retryTime.
func (s *Store) appendInTurn(
	ctx context.Context, group string, step func(ctx context.Context, lock *groupLock) error,
) error {
	lock, err := s.groupLocks.lock(ctx, group)
	if err != nil {
		return err
	}
	defer s.groupLocks.unlock(lock)
	return retryUnavailable(ctx, func(ctx context.Context) error { return step(ctx, lock) })
}

// learn notes the group's next ordinal.
func (l *groupLock) learn(r ledger.AppendReply) {
	if !r.Duplicate {
		l.nextOrdinal = r.First + r.N
	}
}
