package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

var congestionBenchmark = benchmark{
	"congestion",
	"A backlog far above a small global limit: how much of the limit is used, and how often jobs are throttled",
	func(f *flags) runner {
		var jobs, tenants, rps int
		f.int(&jobs, "jobs", 15_000, 1, 0, "number of jobs")
		f.int(&tenants, "tenants", 3, 1, 0, "number of tenants, each with one group")
		f.int(&rps, "rps", 30, 1, 0, "global limit, permits a second")
		quick := f.Bool("quick", false, "ten times the limit")
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			if *quick {
				rps *= 10
			}
			return congestion(ctx, o, jobs, tenants, rps), nil
		}
	},
}

// congestion shows how close a run whose backlog is far above the global limit comes to the ideal
// time (jobs / limit), and how often its jobs were throttled. It submits one group for each tenant;
// all share the limit.
func congestion(ctx context.Context, o options, jobs, tenants, rps int) values {
	x := o.experiment(ctx, "congestion", func(x *run) {
		check(x.submit(ctx, divideJobs(x.name, jobs, tenants, 1, nil)...))
	}, globalLimit(rps))
	limit := x.limitRule(rps)
	permits, starts := x.log.spent(nil), x.log.startEvents("")
	over, most := limit.windowsOver(permits)
	// Jobs were waiting all the time from the first permit to the last one, so all windows between
	// these two count.
	used, _ := limit.usedRatio(permits, permits[0].at, permits[len(permits)-1].at)
	took, ideal := makespan(x.ended), ratio(jobs, rps)
	return values{
		"jobs": jobs, "tenants": tenants, "rps": rps, "ideal_seconds": ideal,
		// from the acceptance of the first group to the end of the last job
		"makespan_seconds": took, "makespan_ratio": ratio(took, ideal),
		"throttles_per_job":  ratio(sumThrottles(x.ended), jobs),
		"windows":            limit.windowCount(permits), // aligned, from the first permit to the last
		"windows_over_limit": over,
		"max_over":           most, // the largest number of permits beyond the limit
		"limit_used_ratio":   used, // permits spent / permits of the limit, in these windows
		"permits":            sumEvents(permits),
		"per_second":         perSecond(permits, starts),
		"overrides":          x.overrides,
	}
}

// secondOfTenants has the number of permits that all tenants together spent in one second of the
// run, and the number of jobs that started in it.
type secondOfTenants struct {
	Second  int   `json:"second"`
	Permits int64 `json:"permits"`
	Starts  int64 `json:"starts"`
}

// perSecond counts the permits and the starts of jobs in each second of a run. It begins with the
// second of the first permit and ends with that of the last permit or start. permits may not be
// empty.
func perSecond(permits, starts []event) []secondOfTenants {
	const second = int64(time.Second / time.Microsecond)
	begin := permits[0].at / second
	end := permits[len(permits)-1].at / second
	if len(starts) > 0 {
		end = max(end, starts[len(starts)-1].at/second)
	}
	out := make([]secondOfTenants, end-begin+1)
	for i := range out {
		out[i].Second = i
	}
	for _, e := range permits {
		out[e.at/second-begin].Permits += e.n
	}
	for _, e := range starts {
		if i := e.at/second - begin; i >= 0 {
			out[i].Starts += e.n
		}
	}
	return out
}

// limitsOptions say which limiters, windows and numbers of partitions are measured. Each
// combination is a run.
type limitsOptions struct {
	options
	limiters   []string
	windows    []time.Duration
	partitions []int
	// seconds is the size of each run: how long its jobs take at the limit; 0: 10 s. Runs with long
	// windows get jobs for at least five windows.
	seconds       float64
	rps, parallel int // parallel: number of runs at the same time
	changes       int
}

