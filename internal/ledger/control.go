package ledger

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	pause       = script("groups/pause", "signals", "tenants", "priority", "fair_queue", "non_ready")
	setting     = script("tenants/setting", "signals", "tenants", "priority")
	tenantState = script("tenants/tenant_state", "signals", "tenants", "pauses", "ready", "limiters", "shares")
)

// Pausable is a kind of thing that can be paused.
type Pausable string

// What can be paused: a group, a tenant, and a type. A type is paused partition by partition.
const (
	PauseGroup  Pausable = "group"
	PauseTenant Pausable = "tenant"
	PauseType   Pausable = "type"
)

// Pause lets nothing of id start any more; running jobs finish. Errors, for groups:
// api.ErrNotFound, api.ErrConflict when it has ended.
func Pause(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string) error {
	return setPaused(ctx, c, p, what, id, 1)
}

// Resume undoes Pause. What was suspended meanwhile comes back within moments, with
// the dispatcher's help.
func Resume(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string) error {
	return setPaused(ctx, c, p, what, id, 0)
}

func setPaused(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string, on int) error {
	r, err := run(ctx, c, pause, p, string(what), id, on)
	if err != nil {
		return err
	}
	return r.refused(id, "paused or resumed")
}

// TenantSettings are what an operator has set for a tenant; nil means the default.
type TenantSettings struct {
	RPS          *float64 // permits a second of its own, above 0; such a tenant never borrows
	Weight       *float64 // above 0; 1 by default
	BasePriority *int64   // added to the priority of all its groups, for FAIR_QUEUE_POLICY=priority
}

// SetTenant replaces a tenant's settings; the next admission follows them.
func SetTenant(ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, s TenantSettings) error {
	rps, weight, base := "", "", ""
	if s.RPS != nil {
		rps = fmt.Sprint(*s.RPS)
	}
	if s.Weight != nil {
		weight = fmt.Sprint(*s.Weight)
	}
	if s.BasePriority != nil {
		base = fmt.Sprint(*s.BasePriority)
	}
	_, err := run(ctx, c, setting, p, tenant, rps, weight, base)
	return err
}

// TenantState is a tenant's part in the flow right now.
type TenantState struct {
	Known      bool // it has groups or settings
	Settings   TenantSettings
	Paused     bool
	Active     bool      // it has jobs that want a permit, and is not paused
	Wanting    int64     // how many: waiting jobs that are neither scheduled nor of a paused group, and its markers
	Unfinished int64     // jobs that have not ended
	NonReady   int64     // non-ready jobs, also suspended ones
	NextDue    time.Time // when the first of these is due; zero: none
	PerSecond  float64   // jobs that ended, over the last 5 to 10 s; 0: not known yet
	// Congestion statistics, kept for CONGESTION_STATS_RETENTION after the last event, or until the
	// tenant's last group ends.
	Throttles   int64         // times one of its jobs was sent to non-ready for want of a permit
	Returns     int64         // times a job came back: a downstream API asked to wait, or a transient error
	Waits       time.Duration // sum of the waits given to those that came back
	LongestWait time.Duration
	LastEvent   time.Time // zero: none

	// permits of the current window: spent, and the tenant's own limit or share; 0: no limit
	Used, Limit             int64
	GlobalUsed, GlobalLimit int64     // of the partition
	ActiveTenants           int64     // of the partition
	NextPermit              time.Time // the tenant's; Now when it may have one at once
	GlobalPermit            time.Time // anybody's
	Now                     time.Time // by Redis
	RateLimitedUntil        time.Time // it waits as a whole for its next permit; zero: it does not
}

// Tenant reads a tenant's state.
func Tenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, limit Limit,
) (TenantState, error) {
	r, err := run(ctx, c, tenantState, p, append([]any{tenant}, limit.args()...)...)
	if err != nil {
		return TenantState{}, err
	}
	ms := func(i int) time.Time {
		if r.num(i) == 0 {
			return time.Time{}
		}
		return time.UnixMilli(r.num(i))
	}
	span := func(i int) time.Duration { return time.Duration(r.num(i)) * time.Millisecond }
	s := TenantState{
		Known:            r.num(0) == 1,
		Paused:           r.num(4) == 1,
		Active:           r.num(5) == 1,
		Wanting:          r.num(6),
		Unfinished:       r.num(7),
		NonReady:         r.num(8),
		NextDue:          ms(9),
		Throttles:        r.num(12),
		Returns:          r.num(13),
		Waits:            span(14),
		LongestWait:      span(15),
		LastEvent:        ms(16),
		Used:             r.num(17),
		Limit:            r.num(18),
		GlobalUsed:       r.num(19),
		GlobalLimit:      r.num(20),
		ActiveTenants:    r.num(21),
		NextPermit:       time.UnixMicro(r.num(22)),
		GlobalPermit:     time.UnixMicro(r.num(23)),
		Now:              time.UnixMicro(r.num(24)),
		RateLimitedUntil: ms(25),
	}
	if v, err := strconv.ParseFloat(r.str(1), 64); err == nil {
		s.Settings.RPS = &v
	}
	if v, err := strconv.ParseFloat(r.str(2), 64); err == nil {
		s.Settings.Weight = &v
	}
	if v, err := strconv.ParseInt(r.str(3), 10, 64); err == nil {
		s.Settings.BasePriority = &v
	}
	s.PerSecond = pace(r.str(10), r.num(11), s.Now)
	return s, nil
}

// pace is the speed since the older of the marks that outcome leaves: "ms count ms count". After a
// long pause it is since the newer one.
func pace(marks string, ended int64, now time.Time) float64 {
	const tooOld, tooYoung = 12 * time.Second, 200 * time.Millisecond
	var at, n, newer, count int64
	read, _ := fmt.Sscan(marks, &at, &n, &newer, &count)
	if read < 2 {
		return 0
	}
	if read == 4 && now.Sub(time.UnixMilli(at)) > tooOld {
		at, n = newer, count
	}
	elapsed := now.Sub(time.UnixMilli(at))
	if elapsed < tooYoung {
		return 0
	}
	return float64(ended-n) / elapsed.Seconds()
}
