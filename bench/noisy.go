package bench

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Noisy is how small tenants fare beside one that floods the workers.
type Noisy struct {
	NoisyJobs    int     `json:"noisy_jobs"`
	SmallTenants int     `json:"small_tenants"`
	SmallP50     float64 `json:"small_p50_seconds"` // accepted to COMPLETED
	SmallP99     float64 `json:"small_p99_seconds"`
	// the better of two runs of all, before and after the noisy one
	SmallSoloP50     float64   `json:"small_solo_p50_seconds"`
	SmallSoloP99     float64   `json:"small_solo_p99_seconds"`
	SmallRatio       float64   `json:"small_ratio"` // p99 to p99
	JobsPerSecond    float64   `json:"jobs_per_second"`
	UnfairPerSecond  float64   `json:"unfair_jobs_per_second"` // of as many jobs in one group: nothing to be fair about
	ThroughputRatio  float64   `json:"throughput_ratio"`
	SmallSeconds     []float64 `json:"small_seconds"`
	SmallSoloSeconds []float64 `json:"small_solo_seconds"`
}

// Long is the same with a noisy tenant whose jobs take 50 times as long as those of the others.
type Long struct {
	WorkerProcesses int     `json:"long_worker_processes"` // each with the default number of workers
	LongNoisyJobs   int     `json:"long_noisy_jobs"`
	LongP50         float64 `json:"long_small_p50_seconds"`
	LongP99         float64 `json:"long_small_p99_seconds"`
	LongSoloP99     float64 `json:"long_small_solo_p99_seconds"`
	LongRatio       float64 `json:"long_ratio"`
	// with one worker process, and a quarter of the noisy jobs
	LongRatioOne    float64   `json:"long_ratio_one_process"`
	LongSmall       []float64 `json:"long_small_seconds"`
	LongSoloSeconds []float64 `json:"long_small_solo_seconds"`
}

const (
	smallTenants = 99
	longFactor   = 50
	longJobs     = 800 // a worker process
	// With few workers there is little that long jobs could leave to others.
	longProcesses = 4
)

// flood is one run of a noisy tenant and the small ones.
type flood struct {
	solo, small []float64
	perSecond   float64
	overrides   map[string]string
}

func runFlood(ctx context.Context, o FairnessOptions, part string, noisyJobs, sleepMS, processes int) (flood, error) {
	s := unlimited()
	s.replicas = map[string]int{"worker": processes}
	x, err := startExperiment(ctx, o.Options, s)
	if err != nil {
		return flood{}, err
	}
	defer x.close()
	out := flood{overrides: x.overrides}
	alone := func(kind string) ([]float64, error) {
		return x.solo(ctx, part, kind, smallTenants, func(i int) string { return fmt.Sprintf("solo-%d", i) })
	}
	first, err := alone("solo")
	if err != nil {
		return out, err
	}
	before := len(x.groups)
	if err := x.submit(
		ctx, group{id: x.name + "-noisy", tenant: "noisy", jobs: noisyJobs, payload: sleeping(sleepMS)},
	); err != nil {
		return out, err
	}
	lasts := time.Duration(noisyJobs*sleepMS/x.workers()/processes) * time.Millisecond
	if err := x.play(ctx, x.arrivals(lasts, o.Seed)); err != nil {
		return out, err
	}
	ended, err := x.await(ctx, part, x.groups[before:])
	if err != nil {
		return out, err
	}
	second, err := alone("again")
	if err != nil {
		return out, err
	}
	if _, _, err := x.finish(ctx, part); err != nil {
		return out, err
	}
	// Whatever else the machine did during one of them would make a small group beside the noisy
	// one look better than it is.
	out.solo = first
	if percentile(second, 99) < percentile(first, 99) {
		out.solo = second
	}
	last := slices.MaxFunc(ended, func(a, b endedGroup) int { return cmp.Compare(a.ended, b.ended) })
	if last.tenant != "noisy" {
		return out, fmt.Errorf("group %s ended after the noisy one, so it was not beside it: give --noisy-jobs more",
			last.id)
	}
	for _, g := range ended[1:] {
		out.small = append(out.small, g.took())
	}
	slices.Sort(out.small)
	slices.Sort(out.solo)
	out.perSecond = float64(noisyJobs+smallTenants*smallJobs) / makespan(ended)
	return out, nil
}

// arrivals are small groups at random times within the time that the noisy one needs at least.
func (x *experiment) arrivals(lasts time.Duration, seed uint64) []visit {
	random := rand.New(rand.NewPCG(seed, seed))
	out := make([]visit, smallTenants)
	for i := range out {
		after := time.Duration((0.05 + 0.85*random.Float64()) * float64(lasts))
		out[i] = visit{after, x.small("small", i, fmt.Sprintf("small-%d", i))}
	}
	slices.SortFunc(out, func(a, b visit) int { return cmp.Compare(a.after, b.after) })
	return out
}

func runNoisy(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	f, err := runFlood(ctx, o, "noisy", o.NoisyJobs, smallSleepMS, 1)
	if err != nil {
		return nil, err
	}
	alone, err := runAlone(ctx, o, o.NoisyJobs+smallTenants*smallJobs)
	if err != nil {
		return nil, err
	}
	n := &Noisy{
		NoisyJobs:        o.NoisyJobs,
		SmallTenants:     smallTenants,
		SmallP50:         percentile(f.small, 50),
		SmallP99:         percentile(f.small, 99),
		SmallSoloP50:     percentile(f.solo, 50),
		SmallSoloP99:     percentile(f.solo, 99),
		JobsPerSecond:    round(f.perSecond),
		UnfairPerSecond:  round(alone),
		SmallSeconds:     f.small,
		SmallSoloSeconds: f.solo,
	}
	n.SmallRatio, n.ThroughputRatio = ratio(n.SmallP99, n.SmallSoloP99), ratio(f.perSecond, alone)
	out.Noisy = n
	return f.overrides, nil
}

// runAlone is the throughput of so many jobs in one group.
func runAlone(ctx context.Context, o FairnessOptions, jobs int) (float64, error) {
	x, err := startExperiment(ctx, o.Options, unlimited())
	if err != nil {
		return 0, err
	}
	defer x.close()
	if _, err := x.solo(ctx, "unfair", "solo", 1, func(int) string { return "warm" }); err != nil {
		return 0, err
	}
	before := len(x.groups)
	if err := x.submit(
		ctx, group{id: x.name + "-alone", tenant: "alone", jobs: jobs, payload: sleeping(smallSleepMS)},
	); err != nil {
		return 0, err
	}
	ended, _, err := x.finish(ctx, "unfair")
	if err != nil {
		return 0, err
	}
	return float64(jobs) / makespan(ended[before:]), nil
}

func runLong(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	f, err := runFlood(ctx, o, "long", longJobs*longProcesses, longFactor*smallSleepMS, longProcesses)
	if err != nil {
		return nil, err
	}
	one, err := runFlood(ctx, o, "long, one worker process", longJobs, longFactor*smallSleepMS, 1)
	if err != nil {
		return nil, err
	}
	n := &Long{
		WorkerProcesses: longProcesses,
		LongNoisyJobs:   longJobs * longProcesses,
		LongP50:         percentile(f.small, 50),
		LongP99:         percentile(f.small, 99),
		LongSoloP99:     percentile(f.solo, 99),
		LongSmall:       f.small,
		LongSoloSeconds: f.solo,
	}
	n.LongRatio = ratio(n.LongP99, n.LongSoloP99)
	n.LongRatioOne = ratio(percentile(one.small, 99), percentile(one.solo, 99))
	out.Long = n
	return f.overrides, nil
}