// These numbers define the processes and the load of a run: several fetchers and dispatchers
// compete for permits; some tenants have a backlog, others submit occasional groups.
const (
	limitFetchers, limitDispatchers                    = 4, 2
	backlogTenants, occasionalTenants, occasionalCount = 3, 12, 24
	occasionalPart                                     = 0.25 // jobs of the occasional groups / all jobs
	limitSeconds, limitWindows, limitSeed              = 10, 5, 3
)

var limiters = []string{"fixed", "sliding", "token"}

var limitsBenchmark = benchmark{
	"limits", "Each limiter with several fetchers, dispatchers, windows and partitions: is it kept, and used fully",
	func(f *flags) runner {
		l := limitsOptions{
			limiters: slices.Clone(limiters), windows: []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second},
			partitions: []int{1, 4},
		}
		list(f, &l.limiters, "limiter", "limiters to try", func(s string) (string, error) {
			return s, among(s, limiters)
		})
		list(f, &l.windows, "window", "windows to try", func(s string) (time.Duration, error) {
			d, err := time.ParseDuration(s)
			if err != nil || d < 10*time.Millisecond || d > time.Hour || d%time.Millisecond != 0 {
				err = fmt.Errorf("must be whole milliseconds from 10ms to 1h")
			}
			return d, err
		})
		list(f, &l.partitions, "partitions", "numbers of partitions to try", func(s string) (n int, err error) {
			if _, err = fmt.Sscan(s, &n); err != nil || n < 1 || n > 64 {
				err = fmt.Errorf("must be from 1 to 64")
			}
			return n, err
		})
		f.float(&l.seconds, "seconds", 0, 0, 3600,
			"size of each run's backlog, in seconds of the limit; 0: 10, at least 5 windows")
		f.int(&l.rps, "rps", 1000, 100, 0, "global limit, permits a second")
		f.int(&l.parallel, "parallel", 3, 1, 0, "runs at the same time, each with its own Redis and processes")
		noElastic := f.Bool("no-elastic", false, "skip the part with one busy tenant among idle ones")
		f.int(&l.changes, "changes", 20, 0, 1000, "how often the limit changes in the part in which it does; 0: skip the part")
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			l.options = o
			runs, err := l.combinations(ctx)
			check(err)
			out := values{"rps": l.rps, "runs": runs}
			all := runs
			if !*noElastic {
				var elastic []values
				for _, n := range l.partitions {
					elastic = append(elastic, l.elastic(ctx, n))
				}
				out["elastic"], all = elastic, slices.Concat(runs, elastic)
			}
			if l.changes > 0 {
				var changed []values
				for _, limiter := range l.limiters {
					for _, n := range l.partitions {
						changed = append(changed, l.changing(ctx, limiter, n))
					}
				}
				out["changed"], all = changed, slices.Concat(all, changed)
			}
			out["overrides"] = unionOverrides(all)
			return out, nil
		}
	},
}

// combinations runs all combinations of limiter, window and partitions. The first error cancels all
// other runs.
func (o limitsOptions) combinations(ctx context.Context) ([]values, error) {
	var runs []values
	for _, limiter := range o.limiters {
		for _, window := range o.windows {
			for _, n := range o.partitions {
				runs = append(runs, values{"limiter": limiter, "window_ms": window.Milliseconds(), "partitions": n})
			}
		}
	}
	// Runs with long windows take the longest. They begin first, so that no such run remains when
	// all others have ended.
	order := slices.Clone(runs)
	slices.SortStableFunc(order, func(a, b values) int { return int(b["window_ms"].(int64) - a["window_ms"].(int64)) })
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(o.parallel)
	for _, r := range order {
		all.Go(func() error {
			return attempt(fmt.Sprint(r), func() {
				o.runCombination(ctx, r, r["limiter"].(string), r["window_ms"].(int64), r["partitions"].(int))
			})
		})
	}
	return runs, all.Wait()
}

