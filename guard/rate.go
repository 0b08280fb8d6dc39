package guard

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// Kind is an algorithm of a rate limiter.
type Kind int

const (
	// TokenBucket allows at most R·t/w + burst in any time t: a bucket of burst permits, which gets
	// R permits in each window w. It is the generic cell rate algorithm (ITU-T I.371).
	TokenBucket Kind = iota
	// SlidingWindow allows at most R permits in any span of the window. The permit of a lease
	// counts until a window after its release.
	SlidingWindow
)

// Rate is a limit: Permits in a Window. The zero Rate is no limit.
type Rate struct {
	Permits int           // 1 to 1e9
	Window  time.Duration // 1 ms to 24 h, whole ms
	Burst   int           // TokenBucket only: permits that can be saved up; 0 = Permits
	Kind    Kind
}

// PerWindow returns a sliding limit: at most permits in any span of w.
func PerWindow(permits int, w time.Duration) Rate {
	return Rate{Permits: permits, Window: w, Kind: SlidingWindow}
}

// Bucket returns a token bucket: it holds capacity permits, and an empty bucket is full again after
// refillOver. In some spans of refillOver it lets 2·capacity through; see PerWindow.
func Bucket(capacity int, refillOver time.Duration) Rate {
	return Rate{Permits: capacity, Window: refillOver, Burst: capacity}
}

// BreakerPolicy says when a circuit breaker opens and closes. The zero policy is no breaker.
type BreakerPolicy struct {
	Failures  int           // this many failures in a row open it; 1 to 1e6
	OpenFor   time.Duration // no calls for so long, then probes; 1 ms to 24 h
	Successes int           // this many probes must succeed before it closes; 1 to 1,000
}

// Outage says what a call does when Redis is away: Closed, Open or Local. Without the option
// OnOutage, a Limiter or Breaker is Open; the other guards are Closed by default.
type Outage string

const (
	// Closed makes calls fail with ErrUnavailable: nothing runs without a lease. A Lock and a
	// Semaphore are always Closed.
	Closed Outage = "closed"
	// Open allows calls as if there were no guard: their leases have fence 0. The constant has no
	// type because it is an Action of Control, too, which opens a breaker.
	Open = "open"

	local = "local|"
)

// Local allows calls, while Redis is away, at a rate that each process keeps for itself. For a
// Limiter only.
func Local(r Rate) Outage {
	return Outage(fmt.Sprintf("%s%d|%d|%d|%d", local, r.Permits, r.Window, r.Burst, r.Kind))
}

// localRate returns the rate of an Outage that Local has made; ok is false for any other one.
func (o Outage) localRate() (r Rate, ok bool) {
	text, ok := strings.CutPrefix(string(o), local)
	if ok {
		_, err := fmt.Sscanf(text, "%d|%d|%d|%d", &r.Permits, &r.Window, &r.Burst, &r.Kind)
		ok = err == nil
	}
	return r, ok
}

// Unbounded is a Concurrency without a bound.
const Unbounded = -1

// Spec describes a pool and its members.
type Spec struct {
	Members     []Member      // 1 to 100,000; only for a Pool
	Rate        Rate          // of each member
	Breaker     BreakerPolicy // of each member
	Concurrency int           // leases of a member at once; 0 = 1; Unbounded
	Lease       time.Duration // 100 ms to 24 h; 0 = 30 s. A holder that dies keeps its member so long
	MaxWait     time.Duration // 10 ms to 1 h; 0 = 60 s. The longest time in the queue
	MaxQueue    int           // 1 to 10,000; 0 = 10,000. The most calls in the queue
	OnOutage    Outage        // Closed (default) or Open
	Rev         int64         // number of this declaration; 0 = the newest wins
}

// Member is one thing that is lent, for example an account. Fields that are set replace those of
// the Spec.
type Member struct {
	ID          string // never a secret: it is stored in Redis, logged and shown
	Rate        *Rate
	Breaker     *BreakerPolicy
	Concurrency int // 0 = as in the Spec; Unbounded
}

const (
	defaultLease    = 30 * time.Second
	defaultMaxWait  = 60 * time.Second
	defaultMaxQueue = 10_000
	mostMembers     = 100_000
)

