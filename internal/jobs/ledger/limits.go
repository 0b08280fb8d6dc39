package ledger

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

var (
	quota      = script("tenants/quota", "signals", "tenants", "pauses", "ready", "non_ready", "limiters", "shares")
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

// Meter is how permits are counted. All processes of an installation must have the same.
type Meter struct {
	Limiter string // "": fixed
	Window  time.Duration
}

func (m Meter) args() []any { return []any{cmp.Or(m.Limiter, LimiterFixed), m.Window.Milliseconds()} }

// PerWindow returns the permits in a window of a limit of rps permits a second: at least 1, or 0
// without a limit.
func (m Meter) PerWindow(rps int64) int64 {
	if rps <= 0 {
		return 0
	}
	return max(1, rps*m.Window.Milliseconds()/1000)
}

// PerSecond converts permits per window to permits per second, rounded to three decimals.
func (m Meter) PerSecond(permits int64) float64 {
	window := m.Window.Milliseconds()
	if window <= 0 {
		return 0
	}
	return math.Round(float64(permits)*1000/float64(window)*1000) / 1000
}

// RPSOf returns an equal part of rps for one partition, at least 1, for estimates; 0 without a limit.
func RPSOf(rps int64, partitions int) int64 {
	if rps <= 0 {
		return 0
	}
	return max(1, rps/int64(partitions))
}

// OwnPermit returns the earliest time of the tenant's next permit, without regard to the global
// limit: the later of NextPermit and RateLimitedUntil. With elastic shares a tenant without an own
// limit may borrow, so only RateLimitedUntil counts; zero if the tenant is not rate-limited.
func (st *TenantState) OwnPermit() time.Time {
	if st.Share == ShareElastic && st.Settings.RPS == nil || st.RateLimitedUntil.After(st.NextPermit) {
		return st.RateLimitedUntil
	}
	return st.NextPermit
}

// Bound returns speed, in jobs per second, or the highest speed that the tenant's limits and the
// limit of its partition allow if that is lower.
func (m Meter) Bound(st *TenantState, speed float64) float64 {
	bound := func(perSecond float64) {
		if perSecond > 0 {
			speed = min(speed, perSecond)
		}
	}
	bound(m.PerSecond(st.GlobalLimit))
	switch {
	case st.Settings.RPS != nil:
		bound(*st.Settings.RPS)
	case st.Share != ShareElastic: // with elastic shares a tenant may use what others leave
		bound(m.PerSecond(st.Limit))
	}
	return speed
}

// LimitState is what a partition has spent of the global limit, and what it has of the limits of a
// type. Permits that are spent are those of the current window (fixed), of the last Window (sliding),
// or those that the bucket lacks (token). The sum over all partitions is the number of the
// installation.
type LimitState struct {
	Used            int64 // permits spent of the global limit; 0 without one
	Permits, Spent  int64 // those of the type: in a window, and spent; Permits -1: it has no rate
	NextPermit      time.Time
	Places, Entries int64 // entries that its ready stream may have and has; Places -1: it has no bound
	Now             time.Time
}

// ReadLimits reads what is left of a partition's limits; with typ "" of the global one only.
func ReadLimits(ctx context.Context, c redis.Cmdable, p keyspace.Partition, m Meter, typ string) (LimitState, error) {
	r := run(ctx, c, limitState, p, append(m.args(), typ)...)
	return call.Done(r, LimitState{
		Used: r.Number(), Permits: r.Number(), Spent: r.Number(), NextPermit: time.UnixMicro(r.Number()),
		Places: r.Number(), Entries: r.Number(), Now: time.UnixMicro(r.Number()),
	})
}

// Limit is a limit that is divided among partitions: a rate, in permits a window, or a bound of a
// type's jobs in flight, in places.
type Limit struct {
	Type   string // "": of all jobs
	Places bool   // a bound; otherwise a rate
	Total  int64  // of all partitions together; of the global rate 0: none
}

// Part is what a partition has of a Limit.
type Part struct {
	Total  int64 // of which it had a part before the call; -1: it knows none; 0: there was no limit
	Held   int64 // what other partitions may not have: Quota, or what was used of a larger one
	FromUS int64 // Redis time (µs) from which on the last change is effective in full; 0: it is
	Demand int64 // permits that its waiting and due jobs could use; of places also those that are used
	Quota  int64 // what it may use now
}

// Parts are a partition's parts of all limits, in the order of the limits that were asked for.
type Parts struct {
	Fenced bool  // another process leads now; the other fields but Fence mean nothing
	Fence  int64 // the fencing number of that process
	Active int64 // number of its active tenants
	Of     []Part
}

// Order is the number of a call of the leader of the limits. Redis refuses calls that are late: of a
// lower Fence, or of the same and a lower Step.
type Order struct{ Fence, Step int64 }

// Terms are the new parts of a partition. To has one for each limit; an increase is effective at
// NotBeforeUS (Redis time, µs), and AtOnce of it at once.
type Terms struct {
	Rev        int64 // revision of the settings
	Share      string
	Partitions int  // of the installation
	Wake       bool // jobs that wait for a permit are looked at again at once
	To         []Increase
}

// Keep is a value of Increase.To: the part stays as it is.
const Keep = int64(-1)

// Increase says what a part becomes and when. With the limiter token, and of places, all of it is
// effective at once.
type Increase struct{ To, NotBeforeUS, AtOnce int64 }

// ReadParts reads a partition's parts of these limits, and stores the order of the call.
func ReadParts(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, at Order, m Meter, limits []Limit,
) (Parts, error) {
	return SetParts(ctx, c, p, at, m, limits, Terms{Rev: -1, To: make([]Increase, len(limits))})
}

// SetParts changes a partition's parts. A decrease is effective at once. The caller may increase a
// part only by what no other partition holds. A type that is not among the limits has none any more.
// Twice: the second call changes nothing.
func SetParts(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, at Order, m Meter, limits []Limit, t Terms,
) (Parts, error) {
	args := append([]any{at.Fence, at.Step}, m.args()...)
	args = append(args, t.Rev, cmp.Or(t.Share, ShareStatic), oldTag(m, t.Partitions, limits), flag(t.Wake))
	for i, l := range limits {
		kind := "rate"
		if l.Places {
			kind = "places"
		}
		args = append(args, kind, l.Type, l.Total, t.To[i].To, t.To[i].NotBeforeUS, t.To[i].AtOnce)
	}
	r := run(ctx, c, quota, p, args...)
	if r.Code("OK", "FENCED") == "FENCED" {
		return call.Done(r, Parts{Fenced: true, Fence: r.Number()})
	}
	parts := Parts{Active: r.Number()}
	for range limits {
		l := r.List()
		parts.Of = append(parts.Of, Part{l.Number(), l.Number(), l.Number(), l.Number(), l.Number()})
	}
	return call.Done(r, parts)
}

// oldTag names the limit for processes that know no layout 3: they divide it among n partitions
// anew when the name changes.
func oldTag(m Meter, n int, limits []Limit) string {
	if n <= 1 {
		return ""
	}
	return fmt.Sprintf("%d/%d/%s/%d", limits[0].Total, m.Window.Milliseconds(), cmp.Or(m.Limiter, LimiterFixed), n)
}

func flag(on bool) int {
	if on {
		return 1
	}
	return 0
}

var (
	setLimits = call.NewScript("set_limits", lua.Source("tenants/set_limits"))
	setIfNone = call.NewScript("layout", lua.Source("processes/layout")) // a field of a hash
)

// TypeSettings are the limits of a type that were set; nil: none.
type TypeSettings struct{ RPS, InFlight *int64 }

// LimitSettings are the limits that were set while processes run, and what the leader of the limits
// has made of them. A nil field has its value from the environment.
type LimitSettings struct {
	Rev                        int64 // grows with each change
	RPS                        *int64
	Share                      *string
	DefaultBackoff, MaxBackoff *time.Duration
	Types                      map[string]TypeSettings
	Applied                    int64 // the revision that is in effect in all partitions
	AppliedAt                  time.Time
	Leader                     *api.ConfiguredLimits // the environment of the last leader; nil: there was none
}

// Fields of the hash limits.
const (
	limitsRev        = "rev"
	limitsRPS        = "rps"
	limitsShare      = "share"
	limitsBackoff    = "default_backoff"
	limitsMaxBackoff = "max_backoff"
	limitsType       = "type:" // a prefix: type:TYPE:rps and type:TYPE:in_flight
	limitsApplied    = "applied"
	limitsAppliedAt  = "applied_at"
	limitsLeader     = "leader"
	limitsLimiter    = "limiter"
	limitsWindow     = "window"
)

// Limits returns the limits that are divided among partitions, the global one first; rps is the
// configured one.
func (s *LimitSettings) Limits(m Meter, rps int64) []Limit {
	if s.RPS != nil {
		rps = *s.RPS
	}
	limits := []Limit{{Total: m.PerWindow(rps)}}
	for _, typ := range slices.Sorted(maps.Keys(s.Types)) {
		if n := s.Types[typ].RPS; n != nil {
			limits = append(limits, Limit{Type: typ, Total: m.PerWindow(*n)})
		}
		if n := s.Types[typ].InFlight; n != nil {
			limits = append(limits, Limit{Type: typ, Places: true, Total: *n})
		}
	}
	return limits
}

// ReadLimitSettings reads the limits that were set.
func ReadLimitSettings(ctx context.Context, c redis.Cmdable, space keyspace.Space) (LimitSettings, error) {
	fields, err := c.HGetAll(ctx, space.Limits()).Result()
	if err != nil {
		return LimitSettings{}, fmt.Errorf("read limits: %w", err)
	}
	whole := func(field string) *int64 {
		n, err := strconv.ParseInt(fields[field], 10, 64)
		if err != nil {
			return nil
		}
		return &n
	}
	orZero := func(n *int64) int64 {
		if n == nil {
			return 0
		}
		return *n
	}
	span := func(field string) *time.Duration {
		d, err := time.ParseDuration(fields[field])
		if err != nil {
			return nil
		}
		return &d
	}
	s := LimitSettings{
		Rev: orZero(whole(limitsRev)), RPS: whole(limitsRPS), Types: map[string]TypeSettings{},
		DefaultBackoff: span(limitsBackoff), MaxBackoff: span(limitsMaxBackoff), Applied: orZero(whole(limitsApplied)),
	}
	if at := whole(limitsAppliedAt); at != nil {
		s.AppliedAt = time.UnixMilli(*at)
	}
	if share, ok := fields[limitsShare]; ok {
		s.Share = &share
	}
	var leader api.ConfiguredLimits
	if json.Unmarshal([]byte(fields[limitsLeader]), &leader) == nil {
		s.Leader = &leader
	}
	for field := range fields {
		rest, ok := strings.CutPrefix(field, limitsType)
		if !ok {
			continue
		}
		i := strings.LastIndexByte(rest, ':')
		typ := rest[:max(0, i)]
		t := s.Types[typ]
		switch rest[i+1:] {
		case limitsRPS:
			t.RPS = whole(field)
		case tenantInFlight:
			t.InFlight = whole(field)
		}
		s.Types[typ] = t
	}
	return s, nil
}

// SetLimits stores a change of limits, if the revision still is rev; otherwise ok is false. Twice:
// the second call finds another revision.
func SetLimits(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, rev int64, p api.GlobalPatch, types map[string]api.TypePatch,
) (ok bool, err error) {
	args := []any{rev, 1}
	set := func(given bool, field string, value any) {
		if given {
			args = append(args, field, value)
		}
	}
	set(p.RPS.Given, limitsRPS, orEmpty(p.RPS.Value))
	set(p.Share.Given, limitsShare, orEmpty(p.Share.Value))
	set(p.DefaultBackoff.Given, limitsBackoff, orEmpty(p.DefaultBackoff.Value))
	set(p.MaxBackoff.Given, limitsMaxBackoff, orEmpty(p.MaxBackoff.Value))
	for typ, t := range types {
		set(t.RPS.Given, limitsType+typ+":"+limitsRPS, orEmpty(t.RPS.Value))
		set(t.InFlight.Given, limitsType+typ+":"+tenantInFlight, orEmpty(t.InFlight.Value))
	}
	reply, err := setLimits.Run(ctx, c, []string{space.Limits()}, args)
	if err != nil {
		return false, fmt.Errorf("set limits: %w", err)
	}
	r := setLimits.Reply(reply)
	return call.Done(r, r.Flag())
}

// MarkApplied stores that a revision is in effect in all partitions, and the environment of the
// leader.
func MarkApplied(
	ctx context.Context, c redis.Cmdable, space keyspace.Space, rev int64, at time.Time, leader api.ConfiguredLimits,
) error {
	text, err := json.Marshal(leader)
	if err != nil {
		return err
	}
	_, err = setLimits.Run(ctx, c, []string{space.Limits()}, []any{
		rev, 0, limitsApplied, rev, limitsAppliedAt, at.UnixMilli(), limitsLeader, string(text),
	})
	return err
}

// LimitsWake returns the key of the list whose wake tokens end the pause of the leader of the limits.
func LimitsWake(space keyspace.Space) string { return space.Partition(0).Wake("rebalancer") }

// WakeLimits wakes the leader of the limits. The token may reach a process that does not lead.
func WakeLimits(ctx context.Context, c redis.Cmdable, space keyspace.Space) error {
	n, err := c.LLen(ctx, LimitsWake(space)).Result()
	if err == nil && n == 0 {
		err = c.LPush(ctx, LimitsWake(space), "1").Err()
	}
	return err
}

// AppliedRev returns the revision of the limits that a partition knows.
func AppliedRev(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (int64, error) {
	n, err := c.HGet(ctx, p.Rate(), limitsRev).Int64()
	if errors.Is(err, redis.Nil) {
		return -1, nil
	}
	return n, err
}

// ErrMeter is wrapped by the error of CheckMeter for an installation that counts in another way.
var ErrMeter = errors.New("permits are counted in another way")

// CheckMeter returns an error if the installation counts permits in another way than m. The first
// process stores how it does.
func CheckMeter(ctx context.Context, c redis.Cmdable, space keyspace.Space, m Meter) error {
	limiter, window := cmp.Or(m.Limiter, LimiterFixed), strconv.FormatInt(m.Window.Milliseconds(), 10)
	have := []string{limiter, window}
	for i, field := range []string{limitsLimiter, limitsWindow} {
		reply, err := setIfNone.Run(ctx, c, []string{space.Limits()}, []any{field, "", have[i]})
		if err != nil {
			return fmt.Errorf("read limits: %w", err)
		}
		r := setIfNone.Reply(reply)
		if have[i], err = call.Done(r, r.Text()); err != nil {
			return err
		}
	}
	if have[0] == limiter && have[1] == window {
		return nil
	}
	return fmt.Errorf("%w: BULKACTION_BACKPRESSURE_LIMITER is %s and BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW %sms, but the "+
		"installation %s counts with %s in windows of %sms: give all processes the same values; to change them, stop "+
		"all processes and run: bulkaction limit reset-counting", ErrMeter, limiter, window, space.Prefix(), have[0], have[1])
}

// ForgetMeter lets the next process that starts say how permits are counted.
func ForgetMeter(ctx context.Context, c redis.Cmdable, space keyspace.Space) error {
	return c.HDel(ctx, space.Limits(), limitsLimiter, limitsWindow).Err()
}