// unionOverrides returns the environment variables that the fleets of some runs had. If the values
// of a variable differ, it gets all of them.
func unionOverrides(runs []values) map[string]string {
	all := map[string][]string{}
	for _, r := range runs {
		for name, v := range r["overrides"].(map[string]string) {
			all[name] = append(all[name], v)
		}
	}
	out := map[string]string{}
	for name, v := range all {
		slices.Sort(v)
		out[name] = strings.Join(slices.Compact(v), " | ")
	}
	return out
}

// someFailOnce returns the JSON of the i-th job of a load. 5% of the jobs fail once with a
// transient error, 2% are throttled once.
func someFailOnce(i int) []byte {
	switch {
	case i%20 == 7:
		return []byte(`{"payload":{"fail":"retry","fail_times":1}}`)
	case i%50 == 13:
		return []byte(`{"payload":{"fail":"throttle","fail_times":1}}`)
	}
	return []byte(`{"payload":{}}`)
}

// limitLoad returns the groups of a run: a backlog, submitted at the start, and occasional groups,
// submitted within the first 70% of the time that all jobs take at the limit. The same seed gives
// the same groups.
func limitLoad(name string, jobs int, seconds float64, seed uint64) (backlog []group, occasional []delayedGroup) {
	occasionalJobs := int(float64(jobs) * occasionalPart)
	backlog = divideJobs(name+"-backlog", jobs-occasionalJobs, backlogTenants, 1, someFailOnce)
	for i := range backlog {
		backlog[i].tenant = fmt.Sprintf("backlog-%d", i)
	}
	random := rand.New(rand.NewPCG(seed, seed))
	weights, sum := make([]float64, occasionalCount), 0.0
	for i := range weights {
		weights[i] = 0.1 + random.Float64()
		sum += weights[i]
	}
	for i, w := range weights {
		after := time.Duration(0.7 * seconds * random.Float64() * float64(time.Second))
		occasional = append(occasional, delayedGroup{after, group{
			id:     fmt.Sprintf("%s-occasional-%d", name, i),
			tenant: fmt.Sprintf("occasional-%d", random.IntN(occasionalTenants)),
			jobs:   max(1, int(float64(occasionalJobs)*w/sum)),
			job:    someFailOnce,
		}})
	}
	slices.SortFunc(occasional, byTime)
	return backlog, occasional
}

// runCombination runs a combination, under a load that is above the limit all the time, and adds its
// figures to out.
func (o limitsOptions) runCombination(ctx context.Context, out values, limiter string, ms int64, partitions int) {
	window := time.Duration(ms) * time.Millisecond
	seconds := o.seconds
	if seconds == 0 {
		seconds = limitSeconds
	}
	seconds = max(seconds, limitWindows*window.Seconds())
	limit := newLimitRule(limiter, o.rps, window)
	jobs := int(seconds * float64(limit.perWindow) / window.Seconds())
	env := []string{globalLimit(o.rps)}
	if limiter != "fixed" {
		env = append(env, "BULKACTION_BACKPRESSURE_LIMITER="+limiter)
	}
	if window != time.Second {
		env = append(env, "BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW="+window.String())
	}
	of := o.options
	of.partitions, of.replicas = partitions, map[string]int{"fetcher": limitFetchers, "dispatcher": limitDispatchers}
	var waitsFrom int64
	x := of.experiment(ctx, limiter+" "+window.String(), func(x *run) {
		backlog, occasional := limitLoad(x.name, jobs, seconds, limitSeed)
		check(x.submit(ctx, backlog...))
		waitsFrom = must(x.awaitAccepted(ctx, backlog...))
		check(x.submitWhenDue(ctx, occasional))
	}, env...)
	out["overrides"] = x.overrides
	countLimit(out, limit, x.ended, x.log, waitsFrom)
}

