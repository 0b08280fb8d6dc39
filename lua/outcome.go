package lua

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var outcome = script("outcome")

// OutcomeKind says what is to become of a job that is not done.
type OutcomeKind string

// Kinds of outcomes.
const (
	OutcomeRetry     OutcomeKind = "r" // a transient error
	OutcomeThrottled OutcomeKind = "t" // the partner said slow down
	OutcomeFailed    OutcomeKind = "f" // for good
	OutcomeReleased  OutcomeKind = "h" // interrupted, without an outcome
	OutcomeUnstarted OutcomeKind = "u" // read, but never started
)

// DoneJob is a job that ran well.
type DoneJob struct {
	Entry   string
	Ordinal int64
	Attempt int
	Line    []byte // its result, one JSON object without a newline
	Trace   string
	Marked  bool // it has an error on record or a payload of its own, which can go
}

// OtherJob is a job that comes back or has failed.
type OtherJob struct {
	Entry      string
	Ordinal    int64
	Attempt    int
	Kind       OutcomeKind
	Retries    int
	Throttles  int
	Losses     int
	Waits      string // as in the blob: fair|rate|congestion
	Queued     []byte // the blob from its ordinal on
	Delay      time.Duration
	Code, Text string
}

// GroupOutcome is one group's part of a batch, each list by ascending ordinal.
type GroupOutcome struct {
	Group  string
	Took   time.Duration // of those that ran, together
	Ran    int
	Done   []DoneJob
	Others []OtherJob
}

// Congestion are the terms of waiting for jobs that come back.
type Congestion struct {
	Base, Cap time.Duration
	RPS       int64 // of all tenants of the partition; 0: no limit
	KeepStats time.Duration
}

// OutcomeReply counts the outcomes that took effect and those that were stale.
type OutcomeReply struct{ Owned, Stale int64 }

// Outcome reports a batch of one type.
func Outcome(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, terms Congestion, groups []GroupOutcome) (OutcomeReply, error) {
	n := 7
	for i := range groups {
		n += 5 + 6*len(groups[i].Done) + 12*len(groups[i].Others)
	}
	args := make([]any, 0, n)
	args = append(args, typ, terms.Base.Milliseconds(), terms.Cap.Milliseconds(), terms.RPS, keepStats(terms.KeepStats), len(groups))
	for i := range groups {
		g := &groups[i]
		args = append(args, g.Group, len(g.Done), len(g.Others), float64(g.Took.Microseconds())/1000, g.Ran)
		for j := range g.Done {
			d := &g.Done[j]
			flags := ""
			if d.Marked {
				flags = "m"
			}
			args = append(args, d.Entry, d.Ordinal, d.Attempt, d.Line, d.Trace, flags)
		}
		for j := range g.Others {
			o := &g.Others[j]
			args = append(args, o.Entry, o.Ordinal, o.Attempt, string(o.Kind), o.Retries, o.Throttles, o.Losses, o.Waits, o.Queued,
				o.Delay.Milliseconds(), o.Code, o.Text)
		}
	}
	r, err := run(ctx, c, outcome, p, args...)
	if err != nil {
		return OutcomeReply{}, err
	}
	return OutcomeReply{Owned: r.num(0), Stale: r.num(1)}, nil
}
