package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// BehindHugeGroup is how small groups fare behind a huge one of their own tenant.
type BehindHugeGroup struct {
	BehindHugeJobs     int       `json:"behind_huge_jobs"`
	BehindP50          float64   `json:"behind_p50_seconds"` // accepted to COMPLETED
	BehindMax          float64   `json:"behind_max_seconds"`
	BehindAloneMax     float64   `json:"behind_solo_max_seconds"`
	BehindRatio        float64   `json:"behind_ratio"`             // slowest to slowest
	BehindFirst        bool      `json:"behind_finished_first"`    // all before the huge one
	BehindHugeLeft     int64     `json:"behind_huge_jobs_left"`    // of the huge group when the last small one had ended
	BehindSeconds      []float64 `json:"behind_seconds"`           // of each
	BehindAloneSeconds []float64 `json:"behind_solo_seconds_each"` // of each
}

const (
	hugeJobs          = 100_000
	hugeSleepMS       = 1
	behindSmallGroups = 20
)

func runBehind(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	x, err := startExperiment(ctx, o.Options, unlimited())
	if err != nil {
		return nil, err
	}
	defer x.close()
	b := &BehindHugeGroup{BehindHugeJobs: hugeJobs}
	tenant := func(int) string { return "one" }
	if b.BehindAloneSeconds, err = x.runAlone(ctx, "behind", "alone", behindSmallGroups, tenant); err != nil {
		return nil, err
	}
	huge := group{id: x.name + "-huge", tenant: tenant(0), jobs: hugeJobs, payload: sleeping(hugeSleepMS)}
	if err := x.submit(ctx, huge); err != nil {
		return nil, err
	}
	if _, err := x.awaitAccepted(ctx, []group{huge}); err != nil {
		return nil, err
	}
	small := make([]group, behindSmallGroups)
	for i := range small {
		small[i] = x.smallGroup("behind", i, tenant(i))
	}
	if b.BehindSeconds, err = x.runOneByOne(ctx, "behind", small); err != nil {
		return nil, err
	}
	now, err := x.readGroups(ctx, []group{huge})
	if err != nil {
		return nil, err
	}
	b.BehindHugeLeft = now[0].accepted - now[0].done
	if b.BehindHugeLeft == 0 {
		return nil, errors.New("the huge group ended before the small ones: they were not behind it")
	}
	if _, _, err := x.finish(ctx, "behind, the rest"); err != nil {
		return nil, fmt.Errorf("after the small groups: %w", err)
	}
	b.BehindFirst = true
	b.BehindP50, b.BehindMax, b.BehindAloneMax = percentile(b.BehindSeconds, 50), slices.Max(b.BehindSeconds),
		slices.Max(b.BehindAloneSeconds)
	b.BehindRatio = ratio(b.BehindMax, b.BehindAloneMax)
	out.BehindHugeGroup = b
	return x.overrides, nil
}
