package main

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/url"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

const (
	guardProcesses = 8 // make calls while limits and queues are checked
	speedProcesses = 4 // make calls while speed is measured
	smallPool      = 40
	largePool      = 10_000
)

// Limits and a breaker that no part reaches.
var (
	wideBucket  = guard.Bucket(1_000_000, time.Second)
	wideWindow  = guard.PerWindow(1_000_000_000, time.Second)
	wideBreaker = guard.BreakerPolicy{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}
)

// guardBench is one run of the benchmark of package guard: a Redis, and child processes that call
// guards on it.
type guardBench struct {
	options
	*fleet
	quick   bool // shorter measurements
	rounds  int
	seconds float64 // duration of each measurement of speed or latency
	loaders []*loader
	prefix  string // of all keys of the run
	given   int    // number of prefixes that were given out
}

var guardsBenchmark = benchmark{
	"guards", "Limiter, pool, lock and queue of package guard: speed, latency, and whether limits hold",
	func(f *flags) runner {
		b := &guardBench{prefix: "guard:"}
		f.BoolVar(&b.quick, "quick", false, "shorter measurements, and 3 rounds unless --rounds is given: under a minute")
		f.int(&b.rounds, "rounds", 5, 1, 0, "measurements of each figure; medians are shown")
		f.float(&b.seconds, "seconds", 0, 0, 60, "duration of each measurement of speed or latency; 0: 2, with --quick 0.5")
		parts := f.parts(
			part{"take", b.inRounds(b.takes)}, part{"pairs", b.inRounds(b.pairs)}, part{"lock", b.inRounds(b.locks)},
			part{"handover", b.inRounds(b.handovers)}, part{"limits", b.limits})
		f.redis()
		f.noRoles = true
		return func(ctx context.Context, o options) (any, error) {
			if b.quick && !f.given("rounds") {
				b.rounds = 3
			}
			if b.seconds == 0 {
				b.seconds = map[bool]float64{false: 2, true: 0.5}[b.quick]
			}
			if b.options = o; o.redisURL != "" { // other data may be there
				b.prefix = privatePrefix()
			}
			b.fleet = startRedis(ctx, o)
			defer b.close()
			for range guardProcesses {
				b.loaders = append(b.loaders, must(startLoader(ctx)))
			}
			out, err := runParts(ctx, o, parts(), false)
			return out.with(values{
				"quick": b.quick, "rounds": b.rounds, "cpus": runtime.NumCPU(), "overrides": values{}, // no roles run
			}), err
		}
	},
}

func (b *guardBench) close() {
	for _, l := range b.loaders {
		l.close()
	}
	if b.redisURL != "" {
		_ = b.removeKeys(context.Background(), b.prefix)
	}
	b.fleet.close()
}

// newPrefix returns a prefix of keys that nothing uses yet.
func (b *guardBench) newPrefix() string {
	b.given++
	return b.prefix + strconv.Itoa(b.given) + ":"
}

// inRounds returns a part that measures figures b.rounds times and returns their medians.
func (b *guardBench) inRounds(once func() map[string]float64) func(context.Context) values {
	return func(context.Context) values {
		rounds := map[string][]float64{}
		for range b.rounds {
			for name, figure := range once() {
				rounds[name] = append(rounds[name], figure)
			}
		}
		out := values{}
		for name, figure := range mediansOf(rounds) {
			out[name] = figure
		}
		return out
	}
}

func mediansOf(rounds map[string][]float64) map[string]float64 {
	out := map[string]float64{}
	for name, figures := range rounds {
		out[name] = round4(median(figures))
	}
	return out
}

// perSecond runs a task in some processes at full speed, after a short run to warm up, and returns
// the calls a second of all.
func (b *guardBench) perSecond(t guardTask) float64 {
	t.Seconds, t.Prefix = b.seconds/4, b.newPrefix()
	b.carryOut(speedProcesses, t) // to warm up
	t.Seconds = b.seconds
	b.prepare(speedProcesses, t)
	began := time.Now()
	b.begin(speedProcesses)
	r := b.end(speedProcesses)
	return float64(r.Calls) / max(t.Seconds, time.Since(began).Seconds())
}

