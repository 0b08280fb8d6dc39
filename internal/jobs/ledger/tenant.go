package ledger

import (
	"context"
	"errors"
	"fmt"
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
	setting     = script("tenants/setting", "signals", "tenants", "priority", "places")
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
				tenantRPS, tenantWeight, tenantBasePriority, tenantInFlight, tenantPaused),
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
	InFlight     *int64   // most entries of its jobs in ready streams, above 0
}

// SetTenant replaces all settings of a tenant; a nil field removes that setting. The next admission
// uses the new settings. Twice: the second call stores the same settings.
func SetTenant(ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, s TenantSettings) error {
	return done(run(ctx, c, setting, p, tenant,
		orEmpty(s.RPS), orEmpty(s.Weight), orEmpty(s.BasePriority), orEmpty(s.InFlight), ""), "OK")
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
		tenantInFlight:     change.InFlight.Given,
	} {
		if !given {
			kept += name + "|"
		}
	}
	return done(run(ctx, c, setting, p, tenant,
		orEmpty(change.RPS.Value), orEmpty(change.Weight.Value), orEmpty(change.BasePriority.Value),
		orEmpty(change.InFlight.Value), kept), "OK")
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

	Places int64  // with Settings.InFlight: entries of its jobs in the ready streams
	Total  int64  // the global limit of all partitions together, permits a window; 0: none
	Share  string // the policy for unused shares
}

// Tenant reads a tenant's state. It writes only if a limiter's stored time is too far in the
// future, because the clock was set back or, with the limiter token, the tenant has borrowed
// permits: it corrects that time.
func Tenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, m Meter,
) (TenantState, error) {
	return readTenant(ctx, c, p, tenant, m, 0, TenantSettings{})
}

// TenantWith reads the state that a tenant would have now with other settings. It stores no
// settings; like Tenant, it may correct a limiter's time that is in the future.
func TenantWith(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, m Meter, set TenantSettings,
) (TenantState, error) {
	st, err := readTenant(ctx, c, p, tenant, m, 1, set)
	st.Settings.BasePriority, st.Settings.InFlight = set.BasePriority, set.InFlight
	return st, err
}

func readTenant(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, tenant string, m Meter, other int, set TenantSettings,
) (TenantState, error) {
	args := append([]any{tenant}, m.args()...)
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
	if v, err := strconv.ParseInt(r.Text(), 10, 64); err == nil {
		s.Settings.InFlight = &v
	}
	s.Places, s.Total, s.Share = r.Number(), r.Number(), r.Text()
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

var policy = script("tenants/policy", "priority")

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
