package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	policy     = script("tenants/policy", "priority")
	quota      = script("tenants/quota", "signals", "tenants", "pauses", "ready", "limiters", "shares")
	limitState = script("tenants/limit_state", "signals", "tenants", "pauses", "ready", "limiters", "shares")
)

// The Limiter constants name the algorithms of a rate limit. lua/parts/limiters.lua says what each
// of them guarantees.
const (
	LimiterFixed   = "fixed"
	LimiterSliding = "sliding"
	LimiterToken   = "token"
)

// The Share constants are the policies for the unused part of a tenant's share: may other tenants
// borrow it?
const (
	ShareStatic  = "static"
	ShareElastic = "elastic" // other tenants may borrow it
)

// Limit is the global rate limit in the form in which a script applies it to one partition.
type Limit struct {
	Limiter string // "": fixed
	Share   string // "": static
	Window  time.Duration
	Permits int64 // in a window, of all partitions together; 0: no limit
	Part    int64 // with several partitions: this one's part of Permits until it is rebalanced
	// Tag identifies the limit and the number of partitions. A quota that was stored under another
	// tag is not used any more. "" with one partition.
	Tag string
}

func (l Limit) args() []any {
	return []any{cmp.Or(l.Limiter, LimiterFixed), l.Window.Milliseconds(), l.Permits, l.Part, l.Tag}
}

func (l Limit) share() string { return cmp.Or(l.Share, ShareStatic) }

// Rate is the configured rate limit of the whole installation: RPS permits a second, counted in
// windows. An RPS of 0 is no limit.
type Rate struct {
	RPS     int64
	Window  time.Duration
	Limiter string
	Share   string
}

// PerWindow returns the permits in a window, of all partitions together: at least 1, or 0 without a
// limit.
func (r Rate) PerWindow() int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS*r.Window.Milliseconds()/1000)
}

// Of returns the limit for the scripts of one partition, whose number counts from 0. Permits is the
// whole limit; Part is the partition's initial quota, until quotas are rebalanced. The Parts of all
// partitions add up to Permits.
func (r Rate) Of(partition, partitions int) Limit {
	n, i := int64(partitions), int64(partition)
	all := r.PerWindow()
	l := Limit{Limiter: r.Limiter, Share: r.Share, Window: r.Window, Permits: all, Part: all*(i+1)/n - all*i/n}
	if partitions > 1 {
		l.Tag = fmt.Sprintf("%d/%d/%s/%d", all, r.Window.Milliseconds(), cmp.Or(r.Limiter, LimiterFixed), partitions)
	}
	return l
}

// RPSOf returns an equal part of RPS for one partition, at least 1, for estimates; 0 without a
// limit.
func (r Rate) RPSOf(partitions int) int64 {
	if r.RPS <= 0 {
		return 0
	}
	return max(1, r.RPS/int64(partitions))
}

// OwnPermit returns the earliest time of the tenant's next permit, without regard to the global
// limit: the later of NextPermit and RateLimitedUntil. With elastic shares a tenant without an own
// limit may borrow, so only RateLimitedUntil counts; zero if the tenant is not rate-limited.
func (r Rate) OwnPermit(st TenantState) time.Time {
	if r.Share == ShareElastic && st.Settings.RPS == nil || st.RateLimitedUntil.After(st.NextPermit) {
		return st.RateLimitedUntil
	}
	return st.NextPermit
}

// Bound returns speed, in jobs per second, or the highest speed that the tenant's limits and the
// limit of its partition allow if that is lower.
func (r Rate) Bound(st TenantState, speed float64) float64 {
	bound := func(perSecond float64) {
		if perSecond > 0 {
			speed = min(speed, perSecond)
		}
	}
	bound(r.PerSecond(st.GlobalLimit))
	switch {
	case st.Settings.RPS != nil:
		bound(*st.Settings.RPS)
	case r.Share != ShareElastic: // with elastic shares a tenant may use what others leave
		bound(r.PerSecond(st.Limit))
	}
	return speed
}

