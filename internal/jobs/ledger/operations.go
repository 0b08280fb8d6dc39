package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	enlist = script("operations/enlist", "operations")
	plan   = script("operations/plan", "operations")
	count  = script("operations/count", "operations")
	direct = script("operations/direct", "operations")
)

// Operation is an operation as Redis describes it.
type Operation struct {
	api.Operation
	Cursor string // where the next page begins; "": at the beginning
	Seq    string // the number of pages and moves
	Page   *Page  // what is planned and not counted yet; nil: nothing
	Last   bool   // no page comes after it
	Err    error  // it can't be read: the other fields mean nothing
}

// Page is what an operation does next, in one partition. Skips has what matches the filter, and need
// not or can't be changed.
type Page struct {
	Partition int    `json:"partition"`
	Items     []Item `json:"items,omitempty"`
	Skips     Skips  `json:"skips,omitempty"`
}

// Item is a group to change, with Jobs some failed jobs of a group, or a dead letter to delete.
type Item struct {
	ID   string  `json:"id"`
	Jobs []int64 `json:"jobs,omitempty"`
}

// Skips has how many groups or dead letters were skipped, by reason.
type Skips map[string]*Skip

// Skip is how many were skipped for one reason, with some of their ids.
type Skip struct {
	N        int64    `json:"n"`
	Examples []string `json:"examples"`
}

const maxExamples = 5

// Add adds n that were skipped, one of which is named id.
func (s Skips) Add(reason, id string, n int64) {
	of := s[reason]
	if of == nil {
		of = &Skip{}
		s[reason] = of
	}
	if of.N += n; len(of.Examples) < maxExamples {
		of.Examples = append(of.Examples, id)
	}
}

// Sum returns how many were skipped for any reason.
func (s Skips) Sum() (n int64) {
	for _, of := range s {
		n += of.N
	}
	return n
}

// N returns how many groups or dead letters an item stands for.
func (i Item) N() int64 { return int64(max(1, len(i.Jobs))) }

// Sum returns how many groups or dead letters of the page match the filter.
func (p *Page) Sum() int64 {
	n := p.Skips.Sum()
	for _, i := range p.Items {
		n += i.N()
	}
	return n
}

// StartOperation stores an operation with the fields ID, Do, Filter, DryRun, Tenant, CreatedBy and
// Total of o. Twice: the second call changes nothing. Errors: api.ErrConflict if too many have not
// ended.
func StartOperation(ctx context.Context, c redis.Cmdable, space keyspace.Space, o api.Operation) error {
	filter, err := json.Marshal(o.Filter)
	if err != nil {
		return fmt.Errorf("encode the filter of an operation: %w", err)
	}
	own := api.MaxOpenOperations
	if o.Tenant != "" {
		own = api.MaxTenantOperations
	}
	return done(run(ctx, c, enlist, space.Partition(0), o.ID, o.Tenant, api.MaxOpenOperations, own,
		opDo, o.Do, opFilter, filter, opDryRun, flag(o.DryRun), opBy, o.CreatedBy, opTotal, o.Total), "OK")
}

// DirectOperation pauses, resumes or cancels an operation. A page that is stored will be done and
// counted all the same. Twice: the second call changes nothing. Errors: api.ErrNotFound;
// api.ErrConflict if it has ended or is being cancelled.
func DirectOperation(ctx context.Context, c redis.Cmdable, space keyspace.Space, id string, do api.OperationCommand) error {
	return done(run(ctx, c, direct, space.Partition(0), id, string(do)), "OK")
}

// FailOperation ends an operation that can't be read; one that has ended keeps its state. Twice: the
// second call changes nothing.
func FailOperation(ctx context.Context, c redis.Cmdable, space keyspace.Space, id, reason string) error {
	return done(run(ctx, c, direct, space.Partition(0), id, "fail", reason), "OK")
}

// ErrStale says that an operation is not as its carrier has read it.
var ErrStale = errors.New("the operation has changed meanwhile")

// PlanOperation stores the page that an operation does next, nil: none, and the cursor behind it.
// examined is how many groups or dead letters were compared with the filter; last says that none is
// left. fence is that of the leader of partition 0. Twice: the second call is stale. Errors: ErrFenced,
// ErrStale.
func PlanOperation(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, fence int64, o *Operation,
	page *Page, cursor string, examined int, last bool,
) error {
	text, planned := []byte(nil), int64(0)
	if page != nil {
		var err error
		if text, err = json.Marshal(page); err != nil {
			return fmt.Errorf("encode a page of operation %s: %w", o.ID, err)
		}
		planned = page.Sum()
	}
	return unlessStale(run(ctx, c, plan, space.Partition(0),
		o.ID, fence, o.Seq, cursor, examined, planned, text, flag(last)))
}

