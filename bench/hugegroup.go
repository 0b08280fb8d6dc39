package bench

import (
	"context"
	"errors"
	"slices"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// BehindHugeGroup shows how long small groups take when a huge group of the same tenant was
// submitted before them.
type BehindHugeGroup struct {
	BehindHugeJobs int     `json:"behind_huge_jobs"`
	BehindP50      float64 `json:"behind_p50_seconds"` // of small groups, from accepted to COMPLETED
	BehindMax      float64 `json:"behind_max_seconds"`
	BehindAloneMax float64 `json:"behind_solo_max_seconds"`
	// slowest behind the huge group / slowest alone
	BehindRatio float64 `json:"behind_ratio"`
	// all small groups ended before the huge one
	BehindFirst bool `json:"behind_finished_first"`
	// BehindHugeLeft is the number of jobs of the huge group that were not done yet when the last
	// small group ended.
	BehindHugeLeft int64     `json:"behind_huge_jobs_left"`
	BehindSeconds  []float64 `json:"behind_seconds"` // of each small group behind the huge one
	// of each small group that ran alone
	BehindAloneSeconds []float64 `json:"behind_solo_seconds_each"`
}

const (
	hugeJobs          = 100_000
	hugeSleepMS       = 1
	behindSmallGroups = 20
)

func runBehind(ctx context.Context, o FairnessOptions, out *Fairness) (map[string]string, error) {
	b := &BehindHugeGroup{BehindHugeJobs: hugeJobs}
	tenant := named("one")
	x, err := o.experiment(ctx, "behind, rest of the huge group", func(x *run) (err error) {
		if b.BehindAloneSeconds, err = x.runAlone(ctx, "behind", "alone", behindSmallGroups, tenant); err != nil {
			return err
		}
		huge := group{id: x.name + "-huge", tenant: tenant(0), jobs: hugeJobs, job: sleeping(hugeSleepMS)}
		if err := x.submit(ctx, huge); err != nil {
			return err
		}
		if _, err := x.awaitAccepted(ctx, huge); err != nil {
			return err
		}
		small := make([]group, behindSmallGroups)
		for i := range small {
			small[i] = x.smallGroup("behind", i, tenant(i))
		}
		if b.BehindSeconds, err = x.runOneByOne(ctx, "behind", small...); err != nil {
			return err
		}
		now, err := x.states(ctx, []group{huge})
		if err != nil {
			return err
		}
		if b.BehindHugeLeft = now[0].Counts.Accepted - now[0].Counts.Done; b.BehindHugeLeft == 0 {
			return errors.New("the huge group ended before the small groups, so they did not run behind it")
		}
		return nil
	}, noGlobalLimit)
	if err != nil {
		return nil, err
	}
	b.BehindFirst = true
	b.BehindP50, b.BehindMax, b.BehindAloneMax = measure.Percentile(b.BehindSeconds, 50), slices.Max(b.BehindSeconds),
		slices.Max(b.BehindAloneSeconds)
	b.BehindRatio = measure.Ratio(b.BehindMax, b.BehindAloneMax)
	out.BehindHugeGroup = b
	return x.overrides, nil
}
