// Package audit proves from the data in Redis that no job was lost and none counted twice: promise
// 4, conservation. It hides how a system that keeps moving can be judged at all.
//
// # Laws
//
//   - [LawConservation]: a group's accepted jobs are the sum of those that are waiting, non-ready,
//     ready, in flight, done, failed and cancelled. None of these is negative.
//   - [LawStates]: a group has one state for each accepted job, and as many of each letter as its
//     ledger says.
//   - [LawLocation]: each job lies where its state says, once, under the same attempt, and nowhere
//     else, and each key is of its type: a waiting one in a queue of its group, a parked one in its
//     tenant's non-ready set or, while it is paused, aside of it, a ready or started one in the
//     ready stream of its type, a failed one among its group's failures, which agree with the error
//     codes. Nothing lies anywhere that is no such job. What a cancelled group has left in a ready
//     stream may stay until a worker comes by.
//   - [LawResults]: each done job's result lies in exactly one entry of the results stream, each
//     reduced one's in exactly one line of the group's results, unless these have expired. The
//     slots of the aggregate count the reduced jobs, and so does an aggregate that counts.
//   - [LawLifecycle]: a group's status agrees with its timestamps, its jobs and the lists of open
//     and ended groups. One whose jobs have all ended and are reduced has ended too, or is among
//     the dirty groups.
//   - [LawCounters]: what types count as waiting and non-ready lies there. What tenants count as
//     unfinished, active and congested are such jobs, and those with active ones are in the active
//     set. Counters of what violates another law are not judged.
//   - [LawRegistry]: a group is owned by its tenant, lies in its partition and is on its list. A
//     name that is owned has a group ([CheckOwnerKeys]).
//   - [LawReceipt]: a group holds the jobs that its producer was told were accepted ([Receipts]).
//   - [LawDurability]: Redis does not forget what it has confirmed. The watchers count seconds in
//     it, and notice when it knows of fewer.
//
// # Method
//
// A group's ledger, states and small structures are read in one transaction, so that they can be
// held against each other. What is too large for that is read between two readings of the states: a
// job whose state and attempt are the same in both has not moved meanwhile, and only such jobs are
// judged. An attempt grows with each move, so no job comes back to the same state unnoticed.
// Counters over many keys are read with them in one transaction where that is small, otherwise
// twice, and are judged only when both readings agree to the byte: never, while what they count
// keeps moving. Whatever is found is looked at again and reported only if it stays.
//
// Redis is read in pages of some hundred elements, without KEYS, and SCAN only for
// [CheckOwnerKeys]. Memory: one group's states and some bits a job, and two bytes for each job
// between the first and the last one of a group that is neither waiting nor ended.
//
// # Three depths
//
//   - [IncrementalCheck] makes rounds: per open group one reading of its ledger and of the lengths
//     of what it holds, no job. A round over 1,000 groups costs Redis 5 ms of CPU and 160 KB (50
//     tenants, closer looks included), one over a group of 1,000,000 waiting jobs 20 µs and 300
//     bytes.
//   - [RunGroups] looks at the groups that a round found suspicious: at their states, and through
//     those shared places, and queues, that give a reason.
//   - [Partition] and [Run] look at everything. For a group of 1,000,000 waiting jobs of 10 bytes
//     that is 43 MB and 80 ms of Redis's CPU, for 1,000 groups of 5 jobs 1 MB and 40 ms;
//     [Options.Rate] spreads it.
//
// # Repair
//
// [Repair] repairs what can be, and [Lose] ends jobs that lie nowhere. What a repair does is
// decided in Redis, in one step, by states and versions: what moves is left alone, and what is done
// twice is done once.
package audit

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// The laws, as a [Violation] names them.
const (
	LawConservation = "conservation"
	LawStates       = "states"
	LawLocation     = "location"
	LawResults      = "results"
	LawLifecycle    = "lifecycle"
	LawCounters     = "counters"
	LawRegistry     = "registry"
	// LawDurability is broken when Redis has forgotten what it had confirmed; the watchers notice
	// it.
	LawDurability = "durability"
	// LawReceipt is broken when a group holds fewer jobs than its producer was told.
	LawReceipt = "receipt"
)

// Laws are all of them.
var Laws = []string{
	LawConservation, LawStates, LawLocation, LawResults, LawLifecycle, LawCounters, LawRegistry, LawDurability,
	LawReceipt,
}

// Report is what an audit came to.
type Report struct {
	OK         bool        `json:"ok"`
	Groups     int64       `json:"groups"`
	Jobs       int64       `json:"jobs"`       // accepted, of all groups
	Violations []Violation `json:"violations"` // never nil; by partition, group and ordinal
	Missing    []Missing   `json:"-"`          // jobs that lie nowhere, all of them; [Lose] ends them

	plans []repairPlan
}

// Violation is one breach of a law.
type Violation = api.Violation

// Options are what an audit can be told.
type Options struct {
	// to read aggregates with; nil: the built-in ones. Of others only the counts are checked.
	Reducers *reducer.Registry
	Rate     int // bytes a second that are read at most, about; 0: as they come

	stateBytes int         // bytes of states kept at once; 0: maxBatch
	only       *Candidates // nil: everything
}

