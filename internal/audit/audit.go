// Package audit checks the data in Redis: that no job was lost and that none was counted twice. It
// recounts everything from the jobs themselves and doesn't trust any counter. It works while the
// roles change the data, and hides how a check can be certain all the same.
//
// # Laws
//
// A law is a statement about the data that must always be true. A [Violation] names the law that it
// breaks.
//
//   - conservation ([LawConservation]): a group's accepted jobs are the sum of its waiting,
//     non-ready, ready, in-flight, done, failed and cancelled ones. None of these counts is
//     negative.
//   - states ([LawStates]): a group has one state for each accepted job, and as many jobs in each
//     state as its counts say.
//   - location ([LawLocation]): each job is at the one location that belongs to its state, once,
//     with the same attempt, and nowhere else. A waiting job is in a queue of its group; a
//     non-ready one is in its tenant's non-ready set, or among its tenant's suspended jobs while it
//     is paused; a ready or in-flight one is in the ready stream of its type; a failed one is in
//     the failures of its group, which agree with the group's error codes. A location holds nothing
//     that is no job. Each key has its Redis type. As an exception, jobs of a cancelled group may
//     stay in a ready stream until a worker or the dispatcher drops them, and among the tenant's
//     non-ready and suspended jobs until the cancellation is completed.
//   - results ([LawResults]): the result of each job that is done and not reduced is in exactly one
//     entry of the results stream. The result of each reduced job is in exactly one line of its
//     group's results, until these expire. The partial aggregates hold as many results as there are
//     reduced jobs.
//   - delivery ([LawDelivery]): each entry of a ready stream, the results stream or the ingest
//     stream that was delivered is pending with a consumer, until it is deleted. The ids of these
//     streams are not in the future.
//   - lifecycle ([LawLifecycle]): a group's status agrees with its timestamps, with its jobs, and
//     with the lists of open, of ended and of failed groups. If all jobs of a sealed group have
//     ended and are reduced, the group has ended too or is dirty.
//   - counters ([LawCounters]): the counters of types (waiting, non-ready) and of tenants
//     (unfinished, active, congested) are the numbers of such jobs, and the set of active tenants
//     holds those with active jobs. A counter is not checked if a job or group that it counts
//     breaks one of the first three laws.
//   - places ([LawPlaces]): the count of jobs in flight of a tenant with a bound is the number of entries
//     that its jobs have in the ready streams; like a counter, it is not always checked.
//   - registry ([LawRegistry]): a group's owner key names its tenant; the group is in its tenant's
//     partition, on its tenant's list, on those of its tags and on that of all groups, and its tenant on that
//     of tenants. A list of groups with a tag has no others, and a tenant's tags are those with such a list.
//     Each group on any list exists, and each owner key has a group ([CheckOwnerKeys]). Who moves
//     jobs on finds them: a group with waiting jobs that may start is in the fair queue, with its
//     tenant, and a tenant with non-ready or suspended jobs is on the lists of such tenants.
//   - operations ([LawOperations]): what an operation on many groups has matched is what it has changed
//     and skipped, by reasons; it can be read, and is on the list of those that have not ended if it has
//     not.
//   - callbacks ([LawCallbacks]): a callback exists and is pending in both sets of its queue, or is dead, has
//     no body and is among the dead ones. The set of queues has those that are not empty, by the time of their
//     first callback, and the bytes of a queue are those of its bodies.
//   - receipt ([LawReceipt]): a group holds at least as many jobs as its producer was told were
//     accepted ([Receipts]).
//   - durability ([LawDurability]): Redis doesn't lose writes that it has confirmed. The watcher
//     checks this law, not this package.
//
// Package checkers has the laws of guards and of the waiting room.
//
// # Method
//
// A group's hash, states and small structures are read in one transaction, so they belong to one
// instant. Larger structures are read between two readings of the states. A job whose state and
// attempt mark are the same in both has not moved in between, and only such jobs are judged: since
// an attempt number grows with each delivery, a job that has moved doesn't look unmoved. (The mark
// repeats after 90 attempts.) Counters over many keys are read in one transaction with what they
// count, if that is small. Otherwise both are read twice, and judged only if nothing has changed;
// while jobs keep moving they are not judged at all. A full audit reads everything at least three
// times if it finds something, and reports what it finds three times in a row.
//
// Redis is read in pages of some hundred elements. No command goes over all keys, except in
// [Run] and [CheckOwnerKeys]. The audit keeps in memory the states of one group and a few bits per job, and
// the states of groups with jobs in shared locations (2 bytes per job, about 64 MiB at most).
//
// # Three kinds of audit
//
//   - An incremental check, [Incremental], reads the counts of each open group and
//     the lengths of its structures, and no job. It names candidates. With 1,000,000 open jobs, of
//     which 200 are ready, one check and the audit of its candidates cost Redis 0.8 ms of CPU and
//     2 MB if they are of one group, 9 ms and 0.2 MB if they are of 1,000 groups, and 305 ms and
//     6 MB if they are of 20,000 groups.
//   - [RunGroups] audits candidates job by job. It reads only the queues and shared locations in
//     which something may be wrong with them.
//   - [Run], and [Partition] for one partition, are full audits. One of a group of 1,000,000
//     waiting jobs of 10 bytes costs Redis 80 ms of CPU and 43 MB; one of 1,000 groups of 5 jobs
//     costs 40 ms and 1.4 MB. [Options.Rate] spreads this over time.
//
// The audit changes nothing. Package repair acts on what it finds ([Report.Partitions]).
package audit

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// Names of the laws, as they stand in a [Violation]. The comment of the package explains each law.
const (
	LawConservation = "conservation"
	LawStates       = "states"
	LawLocation     = "location"
	LawResults      = "results"
	LawDelivery     = "delivery"
	LawLifecycle    = "lifecycle"
	LawCounters     = "counters"
	LawPlaces       = "places"
	LawRegistry     = "registry"
	LawDurability   = "durability"
	LawReceipt      = "receipt"
	LawOperations   = "operations"
	LawCallbacks    = "callbacks"
)