// countLimit computes the figures of a run from its groups and journals. waitsFrom is the time (µs)
// from which jobs were waiting.
func countLimit(out values, limit limitRule, ended []groupState, log journalLog, waitsFrom int64) {
	permits, starts := log.permitEvents(nil), int64(len(log.starts))
	backlog := log.spent(func(p permitEvent) bool { return p.by == "admit" && strings.HasPrefix(p.tenant, "backlog-") })
	over, most := limit.windowsOver(permits)
	// Jobs wait until the last job of the backlog is admitted, so the use of the limit is measured
	// until then.
	used, windows := limit.usedRatio(permits, max(waitsFrom, permits[0].at), backlog[len(backlog)-1].at)
	var jobs, retries int64
	for _, g := range ended {
		jobs, retries = jobs+g.Counts.Accepted, retries+g.Retries
	}
	out["windows"] = limit.windowCount(permits) // aligned, from the first permit to the last
	out["windows_over_limit"], out["max_over"] = over, most
	out["limit_used_ratio"], out["used_windows"] = used, windows // in the whole windows in which jobs waited
	out["jobs"], out["permits"], out["starts"], out["retries"] = jobs, sumEvents(permits), starts, retries
	out["promoted"] = sumEvents(log.permitEvents(func(p permitEvent) bool { return p.by == "promote" }))
	out["starts_without_permit"] = max(0, starts-sumEvents(permits)) // each start needs a permit
	out["throttles_per_job"] = ratio(sumThrottles(ended), jobs)
}

// While the limit changes, three fetchers run; the leader of the limits is killed after half of the
// changes.
const (
	changeFetchers = 3
	changeInterval = 1300 * time.Millisecond // no multiple of a window
)

// limitSpan is the time in which a limit may have been in effect: from the call that set it to the
// answer of the call that set the next one (µs).
type limitSpan struct{ from, answered, to, perWindow int64 }

// changing shows whether a limit that changes under load is kept, and how much of it is used, beside
// the same load without changes.
func (o limitsOptions) changing(ctx context.Context, limiter string, partitions int) values {
	out := values{"limiter": limiter, "partitions": partitions, "changes": o.changes}
	plain := values{}
	o.runChanges(ctx, plain, limiter, partitions, 0)
	o.runChanges(ctx, out, limiter, partitions, o.changes)
	out["use_of_unchanged"] = ratio(out["limit_used_ratio"].(float64), plain["limit_used_ratio"].(float64))
	out["used_unchanged"] = plain["limit_used_ratio"]
	return out
}

// runChanges runs a load of which jobs always wait, and changes the limit n times.
func (o limitsOptions) runChanges(ctx context.Context, out values, limiter string, partitions, n int) {
	of := o.options
	of.partitions, of.replicas = partitions, map[string]int{"fetcher": changeFetchers, "dispatcher": limitDispatchers}
	x := startWithAPI(ctx, of, true, nil, globalLimit(o.rps), "BULKACTION_BACKPRESSURE_LIMITER="+limiter)
	defer x.close()
	random, took := rand.New(rand.NewPCG(limitSeed, uint64(n))), 0.0
	seconds := float64(o.changes) * changeInterval.Seconds()
	jobs := int(2 * float64(o.rps) * seconds)
	check(x.submit(ctx, divideJobs(x.name, jobs, 4*partitions, 1, someFailOnce)...))
	waitsFrom := must(x.awaitAccepted(ctx, x.groups...))
	rule := newLimitRule(limiter, o.rps, time.Second)
	spans, pending := []limitSpan{{perWindow: rule.perWindow}}, 0
	for i := range o.changes {
		check(redisx.Sleep(ctx, changeInterval))
		if n == 0 {
			continue
		}
		if i == n/2 {
			leader := must(x.conn.Cmd.HGet(ctx, x.space.Partition(0).Rebalance(), "owner").Result())
			pid := must(strconv.Atoi(strings.Split(leader, "-")[len(strings.Split(leader, "-"))-2]))
			x.kill(func(p process) bool { return p.PID() == pid })
		}
		rps := int64(o.rps/4 + random.IntN(2*o.rps))
		from := must(x.now(ctx)).UnixMicro()
		began := time.Now()
		l := must(x.api.PatchLimits(ctx, api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo(rps)}}))
		if i != n/2 { // without a leader nothing takes effect until its lease has ended
			took = max(took, time.Since(began).Seconds())
		}
		for len(l.PendingPartitions) > 0 {
			pending++
			l = must(x.api.Limits(ctx))
			check(redisx.Sleep(ctx, 20*time.Millisecond))
		}
		now := must(x.now(ctx)).UnixMicro()
		spans[len(spans)-1].to = now
		spans = append(spans, limitSpan{from: from, answered: now, perWindow: rps})
	}
	end := must(x.now(ctx)).UnixMicro()
	spans[len(spans)-1].to = math.MaxInt64
	if n > 0 { // the rest of the load needs no limit
		must(x.api.PatchLimits(ctx, api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo[int64](0)}}))
	}
	x.finish(ctx, limiter+" changed")
	permits := x.log.spent(nil)
	out["overrides"] = x.overrides
	over, worst := rule.over(permits, spans, end)
	out["windows_over_limit"], out["max_over"], out["longest_patch_seconds"] = over, worst, round4(took)
	out["polls_until_in_effect"] = pending
	given := 0.0
	begin := max(waitsFrom, permits[0].at)
	for _, s := range spans {
		from, to := max(begin, s.answered), min(end, s.to)
		given += float64(s.perWindow) * float64(max(0, to-from)) / float64(time.Second.Microseconds())
	}
	out["limit_used_ratio"] = round4(float64(sumBetween(permits, begin, end)) / given)
}

