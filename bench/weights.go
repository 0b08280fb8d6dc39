package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// Weights has the shares of three tenants with the weights 1, 2 and 4 while all of them have work.
type Weights struct {
	// the largest relative deviation of a tenant's share from the share that its weight gives
	WeightError  float64   `json:"weight_error"`
	WeightShares []float64 `json:"weight_shares"` // shares of the starts, by weight: 1, 2, 4
	WeightStarts int64     `json:"weight_starts"` // number of starts that were counted
}

// Lanes has the shares of the three lanes while all of them have work.
type Lanes struct {
	// the largest relative deviation of a lane's share from the share that its weight gives
	LaneError  float64   `json:"lane_error"`
	LaneShares []float64 `json:"lane_shares"` // high, normal, low
	LaneStarts int64     `json:"lane_starts"`
	// the longest time in which no job of the low lane started while all lanes had work
	LowMaxGap     float64 `json:"low_lane_max_gap_seconds"`
	LowLaneStarts int64   `json:"low_lane_starts"`
}

const (
	competingJobs = 4000 // jobs of each tenant
	// spanMargin is left out at both ends of the time in which all groups have work.
	spanMargin = time.Second
)

// runCompeting submits groups that compete for the workers, waits for their end, and stops the
// processes. It returns their journals, and the starts of each group while all had work.
func runCompeting(ctx context.Context, x *experiment, part string, groups []group) (journal.Log, busySpan, error) {
	if err := x.submit(ctx, groups...); err != nil {
		return journal.Log{}, busySpan{}, err
	}
	_, log, err := x.finish(ctx, part)
	if err != nil {
		return log, busySpan{}, err
	}
	s, err := findBusySpan(log, groups)
	return log, s, err
}

// busySpan is the time (µs) in which all groups have work, and the number of starts of each group
// in it.
type busySpan struct {
	from, to int64
	counts   []int64
}

// findBusySpan returns the span from the first start of the group that begins last to the last
// start of the group that ends first, less a margin at both ends.
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
	x, err := startExperiment(ctx, o.Options, unlimited())
	if err != nil {
		return nil, err
	}
	defer x.close()
	weights := []float64{1, 2, 4}
	groups := make([]group, len(weights))
	for i, w := range weights {
		tenant := fmt.Sprintf("weight-%g", w)
		groups[i] = group{
			id:      x.name + "-" + tenant,
			tenant:  tenant,
			jobs:    competingJobs,
			payload: sleeping(smallSleepMS),
		}
		if err := ledger.SetTenant(ctx, x.fleet.Conn.Cmd, x.space.OfTenant(tenant), tenant,
			ledger.TenantSettings{Weight: &w}); err != nil {
			return nil, fmt.Errorf("set weight of tenant %s: %w", tenant, err)
		}
	}
	_, s, err := runCompeting(ctx, x, "weights", groups)
	if err != nil {
		return nil, err
	}
	out.Weights = &Weights{
		WeightError:  worstDeviation(s.counts, weights),
		WeightShares: sharesOf(s.counts),
		WeightStarts: sumCounts(s.counts),
	}
	return x.overrides, nil
}

func runLanes(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	x, err := startExperiment(ctx, o.Options, unlimited())
	if err != nil {
		return nil, err
	}
	defer x.close()
	lanes := []string{"high", "normal", "low"}
	groups := make([]group, len(lanes))
	for i, lane := range lanes {
		groups[i] = group{
			id:       x.name + "-" + lane,
			tenant:   "lane-" + lane,
			priority: lane,
			jobs:     competingJobs,
			payload:  sleeping(smallSleepMS),
		}
	}
	log, s, err := runCompeting(ctx, x, "lanes", groups)
	if err != nil {
		return nil, err
	}
	low := startEvents(log, func(s journal.StartEvent) bool { return s.Group == groups[2].id })
	out.Lanes = &Lanes{
		LaneError:     worstDeviation(s.counts, []float64{6, 3, 1}),
		LaneShares:    sharesOf(s.counts),
		LaneStarts:    sumCounts(s.counts),
		LowMaxGap:     round4(float64(longestGap(low, s.from, s.to)) / 1e6),
		LowLaneStarts: s.counts[2],
	}
	return x.overrides, nil
}

func sumCounts(counts []int64) int64 {
	var n int64
	for _, c := range counts {
		n += c
	}
	return n
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