// CountOperation counts what was done with the page of an operation, and removes it. Twice and errors:
// as PlanOperation.
func CountOperation(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, fence int64, o *Operation, changed int64, skips Skips,
) error {
	args := []any{o.ID, fence, o.Seq, changed}
	for _, reason := range slices.Sorted(maps.Keys(skips)) {
		args = append(args, reason, skips[reason].N, strings.Join(skips[reason].Examples, " "))
	}
	return unlessStale(run(ctx, c, count, space.Partition(0), args...))
}

func unlessStale(r *call.Reply) error {
	if r.Code("OK", "STALE") == "STALE" {
		return ErrStale
	}
	return r.Err()
}

// RetryMore lets failed jobs of an ended group run again, as Reopen does, or adds them to the round
// that an earlier call of the same operation has opened. page is the number of the page that has
// these jobs. Twice: the second call changes nothing. Errors: as Reopen; ErrMoving while Requeue moves
// jobs of an earlier page.
func RetryMore(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, operation, page string, choice RetryChoice,
) error {
	_, err := reopenFor(ctx, c, p, group, operation+"/"+page, choice, operation+"/")
	return err
}

// OpenedBy says whether an operation has opened a group's round with RetryMore.
func OpenedBy(operation string, f *GroupFacts) bool {
	return strings.HasPrefix(f.Reopened, operation+"/")
}

// OpenOperations returns the ids of the operations that have not ended, the oldest first.
func OpenOperations(ctx context.Context, c redis.Cmdable, space keyspace.Space) ([]string, error) {
	ids, err := c.ZRange(ctx, space.Partition(0).OpenOperations(), 0, api.MaxOpenOperations).Result()
	if err != nil {
		return nil, fmt.Errorf("list operations: %w", err)
	}
	return ids, nil
}

// AllOperations returns the ids of all operations, the newest first.
func AllOperations(ctx context.Context, c redis.Cmdable, space keyspace.Space) ([]string, error) {
	ids, err := c.ZRevRange(ctx, space.Partition(0).Operations(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list operations: %w", err)
	}
	return ids, nil
}

// ReadOperations reads operations in the order of ids, in one round trip. It leaves out those that do
// not exist.
func ReadOperations(ctx context.Context, c redis.Cmdable, space keyspace.Space, ids ...string) ([]Operation, error) {
	p := space.Partition(0)
	// Each reply has the error of the pipeline or its own.
	reads, err := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) *redis.MapStringStringCmd {
		return pipe.HGetAll(ctx, p.Operation(id))
	})
	if call.IsUnavailable(err) {
		return nil, fmt.Errorf("read operations: %w", err)
	}
	all := make([]Operation, 0, len(ids))
	for i, read := range reads {
		fields, err := read.Result()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, err
		case err != nil:
			all = append(all, broken(ids[i], err))
		case len(fields) > 0:
			all = append(all, newOperation(ids[i], fields))
		}
	}
	return all, nil
}

// broken returns an operation that can't be read.
func broken(id string, err error) Operation {
	return Operation{Err: err, Operation: api.Operation{
		ID: id, State: api.OperationFailed, Error: "its data can't be read: " + err.Error(),
	}}
}

// newOperation parses the hash of an operation.
func newOperation(id string, f map[string]string) Operation {
	var bad error
	reasons := int64(0)
	number := func(field string) int64 {
		if f[field] == "" {
			return 0
		}
		n, err := strconv.ParseInt(f[field], 10, 64)
		if err != nil || n < 0 {
			bad = fmt.Errorf("its field %s is no count", field)
		}
		return n
	}
	o := Operation{Cursor: f[opCursor], Seq: f[opSeq], Last: f[opLast] == "1", Operation: api.Operation{
		ID: id, Do: f[opDo], DryRun: f[opDryRun] == "1", State: api.OperationState(f[opState]), Tenant: f[opTenant],
		CreatedBy: f[opBy], Error: f[opError], CreatedAt: instant(f[opCreated]).UTC(), Total: number(opTotal),
		Matched: number(opMatched), Changed: number(opChanged), Skipped: number(opSkipped), Examined: number(opExamined),
	}}
	_ = number(opSeq)
	for field := range f {
		if reason, ok := strings.CutPrefix(field, opSkippedFor); ok {
			n := number(field)
			reasons += n
			o.Reasons = append(o.Reasons, api.OperationSkip{
				Reason: reason, Count: n, Examples: strings.Fields(f[opExamples+reason]),
			})
		}
	}
	slices.SortFunc(o.Reasons, func(a, b api.OperationSkip) int { return strings.Compare(a.Reason, b.Reason) })
	if at := instant(f[opEnded]).UTC(); !at.IsZero() {
		o.EndedAt = &at
	}
	states := []api.OperationState{api.OperationRunning, api.OperationPaused, api.OperationCancelling,
		api.OperationCompleted, api.OperationCancelled, api.OperationFailed}
	switch err := json.Unmarshal([]byte(f[opFilter]), &o.Filter); {
	case err != nil:
		bad = errors.New("its filter can't be read")
	case !slices.Contains(api.OperationKinds, o.Do):
		bad = errors.New("it does not say what it does")
	case o.CreatedAt.IsZero() || !slices.Contains(states, o.State):
		bad = errors.New("its state or its time can't be read")
	case o.Matched != o.Changed+o.Skipped || o.Skipped != reasons:
		bad = errors.New("its counts disagree")
	}
	if text, ok := f[opPage]; ok && (json.Unmarshal([]byte(text), &o.Page) != nil || o.Page == nil) {
		bad = errors.New("its page can't be read")
	}
	if bad != nil {
		damaged := broken(id, bad)
		damaged.CreatedAt, damaged.EndedAt, damaged.Tenant = o.CreatedAt, o.EndedAt, o.Tenant
		return damaged
	}
	switch {
	case o.State == api.OperationCompleted:
		o.Progress = 1
	case o.Total > 0:
		o.Progress = min(1, float64(o.Examined)/float64(o.Total))
	}
	return o
}

