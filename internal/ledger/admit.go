package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var admit = script("jobs/admit", "signals", "states", "blob", "tenants", "priority", "fair_queue", "pauses", "ready",
	"non_ready", "limiters", "shares", "dequeue")

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
	AdmitFull    AdmitState = "FULL"    // the ready stream holds as many jobs as it may, perhaps by this call
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
	Permits  []Permit      // that the admitted jobs have spent, by tenant
	Denials  []Denial      // tenants that were refused a permit
	Traced   []AdmitTrace  // the sampled jobs among the admitted and non-ready ones
	AtUS     int64         // Redis time, µs
}

// AdmitTrace is a sampled job that left the fair queue. The script has made the id of its span.
type AdmitTrace struct {
	Group, Tenant  string
	Ordinal        int64
	Parent, SpanID string        // the job's traceparent before the call; the id of the new span
	Accepted, Now  time.Time     // when the job was accepted and when it left, by Redis's clock
	Fairness, Rate time.Duration // how long it waited for the fair queue and for the rate limit
}

// Admit takes the next jobs of a type out of the fair queue and adds them to its ready stream, with
// one permit each. The first job of a tenant without a permit becomes non-ready, as the tenant's
// marker. Twice: the second call takes the next jobs.
func Admit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AdmitArgs) (AdmitReply, error) {
	args := append([]any{a.Type, a.Most, a.Cap, a.Slots, a.Ahead}, a.Limit.args()...)
	args = append(args, a.Limit.share(), a.Seed, keepStats(a.KeepStats),
		a.LaneWeights[0], a.LaneWeights[1], a.LaneWeights[2])
	r, err := run(ctx, c, admit, p, args...)
	if err != nil {
		return AdmitReply{}, err
	}
	out := AdmitReply{
		State:    AdmitState(r.str(0)),
		Moved:    int(r.num(1)),
		NonReady: int(r.num(2)),
		Wait:     time.Duration(r.num(3)) * time.Millisecond,
		Permits:  r.list(4).permits(),
		Denials:  r.list(5).denials(),
		AtUS:     r.num(7),
	}
	for t := r.list(6); len(t) >= 9; t = t[9:] {
		out.Traced = append(out.Traced, AdmitTrace{
			Group: t.str(0), Ordinal: t.num(1), Tenant: t.str(2), Parent: t.str(3), SpanID: t.str(4),
			Accepted: time.UnixMilli(t.num(5)), Now: time.UnixMilli(t.num(6)),
			Fairness: time.Duration(t.num(7)) * time.Millisecond, Rate: time.Duration(t.num(8)) * time.Millisecond,
		})
	}
	return out, nil
}
