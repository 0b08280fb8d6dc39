package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// RepairResult says what was done about a violation, or why nothing was done.
type RepairResult struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`
	Group     string `json:"group"`
	Ordinal   *int64 `json:"ordinal,omitempty"`
	Detail    string `json:"detail"`
	Done      bool   `json:"done"`
}

// maxRepairRuns bounds how often everything is audited and repaired: a repair may reveal another
// violation.
const maxRepairRuns = 8

// Repair audits all partitions and repairs what it can: it sets counts and counters to the
// recounted values, quarantines what does not belong at its location, and ends missing jobs as
// failed with code LOST. It repeats this until no repair succeeds, and returns the report of what
// is left. It calls tell for each repair at once, and at the end for each violation that it can't
// repair. Each repair is one atomic step in Redis, so the roles may be at work. If they change the
// data too fast, some violations are left for the next call.
func Repair(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts Options, tell func(RepairResult),
) (Report, error) {
	for pass := 1; ; pass++ {
		report, err := Run(ctx, conn, space, opts)
		if err != nil {
			return report, err
		}
		repaired := 0
		var unrepaired []RepairResult
		for _, plan := range report.plans {
			repairs, err := plan.run(ctx, conn)
			for _, r := range repairs {
				if !r.Done {
					unrepaired = append(unrepaired, r)
					continue
				}
				tell(r)
				repaired++
			}
			if err != nil {
				return report, fmt.Errorf("repair partition %d: %w", plan.partition.Index(), err)
			}
		}
		if repaired > 0 && pass < maxRepairRuns {
			continue
		}
		for _, r := range unrepaired {
			tell(r)
		}
		if repaired > 0 {
			return Run(ctx, conn, space, opts)
		}
		return report, nil
	}
}

// repairPlan holds the findings of a partition and the repairs of them.
type repairPlan struct {
	partition keyspace.Partition
	findings  []finding
	details   map[finding]string
	repairs   map[finding]repairAction
	missing   []Missing
}

// run ends the missing jobs and then repairs the findings. It returns a result for each of them.
func (d repairPlan) run(ctx context.Context, conn *redisx.Conn) (all []RepairResult, err error) {
	missing := map[job]bool{}
	for _, m := range d.missing {
		ended, err := Lose(ctx, conn, d.partition, m)
		if err != nil && !read.IsWrongType(err) { // a key of the wrong type has a finding of its own
			return all, err
		}
		for _, j := range m.Jobs {
			missing[job{m.Group, j.Ordinal}] = true
			if _, done := slices.BinarySearch(ended, j.Ordinal); !done { // ended is sorted
				continue
			}
			law := LawLocation
			if j.State.Letter() == ledger.Done {
				law = LawResults
			}
			all = append(all, RepairResult{
				Law: law, Partition: d.partition.Index(), Group: m.Group, Ordinal: &j.Ordinal, Done: true,
				Detail: fmt.Sprintf("it was %s and at no location: it has failed, with code LOST",
					describeState(j.State)),
			})
		}
	}
	done := map[string]bool{} // whether a repair succeeded, by its key
	for _, f := range d.findings {
		r := RepairResult{Law: f.law, Partition: d.partition.Index(), Group: f.group, Detail: d.details[f]}
		if f.ordinal != noOrdinal {
			r.Ordinal = &f.ordinal
		}
		action, ok := d.repairs[f]
		switch {
		case missing[job{f.group, f.ordinal}] && !ok:
			continue
		case !ok:
			r.Detail += "; " + whyNotRepaired(f)
		default:
			repaired, known := done[action.key]
			if !known {
				if repaired, err = action.run(ctx); err != nil && !read.IsWrongType(err) {
					return all, err
				}
				done[action.key] = repaired
			}
			if r.Done = repaired; repaired {
				r.Detail += "; now " + action.result
			} else {
				r.Detail += "; " + whyNotRepaired(finding{})
			}
		}
		all = append(all, r)
	}
	return all, nil
}
