package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

// Weights has the shares that three tenants with the weights 1, 2 and 4 get of the starts of jobs
// while all of them have work.
type Weights struct {
	// WeightError is the largest relative deviation of a tenant's share from the share that its
	// weight gives.
	WeightError  float64   `json:"weight_error"`
	WeightShares []float64 `json:"weight_shares"` // shares of the starts, by weight: 1, 2, 4
	WeightStarts int64     `json:"weight_starts"` // number of starts that were counted
}

// Lanes has the shares that the three lanes get of the starts of jobs while all of them have work.
type Lanes struct {
	// LaneError is the largest relative deviation of a lane's share from the share that its weight
	// gives.
	LaneError  float64   `json:"lane_error"`
	LaneShares []float64 `json:"lane_shares"` // high, normal, low
	LaneStarts int64     `json:"lane_starts"`
	// LowMaxGap is the longest time (seconds) in which no job of the low lane started while all
	// lanes had work.
	LowMaxGap     float64 `json:"low_lane_max_gap_seconds"`
	LowLaneStarts int64   `json:"low_lane_starts"`
}

const (
	competingJobs = 4000 // jobs of each tenant
	// spanMargin is cut off at both ends of the time in which all groups have work, before starts
	// are counted.
	spanMargin = time.Second
)

// runCompeting runs groups that compete for the workers. It calls competitors, which returns the
// groups, after the fleet has started. It returns the ended run, and how many jobs of each group
// started while all groups had work.
func runCompeting(
	ctx context.Context, o FairnessOptions, part string, competitors func(*run) ([]group, error),
) (*run, busySpan, error) {
	x, err := o.experiment(ctx, part, func(x *run) error {
		groups, err := competitors(x)
		if err != nil {
			return err
		}
		return x.submit(ctx, groups...)
	}, noGlobalLimit)
	if err != nil {
		return nil, busySpan{}, err
	}
	s, err := findBusySpan(x.log, x.groups)
	return x, s, err
}

// busySpan is the time, from and to (µs), in which all groups have work, and how many jobs of each
// group started in it.
type busySpan struct {
	from, to int64
	counts   []int64
}

// findBusySpan finds the span in which all groups have work: from the first start of the group that
// begins last to the last start of the group that ends first. It cuts spanMargin off at both ends.
func findBusySpan(log journal.Log, groups []group) (busySpan, error) {
	s := busySpan{from: math.MinInt64, to: math.MaxInt64}
	starts := make([][]event, len(groups))
	for i, g := range groups {
		starts[i] = startEvents(log, func(s journal.StartEvent) bool { return s.Group == g.id })
		if len(starts[i]) == 0 {
			return s, fmt.Errorf("count starts of group %s: no start was logged", g.id)
		}
		s.from, s.to = max(s.from, starts[i][0].at), min(s.to, starts[i][len(starts[i])-1].at)
	}
	s.from, s.to = s.from+spanMargin.Microseconds(), s.to-spanMargin.Microseconds()
	if s.to <= s.from {
		return s, errors.New("count starts: the groups had work at the same time for less than two seconds")
	}
	for i := range groups {
		s.counts = append(s.counts, sumBetween(starts[i], s.from, s.to))
	}
	return s, nil
}

func runWeights(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	weights := []float64{1, 2, 4}
	x, s, err := runCompeting(ctx, o, "weights", func(x *run) (groups []group, err error) {
		for _, w := range weights {
			tenant := fmt.Sprintf("weight-%g", w)
			if err := x.setTenant(ctx, tenant, ledger.TenantSettings{Weight: &w}); err != nil {
				return nil, err
			}
			groups = append(groups, group{
				id: x.name + "-" + tenant, tenant: tenant, jobs: competingJobs, job: sleeping(smallSleepMS),
			})
		}
		return groups, nil
	})
	if err != nil {
		return nil, err
	}
	out.Weights = &Weights{WeightError: worstDeviation(s.counts, weights)}
	out.WeightShares, out.WeightStarts = sharesOf(s.counts)
	return x.overrides, nil
}

func runLanes(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	x, s, err := runCompeting(ctx, o, "lanes", func(x *run) (groups []group, err error) {
		for _, lane := range []string{"high", "normal", "low"} {
			groups = append(groups, group{
				id: x.name + "-" + lane, tenant: "lane-" + lane, jobs: competingJobs, job: sleeping(smallSleepMS),
				fields: map[string]any{"priority": lane},
			})
		}
		return groups, nil
	})
	if err != nil {
		return nil, err
	}
	low := startEvents(x.log, func(s journal.StartEvent) bool { return s.Group == x.groups[2].id })
	out.Lanes = &Lanes{
		LaneError:     worstDeviation(s.counts, []float64{6, 3, 1}),
		LowMaxGap:     measure.Round4(float64(longestGap(low, s.from, s.to)) / 1e6),
		LowLaneStarts: s.counts[2],
	}
	out.LaneShares, out.LaneStarts = sharesOf(s.counts)
	return x.overrides, nil
}

// longestGap returns the longest time within [from, to) without an event. Events are ordered by
// time.
func longestGap(events []event, from, to int64) int64 {
	last, longest := from, int64(0)
	for _, e := range events {
		if e.at < from || e.at >= to {
			continue
		}
		longest, last = max(longest, e.at-last), e.at
	}
	return max(longest, to-last)
}
