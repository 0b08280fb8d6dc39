package ledger

import (
	"cmp"
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	admit = script("jobs/admit", "signals", "states", "blob", "tenants", "priority", "fair_queue", "pauses", "ready",
		"non_ready", "limiters", "shares", "permits", "dequeue")
	promote = script("jobs/promote", "signals", "states", "blob", "tenants", "pauses", "ready",
		"non_ready", "limiters", "shares", "permits")
)

// AdmitArgs are the arguments of Admit.
type AdmitArgs struct {
	Type        string
	Most        int // most jobs to admit
	Cap         int // most undelivered jobs in the ready stream
	Slots       int // jobs that the workers can run at the same time; 0: not known
	Ahead       int // entries that the ready stream may have beyond Slots; 0: there are no workers
	Limit       Limit
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
	args := append([]any{a.Type, a.Most, a.Cap, a.Slots, a.Ahead}, a.Limit.args()...)
	args = append(args, a.Limit.share(), a.Seed, keepStats(a.KeepStats),
		a.LaneWeights[0], a.LaneWeights[1], a.LaneWeights[2])
	r := run(ctx, c, admit, p, args...)
	out := AdmitReply{
		State: AdmitState(r.Code("OK", "FULL", "LIMITED", "PAUSED", "EMPTY")),
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
	Limit    Limit
	Seed     string         // 8 hex digits, with which the span ids of traced jobs begin
	FullWait time.Duration  // when to look again at a tenant whose stream is full or whose permits are kept
	Cap      int            // most undelivered jobs in the ready stream of a type that is not in Caps
	Caps     map[string]int // type → most undelivered jobs in its ready stream
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
	args := append([]any{a.Most}, a.Limit.args()...)
	args = append(args, a.Limit.share(), a.Seed, max(1, a.FullWait.Milliseconds()), a.Cap)
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
