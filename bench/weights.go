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

// Weights are the shares of tenants of weights 1, 2 and 4 while all have work.
type Weights struct {
	// of the share that is furthest off, as a part of what its weight is due
	WeightError  float64   `json:"weight_error"`
	WeightShares []float64 `json:"weight_shares"` // of the starts
	WeightStarts int64     `json:"weight_starts"` // that were counted
}

// Lanes are the shares of the lanes while all have work.
type Lanes struct {
	LaneError  float64   `json:"lane_error"`
	LaneShares []float64 `json:"lane_shares"` // high, normal, low
	LaneStarts int64     `json:"lane_starts"`
	// the longest time in which no job of the low lane started
	LowMaxGap     float64 `json:"low_lane_max_gap_seconds"`
	LowLaneStarts int64   `json:"low_lane_starts"`
}

const (
	contested = 4000 // jobs of each tenant
	// settle is cut off at both ends of the time in which all have work.
	settle = time.Second
)

// contest has groups compete for the workers. What is counted are the starts of each while
// all have work.
func contest(ctx context.Context, x *experiment, part string, groups []group) (journal.Log, span, error) {
	if err := x.submit(ctx, groups...); err != nil {
		return journal.Log{}, span{}, err
	}
	_, log, err := x.finish(ctx, part)
	if err != nil {
		return log, span{}, err
	}
	m, err := middle(log, groups)
	return log, m, err
}

// span is the time in µs in which all groups have work, and the starts of each in it.
type span struct {
	from, to int64
	counts   []int64
}

// middle is the span between the time when the last of the groups has begun and the time when the
// first has no more jobs.
func middle(log journal.Log, groups []group) (span, error) {
	m := span{from: math.MinInt64, to: math.MaxInt64}
	starts := make([][]event, len(groups))
	for i, g := range groups {
		starts[i] = startEvents(log, func(s journal.StartEvent) bool { return s.Group == g.id })
		if len(starts[i]) == 0 {
			return m, fmt.Errorf("count starts of group %s: none was logged", g.id)
		}
		m.from, m.to = max(m.from, starts[i][0].at), min(m.to, starts[i][len(starts[i])-1].at)
	}
	m.from, m.to = m.from+settle.Microseconds(), m.to-settle.Microseconds()
	if m.to <= m.from {
		return m, errors.New("count starts: the groups had work at the same time for less than two seconds")
	}
	for i := range groups {
		m.counts = append(m.counts, within(starts[i], m.from, m.to))
	}
	return m, nil
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
		groups[i] = group{id: x.name + "-" + tenant, tenant: tenant, jobs: contested, payload: sleeping(smallSleepMS)}
		if err := ledger.SetTenant(ctx, x.fleet.Conn.Cmd, x.space.OfTenant(tenant), tenant,
			ledger.TenantSettings{Weight: &w}); err != nil {
			return nil, fmt.Errorf("set weight of tenant %s: %w", tenant, err)
		}
	}
	_, m, err := contest(ctx, x, "weights", groups)
	if err != nil {
		return nil, err
	}
	out.Weights = &Weights{
		WeightError:  deviation(m.counts, weights),
		WeightShares: shares(m.counts),
		WeightStarts: sum(m.counts),
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
			jobs:     contested,
			payload:  sleeping(smallSleepMS),
		}
	}
	log, m, err := contest(ctx, x, "lanes", groups)
	if err != nil {
		return nil, err
	}
	low := startEvents(log, func(s journal.StartEvent) bool { return s.Group == groups[2].id })
	out.Lanes = &Lanes{
		LaneError: deviation(m.counts, []float64{6, 3, 1}), LaneShares: shares(m.counts), LaneStarts: sum(m.counts),
		LowMaxGap: precise(float64(longestGap(low, m.from, m.to)) / 1e6), LowLaneStarts: m.counts[2],
	}
	return x.overrides, nil
}

func sum(counts []int64) int64 {
	var n int64
	for _, c := range counts {
		n += c
	}
	return n
}

// longestGap is the longest time in [from, to) without an event.
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