// over counts the events before end that exceed every limit that may have been in effect in the window
// (fixed) or the span that ends with them; with token also what exceeds a limit between two changes.
// It returns the largest excess in permits, too.
func (r limitRule) over(events []event, spans []limitSpan, end int64) (n int, worst float64) {
	width := r.window.Microseconds()
	limit := func(from, to int64) (most int64) {
		for _, s := range spans {
			if s.from < to && s.to > from {
				most = max(most, s.perWindow)
			}
		}
		return most
	}
	exceeds := func(excess float64) {
		if excess > tokenTolerance {
			n, worst = n+1, max(worst, excess)
		}
	}
	var sum, first int64
	level, last := 0.0, events[0].at
	for i, e := range events {
		if e.at >= end {
			break
		}
		switch r.limiter {
		case "token":
			level = max(0, level-float64(limit(last, e.at))*float64(e.at-last)/float64(width)) + float64(e.n)
			exceeds(level - float64(limit(e.at-width, e.at)))
		case "sliding":
			for sum += e.n; events[first].at <= e.at-width; first++ {
				sum -= events[first].n
			}
			exceeds(float64(sum - limit(e.at-width, e.at)))
		default:
			if i > 0 && last/width != e.at/width {
				sum = 0
			}
			sum += e.n
			exceeds(float64(sum - limit(e.at/width*width, e.at)))
		}
		last = e.at
	}
	if r.limiter == "token" {
		for i, s := range spans[:len(spans)-1] {
			of := slices.DeleteFunc(slices.Clone(events), func(e event) bool { return e.at < s.answered || e.at >= spans[i+1].from })
			one := r
			one.perWindow = s.perWindow
			for _, x := range one.excess(of) {
				exceeds(x)
			}
		}
	}
	return n, round4(worst)
}

const (
	elasticTenants       = 10
	elasticAloneTime     = 10 * time.Second // how long the busy tenant is nearly alone
	trickleInterval      = 250 * time.Millisecond
	returnBacklogWindows = 5 // a returning tenant's backlog, in windows of its share
)