const (
	// confirmations is in how many looks in a row a finding must be the same to be reported.
	confirmations = 3
	// maxPasses bounds the looks at a partition that finds something else each time.
	maxPasses = 8
	// maxStateBytes is how much of the states of unfinished groups is kept at once.
	maxStateBytes = 64 << 20
)

// Run audits all partitions, which may be at work. It changes nothing. An error means that it could
// not be finished.
func Run(ctx context.Context, conn *redisx.Conn, space keyspace.Space, opts Options) (Report, error) {
	report := Report{Violations: []Violation{}}
	for _, p := range space.All() {
		if err := auditPartition(ctx, conn, space, p, opts, &report); err != nil {
			return report, err
		}
	}
	report.sort()
	return report, nil
}

// Partition audits one partition as [Run] does all of them.
func Partition(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, p keyspace.Partition, opts Options,
) (Report, error) {
	report := Report{Violations: []Violation{}}
	err := auditPartition(ctx, conn, space, p, opts, &report)
	report.sort()
	return report, err
}

func auditPartition(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space,
	p keyspace.Partition, opts Options, report *Report,
) error {
	if opts.Reducers == nil {
		opts.Reducers = reducer.NewRegistry()
	}
	opts.stateBytes = cmp.Or(opts.stateBytes, maxStateBytes)
	a := auditor{reader: reader{cmd: conn.Cmd, pacer: &pacer{rate: opts.Rate}}, space: space, p: p, opts: opts}
	if err := a.run(ctx, report); err != nil {
		return fmt.Errorf("audit partition %d: %w", p.Index(), err)
	}
	return nil
}

// Total is how many violations there are, with those that others stand for.
func (r *Report) Total() (n int64) {
	for _, v := range r.Violations {
		n += max(1, v.Count)
	}
	return n
}

func (r *Report) sort() {
	slices.SortStableFunc(r.Violations, compareViolations)
	r.OK = len(r.Violations) == 0
}

// compareViolations puts what stands for others behind them.
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

// auditor audits one partition.
type auditor struct {
	reader
	space keyspace.Space
	p     keyspace.Partition
	opts  Options
}

// run looks at the partition until what it finds is certain.
func (a *auditor) run(ctx context.Context, report *Report) error {
	backoff := redisx.Backoff{Min: 20 * time.Millisecond, Max: 500 * time.Millisecond}
	seen, missed := map[finding]int{}, missed(nil)
	for n := 1; ; n++ {
		ps := a.newPass()
		if err := ps.run(ctx); err != nil {
			return err
		}
		missed = missed.and(ps.missed)
		found := ps.found.all()
		certain, again := 0, make(map[finding]int, len(found))
		for f := range found {
			again[f] = seen[f] + 1
			if again[f] >= confirmations {
				certain++
			}
		}
		seen = again
		if certain == len(found) || n == maxPasses {
			d := repairPlan{partition: a.p, details: found, repairs: ps.repairs}
			report.Groups += ps.groups
			report.Jobs += ps.jobs
			for f, detail := range found {
				if seen[f] >= confirmations {
					v := f.violation(a.p.Index(), detail)
					v.Count = ps.found.rest[f]
					report.Violations = append(report.Violations, v)
					d.findings = append(d.findings, f)
				}
			}
			if n >= confirmations {
				d.missing = missed.list(a.p.Index())
				report.Missing = append(report.Missing, d.missing...)
			}
			slices.SortFunc(d.findings, compareFindings)
			report.plans = append(report.plans, d)
			return nil
		}
		if err := redisx.Sleep(ctx, backoff.Next()); err != nil {
			return err
		}
	}
}

// pass is one pass over a partition.
type pass struct {
	*auditor
	found        findings
	missed       missed
	groups, jobs int64

	tenants, types map[string]bool
	// What hangs together with another violation is not judged.
	uncertainTenants, uncertainTypes map[string]bool

	tracked      map[string]*trackedGroup // groups of the batch with jobs in places that groups share
	trackedBytes int                      // that these keep
	readKeys     map[string]bool          // keys of shared places that were read once

	repairs           map[finding]repairAction
	misplaced         misplacedJobs
	repairedLocations map[location]map[job]bool
}

func (a *auditor) newPass() *pass {
	a.wrongTypes = map[string]string{}
	return &pass{
		auditor: a, tenants: map[string]bool{}, types: map[string]bool{}, uncertainTenants: map[string]bool{},
		uncertainTypes: map[string]bool{}, tracked: map[string]*trackedGroup{}, readKeys: map[string]bool{},
		missed: missed{},
	}
}

func (ps *pass) run(ctx context.Context) error {
	defer ps.reportWrongTypes()
	if ps.opts.only != nil {
		return ps.runGroups(ctx)
	}
	err := ps.readByScore(ctx, ps.p.Groups(), func(ids []string) error { return ps.checkGroups(ctx, ids) })
	if err != nil {
		return fmt.Errorf("read groups: %w", err)
	}
	if err := ps.checkSharedLocations(ctx, true); err != nil {
		return fmt.Errorf("read what groups share: %w", err)
	}
	if err := ps.checkCounters(ctx); err != nil {
		return fmt.Errorf("read counters: %w", err)
	}
	return nil
}
