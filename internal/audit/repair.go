package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// RepairResult is what was done about a violation, or why nothing was.
type RepairResult struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`
	Group     string `json:"group"`
	Ordinal   *int64 `json:"ordinal,omitempty"`
	Detail    string `json:"detail"`
	Done      bool   `json:"done"`
}

// maxRepairRuns bounds how often everything is audited and mended: one repair may show what is
// wrong beside it.
const maxRepairRuns = 8

// Repair audits everything and mends what can be: ledgers and counters are set to what there is,
// what is no job is quarantined, a job that lies nowhere ends as failed with code LOST. It goes on
// until nothing is left to be done, and reports what is left then. Each repair is told as it is
// made; what can't be mended comes last. Whatever it does is decided in Redis, in one step each, so
// the roles may be at work; where they move too fast something may be left for the next time.
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

// repairPlan is what is wrong in a partition, and what mends it.
type repairPlan struct {
	partition keyspace.Partition
	findings  []finding
	details   map[finding]string
	repairs   map[finding]repairAction
	missing   []Missing
}

func (d repairPlan) run(ctx context.Context, conn *redisx.Conn) (all []RepairResult, err error) {
	missing := map[job]bool{}
	for _, m := range d.missing {
		ended, err := Lose(ctx, conn, d.partition, m)
		if err != nil && !isWrongType(err) { // that is said of its key
			return all, err
		}
		for _, j := range m.Jobs {
			missing[job{m.Group, j.Ordinal}] = true
			if _, done := slices.BinarySearch(ended, j.Ordinal); !done { // both are in order
				continue
			}
			law := LawLocation
			if j.State.Letter() == ledger.Done {
				law = LawResults
			}
			all = append(all, RepairResult{
				Law: law, Partition: d.partition.Index(), Group: m.Group, Ordinal: &j.Ordinal, Done: true,
				Detail: fmt.Sprintf("it was %s and lay nowhere: it has failed, with code LOST", describeState(j.State)),
			})
		}
	}
	done := map[string]bool{} // by the cures' keys
	for _, f := range d.findings {
		r := RepairResult{Law: f.law, Partition: d.partition.Index(), Group: f.group, Detail: d.details[f]}
		if f.ordinal != noOrdinal {
			r.Ordinal = &f.ordinal
		}
		c, ok := d.repairs[f]
		switch {
		case missing[job{f.group, f.ordinal}] && !ok:
			continue
		case !ok:
			r.Detail += "; " + whyNotRepaired(f)
		default:
			repaired, known := done[c.key]
			if !known {
				if repaired, err = c.run(ctx); err != nil && !isWrongType(err) {
					return all, err
				}
				done[c.key] = repaired
			}
			if r.Done = repaired; repaired {
				r.Detail += "; now " + c.result
			} else {
				r.Detail += "; " + whyNotRepaired(finding{})
			}
		}
		all = append(all, r)
	}
	return all, nil
}
