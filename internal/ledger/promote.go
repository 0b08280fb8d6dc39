package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var promote = script("jobs/promote", "signals", "states", "blob", "tenants", "pauses", "ready",
	"non_ready", "limiters", "shares")

// PromoteArgs are the arguments of Promote.
type PromoteArgs struct {
	Most     int // most jobs to promote
	Limit    Limit
	Seed     string         // 8 hex digits, with which the span ids of traced jobs begin
	FullWait time.Duration  // when to look again at a tenant whose ready stream is full
	Caps     map[string]int // type → most undelivered jobs in its ready stream; jobs of other types stay
}

// PromoteReply says what Promote has done.
type PromoteReply struct {
	Moved   int            // jobs that are ready now
	Skipped int            // due jobs whose ready stream is full, or whose type is not in Caps
	Wait    time.Duration  // until another call can promote jobs; negative: no tenant that may run has non-ready ones
	Permits []Permit       // that the promoted jobs have spent, by tenant
	Denials []Denial       // tenants that were refused a permit
	Traced  []PromoteTrace // the sampled jobs among the promoted ones
	AtUS    int64          // Redis time, µs
}

// PromoteTrace is a sampled job that was promoted.
type PromoteTrace struct {
	Group, Tenant  string
	Ordinal        int64
	Parent, SpanID string    // the job's traceparent before the call; the id of the new span
	Since, Now     time.Time // when the job began to wait and when it became ready, by Redis's clock
	Attempt        int       // the new attempt
	Reason         string    // why it was non-ready, as in the blob
}

// Promote moves due non-ready jobs to their ready streams, with one permit each. It suspends due
// jobs of paused groups and types; those of a paused tenant stay non-ready. It makes a batch of
// suspended jobs of one resumed tenant non-ready again, before anything else.
// Twice: the second call takes the next jobs.
func Promote(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a PromoteArgs) (PromoteReply, error) {
	args := append([]any{a.Most}, a.Limit.args()...)
	args = append(args, a.Limit.share(), a.Seed, max(1, a.FullWait.Milliseconds()))
	for typ, limit := range a.Caps {
		args = append(args, typ, limit)
	}
	r, err := run(ctx, c, promote, p, args...)
	if err != nil {
		return PromoteReply{}, err
	}
	out := PromoteReply{
		Moved: int(r.num(0)), Skipped: int(r.num(1)), Wait: time.Duration(r.num(2)) * time.Millisecond,
		Permits: r.list(3).permits(), Denials: r.list(4).denials(), AtUS: r.num(6),
	}
	for t := r.list(5); len(t) >= 9; t = t[9:] {
		out.Traced = append(out.Traced, PromoteTrace{
			Group: t.str(0), Ordinal: t.num(1), Tenant: t.str(2), Parent: t.str(3), SpanID: t.str(4),
			Since: time.UnixMilli(t.num(5)), Now: time.UnixMilli(t.num(6)), Attempt: int(t.num(7)), Reason: t.str(8),
		})
	}
	return out, nil
}
