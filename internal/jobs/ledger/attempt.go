package ledger

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// The variables are the scripts of an attempt. start, renew and outcome are called by workers, and
// start and outcome by the watcher to fail jobs without a processor. reclaim, which the dispatcher
// calls, ends the attempts of dead workers.
var (
	start   = script("jobs/start", "signals", "states", "ranges", "blob", "tenants", "pauses", "ready", "non_ready", "lifecycle", "places")
	renew   = script("jobs/renew", "states")
	outcome = script("jobs/outcome", "signals", "states", "ranges", "blob", "priority", "ready", "non_ready", "endings", "places")
	reclaim = script("jobs/reclaim", "signals", "states", "blob", "priority", "ready", "non_ready", "endings", "places")
)

// StartGroup is the jobs of one group in a call of Start, ordered by ordinal.
type StartGroup struct {
	Group string
	Jobs  []StartJob
}

// StartJob is a job that was read from a ready stream.
type StartJob struct {
	Entry   string
	Ordinal int64
	Attempt int
	Failed  bool // attempts of this round have ended with an error: the reply tells the last one
}

// GroupTerms are the tenant of a group and the settings that its jobs run with.
type GroupTerms struct {
	Tenant     string        // "": the group does not exist
	JobTimeout time.Duration // 0: the worker's default
	MaxRetries int           // negative: the worker's default
}

// TokenCancelled is the token that Start gives to a job whose group was cancelled while the job was
// ready: the worker must not run it.
const TokenCancelled = -2

// StartReply says which jobs were started.
type StartReply struct {
	Tokens []int64      // for each job, in the order of the call: the attempt to report under, or negative
	Groups []GroupTerms // for each group, in the order of the call
	AtUS   int64        // Redis time, µs
	// LastErrors has the last error of the jobs that the caller marked Failed. Its key is the index
	// of the job among all jobs of the call. It skips deferrals, and jobs without a readable error.
	LastErrors map[int]JobError
}

// Start moves jobs that a worker has read to in flight, and their sealed groups to RUNNING. The
// worker must not run a job with a
// negative token: it is stale, its group is cancelled or deleted, or it is paused and now
// suspended. Start removes the entry of such a job, unless Reclaim has to decide about it. Twice:
// the second call starts a new attempt of each job, so the worker reports under the tokens of its
// last call.
func Start(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, groups []StartGroup,
) (StartReply, error) {
	n := 0
	for i := range groups {
		n += len(groups[i].Jobs)
	}
	args := make([]any, 0, 2+4*len(groups))
	args = append(args, typ, len(groups))
	for i := range groups {
		var ranges jobRanges
		var entries, failed []byte
		for _, j := range groups[i].Jobs {
			ranges.add(j.Ordinal, j.Attempt)
			entries = append(append(entries, j.Entry...), ' ')
			if j.Failed {
				failed = append(strconv.AppendInt(failed, j.Ordinal, 10), ' ')
			}
		}
		args = append(args, groups[i].Group, ranges.text(), entries, failed)
	}
	r := run(ctx, c, start, p, args...)
	out := StartReply{Tokens: make([]int64, 0, n), Groups: make([]GroupTerms, 0, len(groups))}
	tokens := r.List()
	for i := range groups {
		if tokens.Peek() == "all" {
			_ = tokens.Text()
			for _, j := range groups[i].Jobs {
				out.Tokens = append(out.Tokens, int64(j.Attempt))
			}
			continue
		}
		own := tokens.List()
		for range groups[i].Jobs {
			out.Tokens = append(out.Tokens, own.Number())
		}
	}
	terms, at := r.List(), 0
	for i := range groups {
		g := terms.List()
		t := GroupTerms{Tenant: g.Text(), MaxRetries: -1}
		if ms, given := orDefault(g); given {
			t.JobTimeout = time.Duration(ms) * time.Millisecond
		}
		if n, given := orDefault(g); given {
			t.MaxRetries = int(n)
		}
		out.Groups = append(out.Groups, t)
		out.readLastErrors(g.List(), groups[i].Jobs, at)
		at += len(groups[i].Jobs)
	}
	out.AtUS = r.Number()
	return call.Done(r, out)
}

// orDefault reads a number, or "", which stands for the default.
func orDefault(r *call.Reply) (n int64, given bool) {
	if r.Peek() == "" {
		_ = r.Text()
		return 0, false
	}
	return r.Number(), true
}

// readLastErrors sets LastErrors of a group's jobs, the first of which has the index at in the call.
// There are no records if the script could not read them.
func (r *StartReply) readLastErrors(records *call.Reply, jobs []StartJob, at int) {
	if !records.More() {
		return
	}
	for i, j := range jobs {
		if !j.Failed {
			continue
		}
		if errs := withoutDeferrals(parseJobErrors(records.Text())); len(errs) > 0 {
			if r.LastErrors == nil {
				r.LastErrors = map[int]JobError{}
			}
			r.LastErrors[at+i] = errs[0]
		}
	}
}

// Held is a job that a worker holds.
type Held struct {
	Entry, Group string
	Ordinal      int64
	Attempt      int
	Known        bool // the worker knows that it may be lost: it is not counted as a lost lease
}