// elastic shows how much of the global limit one busy tenant borrows while nine others are nearly
// idle, and how soon each of the others gets its share again when it returns with a backlog.
func (o limitsOptions) elastic(ctx context.Context, partitions int) values {
	idle := func(i int) string { return fmt.Sprintf("idle-%d", i) }
	of := o.options
	of.partitions = partitions
	var limit limitRule
	var busyFrom, busyTo int64
	x := of.experiment(ctx, "elastic", func(x *run) {
		limit = x.limitRule(o.rps)
		windows := elasticAloneTime.Seconds()/limit.window.Seconds() + returnBacklogWindows
		busy := group{id: x.name + "-busy", tenant: "busy", jobs: int(float64(limit.perWindow) * windows)}
		check(x.submit(ctx, busy))
		busyFrom = must(x.awaitAccepted(ctx, busy))
		for began, n := time.Now(), 0; time.Since(began) < elasticAloneTime; n++ {
			id := fmt.Sprintf("%s-trickle-%d", x.name, n)
			check(x.submit(ctx, group{id: id, tenant: idle(n % (elasticTenants - 1)), jobs: 1}))
			check(redisx.Sleep(ctx, trickleInterval))
		}
		busyTo = must(x.now(ctx)).UnixMicro()
		for i := range elasticTenants - 1 {
			jobs := int(limit.perWindow/elasticTenants) * returnBacklogWindows
			check(x.submit(ctx, group{id: fmt.Sprintf("%s-return-%d", x.name, i), tenant: idle(i), jobs: jobs}))
		}
	}, globalLimit(o.rps))
	returned := map[string]int64{}
	for _, g := range x.ended[len(x.ended)-elasticTenants+1:] {
		returned[g.tenant] = g.Created.UnixMicro()
	}
	out := countElastic(limit, x.log, busyFrom, busyTo, returned, limit.perWindow/elasticTenants)
	out["partitions"], out["overrides"] = partitions, x.overrides
	return out
}

// countElastic computes the figures from the journals, which must contain a permit. The busy tenant
// was nearly alone from busyFrom to busyTo (µs). returned has, for each other tenant, the time (µs)
// at which it submitted its backlog. share is a tenant's permits a window.
func countElastic(
	limit limitRule, log journalLog, busyFrom, busyTo int64, returned map[string]int64, share int64,
) values {
	of := func(tenant string) []event {
		return log.permitEvents(func(p permitEvent) bool { return p.tenant == tenant })
	}
	permits, busy := log.spent(nil), of("busy")
	busyShare, busyWindows := limit.usedRatio(busy, busyFrom, busyTo)
	over, _ := limit.windowsOver(permits)
	used, _ := limit.usedRatio(permits, busyFrom, permits[len(permits)-1].at)

	width := limit.window.Microseconds()
	in := func(events []event, window int64) int64 { return sumBetween(events, window*width, (window+1)*width) }
	var perWindow []map[string]int64 // permits of the busy tenant, and of all others together
	last := permits[len(permits)-1].at / width
	for w := permits[0].at / width; w <= last; w++ {
		perWindow = append(perWindow, map[string]int64{"busy": in(busy, w), "others": in(permits, w) - in(busy, w)})
	}
	// The windows that the slowest returning tenant waited until it had its full share; 0: it had it
	// in the window in which it returned. Without it, all windows until the end of the run count.
	var slowest int64
	for tenant, at := range returned {
		n, events := int64(0), of(tenant)
		for at/width+n <= last && in(events, at/width+n) < share {
			n++
		}
		slowest = max(slowest, n)
	}
	return values{
		"busy_share_of_limit": busyShare, "busy_windows": busyWindows, // whole windows in this time
		"return_windows": slowest, "windows_over_limit": over, "limit_used_ratio": used, "per_window": perWindow,
	}
}

// limitRule is a rate limit against which journals are checked: perWindow permits in each window,
// as the limiter counts windows.
type limitRule struct {
	limiter   string // fixed, sliding or token
	window    time.Duration
	perWindow int64
}

// newLimitRule returns the rule for rps permits a second: rps·window permits in a window, at least
// 1.
func newLimitRule(limiter string, rps int, window time.Duration) limitRule {
	return limitRule{limiter, window, max(1, int64(rps)*window.Milliseconds()/1000)}
}

// event is the number n of permits, or of starts of jobs, at one time (µs).
type event struct{ at, n int64 }