// Laws lists the names of all laws.
var Laws = []string{
	LawConservation, LawStates, LawLocation, LawResults, LawDelivery, LawLifecycle, LawCounters, LawPlaces, LawRegistry,
	LawDurability, LawReceipt, LawOperations, LawCallbacks,
}

// Report is the result of an audit.
type Report struct {
	OK         bool        `json:"ok"`
	Groups     int64       `json:"groups"`
	Jobs       int64       `json:"jobs"`       // accepted jobs of all groups
	Violations []Violation `json:"violations"` // never nil; ordered by partition, group and ordinal
	// Missing holds all jobs that are at no location although their state says that they are;
	// package repair ends them. Violations names only some of them if there are many.
	Missing []Missing `json:"-"`
	// Partitions holds for each partition the findings, missing jobs and misplaced jobs, in the
	// form that package repair needs.
	Partitions []PartitionReport `json:"-"`
}

// NoPartition is what stands as the partition in a violation by what is in no partition, such as a
// guard.
const NoPartition = -1

// Violation is one violation of a law.
type Violation = api.Violation

// PartitionReport is what an audit found in one partition, as package repair needs it.
type PartitionReport struct {
	Partition keyspace.Partition
	Findings  []Finding // ordered by group and ordinal
	Missing   []Missing // the part of [Report.Missing] that is in this partition
	// Misplaced holds, by location, the jobs that may be misplaced or duplicated there, including
	// the jobs that Findings leaves out because of its bounds.
	Misplaced map[read.Location]map[read.Job]bool
}

// Options configure an audit.
type Options struct {
	// Reducers decode partial aggregates; nil: the built-in reducers. If an aggregate's reducer is
	// not among them, the audit checks only the number of its results.
	Reducers *reducer.Registry
	// Rate is about how many bytes per second are read from Redis. 0: no limit.
	Rate int

	// unlisted has, by partition, groups that have a key but are not on the list of all groups.
	unlisted map[int][]string
	// orphans has, by partition, callbacks that are neither in a queue nor dead.
	orphans    map[int][]string
	stateBytes int         // how many bytes of states are kept in memory at once; 0: maxStateBytes
	only       *Candidates // audit only these; nil: everything
}

const (
	// confirmations is the number of consecutive passes that must find the same violation before it
	// is reported.
	confirmations = 3
	// maxPasses is the most passes over one partition. Findings that are not confirmed by then are
	// left out of the report.
	maxPasses = 8
	// maxStateBytes is the most memory, in bytes, for the states of tracked groups.
	maxStateBytes = 64 << 20
)

// Run makes a full audit of all partitions. It changes nothing, and the roles may run meanwhile. It
// scans the names of all keys in Redis twice, and so finds groups and callbacks that no list names. An error means that the audit could not be finished: the report is incomplete.
func Run(ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts Options) (Report, error) {
	var err error
	if opts.unlisted, err = unlistedIDs(ctx, conn, space, keyspace.Partition.Group, unlistedGroups); err != nil {
		return Report{}, fmt.Errorf("look for unlisted groups: %w", err)
	}
	if opts.orphans, err = unlistedIDs(ctx, conn, space, keyspace.Partition.Callback, orphanCallbacks); err != nil {
		return Report{}, fmt.Errorf("look for lost callbacks: %w", err)
	}
	return runPartitions(ctx, conn, space, space.All(), opts)
}