// PerSecond converts permits per window to permits per second, rounded to three decimals.
func (r Rate) PerSecond(permits int64) float64 {
	window := r.Window.Milliseconds()
	if window <= 0 {
		return 0
	}
	return math.Round(float64(permits)*1000/float64(window)*1000) / 1000
}

// PermitsUsed returns how many permits of the global limit a partition has spent: in the current
// window (fixed), in the last Window (sliding), or how many the bucket lacks (token). It is 0
// without a limit. The sum over all partitions is the number of the installation.
func PermitsUsed(ctx context.Context, c redis.Cmdable, p keyspace.Partition, limit Limit) (int64, error) {
	if limit.Permits <= 0 {
		return 0, nil
	}
	r := run(ctx, c, limitState, p, limit.args()...)
	return call.Done(r, r.Number())
}

// Quota is the part of the global limit that is assigned to one partition.
type Quota struct {
	Fenced    bool  // another process rebalances now; the other fields mean nothing
	Effective int64 // permits a window that it may spend now; sliding: or has spent in the last one, if more
	Freed     int64 // the part of this call's decrease that other partitions may have at once
	FromUS    int64 // Redis time (µs) from which the last change is effective in full, also for them; 0: it is
	Demand    int64 // permits that its waiting and due jobs could use
	Active    int64 // number of its active tenants
}

// Increase says when an increase of a quota becomes effective: AtOnce permits now, the rest at
// NotBeforeUS (Redis time, µs). With the zero Increase, or with the limiter token, all of it is
// effective at once.
type Increase struct{ NotBeforeUS, AtOnce int64 }

// ReadQuota reads a partition's quota, and stores the fence. From then on Redis refuses the calls
// of earlier quota rebalancers, which have a smaller fence.
func ReadQuota(ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit) (Quota, error) {
	return SetQuota(ctx, c, p, fence, limit, -1, Increase{})
}

// SetQuota changes a partition's quota. A decrease is effective at once. The caller may increase a
// quota only by permits that it has taken from other partitions before: their Freed is available at
// once, the rest from their FromUS on. Twice: the second call changes nothing and returns Freed 0.
func SetQuota(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit, permits int64,
	increase Increase,
) (Quota, error) {
	args := append([]any{fence}, limit.args()...)
	r := run(ctx, c, quota, p, append(args, permits, increase.NotBeforeUS, increase.AtOnce)...)
	if r.Code("OK", "FENCED") == "FENCED" {
		return call.Done(r, Quota{Fenced: true})
	}
	return call.Done(r, Quota{
		Effective: r.Number(), Freed: r.Number(), FromUS: r.Number(), Demand: r.Number(), Active: r.Number(),
	})
}

// rankGroups is the number of groups that one call of the script policy ranks. The call also ranks
// all groups that were created in the same ms as the last of them.
const rankGroups = 200

// SetPolicy chooses how a partition orders waiting jobs: with an alpha, by the priority formula
// with this ALPHA over all groups of a lane; with nil, by the fair queue. If that is a change, it
// ranks all open groups, in several calls of the script, or with nil deletes all ranks. Twice: the
// second call begins again if the first one was interrupted; otherwise it does nothing.
func SetPolicy(ctx context.Context, c redis.Cmdable, p keyspace.Partition, alpha *float64) error {
	want := ""
	if alpha != nil {
		want = strconv.FormatFloat(*alpha, 'f', -1, 64)
	}
	have, err := c.HGet(ctx, p.Rate(), layout.RateRanked).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return fmt.Errorf("read policy of partition %d: %w", p.Index(), err)
	}
	if have == want {
		return nil
	}
	for from := int64(0); ; {
		r := run(ctx, c, policy, p, want, from, rankGroups)
		more := r.Flag()
		if more {
			from = r.Number()
		}
		if err := r.Err(); err != nil || !more {
			return err
		}
	}
}
