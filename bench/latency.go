package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/process/journal"
)

// LatencyOptions say how many single jobs are sent at which rate.
type LatencyOptions struct {
	Options
	Rate    int // jobs a second
	Seconds int // how long they are sent
}

// Latency shows how long a job waits on a system with little load. Each job is a group of its own.
// The time of its acceptance is stored by Redis in whole ms, rounded down, so the real wait is up
// to 1 ms shorter. All other times are in µs.
type Latency struct {
	Quantiles        // from accepted to started
	Rate      int    `json:"rate"`
	Jobs      int    `json:"jobs"`
	Workload  string `json:"workload"`

	// PublishedStarted has the times from the moment at which the job was due to be published until
	// it started: a delay in the producer counts.
	PublishedStarted Quantiles `json:"published_to_started"`
	// PublishedFinished has the times from the same moment until a listener has read the event that
	// the group is COMPLETED.
	PublishedFinished Quantiles `json:"published_to_finished"`

	Overrides map[string]string `json:"overrides"`
}

// RunLatency sends single jobs at a steady rate, which does not fall when earlier jobs are slow. It
// waits until they have ended, and stops the fleet.
func RunLatency(ctx context.Context, o LatencyOptions) (Latency, error) {
	out := Latency{
		Rate: o.Rate, Jobs: o.Rate * o.Seconds, Workload: "groups of one job, a message each, of one tenant",
	}
	r, err := start(ctx, o.Options, true, noGlobalLimit)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = r.overrides
	if _, _, err := r.sendSingles(ctx, "", "-warm", o.Rate, min(o.Rate, warmJobs)); err != nil {
		return out, fmt.Errorf("warm up: %w", err)
	}
	ends, err := r.listenForEnds(ctx, 0)
	if err != nil {
		return out, err
	}
	defer ends.close()
	groups, due, err := r.sendSingles(ctx, "jobs", "-single", o.Rate, out.Jobs)
	if err != nil {
		return out, err
	}
	completed, err := ends.awaitCompleted(ctx, groups)
	if err != nil {
		return out, err
	}
	if err := r.readJournals(); err != nil {
		return out, err
	}
	out.compute(groups, due, completed, r.log)
	if out.PublishedStarted == (Quantiles{}) {
		return out, errNoStarts
	}
	return out, nil
}

// compute computes the figures of l. due has, for each group, the time at which its job was due to
// be published, in µs by Redis's clock.
func (l *Latency) compute(groups []group, due []int64, completed []groupEnd, log journal.Log) {
	started := firstStarts(log)
	var accepted, published, ends []float64
	for i, g := range groups {
		if at, ok := started[g.id]; ok {
			accepted = append(accepted, completed[i].msUntil(at))
			published = append(published, float64(at-due[i])/1000)
		}
		ends = append(ends, float64(completed[i].readAt-due[i])/1000)
	}
	l.Quantiles = quantilesOf(accepted)
	l.PublishedStarted, l.PublishedFinished = quantilesOf(published), quantilesOf(ends)
}

// sendSingles sends n groups of one job at a steady rate and waits until they are done. It returns
// the groups, and the time at which each was due to be published, in µs by Redis's clock.
func (r *run) sendSingles(ctx context.Context, part, suffix string, rate, n int) ([]group, []int64, error) {
	offset, err := r.clockOffset(ctx)
	if err != nil {
		return nil, nil, err
	}
	groups, dues := singleJobs(r.name+suffix, n, named("single"), nil), make([]int64, n)
	err = pace(ctx, rate, n, func(ctx context.Context, i int, due time.Time) error {
		dues[i] = due.Add(offset).UnixMicro()
		if i%paceSenders == 0 {
			r.options.progress(part, i, n)
		}
		return r.publishSingle(ctx, groups[i], 0)
	})
	if err != nil {
		return nil, nil, err
	}
	return groups, dues, r.follow("", groups).wait(ctx)
}
