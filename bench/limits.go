package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

// Limiters has the names of all limiters.
var Limiters = []string{"fixed", "sliding", "token"}

// LimitsOptions say which limiters, windows and numbers of partitions are measured. Each
// combination is a run.
type LimitsOptions struct {
	Options
	Limiters        []string
	Windows         []time.Duration
	PartitionCounts []int
	// Seconds is the size of each run: how long its jobs take at the limit; 0: 10 s. Runs with long
	// windows get jobs for at least five windows.
	Seconds   float64
	RPS       int
	Parallel  int // number of runs at the same time
	NoElastic bool
}

// Limits has the figures of all runs.
type Limits struct {
	RPS       int               `json:"rps"`
	Runs      []LimitRun        `json:"runs"`
	Elastic   []Elastic         `json:"elastic,omitempty"`
	Overrides map[string]string `json:"overrides"`
}

// LimitRun has the figures of one combination of limiter, window and partitions, under a load that
// is above the limit all the time.
type LimitRun struct {
	Limiter    string `json:"limiter"`
	WindowMS   int64  `json:"window_ms"`
	Partitions int    `json:"partitions"`
	// aligned windows from the first permit to the last
	Windows          int `json:"windows"`
	WindowsOverLimit int `json:"windows_over_limit"`
	// the largest number of permits beyond the limit
	MaxOver float64 `json:"max_over" text:"-"`
	// LimitUsedRatio is the permits that were spent / the permits that the limit gives, in the
	// whole windows in which jobs waited.
	LimitUsedRatio  float64           `json:"limit_used_ratio"`
	UsedWindows     int               `json:"used_windows" text:"-"` // the number of these windows
	Jobs            int64             `json:"jobs" text:"-"`
	Permits         int64             `json:"permits" text:"-"`
	Promoted        int64             `json:"promoted" text:"-"` // permits that promotions spent
	Starts          int64             `json:"starts" text:"-"`
	Unpermitted     int64             `json:"starts_without_permit"` // starts beyond the number of permits
	Retries         int64             `json:"retries"`
	ThrottlesPerJob float64           `json:"throttles_per_job" text:"-"`
	Overrides       map[string]string `json:"overrides"`
}

// These numbers define the processes and the load of a run: several fetchers and dispatchers
// compete for permits; some tenants have a backlog, others submit occasional groups.
const (
	limitFetchers, limitDispatchers                    = 4, 2
	backlogTenants, occasionalTenants, occasionalCount = 3, 12, 24
	// jobs of the occasional groups / all jobs
	occasionalPart = 0.25
	limitSeconds   = 10
	limitWindows   = 5
	limitSeed      = 3
)

// RunLimits measures all combinations. Then, unless o.NoElastic is set, it measures how tenants
// borrow permits and get their shares back. The first error cancels all other runs; the figures so
// far are returned.
func RunLimits(ctx context.Context, o LimitsOptions) (Limits, error) {
	out := Limits{RPS: o.RPS}
	for _, limiter := range o.Limiters {
		for _, window := range o.Windows {
			for _, partitions := range o.PartitionCounts {
				out.Runs = append(out.Runs, LimitRun{
					Limiter:    limiter,
					WindowMS:   window.Milliseconds(),
					Partitions: partitions,
				})
			}
		}
	}
	// Runs with long windows take the longest. They begin first, so that no such run remains when
	// all others have ended.
	order := make([]*LimitRun, len(out.Runs))
	for i := range order {
		order[i] = &out.Runs[i]
	}
	slices.SortStableFunc(order, func(a, b *LimitRun) int { return int(b.WindowMS - a.WindowMS) })
	runs, running := errgroup.WithContext(ctx)
	runs.SetLimit(o.Parallel)
	for _, r := range order {
		runs.Go(func() error {
			if err := o.runCombination(running, r); err != nil {
				return fmt.Errorf("%s: %w", r.name(), err)
			}
			return nil
		})
	}
	if err := runs.Wait(); err != nil {
		return out, err
	}
	all := []map[string]string{}
	for i := range out.Runs {
		all = append(all, out.Runs[i].Overrides)
	}
	if !o.NoElastic {
		for _, partitions := range o.PartitionCounts {
			e, err := runElastic(ctx, o, partitions)
			if err != nil {
				return out, fmt.Errorf("elastic with %d partitions: %w", partitions, err)
			}
			out.Elastic = append(out.Elastic, e)
			all = append(all, e.Overrides)
		}
	}
	out.Overrides = unionOverrides(all...)
	return out, ctx.Err()
}

// unionOverrides merges the environment variables that the fleets of several runs had. If the
// values of a variable differ, it gets all of them.
func unionOverrides(runs ...map[string]string) map[string]string {
	values := map[string][]string{}
	for _, r := range runs {
		for name, v := range r {
			if !slices.Contains(values[name], v) {
				values[name] = append(values[name], v)
			}
		}
	}
	out := map[string]string{}
	for name, v := range values {
		slices.Sort(v)
		out[name] = strings.Join(v, " | ")
	}
	return out
}