// p99 returns the 99th percentile (ms) of the time of a call, from the time at which it was due,
// while all processes together make this number of calls a second.
func (b *guardBench) p99(t guardTask, perSecond int) float64 {
	t.PerSecond, t.Seconds = float64(perSecond)/speedProcesses, b.seconds
	return percentile(b.carryOut(speedProcesses, t).Waits, 99)
}

// takes measures Limiter.Take: 4 processes of 16 goroutines, 1,000 keys with a token bucket or a
// sliding window, no limit reached.
func (b *guardBench) takes() map[string]float64 {
	t := guardTask{Kind: "take", Goroutines: 16, Names: 1000, Rate: wideBucket}
	sliding := t
	sliding.Rate = wideWindow
	return map[string]float64{
		"take_per_second": b.perSecond(t), "take_p99_ms": b.p99(t, 5000), "sliding_take_per_second": b.perSecond(sliding),
	}
}

// pairs measures pairs of Pool.Acquire and Release, from 4 processes with 8 goroutines each. Members
// have a token bucket and a breaker, plain ones neither; no limit is reached.
func (b *guardBench) pairs() map[string]float64 {
	t := guardTask{Kind: "pair", Goroutines: 8, Members: smallPool, Capacity: 1, Rate: wideBucket, Breaker: wideBreaker}
	large, plain := t, t
	large.Members = largePool
	plain.Rate, plain.Breaker = guard.Rate{}, guard.BreakerPolicy{}
	speed := b.perSecond(t)
	return map[string]float64{
		"pairs_per_second": speed, "pairs_10000_ratio": ratio(speed, b.perSecond(large)),
		"plain_pairs_per_second": b.perSecond(plain),
	}
}

// locks measures locking and unlocking, from 4 processes of 16 goroutines, with 1,000 locks. No call
// waits.
func (b *guardBench) locks() map[string]float64 {
	t := guardTask{Kind: "lock", Goroutines: 16, Names: 1000}
	return map[string]float64{"lock_pairs_per_second": b.perSecond(t), "lock_p99_ms": b.p99(t, 1000)}
}

// handovers measures the time from the release of a lock, by Redis's clock, until the call of the
// next holder returns. 64 calls of 8 processes wait for one lock; each holds it for 1 ms.
func (b *guardBench) handovers() map[string]float64 {
	r := b.carryOut(guardProcesses, guardTask{
		Kind: "handover", Goroutines: 64 / guardProcesses, Names: 1, Seconds: b.seconds, Hold: time.Millisecond,
	})
	return map[string]float64{"handover_p50_ms": percentile(r.Waits, 50), "handover_p99_ms": percentile(r.Waits, 99)}
}

// limits checks whether limits hold. 8 processes call through a proxy that drops 5% of Redis's
// replies; then 8 processes call without it.
func (b *guardBench) limits(context.Context) values {
	const lostReplies = 0.05 // the probability with which the proxy drops a reply, and resets the connection
	at := must(url.Parse(b.url))
	proxy := must(redisproc.NewProxy(at.Host))
	defer proxy.Close() //nolint:errcheck // nothing can be lost
	at.Host = proxy.Addr()
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	allowed, over := 0, 0
	for _, t := range []guardTask{
		{Kind: "take", Names: 2, Rate: guard.Rate{Permits: 200, Window: time.Second, Burst: 50}},
		{Kind: "take", Names: 2, Rate: guard.PerWindow(200, time.Second)},
		{
			Kind: "lease", Members: 4, Capacity: 2, Rate: guard.PerWindow(50, time.Second),
			Breaker: wideBreaker, Hold: time.Millisecond,
		},
	} {
		t.URL, t.Goroutines, t.Seconds, t.Faults = at.String(), 4, b.seconds, true
		b.prepare(guardProcesses, t)
		proxy.DropReplies(lostReplies, rng)
		b.begin(guardProcesses)
		r := b.end(guardProcesses)
		proxy.Heal()
		allowed, over = allowed+len(r.Events), over+overdraws(r.Events, t)
	}
	used, more := b.limitUsed()
	return values{
		// Calls that exceed a limit: a token bucket, a sliding window, or the rate of a pool's
		// members. Leases of a pool are counted at their grant, and again when their holder works.
		// Leases beyond a member's concurrency count too.
		"overdraws":            over + more,
		"allowed_under_faults": allowed, // while replies were lost
		"dropped_replies":      proxy.Dropped(),
		"limit_used_ratio":     used, // granted leases / allowed ones, while more calls wait, without faults
	}
}

