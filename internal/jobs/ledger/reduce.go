package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var reduce = script("jobs/reduce", "signals", "states", "ranges")

// The Results constants name the fields of an entry of the stream results. An entry has results of
// jobs of one group.
const (
	ResultsGroup  = "g" // the group's id
	ResultsLines  = "l" // the result lines, divided by newlines
	ResultsTraces = "t" // for each sampled job a line "ordinal traceparent"
)

// ReduceArgs are the results of one group that one call adds to one partial aggregate.
type ReduceArgs struct {
	Group    string
	Partial  string   // number of the partial aggregate
	Version  int64    // of the partial aggregate, as it was read
	State    []byte   // the new partial aggregate, encoded by its reducers
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
)

// ReduceReply says whether the results were added.
type ReduceReply struct {
	State   ReduceState
	Version int64   // with ReduceOK and ReduceVersion: the partial aggregate's version now
	Bad     []int64 // with ReduceBad: the ordinals to leave out
}

// Reduce stores a partial aggregate to which the caller has added results, and the result lines,
// and removes the Entries from the stream results. It changes nothing unless all jobs are done and
// not reduced yet, and the stored partial aggregate has the given version; therefore each result
// counts once. Without Ordinals, it only removes the Entries, if the version is right. If the group
// does not exist, it only removes the Entries, whatever the version.
// Twice: the second call replies ReduceVersion; without Ordinals, the same as the first.
func Reduce(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a ReduceArgs) (ReduceReply, error) {
	var ranges jobRanges
	for _, o := range a.Ordinals {
		ranges.add(o, 0)
	}
	args := make([]any, 0, 6+len(a.Entries))
	args = append(args, a.Group, a.Partial, a.Version, a.State, a.Lines, ranges.text())
	for _, e := range a.Entries {
		args = append(args, e)
	}
	r := run(ctx, c, reduce, p, args...)
	var out ReduceReply
	switch out.State = ReduceState(r.Code("OK", "VERSION", "BAD", "GONE")); out.State {
	case ReduceOK, ReduceVersion:
		out.Version = r.Number()
	case ReduceBad:
		out.Bad = r.List().Numbers()
	}
	return call.Done(r, out)
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
const Partials = layout.Partials

// ReadPartials reads the partial aggregate with this number of each group of a partition, in the
// order of the groups and in one round trip.
func ReadPartials(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, partial string, groups []string,
) []PartialAggregate {
	type replies struct{ group, partial *redis.SliceCmd }
	// Each reply has the error of the pipeline or its own.
	reads, _ := pipelined(ctx, c, groups, func(pipe redis.Pipeliner, id string) replies {
		return replies{
			group: pipe.HMGet(ctx, p.Group(id), layout.GroupStatus, layout.GroupTenant, layout.GroupAggregate),
			partial: pipe.HMGet(ctx, p.Aggregate(id),
				layout.AggregateVersion+partial, layout.AggregatePartial+partial),
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