// withDefaults returns the spec with the defaults of Concurrency, Lease, MaxWait and MaxQueue where
// they are zero.
func (s Spec) withDefaults() Spec {
	if s.Concurrency == 0 {
		s.Concurrency = 1
	}
	if s.Lease == 0 {
		s.Lease = defaultLease
	}
	if s.MaxWait == 0 {
		s.MaxWait = defaultMaxWait
	}
	if s.MaxQueue == 0 {
		s.MaxQueue = defaultMaxQueue
	}
	return s
}

// mostRev is the largest Rev: up to it, scripts hold each whole number exactly.
const mostRev = 1 << 53

// check returns every mistake of the spec, with its defaults filled in, for a guard of this kind.
func (s Spec) check(kind string) []error {
	errs := append(checkRate("rate", s.Rate), checkBreaker("breaker", s.Breaker)...)
	errs = append(errs, checkConcurrency("concurrency", s.Concurrency)...)
	errs = append(errs, checkDuration("lease", s.Lease, 100*time.Millisecond, 24*time.Hour)...)
	errs = append(errs, checkDuration("max wait", s.MaxWait, 10*time.Millisecond, time.Hour)...)
	if s.MaxQueue < 1 || s.MaxQueue > defaultMaxQueue {
		errs = append(errs, invalid("max queue %d: must be 1 to %d", s.MaxQueue, defaultMaxQueue))
	}
	if s.OnOutage != "" && s.OnOutage != Closed && s.OnOutage != Open {
		errs = append(errs,
			invalid("on outage %.40q: must be Closed or Open; Local is for a Limiter only", string(s.OnOutage)))
	}
	if s.Rev < 0 || s.Rev > mostRev {
		errs = append(errs, invalid("rev %d: must be 0 to %d", s.Rev, int64(mostRev)))
	}
	if kind != kindPool {
		if len(s.Members) > 0 {
			errs = append(errs, invalid("members: only a Pool has its own members"))
		}
		return errs
	}
	if len(s.Members) == 0 || len(s.Members) > mostMembers {
		errs = append(errs, invalid("members: %d, must be 1 to %d", len(s.Members), mostMembers))
	}
	seen := make(map[string]bool, len(s.Members))
	for _, m := range s.Members {
		if err := checkMember(m.ID); err != nil {
			errs = append(errs, err)
		} else if seen[m.ID] {
			errs = append(errs, invalid("member %s: is declared twice", m.ID))
		}
		seen[m.ID] = true
		if m.Rate != nil {
			errs = append(errs, checkRate("member "+m.ID+": rate", *m.Rate)...)
		}
		if m.Breaker != nil {
			errs = append(errs, checkBreaker("member "+m.ID+": breaker", *m.Breaker)...)
		}
		errs = append(errs, checkConcurrency("member "+m.ID+": concurrency", m.Concurrency)...)
	}
	return errs
}

func checkDuration(field string, d, least, most time.Duration) []error {
	if d < least || d > most || d%time.Millisecond != 0 {
		return []error{invalid("%s %v: must be %v to %v, in whole ms", field, d, least, most)}
	}
	return nil
}

func checkConcurrency(field string, n int) []error {
	if n < Unbounded || n > 1_000_000 {
		return []error{invalid("%s %d: must be 1 to 1000000, or Unbounded", field, n)}
	}
	return nil
}

func checkRate(field string, r Rate) []error {
	if r == (Rate{}) {
		return nil
	}
	const most = 1_000_000_000
	var errs []error
	if r.Permits < 1 || r.Permits > most {
		errs = append(errs, invalid("%s: permits %d: must be 1 to %d", field, r.Permits, most))
	}
	errs = append(errs, checkDuration(field+": window", r.Window, time.Millisecond, 24*time.Hour)...)
	switch {
	case r.Kind != TokenBucket && r.Kind != SlidingWindow:
		errs = append(errs, invalid("%s: kind %d: must be TokenBucket or SlidingWindow", field, r.Kind))
	case r.Burst < 0 || r.Burst > most:
		errs = append(errs, invalid("%s: burst %d: must be 0 to %d", field, r.Burst, most))
	case r.Kind == SlidingWindow && r.Burst != 0:
		errs = append(errs, invalid("%s: burst %d: a SlidingWindow has none", field, r.Burst))
	}
	return errs
}

