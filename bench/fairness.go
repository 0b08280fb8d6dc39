package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// FairnessOptions say how much is run.
type FairnessOptions struct {
	Options
	NoisyJobs int      // of the noisy neighbour
	Only      []string // of FairnessParts; empty: all
	Seed      uint64   // of when small tenants arrive
}

// Fairness is what came of it: of each part that was run, its figures.
type Fairness struct {
	*NoisyNeighbour
	*NoisyLongJobs
	*Weights
	*Lanes
	*BehindHugeGroup
	*AdmitCost
	*Idle
	*RetryAfter
	Overrides map[string]map[string]string `json:"overrides"` // by part
}

// fairnessPart measures one thing on a fleet of its own and says how that differed from a fresh
// installation's.
type fairnessPart struct {
	name string
	run  func(context.Context, FairnessOptions, *Fairness) (map[string]string, error)
}

var fairnessParts = []fairnessPart{
	{"noisy", runNoisy}, {"long", runLong}, {"weights", runWeights}, {"lanes", runLanes},
	{"behind", runBehind}, {"cost", runCost}, {"idle", runIdle}, {"retry-after", runRetryAfter},
}

// FairnessParts are the names of all parts.
func FairnessParts() []string {
	names := make([]string, len(fairnessParts))
	for i, p := range fairnessParts {
		names[i] = p.name
	}
	return names
}

// RunFairness runs the parts one after the other. One that fails is left out of what is returned
// with the error.
func RunFairness(ctx context.Context, o FairnessOptions) (Fairness, error) {
	out := Fairness{Overrides: map[string]map[string]string{}}
	var errs []error
	for _, p := range fairnessParts {
		if len(o.Only) > 0 && !slices.Contains(o.Only, p.name) {
			continue
		}
		overrides, err := p.run(ctx, o, &out)
		if ctx.Err() != nil {
			return out, ctx.Err()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("fairness, part %s: %w", p.name, err))
			continue
		}
		out.Overrides[p.name] = overrides
	}
	return out, errors.Join(errs...)
}

// unlimited has the workers be the bottleneck.
func unlimited() setup {
	return setup{env: map[string]string{"BULKACTION_BACKPRESSURE_GLOBAL_RPS": "0"}}
}

// workerSlots is how many jobs the fleet runs at once.
func (x *experiment) workerSlots() int {
	if n, err := strconv.Atoi(x.overrides["BULKACTION_WORKER_COUNT"]); err == nil && n > 0 {
		return n
	}
	return 10
}

// The small groups, which are the same in every part.
const (
	smallJobs    = 20
	smallSleepMS = 10
)

func (x *experiment) smallGroup(kind string, i int, tenant string) group {
	return group{
		id:      fmt.Sprintf("%s-%s-%d", x.name, kind, i),
		tenant:  tenant,
		jobs:    smallJobs,
		payload: sleeping(smallSleepMS),
	}
}

// runOneByOne submits groups, each when the one before has ended, and says how long each took.
func (x *experiment) runOneByOne(ctx context.Context, part string, groups []group) ([]float64, error) {
	took := make([]float64, 0, len(groups))
	for _, g := range groups {
		if err := x.submit(ctx, g); err != nil {
			return nil, err
		}
		ended, err := x.await(ctx, part, []group{g})
		if err != nil {
			return nil, err
		}
		took = append(took, ended[0].seconds())
	}
	return took, nil
}

// runAlone is how long small groups take with nothing else there. A few before them warm the fleet up.
// Kind is in their names.
func (x *experiment) runAlone(
	ctx context.Context, part, kind string, n int, tenant func(i int) string,
) ([]float64, error) {
	const warm = 3
	groups := make([]group, warm+n)
	for i := range groups {
		groups[i] = x.smallGroup(kind, i, tenant(i))
	}
	took, err := x.runOneByOne(ctx, part+", alone", groups)
	if err != nil {
		return nil, err
	}
	return took[warm:], nil
}
