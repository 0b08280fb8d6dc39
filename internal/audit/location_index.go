package audit

import (
	"fmt"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// locationKind is where a job, or what is left of it, can lie.
type locationKind int

const (
	atQueue locationKind = iota
	atNonReady
	atReady
	atFailures
	atResultsStream // of results
	atGroupResults  // of the group's results
	locationKinds
)

var kindNames = [locationKinds]string{
	"the group's queues", "non-ready", "the ready stream",
	"the group's failures", "the results stream", "the group's results",
}

func (kind locationKind) law() string {
	if kind == atResultsStream || kind == atGroupResults {
		return LawResults
	}
	return LawLocation
}

// stateNames are the words for letters.
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

// kindOf is where a job with a state must lie; false when nowhere.
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

// unknownAttempt is the attempt of what does not tell it.
const unknownAttempt = -1

// fits says whether what lies in a place under an attempt is a job with that state (a
// letter and a mark).
func fits(kind locationKind, state ledger.State, attempt int) bool {
	home, ok := kindOf(state.Letter())
	if !ok || home != kind {
		return false
	}
	// A job that was started again under the same entry has one attempt more than that.
	return attempt == unknownAttempt || state.IsOf(attempt) || state.Letter() == ledger.InFlight &&
		state.IsOf(attempt+1)
}

// describeState says a state in words.
func describeState(state ledger.State) string {
	name, ok := stateNames[state.Letter()]
	if !ok {
		name = fmt.Sprintf("%q", string(state[:1]))
	}
	return fmt.Sprintf("%s at attempt %d", name, state.Attempt())
}

// bitset is a set of small numbers. The nil set is empty.
type bitset []uint64

func (b bitset) has(i int64) bool { return b != nil && b[i/64]&(1<<(i%64)) != 0 }

func (b *bitset) set(i, size int64) {
	if *b == nil {
		*b = make(bitset, (size+63)/64)
	}
	(*b)[i/64] |= 1 << (i % 64)
}

// locationIndex tells jobs that were found at home, and once, from the others.
type locationIndex struct {
	first             int64  // ordinal of the first job
	states            string // states, two bytes a job
	cancelled         bool   // nothing of the group may lie in its queues
	found, duplicated bitset // at home; more than once
	misplaced         [locationKinds]bitset
}

func (x *locationIndex) size() int64 { return int64(len(x.states) / ledger.StateBytes) }

// state is a job's state at the first reading, "" when the index does not hold it.
func (x *locationIndex) state(ordinal int64) ledger.State {
	i := ordinal - x.first
	if i < 0 || i >= x.size() {
		return ""
	}
	return ledger.StateAt(x.states, i)
}

// record notes that a job, which the index must hold, lies in a place. It says whether it was found
// at home before.
func (x *locationIndex) record(kind locationKind, ordinal int64, attempt int) (duplicate bool) {
	i, n := ordinal-x.first, x.size()
	switch {
	case !fits(kind, x.state(ordinal), attempt) || x.cancelled && kind == atQueue:
		x.misplaced[kind].set(i, n)
	case x.found.has(i):
		x.duplicated.set(i, n)
		return true
	default:
		x.found.set(i, n)
	}
	return false
}

// unrecordDuplicate takes a second finding back.
func (x *locationIndex) unrecordDuplicate(ordinal int64) {
	x.duplicated[(ordinal-x.first)/64] &^= 1 << ((ordinal - x.first) % 64)
}

// problem is what is wrong with a job.
type problem struct {
	ordinal int64
	kind    locationKind
	fault   string // missing, duplicated or misplaced
	state   ledger.State
}

// eachProblem yields what is wrong with jobs whose state is the same in now as in base, as far as
// it concerns the places.
func (x *locationIndex) eachProblem(now string, covers func(locationKind) bool, yield func(problem) (more bool)) {
	for i := range min(x.size(), int64(len(now)/ledger.StateBytes)) {
		state := ledger.StateAt(x.states, i)
		if ledger.StateAt(now, i) != state {
			continue
		}
		if kind, ok := kindOf(state.Letter()); ok && covers(kind) {
			if !x.found.has(i) && !yield(problem{x.first + i, kind, "missing", state}) {
				return
			}
			if x.duplicated.has(i) && !yield(problem{x.first + i, kind, "duplicated", state}) {
				return
			}
		}
		for kind := range locationKinds {
			if x.misplaced[kind].has(i) && !yield(problem{x.first + i, kind, "misplaced", state}) {
				return
			}
		}
	}
}

func (p problem) detail() string {
	switch p.fault {
	case "missing":
		return fmt.Sprintf("it is %s, but not in %s", describeState(p.state), kindNames[p.kind])
	case "duplicated":
		return fmt.Sprintf("it is %s, and more than once in %s", describeState(p.state), kindNames[p.kind])
	}
	return fmt.Sprintf("it is %s, but something of it lies in %s", describeState(p.state), kindNames[p.kind])
}

func (ps *pass) reportJob(group, tenant string, types []string, p problem) {
	f := finding{p.kind.law(), group, p.ordinal, fmt.Sprint(p.fault, p.kind, p.state)}
	ps.found.add(f, "%s", p.detail())
	if p.fault != "missing" && p.kind != atGroupResults {
		locations := ps.locationsOf(p.kind, group, tenant, p.ordinal, types)
		ps.addRepair(f, ps.misplacedRepair(job{group, p.ordinal}, locations...))
	}
	ps.markUncertain(p.kind.law(), tenant, types...)
	if p.fault == "missing" && p.kind != atGroupResults && (p.kind != atFailures || ps.opts.only == nil) {
		ps.missed.add(group, tenant, types, p)
	}
}