func checkBreaker(field string, b BreakerPolicy) []error {
	if b == (BreakerPolicy{}) {
		return nil
	}
	var errs []error
	if b.Failures < 1 || b.Failures > 1_000_000 {
		errs = append(errs, invalid("%s: failures %d: must be 1 to 1000000", field, b.Failures))
	}
	if b.Successes < 1 || b.Successes > 1000 {
		errs = append(errs, invalid("%s: successes %d: must be 1 to 1000", field, b.Successes))
	}
	return append(errs, checkDuration(field+": open for", b.OpenFor, time.Millisecond, 24*time.Hour)...)
}

// burst returns how many permits the bucket holds; 0 for a sliding limit.
func (r Rate) burst() int {
	if r.Kind == SlidingWindow {
		return 0
	}
	if r.Burst == 0 {
		return r.Permits
	}
	return r.Burst
}

// most returns how many permits one call can take at most.
func (r Rate) most() int {
	if r.Kind == SlidingWindow {
		return r.Permits
	}
	return r.burst()
}

func (r Rate) perSecond() float64 {
	if r == (Rate{}) {
		return math.Inf(1)
	}
	return float64(r.Permits) / r.Window.Seconds()
}

func (r Rate) kindName() string {
	switch {
	case r == (Rate{}):
		return "none"
	case r.Kind == SlidingWindow:
		return "sliding"
	}
	return "token"
}

// packRate returns a rate as the text that scripts read. lua/parts/guard.lua describes the texts of
// a spec and of a member's overrides.
func packRate(r Rate) string {
	return fmt.Sprintf("%s|%d|%d|%d", r.kindName(), r.Permits, r.Window.Milliseconds(), r.burst())
}

func packBreaker(b BreakerPolicy) string {
	return fmt.Sprintf("%d|%d|%d", b.Failures, b.OpenFor.Milliseconds(), b.Successes)
}

func packConcurrency(n int) string { return fmt.Sprint(max(n, 0)) }

func (s Spec) pack(ttl time.Duration) string {
	return fmt.Sprintf("%s|%s|%s|%d|%d|%d|%d",
		packRate(s.Rate), packBreaker(s.Breaker), packConcurrency(s.Concurrency),
		s.Lease.Milliseconds(), s.MaxWait.Milliseconds(), s.MaxQueue, ttl.Milliseconds())
}

func (m Member) pack() string {
	if m.Rate == nil && m.Breaker == nil && m.Concurrency == 0 {
		return ""
	}
	rate, breaker, concurrency := "|||", "||", ""
	if m.Rate != nil {
		rate = packRate(*m.Rate)
	}
	if m.Breaker != nil {
		breaker = packBreaker(*m.Breaker)
	}
	if m.Concurrency != 0 {
		concurrency = packConcurrency(m.Concurrency)
	}
	return rate + "|" + breaker + "|" + concurrency
}

// ttl returns the TTL of a guard's keys in Redis; 0 = for ever. It is longer than an open breaker
// and than a window, because a key that expires forgets them. Scripts set it again when less than
// half is left, or less than a lease or a spent permit lasts; see close in lua/parts/guard.lua.
func (s Spec) ttl(kind string) time.Duration {
	switch kind {
	case kindPool:
		return 0
	case kindLock, kindSemaphore:
		return s.Lease + time.Minute
	}
	return max(time.Hour, s.Breaker.OpenFor+time.Hour, s.Rate.Window+time.Minute, s.Lease+time.Minute)
}

// perSecond returns how many leases a second the rates of all members allow.
func (s Spec) perSecond() float64 {
	if len(s.Members) == 0 {
		return s.Rate.perSecond()
	}
	sum := 0.0
	for _, m := range s.Members {
		if m.Rate != nil {
			sum += m.Rate.perSecond()
		} else {
			sum += s.Rate.perSecond()
		}
	}
	return sum
}

func checkName(name string) error {
	if !validID(name) {
		return invalid("name %.140q: must be 1 to 128 of A-Z a-z 0-9 . _ -", name)
	}
	return nil
}

func checkMember(id string) error {
	if !validID(id) {
		return invalid("member %.140q: an id must be 1 to 128 of A-Z a-z 0-9 . _ -", id)
	}
	return nil
}

func validID(id string) bool {
	if len(id) < 1 || len(id) > 128 {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}
