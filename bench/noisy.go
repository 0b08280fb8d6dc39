package bench

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// NoisyNeighbour compares how long groups of small tenants take beside a noisy tenant, whose
// backlog keeps all workers busy, and alone.
type NoisyNeighbour struct {
	NoisyJobs    int     `json:"noisy_jobs"`
	SmallTenants int     `json:"small_tenants"`
	SmallP50     float64 `json:"small_p50_seconds"` // from accepted to COMPLETED
	SmallP99     float64 `json:"small_p99_seconds"`
	// SmallAloneP50 and SmallAloneP99 are the times of small groups that run alone. They are
	// measured before and after the noisy tenant's load; the measurement with the lower p99 counts.
	SmallAloneP50 float64 `json:"small_solo_p50_seconds"`
	SmallAloneP99 float64 `json:"small_solo_p99_seconds"`
	SmallRatio    float64 `json:"small_ratio"` // p99 beside the noisy tenant / p99 alone
	JobsPerSecond float64 `json:"jobs_per_second"`
	// speed of the same number of jobs in one group of one tenant
	OneGroupPerSecond float64 `json:"unfair_jobs_per_second"`
	ThroughputRatio   float64 `json:"throughput_ratio"` // JobsPerSecond / OneGroupPerSecond
	// SmallSeconds and SmallAloneSeconds have the seconds of each small group beside the noisy
	// tenant, and alone, in ascending order.
	SmallSeconds      []float64 `json:"small_seconds"`
	SmallAloneSeconds []float64 `json:"small_solo_seconds"`
}

// NoisyLongJobs is like NoisyNeighbour, but each job of the noisy tenant takes 50 times as long as
// a job of a small one.
type NoisyLongJobs struct {
	WorkerProcesses int     `json:"long_worker_processes"` // each has the default number of slots
	LongNoisyJobs   int     `json:"long_noisy_jobs"`
	LongP50         float64 `json:"long_small_p50_seconds"` // of small groups beside it; LongP99 too
	LongP99         float64 `json:"long_small_p99_seconds"`
	LongAloneP99    float64 `json:"long_small_solo_p99_seconds"`
	LongRatio       float64 `json:"long_ratio"` // p99 beside the noisy tenant / p99 alone
	// LongRatioOne is LongRatio measured with one worker process and a quarter of the noisy jobs.
	LongRatioOne float64 `json:"long_ratio_one_process"`
	// LongSmall and LongAloneSeconds have the seconds of each small group beside the noisy tenant,
	// and alone, in ascending order.
	LongSmall        []float64 `json:"long_small_seconds"`
	LongAloneSeconds []float64 `json:"long_small_solo_seconds"`
}

const (
	smallTenants = 99
	longFactor   = 50
	longJobs     = 800 // noisy jobs for each worker process
	// longProcesses is the number of worker processes in the part with long jobs. A single one has
	// so few slots that long jobs would leave hardly any to other tenants.
	longProcesses = 4
)

// noisyRun has the figures of one run: the seconds that small groups took alone and beside the
// noisy tenant, each in ascending order, and the jobs a second of all groups.
type noisyRun struct {
	alone, beside []float64
	jobsPerSecond float64
	overrides     map[string]string
}

func runBesideNoisy(
	ctx context.Context, o FairnessOptions, part string, noisyJobs, sleepMS, processes int,
) (noisyRun, error) {
	o.Replicas = map[string]int{"worker": processes}
	var out noisyRun
	var ended []groupState
	x, err := o.experiment(ctx, part, func(x *run) error {
		first, err := x.runAlone(ctx, part, "alone", smallTenants, aloneTenant)
		if err != nil {
			return err
		}
		earlier := len(x.groups)
		noisy := group{id: x.name + "-noisy", tenant: "noisy", jobs: noisyJobs, job: sleeping(sleepMS)}
		if err := x.submit(ctx, noisy); err != nil {
			return err
		}
		lasts := time.Duration(noisyJobs*sleepMS/x.workerSlots()/processes) * time.Millisecond
		if err := x.submitWhenDue(ctx, smallGroupsAtRandom(x, lasts, o.Seed)); err != nil {
			return err
		}
		if ended, err = x.awaitDone(ctx, part, x.groups[earlier:]); err != nil {
			return err
		}
		second, err := x.runAlone(ctx, part, "again", smallTenants, aloneTenant)
		// The faster of two measurements of small groups alone counts. Other work on the machine
		// may have slowed down the slower one; the ratio would then be too small.
		out.alone = slices.MinFunc([][]float64{first, second}, func(a, b []float64) int {
			return cmp.Compare(measure.Percentile(a, 99), measure.Percentile(b, 99))
		})
		return err
	}, noGlobalLimit)
	if err != nil {
		return out, err
	}
	out.overrides = x.overrides
	last := slices.MaxFunc(ended, func(a, b groupState) int { return a.JobsEnded.Compare(b.JobsEnded) })
	if last.tenant != "noisy" {
		return out, fmt.Errorf("group %s ended after the noisy group, so it did not run beside it all the "+
			"time: raise --noisy-jobs",
			last.id)
	}
	for _, g := range ended[1:] {
		out.beside = append(out.beside, g.seconds())
	}
	slices.Sort(out.beside)
	slices.Sort(out.alone)
	out.jobsPerSecond = float64(noisyJobs+smallTenants*smallJobs) / makespan(ended)
	return out, nil
}

