// Package repair sets wrong data in Redis right where the right value is certain: it acts on what
// package audit finds and proves. [Run] repairs jobs, groups and counters, [OwnerKeys] deletes
// owner keys without a group, and [Lose] ends missing jobs as failed. It hides in which order and with which scripts this is done.
//
// Each repair of Run is one atomic step in Redis that compares states and versions with what the
// audit saw: it changes nothing if the data has moved since, and a repeated repair changes nothing
// either.
package repair

import (
	"context"
	"fmt"
	"slices"
	"time"

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

// creationTime is a wait that is longer than any process takes from reading a group's owner key to
// creating the group.
const creationTime = time.Second

// OwnerKeys looks in all of Redis for owner keys whose groups do not exist, deletes them, and waits
// for creationTime. If the group of a deleted key was created meanwhile, it writes the key again.
// It calls tell for each key that stays deleted.
func OwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(Result)) error {
	orphans, err := audit.FindOwnerKeysWithoutGroup(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for owner keys without a group: %w", err)
	}
	key := func(f audit.Finding) string { return space.OfGroup(f.Group).Owner(f.Group) }
	for _, f := range orphans {
		if err := conn.Cmd.Del(ctx, key(f)).Err(); err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
	}
	// A process that is creating the group may have read the owner key before its deletion. Then
	// the group soon exists, and its key must be written again.
	if len(orphans) > 0 && redisx.Sleep(ctx, creationTime) != nil {
		return ctx.Err()
	}
	for _, f := range orphans {
		tenant, err := ledger.TenantOf(ctx, conn.Cmd, space.OfTenant(f.Tenant), f.Group)
		if err == nil && tenant != "" {
			err = conn.Cmd.SetNX(ctx, key(f), f.Tenant, 0).Err()
		}
		if err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
		if tenant == "" {
			tell(newResult(f.Violation, "; now the key is gone", true))
		}
	}
	return nil
}
