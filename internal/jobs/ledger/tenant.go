package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	pause       = script("groups/pause", "signals", "tenants", "priority", "fair_queue", "non_ready")
	setting     = script("tenants/setting", "signals", "tenants", "priority")
	tenantState = script("tenants/tenant_state", "signals", "tenants", "pauses", "ready", "limiters", "shares")
)

// Pausable is a kind of thing that Pause can pause.
type Pausable string

// The kinds of things that Pause can pause. A type is paused in each partition separately.
const (
	PauseGroup  Pausable = "group"
	PauseTenant Pausable = "tenant"
	PauseType   Pausable = "type"
)

// Pause stops the jobs of a group, tenant or type from starting; jobs in flight finish. It creates
// a tenant that is not known. Twice: the second call changes nothing. Errors, for groups:
// api.ErrNotFound; api.ErrConflict if the group has ended.
func Pause(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string) error {
	return setPaused(ctx, c, p, what, id, 1)
}

// Resume undoes Pause. Promote then makes the suspended jobs non-ready again, in batches, unless
// they are paused for another reason. Twice and errors: as Pause.
func Resume(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string) error {
	return setPaused(ctx, c, p, what, id, 0)
}

func setPaused(ctx context.Context, c redis.Cmdable, p keyspace.Partition, what Pausable, id string, on int) error {
	return done(run(ctx, c, pause, p, string(what), id, on), "OK")
}

// TenantRef names a tenant and its partition.
type TenantRef struct {
	Partition keyspace.Partition
	ID        string
}

// Tenants returns known tenants of these partitions whose id is greater than after, ordered by id;
// with after "" from the first one on. It reads at most n ids of each partition, in one round trip.
// It skips no id before the last one that it returns. more says that there may be others; then it
// returns at least n.
func Tenants(
	ctx context.Context, c redis.Cmdable, parts []keyspace.Partition, after string, n int,
) (found []TenantRef, more bool, err error) {
	low := "-"
	if after != "" {
		low = "(" + after
	}
	reads, err := pipelined(ctx, c, parts, func(pipe redis.Pipeliner, p keyspace.Partition) *redis.StringSliceCmd {
		return pipe.ZRangeByLex(ctx, p.Tenants(), &redis.ZRangeBy{Min: low, Max: "+", Count: int64(n)})
	})
	if err != nil {
		return nil, false, fmt.Errorf("list tenants: %w", err)
	}
	last := "" // the lowest id after which a partition may have ids that were not read
	for i, r := range reads {
		ids := r.Val()
		for _, id := range ids {
			found = append(found, TenantRef{parts[i], id})
		}
		if len(ids) == n && (!more || ids[n-1] < last) {
			more, last = true, ids[n-1]
		}
	}
	slices.SortFunc(found, func(a, b TenantRef) int { return strings.Compare(a.ID, b.ID) })
	if more {
		found = slices.DeleteFunc(found, func(t TenantRef) bool { return t.ID > last })
	}
	return found, more, nil
}

