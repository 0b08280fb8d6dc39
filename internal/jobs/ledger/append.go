package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var appendJobs = script("jobs/append", "blob", "signals", "tenants", "priority", "fair_queue", "non_ready", "tags")

// MaxAppend is the most jobs of one call of Append or AppendMany, MaxAppendBytes the most bytes of
// their payloads; their other fields are short and do not count. The callers keep to them: Append
// and AppendMany don't check.
const (
	MaxAppend      = 200
	MaxAppendBytes = 1 << 20
)

// NewJob is a job that enters a group. Its TraceParent is not the producer's, but the job's own
// trace context, "" if it is not sampled. Its key has no control characters.
type NewJob = messages.Job

// AppendMode says whether a call of Append is the last one of its submission. The last call needs
// no request id: once a submission has ended, the next such call is a duplicate.
type AppendMode string

// Modes of an Append.
const (
	AppendMore AppendMode = ""     // the submission goes on, or the jobs are not a part of one
	AppendLast AppendMode = "last" // the submission ends with these jobs
	AppendSeal AppendMode = "seal" // it ends with them, and the group is sealed
)

// SubmissionPrefix is the prefix of the request ids of a submission's pieces. The piece's number,
// from 0, follows it.
const SubmissionPrefix = "="

// ErrGap says that a failover has lost earlier pieces of a submission. The caller repeats the
// submission from its first piece: the pieces that Redis still has are duplicates.
var ErrGap = fmt.Errorf("%w: earlier pieces of the submission are missing: repeat it from the first",
	api.ErrUnavailable)

// EntryRequest returns how the request ids of the jobs begin that an entry of the main ingest
// stream adds, if its message has no id of its own: for the entry 5-1, the ids are @5-1#0, @5-1#1…
func EntryRequest(entry string) string { return "@" + entry }

// AppendArgs are the arguments of Append.
type AppendArgs struct {
	Group   string
	Request string // id by which a repeated call is recognized for some time; "": none
	Limit   int64  // most jobs of a group
	Mode    AppendMode
	Next    int64 // expected ordinal of the group's next job; if it is wrong, the script costs more
	Jobs    []NewJob
	Create  *CreateArgs // the group is created with it unless it exists; nil: it must exist
}

// AppendReply says which ordinals the jobs got: First and the N-1 behind it.
type AppendReply struct {
	First, N  int64
	Duplicate bool // the request was applied before; First and N are not known
	// Skipped are the jobs that were left out, by their number in the request from 0, because the
	// group has unique keys and another job has their key. They do not count in N. A duplicate with
	// a request id returns those of the first call.
	Skipped []int
}

// Append adds jobs to a group, all or none. They are waiting, or non-ready until their RunAt. A
// group that reaches its announced total is sealed. A group with unique keys gets no second job
// with the same key (see AppendReply).
//
// Twice: with a request id that is still stored, or with a mode, the second call reports a
// duplicate; without, it adds the jobs again. Errors:
//
//	ErrGap           earlier pieces of the submission are missing
//	api.ErrNotFound  there is no such group
//	api.ErrSealed    the group gets no more jobs
//	api.ErrConflict  the group would have more jobs than announced or allowed
func Append(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AppendArgs) (AppendReply, error) {
	results, err := Submit(ctx, c, p, []AppendArgs{a})
	if err != nil {
		return AppendReply{}, err
	}
	return results[0].AppendReply, results[0].Err
}

// MaxSubmit is the most groups of one call of Submit.
const MaxSubmit = 32

// Submit does what Append does for several groups in one call, each like an Append of its own: some
// may be refused and others accepted. A group that has Create is created unless it exists; without
// jobs it is only created, and sealed with the mode AppendSeal. It is not created if its jobs are
// refused. An error is of the whole call: the groups may have been stored or not, but if Redis is
// out of memory, none is. Twice: as Append and Create. Errors of a group are those of Append, and:
//
//	api.ErrConflict  another submission has created the group, or its id belongs to another tenant
//	redis.Error      a key of the group is of the wrong type: nothing of the group was stored
func Submit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, all []AppendArgs) ([]AppendResult, error) {
	groups, requests := make([]groupAppend, len(all)), make([]Request, len(all))
	for i := range all {
		a := &all[i]
		requests[i] = Request{ID: a.Request, Jobs: a.Jobs}
		if groups[i].AppendArgs = a; a.Create == nil || len(a.Jobs) > 0 {
			groups[i].requests = requests[i : i+1]
		}
	}
	r, results := runAppend(ctx, c, p, groups), make([]AppendResult, len(all))
	for i := range groups {
		g := r.List()
		if results[i].Err = refused(g, appendJobs, all[i].Group); results[i].Err != nil {
			continue
		}
		_ = g.Code("OK")
		status := api.Status(g.Text())
		for j := range groups[i].requests {
			results[i] = appendResult(g.List(), groups[i].AppendArgs, &groups[i].requests[j])
		}
		results[i].Status = status
	}
	return call.Done(r, results)
}