func (r *LimitRun) name() string {
	return fmt.Sprintf("%s, window %s, %d partitions", r.Limiter,
		time.Duration(r.WindowMS)*time.Millisecond, r.Partitions)
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
	for i, g := range divideJobs(name+"-backlog", jobs-occasionalJobs, backlogTenants, 1, someFailOnce) {
		g.tenant = fmt.Sprintf("backlog-%d", i)
		backlog = append(backlog, g)
	}
	return backlog, occasionalGroups(name, occasionalJobs, seconds, rand.New(rand.NewPCG(seed, seed)))
}

func occasionalGroups(name string, jobs int, seconds float64, random *rand.Rand) []delayedGroup {
	weights, sum := make([]float64, occasionalCount), 0.0
	for i := range weights {
		weights[i] = 0.1 + random.Float64()
		sum += weights[i]
	}
	out := make([]delayedGroup, occasionalCount)
	for i := range out {
		out[i] = delayedGroup{time.Duration(0.7 * seconds * random.Float64() * float64(time.Second)), group{
			id:     fmt.Sprintf("%s-occasional-%d", name, i),
			tenant: fmt.Sprintf("occasional-%d", random.IntN(occasionalTenants)),
			jobs:   max(1, int(float64(jobs)*weights[i]/sum)),
			job:    someFailOnce,
		}}
	}
	slices.SortFunc(out, func(a, b delayedGroup) int { return int(a.after - b.after) })
	return out
}

// runCombination runs the combination that r names, and stores its figures in r.
func (o LimitsOptions) runCombination(ctx context.Context, r *LimitRun) error {
	window := time.Duration(r.WindowMS) * time.Millisecond
	seconds := o.Seconds
	if seconds == 0 {
		seconds = limitSeconds
	}
	seconds = max(seconds, limitWindows*window.Seconds())
	limit := newLimitRule(r.Limiter, o.RPS, window)
	jobs := int(seconds * float64(limit.perWindow) / window.Seconds())
	env := []string{globalLimit(o.RPS)}
	if r.Limiter != "fixed" {
		env = append(env, "BULKACTION_BACKPRESSURE_LIMITER="+r.Limiter)
	}
	if window != time.Second {
		env = append(env, "BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW="+window.String())
	}
	o.Partitions = r.Partitions
	o.Replicas = map[string]int{"fetcher": limitFetchers, "dispatcher": limitDispatchers}
	var waitsFrom int64
	x, err := o.experiment(ctx, r.name(), func(x *run) (err error) {
		backlog, occasional := limitLoad(x.name, jobs, seconds, limitSeed)
		if err := x.submit(ctx, backlog...); err != nil {
			return err
		}
		if waitsFrom, err = x.awaitAccepted(ctx, backlog...); err != nil {
			return err
		}
		return x.submitWhenDue(ctx, occasional)
	}, env...)
	if err != nil {
		return err
	}
	r.Overrides = x.overrides
	return r.count(limit, x.ended, x.log, waitsFrom)
}

// count computes the figures of r from the groups and journals of an ended run. waitsFrom is the
// time (µs) from which jobs were waiting.
func (r *LimitRun) count(limit limitRule, ended []groupState, log journal.Log, waitsFrom int64) error {
	permits := permitEvents(log, nil)
	admittedBacklog := permitEvents(log, func(p journal.PermitEvent) bool {
		return p.By == journal.Admit && strings.HasPrefix(p.Tenant, "backlog-")
	})
	if len(admittedBacklog) == 0 {
		return errNoPermits
	}
	r.Windows, r.Permits, r.Starts = limit.windowCount(permits), sumEvents(permits), int64(len(log.Starts))
	r.Unpermitted = max(0, r.Starts-r.Permits) // each start needs a permit
	r.Promoted = sumEvents(permitEvents(log, func(p journal.PermitEvent) bool { return p.By == journal.Promote }))
	r.WindowsOverLimit, r.MaxOver = limit.windowsOver(permits)
	r.MaxOver = measure.Round4(r.MaxOver)
	// Jobs wait until the last job of the backlog is admitted, so the use of the limit is measured
	// until then.
	used, windows := limit.usedRatio(permits, max(waitsFrom, permits[0].at), admittedBacklog[len(admittedBacklog)-1].at)
	r.LimitUsedRatio, r.UsedWindows = measure.Round4(used), windows
	for _, g := range ended {
		r.Jobs += g.Counts.Accepted
		r.Retries += g.Retries
	}
	r.ThrottlesPerJob = measure.Ratio(float64(sumThrottles(ended)), float64(r.Jobs))
	return nil
}