// ImplicitTenants says which of these tenants are implicit: the tenant's only group has the
// tenant's id, and the tenant has no settings and is not paused. It costs one round trip and two
// constant reads a tenant.
func ImplicitTenants(ctx context.Context, c redis.Cmdable, tenants []TenantRef) ([]bool, error) {
	type replies struct {
		groups *redis.StringSliceCmd
		set    *redis.SliceCmd
	}
	reads, err := pipelined(ctx, c, tenants, func(pipe redis.Pipeliner, t TenantRef) replies {
		return replies{
			pipe.ZRange(ctx, t.Partition.GroupsOf(t.ID), 0, 1),
			pipe.HMGet(ctx, t.Partition.Tenant(t.ID),
				tenantRPS, tenantWeight, tenantBasePriority, tenantPaused),
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read groups of tenants: %w", err)
	}
	implicit := make([]bool, len(tenants))
	for i, r := range reads {
		implicit[i] = slices.Equal(r.groups.Val(), []string{tenants[i].ID}) &&
			!slices.ContainsFunc(r.set.Val(), func(value any) bool { return value != nil })
	}
	return implicit, nil
}

// TenantSettings are the settings that an operator has made for a tenant; nil means the default.
type TenantSettings struct {
	RPS          *float64 // a rate limit of its own, permits a second, above 0; it never borrows then
	Weight       *float64 // above 0; the default is 1
	BasePriority *int64   // added to the priority of all its groups, with FAIR_QUEUE_POLICY=priority
}

// SetTenant replaces all settings of a tenant; a nil field removes that setting. The next admission
// uses the new settings. Twice: the second call stores the same settings.
func SetTenant(ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, s TenantSettings) error {
	return done(run(ctx, c, setting, p, tenant,
		orEmpty(s.RPS), orEmpty(s.Weight), orEmpty(s.BasePriority), ""), "OK")
}

// ChangeTenant changes those settings of a tenant that the patch contains; the others stay as they
// are. The next admission uses the new settings. Twice: the second call stores the same settings.
func ChangeTenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, change api.TenantPatch,
) error {
	kept := ""
	for name, given := range map[string]bool{
		tenantRPS:          change.RPS.Given,
		tenantWeight:       change.Weight.Given,
		tenantBasePriority: change.BasePriority.Given,
	} {
		if !given {
			kept += name + "|"
		}
	}
	return done(run(ctx, c, setting, p, tenant,
		orEmpty(change.RPS.Value), orEmpty(change.Weight.Value), orEmpty(change.BasePriority.Value), kept), "OK")
}

// orEmpty returns the script argument for an optional value: "" for nil.
func orEmpty[T any](value *T) any {
	if value == nil {
		return ""
	}
	return *value
}

// TenantState is the limits, the usage and the queue of a tenant.
type TenantState struct {
	Known    bool // it has groups or settings, or is paused
	Settings TenantSettings
	Paused   bool
	Active   bool // it has jobs that want a permit, and is not paused
	// Wanting is the number of jobs that want a permit: markers, and waiting jobs except those of
	// scheduled and paused groups.
	Wanting    int64
	Unfinished int64   // jobs that have not ended
	NonReady   int64   // non-ready jobs, suspended ones too
	PerSecond  float64 // jobs a second that were done or failed lately (see pace); 0: none, or not known
	// The next fields are congestion statistics, kept for CONGESTION_STATS_RETENTION after the last
	// event, or until the tenant's last group ends.
	Throttles   int64         // times that one of its jobs became the marker, because it got no permit
	Returns     int64         // times that a downstream API or a transient error sent one of its jobs back
	Waits       time.Duration // sum of the waits that these returns set
	LongestWait time.Duration // the longest of these waits
	LastEvent   time.Time     // the last throttle or return; zero: none

	// Used is the number of permits that the tenant has spent, as PermitsUsed counts them for a
	// partition; Limit is its own limit or share, permits a window. 0: no limit.
	Used, Limit             int64
	GlobalUsed, GlobalLimit int64     // the same of all tenants of the partition, whose limit is its quota
	ActiveTenants           int64     // of the partition; with a limit, also this one and others with due jobs
	NextPermit              time.Time // next permit of the tenant's own limit or share; Now if one is left
	GlobalPermit            time.Time // the partition's next permit; Now if one is left
	Now                     time.Time // by Redis
	RateLimitedUntil        time.Time // the latest of all types; zero: it is not rate-limited
}

// Tenant reads a tenant's state. It writes only if a limiter's stored time is too far in the
// future, because the clock was set back or, with the limiter token, the tenant has borrowed
// permits: it corrects that time.
func Tenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, limit Limit,
) (TenantState, error) {
	return readTenant(ctx, c, p, tenant, limit, 0, TenantSettings{})
}

// TenantWith reads the state that a tenant would have now with other settings. It stores no
// settings; like Tenant, it may correct a limiter's time that is in the future.
func TenantWith(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, limit Limit, set TenantSettings,
) (TenantState, error) {
	st, err := readTenant(ctx, c, p, tenant, limit, 1, set)
	st.Settings.BasePriority = set.BasePriority
	return st, err
}

func readTenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, limit Limit, other int,
	set TenantSettings,
) (TenantState, error) {
	args := append([]any{tenant}, limit.args()...)
	r := run(ctx, c, tenantState, p, append(args, other, orEmpty(set.RPS), orEmpty(set.Weight))...)
	s := TenantState{Known: r.Flag()}
	if v, err := strconv.ParseFloat(r.Text(), 64); err == nil {
		s.Settings.RPS = &v
	}
	if v, err := strconv.ParseFloat(r.Text(), 64); err == nil {
		s.Settings.Weight = &v
	}
	if v, err := strconv.ParseInt(r.Text(), 10, 64); err == nil {
		s.Settings.BasePriority = &v
	}
	s.Paused, s.Active = r.Flag(), r.Flag()
	s.Wanting, s.Unfinished, s.NonReady = r.Number(), r.Number(), r.Number()
	marks, ended := r.Text(), r.Number()
	s.Throttles, s.Returns = r.Number(), r.Number()
	s.Waits, s.LongestWait, s.LastEvent = r.Duration(), r.Duration(), r.Time()
	s.Used, s.Limit, s.GlobalUsed, s.GlobalLimit = r.Number(), r.Number(), r.Number(), r.Number()
	s.ActiveTenants = r.Number()
	s.NextPermit, s.GlobalPermit = time.UnixMicro(r.Number()), time.UnixMicro(r.Number())
	s.Now, s.RateLimitedUntil = time.UnixMicro(r.Number()), r.Time()
	s.PerSecond = pace(marks, ended, s.Now)
	return call.Done(r, s)
}

// pace returns the tenant's present speed: ended jobs a second since the older of two marks, which
// outcome.lua writes as "ms count ms count", at least 5 s apart. If the older mark is more than
// 12 s old, it uses the newer one. All jobs that have ended since the newer mark did so within 5 s
// of it, so of an idle tenant the speed falls, and is 0 when that mark is 12 s old. Of a mark
// younger than 200 ms it returns 0.
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
	if elapsed < tooYoung || elapsed > tooOld {
		return 0
	}
	return float64(ended-n) / elapsed.Seconds()
}

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
	have, err := c.HGet(ctx, p.Rate(), rateRanked).Result()
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