// Request is the jobs that one HTTP request, or one message of the ingest stream, adds to a group,
// all or none. A repeated request is recognized by its id.
type Request struct {
	ID   string // as AppendArgs.Request; no piece of a submission
	Jobs []NewJob
}

// AppendResult is the result of one Request, or of one group of Submit. Err is nil, or one of the
// errors that Append and Submit list.
type AppendResult struct {
	AppendReply
	Status api.Status // of the group before these jobs, CREATED if this call has created it; only of Submit
	Err    error
}

// AppendMany adds the jobs of several requests to one group, in order, each like an Append of its
// own: some may be refused and others accepted. limit and next are as in AppendArgs. The results
// are in the order of the requests. An error is of the whole call: the jobs may have been added or
// not. Twice: as Append.
func AppendMany(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	group string, limit, next int64, requests []Request,
) ([]AppendResult, error) {
	a := &AppendArgs{Group: group, Limit: limit, Next: next}
	r, results := runAppend(ctx, c, p, []groupAppend{{a, requests}}), make([]AppendResult, len(requests))
	g := r.List()
	if err := refused(g, appendJobs, group); err != nil {
		return nil, err
	}
	_, _ = g.Code("OK"), g.Text()
	for i := range requests {
		results[i] = appendResult(g.List(), a, &requests[i])
	}
	return call.Done(r, results)
}

// groupAppend is what one call of the script does to one group: AppendArgs, but with these requests
// instead of its own.
type groupAppend struct {
	*AppendArgs
	requests []Request
}

// largePayload is the size in bytes of the largest payload that is a part of the blob: LARGE in
// append.lua. A larger one is stored in payloads:GROUP.
const largePayload = 4096

func runAppend(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups []groupAppend) *call.Reply {
	size := 1 + 32*len(groups)
	for _, g := range groups {
		for i := range g.requests {
			size += 2 + 4*len(g.requests[i].Jobs)
		}
	}
	args := append(make([]any, 0, size), len(groups))
	compose := newComposer(time.Now())
	for _, g := range groups {
		args = g.arguments(args, compose)
	}
	return run(ctx, c, appendJobs, p, args...)
}

// arguments appends the script's arguments for the group to args.
func (g groupAppend) arguments(args []any, compose composer) []any {
	ready, bytes := "ready", 0
	for i := range g.requests {
		for j := range g.requests[i].Jobs {
			job := &g.requests[i].Jobs[j]
			if job.Type != "" || job.RunAt != nil || len(job.Payload) > largePayload {
				ready = ""
			}
			bytes += queuedSize(job)
		}
	}
	args = append(args, g.Group, g.Limit, string(g.Mode), ready, len(g.requests))
	if c := g.Create; c == nil {
		args = append(args, 0)
	} else {
		args = append(args, 4+2*len(c.Fields), c.Tenant, c.Type, c.Hash, c.Own)
		for field, value := range c.Fields {
			args = append(args, field, value)
		}
	}
	for i := range g.requests {
		args = append(args, g.requests[i].ID, len(g.requests[i].Jobs))
	}
	if ready != "" {
		return appendBlobs(args, compose, g.Next, g.requests, bytes)
	}
	for i := range g.requests {
		for j := range g.requests[i].Jobs {
			job := &g.requests[i].Jobs[j]
			at := int64(0)
			if job.RunAt != nil {
				at = job.RunAt.UnixMilli()
			}
			payload := appendFields(slices.Clip(job.Payload), job)
			args = append(args, job.Type, at, job.TraceParent, payload)
		}
	}
	return args
}

// appendBlobs appends the queued blobs of all jobs to args; the first job has the ordinal next. The
// blobs are in one buffer of about the given number of bytes.
func appendBlobs(args []any, compose composer, next int64, requests []Request, bytes int) []any {
	all := make([]byte, 0, bytes)
	for i := range requests {
		for j := range requests[i].Jobs {
			job, first := &requests[i].Jobs[j], len(all)
			all = compose.append(all, next, job)
			args = append(args, all[first:len(all):len(all)])
			next++
		}
	}
	return args
}

