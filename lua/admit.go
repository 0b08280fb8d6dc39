package lua

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var admit = script("admit")

// Limit is the rate limit of a partition: Permits in any window that is aligned to the epoch; 0 is no limit.
type Limit struct {
	Window  time.Duration
	Permits int64
}

// AdmitArgs asks for the next jobs of a type.
type AdmitArgs struct {
	Type        string
	Most        int // jobs
	Cap         int // jobs that may lie in the ready stream without having been read
	Limit       Limit
	Seed        string // 8 hex digits, from which span ids are minted
	LaneWeights [3]int // high, normal, low
}

// AdmitState says how an admission ended.
type AdmitState string

// States of an admission.
const (
	AdmitOK      AdmitState = "OK"
	AdmitFull    AdmitState = "FULL"    // the ready stream holds as much as it may
	AdmitLimited AdmitState = "LIMITED" // the global limit is reached
	AdmitEmpty   AdmitState = "EMPTY"   // nothing waits that may run now
)

// AdmitReply is what was admitted.
type AdmitReply struct {
	State   AdmitState
	Moved   int
	Parked  int
	Wait    time.Duration // until it is worth asking again; negative: until woken
	Permits []Permit
	Denials []Denial
	Traced  []AdmitTrace
}

// AdmitTrace is a sampled job that was admitted; its span's id was minted by the script.
type AdmitTrace struct {
	Group, Tenant  string
	Ordinal        int64
	Parent, SpanID string
	Accepted, Now  time.Time
}

// Admit moves jobs from the fair queue to the ready stream.
func Admit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a AdmitArgs) (AdmitReply, error) {
	r, err := run(ctx, c, admit, p, a.Type, a.Most, a.Cap, a.Limit.Window.Milliseconds(), a.Limit.Permits, a.Seed,
		a.LaneWeights[0], a.LaneWeights[1], a.LaneWeights[2])
	if err != nil {
		return AdmitReply{}, err
	}
	out := AdmitReply{
		State: AdmitState(r.str(0)), Moved: int(r.num(1)), Parked: int(r.num(2)), Wait: time.Duration(r.num(3)) * time.Millisecond,
		Permits: r.list(4).permits(), Denials: r.list(5).denials(),
	}
	for t := r.list(6); len(t) >= 7; t = t[7:] {
		out.Traced = append(out.Traced, AdmitTrace{
			Group: t.str(0), Ordinal: t.num(1), Tenant: t.str(2), Parent: t.str(3), SpanID: t.str(4),
			Accepted: time.UnixMilli(t.num(5)), Now: time.UnixMilli(t.num(6)),
		})
	}
	return out, nil
}
