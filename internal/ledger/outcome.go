package ledger

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var outcome = script("jobs/outcome", "signals", "states", "ranges", "blob", "priority", "ready", "non_ready", "endings")

// OutcomeKind is the outcome of a job that is not done.
type OutcomeKind string

// Kinds of outcomes.
const (
	OutcomeRetry     OutcomeKind = "r" // a transient error: the job gets another attempt later
	OutcomeThrottled OutcomeKind = "t" // the downstream API asked to wait: another attempt later
	OutcomeFailed    OutcomeKind = "f" // the job has failed
	OutcomeReleased  OutcomeKind = "h" // the worker gives it back and may have started it: due at once
	OutcomeUnstarted OutcomeKind = "u" // the worker gives it back and has not started it: ready at once
)

// DoneJob is a job whose processor succeeded.
type DoneJob struct {
	Entry   string // id of its entry in the ready stream
	Ordinal int64
	Attempt int    // the attempt that the worker reports on
	Line    []byte // its result line: one JSON object without a newline, never empty
	Trace   string // its traceparent; "": it is not sampled
	Marked  bool   // Redis holds an error or a payload of it, which are deleted
}

// OtherJob is a job that is not done. Retries, Throttles, Losses and Waits are those that its next
// moving blob gets: they contain this outcome.
type OtherJob struct {
	Entry      string // id of its entry in the ready stream
	Ordinal    int64
	Attempt    int // the attempt that the worker reports on
	Kind       OutcomeKind
	Retries    int
	Throttles  int
	Losses     int
	Waits      string        // ms, as in the moving blob: fair|rate|congestion
	Queued     []byte        // the queued blob
	Delay      time.Duration // least wait; of OutcomeThrottled: Retry-After, or -Delay is the least wait
	Code, Text string        // of the error
}

// GroupOutcome is one group's part of a batch. Each list is ordered by ordinal.
type GroupOutcome struct {
	Group  string
	Took   time.Duration // run time, added up, of its jobs in this batch that ran and were not released
	Ran    int           // how many these jobs are
	Done   []DoneJob
	Others []OtherJob
}

// Congestion says how long jobs wait that are retried or throttled.
type Congestion struct {
	Base, Cap time.Duration // the least and the longest wait; a longer Retry-After is kept
	RPS       int64         // permits a second for all tenants of the partition; 0: no limit
	KeepStats time.Duration // how long congestion statistics are kept after a tenant's last event
}

// OutcomeReply counts the outcomes that took effect and those that were stale.
type OutcomeReply struct{ Owned, Stale int64 }

// Outcome stores the outcomes of a batch of jobs of one type, and removes their entries from the
// ready stream. An outcome is stale if the job has another attempt by now, has ended, or its group
// is cancelled: it changes nothing but a counter of the type. The entry of a stale outcome stays if
// it may hold the job's present attempt; Reclaim then decides. Twice: all outcomes of the second
// call are stale.
func Outcome(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	typ string, terms Congestion, groups []GroupOutcome,
) (OutcomeReply, error) {
	n, jobs := 7, 0
	for i := range groups {
		jobs += len(groups[i].Done) + len(groups[i].Others)
		n += 9 + 11*len(groups[i].Others)
	}
	args := make([]any, 0, n+jobs)
	args = append(args, typ, terms.Base.Milliseconds(), terms.Cap.Milliseconds(), terms.RPS,
		keepStats(terms.KeepStats), len(groups), jobs)
	for i := range groups {
		for j := range groups[i].Done {
			args = append(args, groups[i].Done[j].Entry)
		}
		for j := range groups[i].Others {
			args = append(args, groups[i].Others[j].Entry)
		}
	}
	for i := range groups {
		g := &groups[i]
		args = append(args, g.Group, len(g.Done), len(g.Others), float64(g.Took.Microseconds())/1000, g.Ran)
		if len(g.Done) > 0 {
			args = appendDone(args, g.Done)
		}
		for j := range g.Others {
			o := &g.Others[j]
			args = append(args, o.Ordinal, o.Attempt, string(o.Kind), o.Retries, o.Throttles,
				o.Losses, o.Waits, o.Queued, o.Delay.Milliseconds(), o.Code, o.Text)
		}
	}
	r, err := run(ctx, c, outcome, p, args...)
	if err != nil {
		return OutcomeReply{}, err
	}
	return OutcomeReply{Owned: r.num(0), Stale: r.num(1)}, nil
}

// appendDone encodes the done jobs of a group as four arguments, however many jobs there are.
func appendDone(args []any, jobs []DoneJob) []any {
	size := 0
	for i := range jobs {
		size += len(jobs[i].Line) + 1
	}
	var ranges jobRanges
	var traces, marked []byte
	lines := make([]byte, 0, size)
	for i := range jobs {
		d := &jobs[i]
		ranges.add(d.Ordinal, d.Attempt)
		if i > 0 {
			lines = append(lines, '\n')
		}
		lines = append(lines, d.Line...)
		if d.Trace != "" {
			if len(traces) > 0 {
				traces = append(traces, '\n')
			}
			traces = append(append(strconv.AppendInt(traces, d.Ordinal, 10), ' '), d.Trace...)
		}
		if d.Marked {
			marked = append(strconv.AppendInt(marked, d.Ordinal, 10), ' ')
		}
	}
	return append(args, ranges.text(), lines, traces, marked)
}