// limitUsed runs leases of a pool with more demand than its limit allows. used is the granted
// leases / the allowed ones in whole windows; over is the number of leases that break the limit.
func (b *guardBench) limitUsed() (used float64, over int) {
	const members, perSecond = 8, 50
	window := min(seconds(b.seconds), time.Second)
	permits := max(1, int(perSecond*window.Seconds()))
	t := guardTask{
		Kind: "lease", Goroutines: 8, Members: members, Capacity: 8, Rate: guard.PerWindow(permits, window),
		Seconds: b.seconds + 2*window.Seconds(),
	}
	r := b.carryOut(guardProcesses, t)
	if len(r.Events) == 0 {
		failf("no call got a lease")
	}
	// Only windows from the second on count: the first one begins with all of its permits. The
	// calls go on until the last counted window is over.
	windows := int64(seconds(b.seconds) / window)
	from := slices.MinFunc(r.Events, byGrant).Granted + window.Microseconds()
	to, granted := from+windows*window.Microseconds(), 0
	for _, e := range r.Events {
		if e.Granted >= from && e.Granted < to {
			granted++
		}
	}
	return ratio(granted, windows*int64(members*permits)), overdraws(r.Events, t)
}

// overdraws returns how often calls have broken the limits of t. For each key or member it counts
// the calls that exceed t.Rate. For a pool with a sliding window it also counts the starts of work
// that exceed t.Rate, under leases shorter than the window, and the leases that exceed the
// concurrency t.Capacity. So one lease may count more than once.
func overdraws(events []guardEvent, t guardTask) (n int) {
	byName := map[string][]guardEvent{}
	for _, e := range events {
		byName[e.Name] = append(byName[e.Name], e)
	}
	for _, of := range byName {
		var granted, works []int64
		for _, e := range of {
			granted = append(granted, e.Granted)
			if e.Released-e.Granted < t.Rate.Window.Microseconds() { // a longer lease is outside the promise
				works = append(works, e.Works)
			}
		}
		switch {
		case t.Rate.Kind == guard.TokenBucket:
			n += beyondBucket(granted, t.Rate)
		case t.Kind == "lease":
			n += beyondWindow(granted, t.Rate) + beyondWindow(works, t.Rate) + overlaps(of, t.Capacity)
		default:
			n += beyondWindow(granted, t.Rate)
		}
	}
	return n
}

// beyondWindow returns the number of calls that exceed a sliding window: r.Permits other calls were
// made less than a window before. times are those of all calls, in µs.
func beyondWindow(times []int64, r guard.Rate) (n int) {
	slices.Sort(times)
	for i := r.Permits; i < len(times); i++ {
		if times[i]-times[i-r.Permits] < r.Window.Microseconds() {
			n++
		}
	}
	return n
}

// beyondBucket returns the number of calls that exceed a token bucket, which is full at first.
// times are those of all calls, in µs.
func beyondBucket(times []int64, r guard.Rate) (n int) {
	slices.Sort(times)
	each := float64(r.Window.Microseconds()) / float64(r.Permits)
	const rounding = 2 // µs; the limiter rounds its times up to quarters of a µs
	fullAt := 0.0      // the time at which the bucket is full again
	for _, at := range times {
		fullAt = max(fullAt, float64(at)) + each
		if fullAt-float64(at) > float64(r.Burst)*each+rounding {
			n++
		}
	}
	return n
}

// overlaps returns the number of leases of a member that began while at least `most` other leases
// of it were held.
func overlaps(leases []guardEvent, most int) (n int) {
	slices.SortFunc(leases, byGrant)
	for i, e := range leases {
		held := 0
		for _, before := range leases[:i] {
			if before.Ends > e.Granted {
				held++
			}
		}
		if held >= most {
			n++
		}
	}
	return n
}

func byGrant(a, b guardEvent) int { return cmp.Compare(a.Granted, b.Granted) }
