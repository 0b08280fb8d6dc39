package audit

import (
	"fmt"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// locationKind is a kind of location. One group or tenant may have several locations of a kind, for
// example a queue for each type.
type locationKind int

const (
	atQueue         locationKind = iota // the group's queues
	atNonReady                          // the tenant's non-ready and suspended jobs
	atReady                             // the ready streams
	atFailures                          // the group's failures
	atResultsStream                     // the results that are not reduced yet
	atGroupResults                      // the group's result lines
	locationKinds                       // the number of kinds
)

// kindNames says in words where a job of each kind of location is.
var kindNames = [locationKinds]string{
	"the group's queues", "non-ready", "the ready stream",
	"the group's failures", "the results stream", "the group's results",
}

// law returns the law that a job at a wrong location of this kind breaks.
func (kind locationKind) law() string {
	if kind == atResultsStream || kind == atGroupResults {
		return LawResults
	}
	return LawLocation
}

// stateNames says in words what each state letter means.
var stateNames = map[ledger.Letter]string{
	ledger.Waiting:   "waiting",
	ledger.NonReady:  "non-ready",
	ledger.Ready:     "ready",
	ledger.InFlight:  "in flight",
	ledger.Done:      "done and not reduced",
	ledger.Reduced:   "done and reduced",
	ledger.Failed:    "failed",
	ledger.Cancelled: "cancelled",
}

// kindOf returns the kind of location at which a job with this state letter must be; ok is false if
// it is at none.
func kindOf(letter ledger.Letter) (locationKind, bool) {
	switch letter {
	case ledger.Waiting:
		return atQueue, true
	case ledger.NonReady:
		return atNonReady, true
	case ledger.Ready, ledger.InFlight:
		return atReady, true
	case ledger.Failed:
		return atFailures, true
	case ledger.Done:
		return atResultsStream, true
	case ledger.Reduced:
		return atGroupResults, true
	}
	return 0, false
}

// unknownAttempt stands for the attempt of a job at a location that doesn't record it.
const unknownAttempt = -1

// fits reports whether a job at a location of this kind, recorded with this attempt, is where its
// state says.
func fits(kind locationKind, state ledger.State, attempt int) bool {
	home, ok := kindOf(state.Letter())
	if !ok || home != kind {
		return false
	}
	// If a worker starts the same entry twice, the second start increases the attempt, and the
	// entry keeps the first one.
	return attempt == unknownAttempt || state.IsOf(attempt) || state.Letter() == ledger.InFlight &&
		state.IsOf(attempt+1)
}

// DescribeState says a state in words, for example "waiting at attempt 0".
func DescribeState(state ledger.State) string {
	name, ok := stateNames[state.Letter()]
	if !ok {
		name = fmt.Sprintf("%q", string(state[:1]))
	}
	return fmt.Sprintf("%s at attempt %d", name, state.Attempt())
}

// bitset is a set of numbers from 0 on. The nil bitset is empty.
type bitset []uint64

// has reports whether i is in the set.
func (b bitset) has(i int64) bool { return b != nil && b[i/64]&(1<<(i%64)) != 0 }

// set adds i to a set for numbers below size.
func (b *bitset) set(i, size int64) {
	if *b == nil {
		*b = make(bitset, (size+63)/64)
	}
	(*b)[i/64] |= 1 << (i % 64)
}

// locationIndex records where an audit has found the jobs of a group, so that missing, duplicated
// and misplaced jobs can be told apart. It holds a range of ordinals; a bit per job is enough,
// because a job has only one right location.
type locationIndex struct {
	first             int64                 // the first ordinal of the range
	states            string                // the states of the range when it was first read
	cancelled         bool                  // the group is cancelled, so its queues must be empty
	found, duplicated bitset                // jobs found at the right location, and more than once
	misplaced         [locationKinds]bitset // jobs found at a wrong location of each kind
}

// size returns the number of jobs in the range.
func (idx *locationIndex) size() int64 { return int64(len(idx.states) / ledger.StateBytes) }

// state returns the state of a job when it was first read; "" if the job is not in the range.
func (idx *locationIndex) state(ordinal int64) ledger.State {
	i := ordinal - idx.first
	if i < 0 || i >= idx.size() {
		return ""
	}
	return ledger.StateAt(idx.states, i)
}

// record records that a job of the range was found at a location. It returns whether the job was
// found at its right location before, so that this is a duplicate.
func (idx *locationIndex) record(kind locationKind, ordinal int64, attempt int) (duplicate bool) {
	i, n := ordinal-idx.first, idx.size()
	switch {
	case !fits(kind, idx.state(ordinal), attempt) || idx.cancelled && kind == atQueue:
		idx.misplaced[kind].set(i, n)
	case idx.found.has(i):
		idx.duplicated.set(i, n)
		return true
	default:
		idx.found.set(i, n)
	}
	return false
}

// unrecordDuplicate makes a job no duplicate again, after a second look at its location.
func (idx *locationIndex) unrecordDuplicate(ordinal int64) {
	idx.duplicated[(ordinal-idx.first)/64] &^= 1 << ((ordinal - idx.first) % 64)
}

// problem is something that is wrong with the location of a job.
type problem struct {
	ordinal int64
	kind    locationKind
	fault   string       // missing (not at the right location), duplicated (there more than once) or misplaced
	state   ledger.State // unchanged while its locations were read
}

// eachProblem yields the problems of the jobs that have not moved: now holds the states of the
// range after the locations were read, and a job whose state has changed is not judged. Covers says
// which kinds of location were read; a job can be missing only there.
func (idx *locationIndex) eachProblem(now string, covers func(locationKind) bool, yield func(problem) (more bool)) {
	for i := range min(idx.size(), int64(len(now)/ledger.StateBytes)) {
		state := ledger.StateAt(idx.states, i)
		if ledger.StateAt(now, i) != state {
			continue
		}
		if kind, ok := kindOf(state.Letter()); ok && covers(kind) {
			if !idx.found.has(i) && !yield(problem{idx.first + i, kind, "missing", state}) {
				return
			}
			if idx.duplicated.has(i) && !yield(problem{idx.first + i, kind, "duplicated", state}) {
				return
			}
		}
		for kind := range locationKinds {
			if idx.misplaced[kind].has(i) && !yield(problem{idx.first + i, kind, "misplaced", state}) {
				return
			}
		}
	}
}

// detail describes the problem in a sentence.
func (p problem) detail() string {
	switch p.fault {
	case "missing":
		return fmt.Sprintf("it is %s, but not in %s", DescribeState(p.state), kindNames[p.kind])
	case "duplicated":
		return fmt.Sprintf("it is %s, and more than once in %s", DescribeState(p.state), kindNames[p.kind])
	}
	return fmt.Sprintf("it is %s, but something of it lies in %s", DescribeState(p.state), kindNames[p.kind])
}

// reportJob reports a problem of a job. A missing job is also added to the missing ones, and any
// other job to the misplaced ones, unless the location is the group's result lines. The counters of
// its tenant and types may become uncertain.
func (ps *pass) reportJob(group, tenant string, types []string, p problem) {
	f := finding{p.kind.law(), group, p.ordinal, fmt.Sprint(p.fault, p.kind, p.state)}
	ps.found.add(f, "%s", p.detail())
	if p.fault != "missing" && p.kind != atGroupResults {
		locations := ps.locationsOf(p.kind, group, tenant, p.ordinal, types)
		ps.addMisplaced(f, Job{group, p.ordinal}, locations...)
	}
	ps.markUncertain(p.kind.law(), tenant, types...)
	if p.fault == "missing" && p.kind != atGroupResults && (p.kind != atFailures || ps.opts.only == nil) {
		ps.missing.add(group, tenant, types, p)
	}
}
