package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var admit = script("jobs/admit", "signals", "states", "blob", "tenants", "priority", "fair_queue", "pauses", "ready",
	"non_ready", "limiters", "shares", "dequeue")

// AdmitArgs asks for the next jobs of a type.
type AdmitArgs struct {
	Type        string
	Most        int // jobs
	Cap         int // jobs that may lie in the ready stream without having been read
	Slots       int // jobs that the workers run side by side; 0: not known
	Ahead       int // jobs that may lie in the ready stream beyond those; 0: there are no workers
	Limit       Limit
	Seed        string        // 8 hex digits, from which span ids are minted
	LaneWeights [3]int        // high, normal, low
	KeepStats   time.Duration // of congestion, after a tenant's last event
}

// AdmitState says how an admission ended.
type AdmitState string

// States of an admission.
const (
	AdmitOK      AdmitState = "OK"
	AdmitFull    AdmitState = "FULL"    // the ready stream holds as much as it may
	AdmitLimited AdmitState = "LIMITED" // the global limit is reached, or what is left of it is others'
	AdmitPaused  AdmitState = "PAUSED"  // the type is
	AdmitEmpty   AdmitState = "EMPTY"   // nothing waits that may run now
)

// AdmitReply is what was admitted.
type AdmitReply struct {
	State    AdmitState
	Moved    int
	NonReady int
	Wait     time.Duration // until it is worth asking again; negative: until woken
	Permits  []Permit
	Denials  []Denial
	Traced   []AdmitTrace
	AtUS     int64 // Redis time, µs
}

// AdmitTrace is a sampled job that was admitted; its span's id was minted by the script.
type AdmitTrace struct {
	Group, Tenant  string
	Ordinal        int64
	Parent, SpanID string
	Accepted, Now  time.Time
	Fairness, Rate time.Duration // what it waited for
}

// Admit moves jobs from the fair queue to the ready stream.
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
