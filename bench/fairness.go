package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// FairnessOptions say which parts of the benchmark of fairness are run, and how large they are.
type FairnessOptions struct {
	Options
	NoisyJobs int      // jobs of the noisy tenant
	Only      []string // names of parts, see FairnessParts; empty: all
	Seed      uint64   // of the random times at which small groups are submitted
}

// Fairness has the figures of all parts that were run; those of other parts are nil.
type Fairness struct {
	*NoisyNeighbour
	*NoisyLongJobs
	*Weights
	*Lanes
	*BehindHugeGroup
	*AdmitCost
	*Idle
	*RetryAfter
	Overrides map[string]map[string]string `json:"overrides"` // by part; see Options.overrides
}

// fairnessPart is one experiment of [RunFairness]. run stores its figures in Fairness and returns
// the settings that its fleet had (see Options.overrides).
type fairnessPart struct {
	name string
	run  func(context.Context, FairnessOptions, *Fairness) (map[string]string, error)
}

var fairnessParts = []fairnessPart{
	{"noisy", runNoisy}, {"long", runLong}, {"weights", runWeights}, {"lanes", runLanes},
	{"behind", runBehind}, {"cost", runCost}, {"idle", runIdle}, {"retry-after", runRetryAfter},
}

// FairnessParts returns the names of all parts.
func FairnessParts() []string {
	names := make([]string, len(fairnessParts))
	for i, p := range fairnessParts {
		names[i] = p.name
	}
	return names
}

// RunFairness runs the chosen parts one after the other, each on fleets of its own. A part that
// fails does not stop the others: the figures of those that succeeded are returned with the error.
// Only the end of ctx stops all.
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

// Size of the small groups, which is the same in all parts.
const (
	smallJobs    = 20
	smallSleepMS = 10
)

func (r *run) smallGroup(kind string, i int, tenant string) group {
	return group{
		id: fmt.Sprintf("%s-%s-%d", r.name, kind, i), tenant: tenant, jobs: smallJobs, job: sleeping(smallSleepMS),
	}
}

// runOneByOne submits each group when the previous one is completed. It returns, in the order of
// groups, the seconds that each took from its acceptance to COMPLETED.
func (r *run) runOneByOne(ctx context.Context, part string, groups ...group) ([]float64, error) {
	took := make([]float64, 0, len(groups))
	for _, g := range groups {
		if err := r.submit(ctx, g); err != nil {
			return nil, err
		}
		ended, err := r.awaitDone(ctx, part, []group{g})
		if err != nil {
			return nil, err
		}
		took = append(took, ended[0].seconds())
	}
	return took, nil
}

// runAlone returns the seconds that each of n small groups takes when they run one after the other
// and nothing else runs. It runs a few more groups first, to warm up. kind becomes part of the
// groups' ids.
func (r *run) runAlone(
	ctx context.Context, part, kind string, n int, tenant func(i int) string,
) ([]float64, error) {
	const warm = 3
	groups := make([]group, warm+n)
	for i := range groups {
		groups[i] = r.smallGroup(kind, i, tenant(i))
	}
	took, err := r.runOneByOne(ctx, part+", alone", groups...)
	if err != nil {
		return nil, err
	}
	return took[warm:], nil
}