func aloneTenant(i int) string { return fmt.Sprintf("alone-%d", i) }

// smallGroupsAtRandom returns the groups of the small tenants, each with a random time of
// submission while the noisy tenant has work. lasts is the least time that its work takes. The same
// seed gives the same times.
func smallGroupsAtRandom(x *run, lasts time.Duration, seed uint64) []delayedGroup {
	random := rand.New(rand.NewPCG(seed, seed))
	out := make([]delayedGroup, smallTenants)
	for i := range out {
		after := time.Duration((0.05 + 0.85*random.Float64()) * float64(lasts))
		out[i] = delayedGroup{after, x.smallGroup("small", i, fmt.Sprintf("small-%d", i))}
	}
	slices.SortFunc(out, func(a, b delayedGroup) int { return cmp.Compare(a.after, b.after) })
	return out
}

func runNoisy(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	f, err := runBesideNoisy(ctx, o, "noisy", o.NoisyJobs, smallSleepMS, 1)
	if err != nil {
		return nil, err
	}
	oneGroup, err := oneGroupSpeed(ctx, o, o.NoisyJobs+smallTenants*smallJobs)
	if err != nil {
		return nil, err
	}
	n := &NoisyNeighbour{
		NoisyJobs:         o.NoisyJobs,
		SmallTenants:      smallTenants,
		SmallP50:          measure.Percentile(f.beside, 50),
		SmallP99:          measure.Percentile(f.beside, 99),
		SmallAloneP50:     measure.Percentile(f.alone, 50),
		SmallAloneP99:     measure.Percentile(f.alone, 99),
		JobsPerSecond:     measure.Round2(f.jobsPerSecond),
		OneGroupPerSecond: measure.Round2(oneGroup),
		SmallSeconds:      f.beside,
		SmallAloneSeconds: f.alone,
	}
	n.SmallRatio = measure.Ratio(n.SmallP99, n.SmallAloneP99)
	n.ThroughputRatio = measure.Ratio(f.jobsPerSecond, oneGroup)
	out.NoisyNeighbour = n
	return f.overrides, nil
}

// oneGroupSpeed returns the jobs a second of one group with the given number of jobs, which runs
// alone on a fleet of its own.
func oneGroupSpeed(ctx context.Context, o FairnessOptions, jobs int) (float64, error) {
	x, err := o.experiment(ctx, "unfair", func(x *run) error {
		if _, err := x.runAlone(ctx, "unfair", "alone", 1, named("warm")); err != nil {
			return err
		}
		return x.submit(ctx, group{id: x.name + "-alone", tenant: "alone", jobs: jobs, job: sleeping(smallSleepMS)})
	}, noGlobalLimit)
	if err != nil {
		return 0, err
	}
	return float64(jobs) / makespan(x.ended[len(x.ended)-1:]), nil
}

func runLong(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	f, err := runBesideNoisy(ctx, o, "long", longJobs*longProcesses, longFactor*smallSleepMS, longProcesses)
	if err != nil {
		return nil, err
	}
	one, err := runBesideNoisy(ctx, o, "long, one worker process", longJobs, longFactor*smallSleepMS, 1)
	if err != nil {
		return nil, err
	}
	n := &NoisyLongJobs{
		WorkerProcesses:  longProcesses,
		LongNoisyJobs:    longJobs * longProcesses,
		LongP50:          measure.Percentile(f.beside, 50),
		LongP99:          measure.Percentile(f.beside, 99),
		LongAloneP99:     measure.Percentile(f.alone, 99),
		LongSmall:        f.beside,
		LongAloneSeconds: f.alone,
	}
	n.LongRatio = measure.Ratio(n.LongP99, n.LongAloneP99)
	n.LongRatioOne = measure.Ratio(measure.Percentile(one.beside, 99), measure.Percentile(one.alone, 99))
	out.NoisyLongJobs = n
	return f.overrides, nil
}
