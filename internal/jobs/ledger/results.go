package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/reducer"
)

// resultChunks is how many chunks of results one read returns; a chunk can have several MB.
const resultChunks = 10

// maxJobs bounds the ordinals of jobs: the states of a group are one string, which in Redis has at
// most 512 MB.
const maxJobs = 512 << 20 / StateBytes

// Results calls yield with the result line of each reduced job of a group, in the order of
// reduction. It stops at the first error of yield and returns it.
func Results(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, yield func(line []byte) error,
) error {
	for from := int64(0); ; from += resultChunks {
		chunks, err := c.LRange(ctx, p.Results(group), from, from+resultChunks-1).Result()
		if err != nil {
			return fmt.Errorf("read results of group %s: %w", group, err)
		}
		for _, chunk := range chunks {
			for line := range strings.SplitSeq(chunk, "\n") {
				if err := yield([]byte(line)); err != nil {
					return err
				}
			}
		}
		if len(chunks) < resultChunks {
			return nil
		}
	}
}

// Life tells one life of a group from another. The zero Life is that of a group that does not exist.
type Life struct{ round, created, resultsExpired string }

// Ended reports whether the group, or its results, were deleted between l and now. A retry, which
// begins a new round, is no end.
func (l Life) Ended(now Life) bool {
	sameRound := l.round == now.round
	return now.created == "" || l.resultsExpired != now.resultsExpired ||
		sameRound && l.created != now.created || !sameRound && integer(now.round) < integer(l.round)
}

// ReadLife reads the present life of a group.
func ReadLife(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (Life, error) {
	read, err := c.HMGet(ctx, p.Group(group), groupRound, "at:created", groupResultsExpired).Result()
	if err != nil {
		return Life{}, fmt.Errorf("read group %s: %w", group, err)
	}
	f := values(read)
	return Life{f.str(0), f.str(1), f.str(2)}, nil
}

// FindResult returns the result line of a reduced job. It returns nil if the group has no such line,
// or with all false if it was not among the lines that were read: bound bytes, and a chunk more.
// Chunks are about in the order of ordinals, so it looks for the job's place by bisection, and then
// around it.
func FindResult(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, ordinal int64, bound int,
) (line []byte, all bool, err error) {
	prefix, read := `{"ordinal":`+strconv.FormatInt(ordinal, 10)+",", 0
	// look reads a chunk: it returns whether the line is in it, and whether the chunk begins behind it.
	look := func(i int64) (found, behind bool, err error) {
		chunk, err := c.LIndex(ctx, p.Results(group), i).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return false, false, fmt.Errorf("look for the result of job %s.%d: %w", group, ordinal, err)
		}
		read += len(chunk)
		for each := range strings.SplitSeq(chunk, "\n") {
			if strings.HasPrefix(each, prefix) {
				line = []byte(each)
				return true, false, nil
			}
		}
		first, _, _ := strings.Cut(strings.TrimPrefix(chunk, `{"ordinal":`), ",")
		return false, integer(first) > ordinal, nil
	}
	n, err := c.LLen(ctx, p.Results(group)).Result()
	if err != nil {
		return nil, false, fmt.Errorf("look for the result of job %s.%d: %w", group, ordinal, err)
	}
	seen := map[int64]bool{}
	from, to := int64(0), n // the first chunk that begins behind the job is in [from, to]
	for from < to && read < bound {
		mid := (from + to) / 2
		found, behind, err := look(mid)
		if found || err != nil {
			return line, true, err
		}
		if seen[mid] = true; behind {
			to = mid
		} else {
			from = mid + 1
		}
	}
	for d := int64(0); d <= n; d++ {
		for _, i := range []int64{from - 1 - d, from + d} {
			if i < 0 || i >= n || seen[i] {
				continue
			}
			if read >= bound {
				return nil, false, nil
			}
			if found, _, err := look(i); found || err != nil {
				return line, true, err
			}
		}
	}
	return nil, true, nil
}