func appendResult(r *call.Reply, a *AppendArgs, request *Request) AppendResult {
	piece := strings.TrimPrefix(request.ID, SubmissionPrefix)
	if err := refused(r, appendJobs, a.Group, a.Limit, len(request.Jobs), piece); err != nil {
		return AppendResult{Err: err}
	}
	var out AppendReply
	switch r.Code("OK", "DUP") {
	case "OK":
		out.First, out.N = r.Number(), r.Number()
	case "DUP":
		out.Duplicate = true
	}
	if r.More() {
		out.Skipped = jobNumbers(r.Text())
	}
	return AppendResult{AppendReply: out}
}

// jobNumbers reads numbers that commas divide.
func jobNumbers(list string) (numbers []int) {
	if list == "" {
		return nil
	}
	for text := range strings.SplitSeq(list, ",") {
		numbers = append(numbers, int(integer(text)))
	}
	return numbers
}

var (
	admit = script("jobs/admit", "signals", "states", "blob", "tenants", "priority", "fair_queue", "pauses", "ready",
		"non_ready", "limiters", "shares", "permits", "places", "dequeue")
	promote = script("jobs/promote", "signals", "states", "blob", "tenants", "pauses", "ready",
		"non_ready", "limiters", "shares", "permits", "places")
)

// AdmitArgs are the arguments of Admit.
type AdmitArgs struct {
	Type        string
	Most        int  // most jobs to admit
	Cap         int  // most undelivered jobs in the ready stream
	Slots       int  // jobs that the workers can run at the same time; 0: not known
	Ahead       int  // entries that the ready stream may have beyond Slots; 0: there are no workers
	Unserved    bool // no live worker serves the type: no job becomes ready that would hold a place
	Meter       Meter
	Seed        string        // 8 hex digits, with which the span ids of traced jobs begin
	LaneWeights [3]int        // high, normal, low
	KeepStats   time.Duration // how long congestion statistics are kept after a tenant's last event
}

// AdmitState says how an admission ended.
type AdmitState string

// States of an admission.
const (
	AdmitOK      AdmitState = "OK"      // jobs were admitted, or the call has looked at enough tenants
	AdmitFull    AdmitState = "FULL"    // the ready stream takes no more jobs now, perhaps after this call's
	AdmitLimited AdmitState = "LIMITED" // no permit is left now, or other tenants may claim those that are
	AdmitPaused  AdmitState = "PAUSED"  // the type is paused: nothing was admitted
	AdmitUnset   AdmitState = "UNSET"   // the partition knows no limits yet: nothing was admitted
	AdmitEmpty   AdmitState = "EMPTY"   // no waiting job may run now: nothing was admitted
)

// AdmitReply says what Admit has done.
type AdmitReply struct {
	State    AdmitState
	Moved    int           // jobs that are ready now
	NonReady int           // jobs that became non-ready, as markers
	Wait     time.Duration // until another call can admit jobs; negative: until the process is woken
	Permits  []Permit      // number of admitted jobs by tenant; with a limit, each has spent a permit
	Denials  []Denial      // tenants that were refused a permit
	Traced   []AdmitTrace  // the sampled jobs among the admitted and non-ready ones
	AtUS     int64         // Redis time, µs
}

// TracedJob is a sampled job that a script has moved. The script has chosen the id of the span; the
// caller records it.
type TracedJob struct {
	Group, Tenant  string
	Ordinal        int64
	Parent, SpanID string // the job's traceparent before the call; the id of the new span
}

func traced(r *call.Reply) TracedJob {
	return TracedJob{Group: r.Text(), Ordinal: r.Number(), Tenant: r.Text(), Parent: r.Text(), SpanID: r.Text()}
}

// JobStep is a sampled job that a script has ended or taken back. The caller records a span for it.
type JobStep struct {
	Name          string // of the span: fail, cancel or reclaim
	Tenant, Group string
	Ordinal       int64
	Attempt       int    // 0: it has not begun
	Trace         string // the traceparent that the span follows
	Code          string // of the error, if it failed
}