// Partition is a full audit of one partition; see [Run]. It does not scan keys: it finds the groups
// that a list of the partition or of a tenant names.
func Partition(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, opts Options,
) (Report, error) {
	return runPartitions(ctx, conn, space, []keyspace.Partition{p}, opts)
}

// Candidates name groups and tenants of one partition in which something looks wrong.
type Candidates struct {
	Groups  []string
	Tenants []string // the non-ready and suspended jobs of these tenants are read too
}

// RunGroups audits some groups of a partition. It reads their own keys, and their jobs in the
// locations that groups share, but only where one of them may be missing or misplaced: a queue with
// the right length is not read. Only a full audit ([Partition]) finds jobs of groups that don't
// exist, unreadable elements of shared locations, unowned entries of streams, and wrong counters of
// tenants and types.
func RunGroups(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, candidates Candidates,
	opts Options,
) (Report, error) {
	opts.only = &candidates
	return Partition(ctx, conn, space, p, opts)
}

func runPartitions(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, partitions []keyspace.Partition, opts Options,
) (Report, error) {
	if opts.Reducers == nil {
		opts.Reducers = reducer.NewRegistry()
	}
	opts.stateBytes = cmp.Or(opts.stateBytes, maxStateBytes)
	report := Report{Violations: []Violation{}}
	for _, p := range partitions {
		s := scope{Reader: read.Reader{Cmd: conn.Cmd, Pacer: read.NewPacer(opts.Rate)}, space: space, p: p, opts: opts}
		if err := report.addPartition(ctx, s); err != nil {
			return report, fmt.Errorf("audit partition %d: %w", p.Index(), err)
		}
	}
	report.Add()
	return report, nil
}

// Total returns the number of violations, including those that are only counted in a summary.
func (r *Report) Total() (n int64) {
	for _, v := range r.Violations {
		n += max(1, v.Count)
	}
	return n
}

// Add adds violations to the report, in its order.
func (r *Report) Add(found ...Violation) {
	r.Violations = append(r.Violations, found...)
	slices.SortStableFunc(r.Violations, compareViolations)
	r.OK = len(r.Violations) == 0
}

// compareViolations orders violations for the report. A summary ("and 900 more like these") comes
// after the violations that it belongs to.
func compareViolations(a, b Violation) int {
	ordinal := func(v Violation) int64 {
		switch {
		case v.Count > 0:
			return math.MaxInt64
		case v.Ordinal == nil:
			return noOrdinal
		}
		return *v.Ordinal
	}
	surplus := func(v Violation) int64 {
		if v.Group == "" {
			return v.Count
		}
		return 0
	}
	return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(surplus(a), surplus(b)),
		cmp.Compare(a.Group, b.Group), cmp.Compare(ordinal(a), ordinal(b)),
		cmp.Compare(a.Law, b.Law), cmp.Compare(a.Detail, b.Detail))
}

// addPartition adds the confirmed findings of a partition to the report. A finding is confirmed
// when `confirmations` passes in a row have found it. addPartition makes passes until all findings
// of the last one are confirmed, at most maxPasses.
func (r *Report) addPartition(ctx context.Context, s scope) error {
	backoff := redisx.Backoff{Min: 20 * time.Millisecond, Max: 500 * time.Millisecond}
	confirmed, missing := map[identity]int{}, missingJobs(nil)
	for n := 1; ; n++ {
		ps := newPass(s)
		if err := ps.run(ctx); err != nil {
			return err
		}
		if n > 1 {
			ps.found.missing.keep(missing)
		}
		missing = ps.found.missing
		found := ps.found.withSummaries()
		certain, now := 0, make(map[identity]int, len(found))
		for id := range found {
			now[id] = confirmed[id] + 1
			if now[id] >= confirmations {
				certain++
			}
		}
		confirmed = now
		if certain == len(found) || n == maxPasses {
			result := PartitionReport{Partition: s.p, Misplaced: ps.found.misplaced}
			for _, id := range slices.SortedFunc(maps.Keys(found), compareIdentities) {
				if f := found[id]; confirmed[id] >= confirmations {
					f.Partition = s.p.Index()
					r.Violations = append(r.Violations, f.Violation)
					result.Findings = append(result.Findings, f)
				}
			}
			if n >= confirmations {
				result.Missing = missing.list(s.p.Index())
			}
			r.Groups, r.Jobs = r.Groups+ps.groups, r.Jobs+ps.jobs
			r.Missing, r.Partitions = append(r.Missing, result.Missing...), append(r.Partitions, result)
			return nil
		}
		if err := redisx.Sleep(ctx, backoff.Next()); err != nil {
			return err
		}
	}
}
