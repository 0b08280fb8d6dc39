package audit

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Repair is what was done about a violation, or why nothing was.
type Repair struct {
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

// Mend audits everything and mends what can be: ledgers and counters are set to what there is, what
// is no job is quarantined, a job that lies nowhere ends as failed with code LOST. It goes on until
// nothing is left to be done, and reports what is left then. Each repair is told as it is made;
// what can't be mended comes last. Whatever it does is decided in Redis, in one step each, so the
// roles may be at work; where they move too fast something may be left for the next time.
func Mend(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts Options, tell func(Repair),
) (Report, error) {
	for pass := 1; ; pass++ {
		report, err := Run(ctx, conn, space, opts)
		if err != nil {
			return report, err
		}
		done := 0
		var not []Repair
		for _, d := range report.diagnoses {
			repairs, err := d.mend(ctx, conn)
			for _, r := range repairs {
				if !r.Done {
					not = append(not, r)
					continue
				}
				tell(r)
				done++
			}
			if err != nil {
				return report, fmt.Errorf("repair partition %d: %w", d.partition.Index(), err)
			}
		}
		if done > 0 && pass < maxRepairRuns {
			continue
		}
		for _, r := range not {
			tell(r)
		}
		if done > 0 {
			return Run(ctx, conn, space, opts)
		}
		return report, nil
	}
}

// diagnosis is what is wrong in a partition, and what mends it.
type diagnosis struct {
	partition keyspace.Partition
	findings  []finding
	details   map[finding]string
	cures     map[finding]cure
	missing   []Missing
}

func (d diagnosis) mend(ctx context.Context, conn *redisx.Conn) (all []Repair, err error) {
	gone := map[job]bool{}
	for _, m := range d.missing {
		ended, err := Lose(ctx, conn, d.partition, m)
		if err != nil && !isWrongType(err) { // that is said of its key
			return all, err
		}
		for _, j := range m.Jobs {
			gone[job{m.Group, j.Ordinal}] = true
			if _, did := slices.BinarySearch(ended, j.Ordinal); !did { // both are in order
				continue
			}
			law := Place
			if j.State.Letter() == ledger.Done {
				law = Results
			}
			all = append(all, Repair{
				Law: law, Partition: d.partition.Index(), Group: m.Group, Ordinal: &j.Ordinal, Done: true,
				Detail: fmt.Sprintf("it was %s and lay nowhere: it has failed, with code LOST", describeState(j.State)),
			})
		}
	}
	did := map[string]bool{} // by the cures' keys
	for _, f := range d.findings {
		r := Repair{Law: f.law, Partition: d.partition.Index(), Group: f.group, Detail: d.details[f]}
		if f.ordinal != noOrdinal {
			r.Ordinal = &f.ordinal
		}
		c, ok := d.cures[f]
		switch {
		case gone[job{f.group, f.ordinal}] && !ok:
			continue
		case !ok:
			r.Detail += "; " + hopeless(f)
		default:
			before, known := did[c.key]
			if !known {
				if before, err = c.do(ctx); err != nil && !isWrongType(err) {
					return all, err
				}
				did[c.key] = before
			}
			if r.Done = before; before {
				r.Detail += "; now " + c.say
			} else {
				r.Detail += "; " + hopeless(finding{})
			}
		}
		all = append(all, r)
	}
	return all, nil
}