// steps reads the list steps of a script's reply.
func steps(r *call.Reply) (all []JobStep) {
	for r.More() {
		all = append(all, JobStep{Name: r.Text(), Group: r.Text(), Ordinal: r.Number(), Tenant: r.Text(), Trace: r.Text(),
			Attempt: int(r.Number()), Code: r.Text()})
	}
	return all
}

// AdmitTrace is a sampled job that left the fair queue.
type AdmitTrace struct {
	TracedJob
	Now            time.Time     // when it left, by Redis's clock
	Fairness, Rate time.Duration // how long it waited for the fair queue and for the rate limit
}

// Admit takes the next jobs of a type out of the fair queue and adds them to its ready stream, with
// one permit each. The first job of a tenant without a permit becomes non-ready, as the tenant's
// marker. Twice: the second call takes the next jobs.
func Admit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AdmitArgs) (AdmitReply, error) {
	args := append([]any{a.Type, a.Most, a.Cap, a.Slots, a.Ahead, flag(!a.Unserved)}, a.Meter.args()...)
	args = append(args, a.Seed, keepStats(a.KeepStats),
		a.LaneWeights[0], a.LaneWeights[1], a.LaneWeights[2])
	r := run(ctx, c, admit, p, args...)
	out := AdmitReply{
		State: AdmitState(r.Code("OK", "FULL", "LIMITED", "PAUSED", "UNSET", "EMPTY")),
		Moved: int(r.Number()), NonReady: int(r.Number()), Wait: r.Duration(),
		Permits: permits(r.List()), Denials: denials(r.List()),
	}
	for t := r.List(); t.More(); {
		out.Traced = append(out.Traced, AdmitTrace{
			TracedJob: traced(t), Now: t.Time(), Fairness: t.Duration(), Rate: t.Duration(),
		})
	}
	out.AtUS = r.Number()
	return call.Done(r, out)
}

// keepStats returns how long congestion statistics are kept, in ms. The default is one hour.
func keepStats(d time.Duration) int64 { return cmp.Or(d, time.Hour).Milliseconds() }

// PromoteArgs are the arguments of Promote.
type PromoteArgs struct {
	Most     int // most jobs to promote
	Meter    Meter
	Seed     string         // 8 hex digits, with which the span ids of traced jobs begin
	FullWait time.Duration  // when to look again at a tenant whose stream is full or whose permits are kept
	Cap      int            // most undelivered jobs in the ready stream of a type that is not in Caps
	Caps     map[string]int // type that a live worker serves → most undelivered jobs in its ready stream
}

// PromoteReply says what Promote has done.
type PromoteReply struct {
	Moved   int            // jobs that are ready now
	Skipped int            // due jobs whose ready stream is full
	Wait    time.Duration  // until another call can promote jobs; negative: no tenant that may run has non-ready ones
	Permits []Permit       // number of promoted jobs by tenant; with a limit, each has spent a permit
	Denials []Denial       // tenants that were refused a permit
	Traced  []PromoteTrace // the sampled jobs among the promoted ones
	AtUS    int64          // Redis time, µs
}

// PromoteTrace is a sampled job that was promoted.
type PromoteTrace struct {
	TracedJob
	Since, Now time.Time // when the job began to wait and when it became ready, by Redis's clock
	Attempt    int       // the new attempt
	Reason     string    // why it was non-ready, as in the blob
}

// Promote moves due non-ready jobs to their ready streams, with one permit each. It suspends due
// jobs of paused groups and types; those of a paused tenant stay non-ready. After a resumption of a
// tenant, group or type it first makes a batch of one tenant's suspended jobs non-ready again.
// Twice: the second call takes the next jobs.
func Promote(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a PromoteArgs) (PromoteReply, error) {
	args := append([]any{a.Most}, a.Meter.args()...)
	args = append(args, a.Seed, max(1, a.FullWait.Milliseconds()), a.Cap)
	for typ, limit := range a.Caps {
		args = append(args, typ, limit)
	}
	r := run(ctx, c, promote, p, args...)
	out := PromoteReply{
		Moved: int(r.Number()), Skipped: int(r.Number()), Wait: r.Duration(),
		Permits: permits(r.List()), Denials: denials(r.List()),
	}
	for t := r.List(); t.More(); {
		out.Traced = append(out.Traced, PromoteTrace{
			TracedJob: traced(t), Since: t.Time(), Now: t.Time(), Attempt: int(t.Number()), Reason: t.Text(),
		})
	}
	out.AtUS = r.Number()
	return call.Done(r, out)
}