// Renew extends the leases of a worker's jobs of one type. It returns the indexes in jobs of those
// whose lease the worker has lost: they were taken back, cancelled, or have ended. Twice: the
// second call returns the same and extends the leases of the others again.
func Renew(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ, consumer string, jobs []Held,
) ([]int, error) {
	args := make([]any, 0, 3+5*len(jobs))
	args = append(args, typ, consumer, len(jobs))
	for _, j := range jobs {
		flag := ""
		if j.Known {
			flag = "k"
		}
		args = append(args, j.Entry, j.Group, j.Ordinal, j.Attempt, flag)
	}
	r := run(ctx, c, renew, p, args...)
	lost := make([]int, 0, r.Len())
	for r.More() {
		lost = append(lost, int(r.Number())-1)
	}
	return call.Done(r, lost)
}

// OutcomeKind is the outcome of a job that is not done.
type OutcomeKind string

// Kinds of outcomes.
const (
	OutcomeRetry     OutcomeKind = "r" // a transient error: the job gets another attempt later
	OutcomeThrottled OutcomeKind = "t" // the downstream API asked to wait: another attempt later
	OutcomeFailed    OutcomeKind = "f" // the job has failed
	OutcomeReleased  OutcomeKind = "h" // the worker gives it back and may have started it: due at once
	OutcomeUnstarted OutcomeKind = "u" // the worker gives it back and has not started it: ready at once
	OutcomeDeferred  OutcomeKind = "d" // what it needs is busy, whether it was started or not: another attempt later
)

// DoneJob is a job whose processor succeeded.
type DoneJob struct {
	Entry   string // id of its entry in the ready stream
	Ordinal int64
	Attempt int    // the attempt that the worker reports on
	Line    []byte // its result line: one JSON object without a newline, never empty
	Trace   string // its traceparent; "": it is not sampled
	Marked  bool   // Redis may hold errors or a payload of it, which are then deleted
}

// OtherJob is the outcome of an attempt that is not done. Retries, Throttles, Losses and Waits are
// the new values for the job's next moving blob: they already include this attempt.
type OtherJob struct {
	Entry     string // id of its entry in the ready stream
	Ordinal   int64
	Attempt   int // the attempt that the worker reports on
	Kind      OutcomeKind
	Retries   int
	Throttles int
	Losses    int
	Waits     string // ms, as in the moving blob: fair|rate|congestion
	Queued    []byte // the queued blob
	// Delay is, for OutcomeThrottled, the Retry-After, or negative: -Delay is the least wait. For
	// OutcomeDeferred it is the exact wait, for OutcomeRetry the least wait. Other outcomes ignore
	// it.
	Delay      time.Duration
	Code, Text string // of the error
}

// GroupOutcome is the outcomes of one group's jobs in a call of Outcome. Each list is ordered by
// ordinal.
type GroupOutcome struct {
	Group  string
	Took   time.Duration // run time, added up, of its jobs here that ran and were not released or deferred
	Ran    int           // how many these jobs are
	Done   []DoneJob
	Others []OtherJob
}

// Congestion is the settings that decide how long retried and throttled jobs wait.
type Congestion struct {
	Base, Cap time.Duration // the least and the longest wait; a longer Retry-After is kept
	RPS       int64         // permits a second for all tenants of the partition; 0: no limit
	Flat      bool          // waits depend neither on RPS nor on a tenant's own limit
	KeepStats time.Duration // how long congestion statistics are kept after a tenant's last event
}

// OutcomeReply has the numbers of the outcomes that took effect, of those that were stale, and of
// the jobs that have failed.
type OutcomeReply struct {
	Owned, Stale, Failed int64
	Steps                []JobStep // sampled jobs that have failed, or that were cancelled meanwhile
}

// Outcome stores the outcomes of a batch of jobs of one type, and removes their entries from the
// ready stream. An outcome is stale if the job was taken back, has another attempt by now or has
// ended, or if its group is cancelled or deleted. A stale outcome changes nothing, except that it
// counts in the field stale of load:TYPE unless its group is cancelled or deleted. Its entry stays
// if it may hold the job's present attempt; Reclaim then decides. Twice: all outcomes of the second
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
	rps := any(terms.RPS)
	if terms.Flat {
		rps = ""
	}
	args = append(args, typ, terms.Base.Milliseconds(), terms.Cap.Milliseconds(), rps,
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
	r := run(ctx, c, outcome, p, args...)
	return call.Done(r, OutcomeReply{
		Owned: r.Number(), Stale: r.Number(), Failed: r.Number(), Steps: steps(r.List()),
	})
}

// appendDone encodes the done jobs of a group as four script arguments, whatever their number.
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

// ReclaimReply says what Reclaim has done.
type ReclaimReply struct {
	Steps   []JobStep // sampled jobs that were taken back, have failed, or were cancelled before
	Taken   int       // jobs that are non-ready now, due at once
	Failed  int       // jobs that have failed, because they lost more than maxLosses workers
	Stale   int       // entries that were no jobs, or whose job or group has ended, or that are of another attempt
	Missing []string  // pending entries that another program has deleted from the stream: an incident
}

// Reclaim takes back the jobs of dead workers: it takes at most `most` pending entries of a type's
// ready stream that were idle for a lease. Twice: the second call takes the next ones.
func Reclaim(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	typ string, lease time.Duration, most, maxLosses int, unserved bool,
) (ReclaimReply, error) {
	r := run(ctx, c, reclaim, p, typ, lease.Milliseconds(), most, maxLosses, flag(unserved))
	out := ReclaimReply{Taken: int(r.Number()), Failed: int(r.Number())}
	if missing := r.List(); missing.More() {
		out.Missing = missing.Texts()
	}
	out.Stale, out.Steps = int(r.Number()), steps(r.List())
	return call.Done(r, out)
}
