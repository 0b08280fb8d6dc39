package bench

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/faultproxy"
)

// lostReplies is the probability with which a proxy drops a reply of Redis, and resets the
// connection, in the check of limits.
const lostReplies = 0.05

func (b *guardBench) limits() (out GuardLimits, err error) {
	at, err := url.Parse(b.url)
	if err != nil {
		return out, err
	}
	proxy, err := faultproxy.New(at.Host)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, proxy.Close()) }()
	at.Host = proxy.Addr()
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for _, t := range []guardTask{
		{Kind: "take", Names: 2, Rate: guard.Rate{Permits: 200, Window: time.Second, Burst: 50}},
		{Kind: "take", Names: 2, Rate: guard.PerWindow(200, time.Second)},
		{
			Kind: "lease", Members: 4, Capacity: 2, Rate: guard.PerWindow(50, time.Second),
			Breaker: wideBreaker, Hold: time.Millisecond,
		},
	} {
		t.URL, t.Goroutines, t.Seconds, t.Faults, t.Prefix = at.String(), 4, b.Seconds, true, b.newPrefix()
		if err := b.prepare(guardProcesses, t); err != nil {
			return out, err
		}
		proxy.DropReplies(lostReplies, rng)
		if err := b.begin(guardProcesses); err != nil {
			return out, err
		}
		r, err := b.end(guardProcesses)
		if err != nil {
			return out, err
		}
		proxy.Heal()
		out.Allowed += len(r.Events)
		out.Overdraws += overdraws(r.Events, t)
	}
	out.Dropped = proxy.Dropped()
	used, over, err := b.limitUsed()
	out.LimitUsedRatio, out.Overdraws = used, out.Overdraws+over
	return out, err
}

// limitUsed runs leases of a pool with more demand than its limit allows. ratio is the granted
// leases / the allowed ones in whole windows; over is the number of leases that break the limit.
func (b *guardBench) limitUsed() (ratio float64, over int, err error) {
	const members, perSecond = 8, 50
	window := min(seconds(b.Seconds), time.Second)
	permits := max(1, int(perSecond*window.Seconds()))
	t := guardTask{
		Kind: "lease", Goroutines: 8, Members: members, Capacity: 8, Rate: guard.PerWindow(permits, window),
		Seconds: b.Seconds + 2*window.Seconds(),
	}
	r, err := b.run(guardProcesses, t)
	if err != nil || len(r.Events) == 0 {
		return 0, 0, err
	}
	// Only windows from the second on count: the first one begins with all of its permits. The
	// calls go on until the last counted window is over.
	first := slices.MinFunc(r.Events, byGrant).Granted
	windows := int(seconds(b.Seconds) / window)
	from := first + window.Microseconds()
	to, used := from+int64(windows)*window.Microseconds(), 0
	for _, e := range r.Events {
		if e.Granted >= from && e.Granted < to {
			used++
		}
	}
	return measure.Ratio(float64(used), float64(windows*members*permits)), overdraws(r.Events, t), nil
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

// order measures whether a lock is granted in the order of its queue. It puts calls into the queue
// one by one, lets some leave and some time out, kills one process, and then releases the lock.
func (b *guardBench) order(ctx context.Context) (out GuardOrder, err error) {
	const waiters, killed = 64, guardProcesses - 1
	q, err := b.holdQueue(ctx, guardProcesses)
	if err != nil {
		return out, err
	}
	defer q.close()
	for i := range waiters {
		process, s := i%guardProcesses, guardStep{Number: i, Count: 1}
		if i%10 == 3 {
			s.Wait = orderTimeout
		}
		if err := q.join(ctx, process, s); err != nil {
			return out, err
		}
		if i%10 == 7 && process != killed {
			if err := q.loaders[process].send.Encode(guardStep{Number: i, Leave: true}); err != nil {
				return out, err
			}
		}
	}
	if err := redisx.Sleep(ctx, orderTimeout); err != nil {
		return out, err
	}
	b.loaders[killed].Kill()
	_ = b.loaders[killed].out.Close() // it was only read
	if b.loaders[killed], err = startLoader(b.program, GuardLoadCommand); err != nil {
		return out, err
	}
	context.AfterFunc(ctx, b.loaders[killed].Kill)
	if err := q.lease.Release(ctx, guard.Neutral); err != nil {
		return out, err
	}
	if err := q.await(ctx, "the queue to be empty", 5*time.Millisecond, func() (int, error) {
		waiting, err := q.conn.Cmd.ZCard(ctx, q.base+"queue").Result()
		if err != nil {
			return 0, err
		}
		held, err := q.conn.Cmd.ZCard(ctx, q.base+"leases").Result()
		return int(waiting + held), err
	}); err != nil {
		return out, err
	}
	r, err := q.finish(killed)
	out.FIFOGrants, out.FIFOInversions = len(r.Events), inversions(r.Events)
	return out, err
}

// orderTimeout is how long the calls wait that time out.
const orderTimeout = 300 * time.Millisecond

// inversions returns the number of grants out of order: a call that joined the queue later was
// granted before.
func inversions(events []guardEvent) (n int) {
	slices.SortFunc(events, byGrant)
	latest := -1
	for _, e := range events {
		if e.Number < latest {
			n++
		}
		latest = max(latest, e.Number)
	}
	return n
}

func byGrant(a, b guardEvent) int { return cmp.Compare(a.Granted, b.Granted) }

func (b *guardBench) probes(context.Context) (out GuardProbes, err error) {
	t := guardTask{
		Kind: "probe", Members: 1, Capacity: guard.Unbounded, Goroutines: 4, Seconds: b.Seconds,
		Hold:    2 * time.Millisecond,
		Breaker: guard.BreakerPolicy{Failures: 3, OpenFor: 100 * time.Millisecond, Successes: 3},
	}
	r, err := b.run(guardProcesses, t)
	probes := slices.DeleteFunc(r.Events, func(e guardEvent) bool { return !e.Probe })
	out.Probes, out.ProbesOver = len(probes), probesOver(probes, t.Breaker)
	return out, err
}

// probesOver returns the number of probes beyond b.Successes of each opening of the breaker. A
// pause of OpenFor before a probe means a new opening, because the first failed probe opens the
// breaker again.
func probesOver(probes []guardEvent, b guard.BreakerPolicy) (n int) {
	slices.SortFunc(probes, byGrant)
	of := 0 // probes of this opening
	for i, e := range probes {
		if i == 0 || e.Granted-probes[i-1].Granted >= b.OpenFor.Microseconds() {
			of = 0
		}
		if of++; of > b.Successes {
			n++
		}
	}
	return n
}
