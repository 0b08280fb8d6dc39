// Package repair sets wrong data in Redis right where the right value is certain: it acts on what
// package audit finds and proves. [Run] repairs jobs, groups and counters, [OwnerKeys] deletes
// owner keys without a group, [Guards] repairs guards, and [Lose] ends missing jobs as failed. It
// hides in which order and with which scripts this is done.
//
// Each repair of Run is one atomic step in Redis that compares states and versions with what the
// audit saw: it changes nothing if the data has moved since, and a repeated repair changes nothing
// either.
package repair

import (
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Result says what was done about a violation, or why nothing was done.
type Result struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`
	Group     string `json:"group"`
	Ordinal   *int64 `json:"ordinal,omitempty"`
	Detail    string `json:"detail"`
	Done      bool   `json:"done"`
}

// newResult returns the result for a violation. more is appended to the violation's detail.
func newResult(v audit.Violation, more string, done bool) Result {
	return Result{v.Law, v.Partition, v.Group, v.Ordinal, v.Detail + more, done}
}

// maxRuns is the most rounds of audit and repair in one call of Run: a repair may reveal another
// violation.
const maxRuns = 8

// Run audits all partitions and repairs what it can: it sets counts and counters to the recounted
// values, quarantines what does not belong at its location, and ends missing jobs as failed with
// code LOST. It repeats this until no repair succeeds, at most maxRuns times, and returns the
// report of what is left. It calls tell for the repairs of a partition when that is done, and at
// the end for each violation that it can't repair. The roles may be at work. If they change the
// data too fast, some violations are left for the next call.
func Run(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts audit.Options, tell func(Result),
) (audit.Report, error) {
	for pass := 1; ; pass++ {
		report, err := audit.Run(ctx, conn, space, opts)
		if err != nil {
			return report, err
		}
		repaired := 0
		var unrepaired []Result
		for _, found := range report.Partitions {
			r := partitionRepair{
				Reader: read.Reader{Cmd: conn.Cmd, Pacer: read.NewPacer(opts.Rate)}, conn: conn, space: space,
				p: found.Partition, found: found, removed: map[read.Location]map[read.Job]bool{},
			}
			results, err := r.run(ctx)
			for _, r := range results {
				if !r.Done {
					unrepaired = append(unrepaired, r)
					continue
				}
				tell(r)
				repaired++
			}
			if err != nil {
				return report, fmt.Errorf("repair partition %d: %w", found.Partition.Index(), err)
			}
		}
		if repaired > 0 && pass < maxRuns {
			continue
		}
		for _, r := range unrepaired {
			tell(r)
		}
		if repaired > 0 {
			return audit.Run(ctx, conn, space, opts)
		}
		return report, nil
	}
}

// partitionRepair is one repair of the findings of one partition.
type partitionRepair struct {
	read.Reader
	conn    *redisx.Conn
	space   keyspace.Space
	p       keyspace.Partition
	found   audit.PartitionReport
	removed map[read.Location]map[read.Job]bool // the repaired locations, and the jobs removed there
}

// run ends the missing jobs as failed and then repairs the findings. It returns a result for each
// ended job and for each finding, except findings about missing jobs without a repair of their own.
func (r *partitionRepair) run(ctx context.Context) (all []Result, err error) {
	missing := map[read.Job]bool{}
	for _, m := range r.found.Missing {
		ended, err := Lose(ctx, r.conn, r.p, m)
		if err != nil && !read.IsWrongType(err) { // a key of the wrong type has a finding of its own
			return all, err
		}
		for _, j := range m.Jobs {
			missing[read.Job{Group: m.Group, Ordinal: j.Ordinal}] = true
			if _, done := slices.BinarySearch(ended, j.Ordinal); !done { // ended is sorted
				continue
			}
			law := audit.LawLocation
			if j.State.Letter() == ledger.Done {
				law = audit.LawResults
			}
			all = append(all, Result{
				Law: law, Partition: r.p.Index(), Group: m.Group, Ordinal: &j.Ordinal, Done: true,
				Detail: fmt.Sprintf("it was %s and at no location: it has failed, with code LOST",
					audit.DescribeState(j.State)),
			})
		}
	}
	repaired := map[string]bool{} // whether a repair succeeded; several findings may have the same one
	for _, f := range r.found.Findings {
		repair, ok := repairs[f.Repair.Kind]
		if !ok {
			if !missing[f.Job()] {
				all = append(all, newResult(f.Violation, "; "+whyNotRepaired(f.Violation), false))
			}
			continue
		}
		key := fmt.Sprint(f.Group, f.Job(), f.Locations, f.Repair)
		if f.Repair.Kind != audit.Quarantine {
			key = fmt.Sprint(f.Group, f.Repair)
		}
		done, known := repaired[key]
		if !known {
			if done, err = repair.run(r, ctx, f); err != nil && !read.IsWrongType(err) {
				return all, err
			}
			repaired[key] = done
		}
		more := "; " + whyNotRepaired(audit.Violation{})
		if done {
			more = "; now " + repair.result(f)
		}
		all = append(all, newResult(f.Violation, more, done))
	}
	return all, nil
}

// Lose ends missing jobs as failed with code LOST, so that their group can end, and returns the
// ordinals of the jobs that it ended. It skips a job whose state has changed. If a worker still
// runs a job whose stream entry is gone, the worker's report will be refused as stale.
func Lose(ctx context.Context, conn *redisx.Conn, p keyspace.Partition, m audit.Missing) ([]int64, error) {
	var lost []int64
	for some := range slices.Chunk(m.Jobs, ledger.MaxLose) {
		ended, err := ledger.Lose(ctx, conn.Cmd, p, m.Group, m.Type, some)
		if err != nil {
			return lost, fmt.Errorf("end lost jobs of group %s: %w", m.Group, err)
		}
		lost = append(lost, ended...)
	}
	return lost, nil
}