// ForgetOperations deletes the oldest operations that have ended, if they ended before a time or there
// are more than most. It looks at the oldest ones.
func ForgetOperations(ctx context.Context, c redis.Cmdable, space keyspace.Space, before time.Time, most int64) error {
	p := space.Partition(0)
	n, err := c.ZCard(ctx, p.Operations()).Result()
	if err != nil || n == 0 {
		return err
	}
	ids, err := c.ZRange(ctx, p.Operations(), 0, 2*api.MaxOpenOperations).Result()
	if err != nil {
		return fmt.Errorf("list operations: %w", err)
	}
	all, err := ReadOperations(ctx, c, space, ids...)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, o := range all {
		old := o.EndedAt != nil && o.EndedAt.Before(before)
		known[o.ID] = !(o.State.Ended() && (n > most || old))
		if !known[o.ID] {
			n--
		}
	}
	for _, id := range ids {
		if known[id] {
			continue
		}
		if err := c.Unlink(ctx, p.Operation(id)).Err(); err != nil {
			return fmt.Errorf("delete operation %s: %w", id, err)
		}
		if err := c.ZRem(ctx, p.Operations(), id).Err(); err != nil {
			return fmt.Errorf("delete operation %s: %w", id, err)
		}
	}
	return nil
}

// CountCandidates returns how many groups, or dead letters, an operation has to compare with its
// filter. tenant is the one whose groups are listed, "": all.
func CountCandidates(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, tenant string, letters bool,
) (n int64, err error) {
	counts, err := pipelined(ctx, c, PartitionsOf(space, tenant), func(pipe redis.Pipeliner, p keyspace.Partition) *redis.IntCmd {
		switch {
		case letters:
			return pipe.XLen(ctx, p.DeadLetters())
		case tenant != "":
			return pipe.ZCard(ctx, p.GroupsOf(tenant))
		}
		return pipe.ZCard(ctx, p.Groups())
	})
	for _, one := range counts {
		n += one.Val()
	}
	if err != nil {
		return 0, fmt.Errorf("count what an operation looks at: %w", err)
	}
	return n, nil
}

// HaveFailedWith returns whether each of these groups of a partition has a failed job with an error
// code. It takes a group that can't be read for one without.
func HaveFailedWith(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids []string, code string,
) ([]bool, error) {
	reads, err := pipelined(ctx, c, ids, func(pipe redis.Pipeliner, id string) *redis.StringCmd {
		return pipe.HGet(ctx, p.Codes(id), code)
	})
	if call.IsUnavailable(err) {
		return nil, fmt.Errorf("read failures by code: %w", err)
	}
	have := make([]bool, len(ids))
	for i, read := range reads {
		have[i] = integer(read.Val()) > 0
	}
	return have, ctx.Err()
}

// PartitionsOf returns the partitions with data of a tenant, "": of all tenants.
func PartitionsOf(space keyspace.Space, tenant string) []keyspace.Partition {
	if tenant == "" {
		return space.All()
	}
	return []keyspace.Partition{space.OfTenant(tenant)}
}

// Unsettled returns how many groups of a partition wait for the watcher, which moves the jobs of
// reopened ones.
func Unsettled(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (int64, error) {
	return c.SCard(ctx, p.Dirty()).Result()
}

// DeleteDeadLetters deletes dead letters. Twice: the second call finds none of them.
func DeleteDeadLetters(ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids ...string) error {
	if err := c.XDel(ctx, p.DeadLetters(), ids...).Err(); err != nil {
		return fmt.Errorf("delete dead letters of partition %d: %w", p.Index(), err)
	}
	return nil
}