// Failures calls yield once with the error record of each failed job of a group, in no order. It
// stops at the first error of yield and returns it, and fails at a record that it can't read.
func Failures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, yield func(JobError) error,
) error {
	var seen bitset // HSCAN may return a field more than once
	for record, err := range scan(func(cursor uint64) *redis.ScanCmd {
		return c.HScan(ctx, p.Failures(group), cursor, "", 100)
	}) {
		if err != nil {
			return fmt.Errorf("read failures of group %s: %w", group, err)
		}
		e, err := parseFailure(record[1])
		if err != nil {
			return fmt.Errorf("failures of group %s: %w", group, err)
		}
		if e.Ordinal < 0 || e.Ordinal >= maxJobs {
			return fmt.Errorf("failures of group %s: no job has the ordinal %d", group, e.Ordinal)
		}
		if !seen.add(e.Ordinal) {
			continue
		}
		if err := yield(e); err != nil {
			return err
		}
	}
	return nil
}

// SomeFailures returns the error records, without payloads, of up to `most` failed jobs of a group,
// in no order. Which jobs these are does not depend on their errors.
func SomeFailures(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, most int,
) ([]JobError, error) {
	var some []JobError
	err := Failures(ctx, c, p, group, func(e JobError) error {
		if len(some) == most {
			return errEnough
		}
		e.Payload, e.Job = "", nil // they may have 4 KiB
		some = append(some, e)
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return some, err
}

var errEnough = errors.New("enough records were read")

// FailureCodes returns how many jobs of a group have failed, by code.
func FailureCodes(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string,
) (map[string]int64, error) {
	codes, err := c.HGetAll(ctx, p.Codes(group)).Result()
	if err != nil {
		return nil, fmt.Errorf("read failures by code of group %s: %w", group, err)
	}
	return countsByCode(codes), nil
}

// countsByCode parses the hash codes:GROUP. It leaves out codes whose count is 0: their jobs were
// requeued.
func countsByCode(codes map[string]string) map[string]int64 {
	counts := map[string]int64{}
	for code, value := range codes {
		if n := integer(value); n > 0 {
			counts[code] = n
		}
	}
	return counts
}

// bitset is a set of ordinals, one bit for each: a group may have millions of jobs.
type bitset []uint64

// add adds an ordinal and returns false if the set had it.
func (b *bitset) add(ordinal int64) bool {
	word, bit := int(ordinal/64), uint64(1)<<(ordinal%64)
	if word >= len(*b) {
		*b = append(*b, make([]uint64, word+1-len(*b))...)
	}
	fresh := (*b)[word]&bit == 0
	(*b)[word] |= bit
	return fresh
}

// DeadLetters reads a partition's n newest dead letters that are older than the entry before and
// not older than the entry oldest; "" sets no bound.
func DeadLetters(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, before, oldest string, n int,
) ([]api.DeadLetter, error) {
	top := "+"
	if before != "" {
		top = "(" + before
	}
	entries, err := c.XRevRangeN(ctx, p.DeadLetters(), top, cmp.Or(oldest, "-"), int64(n)).Result()
	if err != nil {
		return nil, fmt.Errorf("read dead letters of partition %d: %w", p.Index(), err)
	}
	all := make([]api.DeadLetter, len(entries))
	for i, e := range entries {
		all[i] = deadLetter(e)
	}
	return all, nil
}

// deadLetter parses an entry of the stream dead-letters, as fail_job in lua/parts/endings.lua
// writes it. Other programs may write to the stream as well: a missing or invalid field is empty,
// but At is then the time in the entry's id. The result can always be encoded as JSON.
func deadLetter(e redis.XMessage) api.DeadLetter {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	const year9999 = 253402300799999 // the last time that JSON can express
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil || at < 0 || at > year9999 {
		id, _ := stream.ParseID(e.ID)
		at = int64(min(id.MS, year9999))
	}
	d := api.DeadLetter{
		EntryID:  e.ID,
		Job:      text("job"),
		Tenant:   text("tenant"),
		Group:    text("group"),
		Ordinal:  integer(text("ordinal")),
		Key:      text("key"),
		Type:     text("type"),
		Code:     text("code"),
		Error:    text("error"),
		Attempts: int(integer(text("attempts"))),
		At:       time.UnixMilli(at).UTC(),
	}
	if payload := text("payload"); json.Valid([]byte(payload)) {
		d.Payload = []byte(payload)
	}
	return d
}

// The functions of this file encode the aggregates that a group asks for into the field aggregate of
// the group's hash, and compile them from its value.

// EncodeAggregates returns the field's value for the aggregates that a group asks for; "" if it asks for
// none. It returns an error when the registry refuses an aggregate.
func EncodeAggregates(registry *reducer.Registry, asked []messages.Aggregate) (string, error) {
	if len(asked) == 0 {
		return "", nil
	}
	specs := make([]reducer.Spec, len(asked))
	for i, a := range asked {
		specs[i] = reducer.Spec{As: a.As, Op: a.Op, Field: a.Field, Over: a.Over}
	}
	if _, err := registry.Compile(specs); err != nil {
		return "", err
	}
	b, err := json.Marshal(asked)
	if err != nil {
		return "", fmt.Errorf("encode aggregates: %w", err)
	}
	return string(b), nil
}

// CountingAggregates returns the names of those aggregates in the field's value that simply count all results.
// It returns none if the value can't be decoded.
func CountingAggregates(encoded string) []string {
	specs, _ := decodeAggregates(encoded)
	var names []string
	for _, a := range specs {
		if a.Op == "count" && a.Field == "" && a.Over == "" {
			names = append(names, a.As)
		}
	}
	return names
}

// AggregatePlan compiles the aggregates in the field's value; the value "" has none. The plan says
// which reducers this process lacks.
func AggregatePlan(registry *reducer.Registry, encoded string) (*reducer.Plan, error) {
	specs, err := decodeAggregates(encoded)
	if err != nil {
		return nil, err
	}
	return registry.CompileStored(specs), nil
}

// AggregateOps returns the names of the reducers in the field's value, sorted.
func AggregateOps(encoded string) []string {
	specs, _ := decodeAggregates(encoded)
	ops := make([]string, len(specs))
	for i, a := range specs {
		ops[i] = a.Op
	}
	slices.Sort(ops)
	return slices.Compact(ops)
}

// MissingReducerError says that this process lacks reducers of a group.
type MissingReducerError struct {
	Ops     []string // of all aggregates of the group
	Missing []string // of them
}

func (e *MissingReducerError) Error() string {
	return "this process lacks the reducer " + strings.Join(e.Missing, ", ")
}

// WorkPlan compiles the aggregates in the field's value, so that results can be added. The error is
// a *MissingReducerError if this process lacks a reducer.
func WorkPlan(registry *reducer.Registry, encoded string) (*reducer.Plan, error) {
	plan, err := AggregatePlan(registry, encoded)
	if err == nil && len(plan.Missing()) > 0 {
		return nil, &MissingReducerError{Ops: AggregateOps(encoded), Missing: plan.Missing()}
	}
	return plan, err
}

// decodeAggregates returns the aggregates in the field's value; the value "" has none. If the value can't be
// decoded, it returns an error.
func decodeAggregates(encoded string) ([]reducer.Spec, error) {
	if encoded == "" {
		return nil, nil
	}
	var specs []reducer.Spec
	if err := json.Unmarshal([]byte(encoded), &specs); err != nil {
		return nil, fmt.Errorf("read aggregates: %w", err)
	}
	return specs, nil
}

var reduce = script("jobs/reduce", "signals", "states", "ranges", "tenants", "lifecycle")

// The Results constants name the fields of an entry of the stream results. An entry has results of
// jobs of one group.
const (
	ResultsGroup  = "g" // the group's id
	ResultsLines  = "l" // the result lines, divided by newlines
	ResultsTraces = "t" // for each sampled job a line "ordinal traceparent"
	ResultsPlain  = "p" // the group's tenant, if the group asks for no aggregates; otherwise ""
)

// ReduceArgs are results of one group, which are added to one partial aggregate.
type ReduceArgs struct {
	Group    string
	Partial  string   // number of the partial aggregate
	Version  int64    // of the partial aggregate, as it was read
	State    []byte   // the new partial aggregate, encoded by its reducers; empty: the group has no aggregates
	Lines    []byte   // the result lines of the jobs
	Entries  []string // ids of the entries of the stream results that held these results
	Ordinals []int64  // of the jobs, ascending
}

// ReduceState says how a reduction ended.
type ReduceState string

// States of a ReduceReply.
const (
	ReduceOK      ReduceState = "OK"
	ReduceVersion ReduceState = "VERSION" // the partial aggregate has changed: read it again
	ReduceBad     ReduceState = "BAD"     // some jobs are not done, or are reduced: leave them out
	ReduceGone    ReduceState = "GONE"    // there is no such group: its entries were removed
	ReduceError   ReduceState = "ERR"     // a key of the group has a wrong Redis type
)

// ReduceReply says whether the results were added.
type ReduceReply struct {
	State   ReduceState
	Version int64   // with ReduceOK and ReduceVersion: the partial aggregate's version now
	Bad     []int64 // with ReduceBad: the ordinals to leave out
	Err     error   // with ReduceError
}

// Most results of one call of Reduce with several groups, and most groups: it takes 1 or 2 ms of
// Redis's time.
const (
	MaxReduceGroups = 32
	MaxReduceJobs   = 200
	MaxReduceBytes  = 1 << 20
)

// Reduce stores, for each group, a partial aggregate to which the caller has added results, and the
// result lines, and removes the Entries from the stream results. It changes nothing of a group
// unless all its jobs are done and not reduced yet, and the stored partial aggregate has the given
// version; therefore each result counts once. A group of which nothing but these results was missing
// ends. Without Ordinals, it only removes the Entries, if the version is right. If the group does not
// exist, it only removes the Entries, whatever the version. The replies are in the order of all.
// Twice: the second call replies ReduceVersion, and without a State ReduceBad; without Ordinals, the
// same as the first.
func Reduce(ctx context.Context, c redis.Cmdable, p keyspace.Partition, all ...ReduceArgs) ([]ReduceReply, error) {
	args := make([]any, 0, 7*len(all))
	for i := range all {
		a := &all[i]
		var ranges jobRanges
		for _, o := range a.Ordinals {
			ranges.add(o, 0)
		}
		args = append(args, a.Group, a.Partial, a.Version, a.State, a.Lines, ranges.text(), strings.Join(a.Entries, " "))
	}
	r := run(ctx, c, reduce, p, args...)
	replies := make([]ReduceReply, len(all))
	for i := range replies {
		one, out := r.List(), &replies[i]
		switch out.State = ReduceState(one.Code("OK", "VERSION", "BAD", "GONE", "ERR")); out.State {
		case ReduceOK, ReduceVersion:
			out.Version = one.Number()
		case ReduceBad:
			out.Bad = one.List().Numbers()
		case ReduceError:
			out.Err = fmt.Errorf("reduce results of group %s: %s", all[i].Group, one.Text())
		}
	}
	return call.Done(r, replies)
}

// PartialAggregate is one partial aggregate of a group, with what an aggregator needs to know of
// the group.
type PartialAggregate struct {
	Exists     bool // whether the group exists
	Tenant     string
	Aggregates string // that were asked for, as JSON; "": none
	Version    int64  // see ReduceArgs
	State      string // encoded by its reducers; "": nothing was added to it yet
	Err        error  // that the group can't be read
}

// Partials is the number of partial aggregates of a group.
const Partials = partials

// ReadPartials reads the partial aggregate with this number of each group of a partition, in the
// order of the groups and in one round trip.
func ReadPartials(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, partial string, groups []string,
) []PartialAggregate {
	type replies struct{ group, partial *redis.SliceCmd }
	// Each reply has the error of the pipeline or its own.
	reads, _ := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, id string) replies {
		return replies{
			group: pipe.HMGet(ctx, p.Group(id), groupStatus, groupTenant, groupAggregate),
			partial: pipe.HMGet(ctx, p.Aggregate(id),
				aggregateVersion+partial, aggregatePartial+partial),
		}
	})
	out := make([]PartialAggregate, len(groups))
	for i, r := range reads {
		group, err := r.group.Result()
		if err == nil {
			err = r.partial.Err()
		}
		if err != nil {
			out[i].Err = fmt.Errorf("read aggregate of group %s: %w", groups[i], err)
			continue
		}
		fields, partials := values(group), values(r.partial.Val())
		out[i] = PartialAggregate{
			Exists: fields.str(0) != "", Tenant: fields.str(1), Aggregates: fields.str(2),
			Version: partials.num(0), State: partials.str(1),
		}
	}
	return out
}