// tokenTolerance is how far (in permits) a token limiter may exceed its limit without a fault: it
// computes with fractions, which are rounded.
const tokenTolerance = 1e-3

// windowsOver counts the aligned windows in which the events exceed the limit, and returns the
// largest excess in permits. Events are ordered by time. What exceeds the limit depends on the
// limiter:
//
//   - fixed: more than perWindow in the window.
//   - sliding: more than perWindow in a span [t, t+window) that ends in the window.
//   - token: more than perWindow·t/window + perWindow in a span of any length t that ends in the
//     window.
func (r limitRule) windowsOver(events []event) (windows int, worst float64) {
	excess := r.excess(events)
	width, last := r.window.Microseconds(), int64(math.MinInt64)
	for i, x := range excess {
		if x <= tokenTolerance {
			continue
		}
		worst = max(worst, x)
		if w := events[i].at / width; w != last {
			windows, last = windows+1, w
		}
	}
	return windows, round4(worst)
}

// excess returns, for each event, by how many permits the spans that end with this event exceed the
// limit; 0 or less if they do not.
func (r limitRule) excess(events []event) []float64 {
	width := r.window.Microseconds()
	out := make([]float64, len(events))
	var sum, first int64
	level := 0.0
	for i, e := range events {
		switch r.limiter {
		case "token": // a leaky bucket: TestTokenLooksAtEverySpan shows that it checks all spans
			if i > 0 {
				level = max(0, level-float64(r.perWindow)*float64(e.at-events[i-1].at)/float64(width))
			}
			level += float64(e.n)
			out[i] = level - float64(r.perWindow)
			continue
		case "sliding":
			sum += e.n
			for events[first].at <= e.at-width {
				sum -= events[first].n
				first++
			}
		default:
			if i > 0 && events[i-1].at/width != e.at/width {
				sum = 0
			}
			sum += e.n
		}
		out[i] = float64(sum - r.perWindow)
	}
	return out
}

// usedRatio returns the permits that were spent / the permits that the limit gives, in the whole
// windows between from and to (µs), and the number of these windows. It returns 0 and 0 if there is
// none. Windows begin at multiples of their length since 1970; with a sliding limiter the first
// begins at from.
func (r limitRule) usedRatio(events []event, from, to int64) (used float64, windows int) {
	width := r.window.Microseconds()
	begin, end := (from/width+1)*width, to/width*width
	if r.limiter == "sliding" { // a sliding window may begin at any time
		begin, end = from, from+(to-from)/width*width
	}
	if end <= begin {
		return 0, 0
	}
	windows = int((end - begin) / width)
	return ratio(sumBetween(events, begin, end), int64(windows)*r.perWindow), windows
}

func sumBetween(events []event, from, to int64) int64 {
	var n int64
	for _, e := range events {
		if e.at >= from && e.at < to {
			n += e.n
		}
	}
	return n
}

// windowCount returns the number of aligned windows from the first event to the last.
func (r limitRule) windowCount(events []event) int {
	if len(events) == 0 {
		return 0
	}
	width := r.window.Microseconds()
	return int(events[len(events)-1].at/width-events[0].at/width) + 1
}

// permitEvents returns the permits that of accepts; nil: all.
func (l journalLog) permitEvents(of func(permitEvent) bool) (out []event) {
	for _, p := range l.permits {
		if of == nil || of(p) {
			out = append(out, event{p.at, p.n})
		}
	}
	return out
}

// spent is like permitEvents. It fails if there are none.
func (l journalLog) spent(of func(permitEvent) bool) []event {
	out := l.permitEvents(of)
	if len(out) == 0 {
		check(errNoPermits)
	}
	return out
}

func (l journalLog) startEvents(group string) (out []event) {
	for _, s := range l.starts {
		if group == "" || s.group == group {
			out = append(out, event{s.at, 1})
		}
	}
	return out
}

func sumEvents(events []event) int64 {
	var n int64
	for _, e := range events {
		n += e.n
	}
	return n
}
