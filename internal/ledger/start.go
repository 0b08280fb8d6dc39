package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var start = script("jobs/start", "signals", "states", "ranges", "blob", "pauses", "ready", "non_ready")

// StartGroup is one group's part of a batch. Its jobs are ordered by ordinal.
type StartGroup struct {
	Group string
	Jobs  []StartJob
}

// StartJob is a job that was read from a ready stream.
type StartJob struct {
	Entry   string
	Ordinal int64
	Attempt int
}

// GroupTerms are the tenant of a group and the settings that its jobs run with.
type GroupTerms struct {
	Tenant     string        // "": the group does not exist
	JobTimeout time.Duration // 0: the worker's default
	MaxRetries int           // negative: the worker's default
}

// StartReply says which jobs were started.
type StartReply struct {
	Tokens []int64      // for each job, in the order of the call: the attempt to report under, or -1
	Groups []GroupTerms // for each group, in the order of the call
	AtUS   int64        // Redis time, µs
}

// Start moves jobs that a worker has read to in flight. The worker must not run a job with token
// -1: it is stale, its group is cancelled or deleted, or it is paused and suspended now. Start
// removes the entry of such a job, unless Reclaim has to decide about it. Twice: the second call
// starts a new attempt of each job, so the worker reports under the tokens of its last call.
func Start(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, groups []StartGroup,
) (StartReply, error) {
	n := 0
	for i := range groups {
		n += len(groups[i].Jobs)
	}
	args := make([]any, 0, 2+3*len(groups))
	args = append(args, typ, len(groups))
	for i := range groups {
		var ranges jobRanges
		var entries []byte
		for _, j := range groups[i].Jobs {
			ranges.add(j.Ordinal, j.Attempt)
			entries = append(append(entries, j.Entry...), ' ')
		}
		args = append(args, groups[i].Group, ranges.text(), entries)
	}
	r, err := run(ctx, c, start, p, args...)
	if err != nil {
		return StartReply{}, err
	}
	out := StartReply{Tokens: make([]int64, 0, n), Groups: make([]GroupTerms, 0, len(groups)), AtUS: r.num(2)}
	for i := range groups {
		if own := r.list(0); own.str(i) == "all" {
			for _, j := range groups[i].Jobs {
				out.Tokens = append(out.Tokens, int64(j.Attempt))
			}
		} else {
			out.Tokens = append(out.Tokens, own.list(i).nums()...)
		}
	}
	if len(out.Tokens) != n {
		return StartReply{}, fmt.Errorf("script start: %d tokens for %d jobs", len(out.Tokens), n)
	}
	for i := range groups {
		g := reply(r.list(1)).list(i)
		t := GroupTerms{Tenant: g.str(0), JobTimeout: time.Duration(g.num(1)) * time.Millisecond, MaxRetries: -1}
		if g.str(2) != "" {
			t.MaxRetries = int(g.num(2))
		}
		out.Groups = append(out.Groups, t)
	}
	return out, nil
}
