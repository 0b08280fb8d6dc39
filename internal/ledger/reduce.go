package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var reduce = script("jobs/reduce", "signals", "states", "ranges")

// Fields of an entry of the stream results, which holds results of jobs of one group.
const (
	ResultsGroup  = "g" // the group's id
	ResultsLines  = "l" // the result lines, divided by newlines
	ResultsTraces = "t" // for each sampled job a line "ordinal traceparent"
)

// ReduceArgs are results of one group that are added to one partial aggregate.
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
// not reduced yet, and the partial aggregate has the given version. So each result counts once. If
// the group does not exist, it only removes the Entries. Twice: the second call replies
// ReduceVersion.
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
	r, err := run(ctx, c, reduce, p, args...)
	if err != nil {
		return ReduceReply{}, err
	}
	out := ReduceReply{State: ReduceState(r.str(0))}
	switch out.State {
	case ReduceOK, ReduceVersion:
		out.Version = r.num(1)
	case ReduceBad:
		out.Bad = r.list(1).nums()
	case ReduceGone:
	default:
		return out, fmt.Errorf("script reduce: unknown reply %q", out.State)
	}
	return out, nil
}
