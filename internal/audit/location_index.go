package audit

import (
	"fmt"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// place is where a job, or what is left of it, can lie.
type place int

const (
	inQueue place = iota
	inNonReady
	inReady
	inFailures
	inStream // of results
	inLines  // of the group's results
	places
)

var placeNames = [places]string{
	"the group's queues", "non-ready", "the ready stream",
	"the group's failures", "the results stream", "the group's results",
}

func (pl place) law() string {
	if pl == inStream || pl == inLines {
		return Results
	}
	return Place
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

// home is where a job with a state must lie; false when nowhere.
func home(letter ledger.Letter) (place, bool) {
	switch letter {
	case ledger.Waiting:
		return inQueue, true
	case ledger.NonReady:
		return inNonReady, true
	case ledger.Ready, ledger.InFlight:
		return inReady, true
	case ledger.Failed:
		return inFailures, true
	case ledger.Done:
		return inStream, true
	case ledger.Reduced:
		return inLines, true
	}
	return 0, false
}

// unknown is the attempt of what does not tell it.
const unknown = -1

// belongs says whether what lies in a place under an attempt is a job with that state (a
// letter and a mark).
func belongs(pl place, state ledger.State, attempt int) bool {
	at, ok := home(state.Letter())
	if !ok || at != pl {
		return false
	}
	// A job that was started again under the same entry has one attempt more than that.
	return attempt == unknown || state.IsOf(attempt) || state.Letter() == ledger.InFlight && state.IsOf(attempt+1)
}

// describe says a state in words.
func describe(state ledger.State) string {
	name, ok := stateNames[state.Letter()]
	if !ok {
		name = fmt.Sprintf("%q", string(state[:1]))
	}
	return fmt.Sprintf("%s at attempt %d", name, state.Attempt())
}

// bits is a set of small numbers. The nil set is empty.
type bits []uint64

func (b bits) has(i int64) bool { return b != nil && b[i/64]&(1<<(i%64)) != 0 }

func (b *bits) set(i, size int64) {
	if *b == nil {
		*b = make(bits, (size+63)/64)
	}
	(*b)[i/64] |= 1 << (i % 64)
}

// locationIndex tells jobs that were found at home, and once, from the others.
type locationIndex struct {
	first             int64  // ordinal of the first job
	states            string // states, two bytes a job
	cancelled         bool   // nothing of the group may lie in its queues
	found, duplicated bits   // at home; more than once
	misplaced         [places]bits
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
func (x *locationIndex) record(pl place, ordinal int64, attempt int) (duplicate bool) {
	i, n := ordinal-x.first, x.size()
	switch {
	case !belongs(pl, x.state(ordinal), attempt) || x.cancelled && pl == inQueue:
		x.misplaced[pl].set(i, n)
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
	place   place
	what    string // missing, duplicated or misplaced
	state   ledger.State
}

// eachProblem yields what is wrong with jobs whose state is the same in now as in base, as far as it
// concerns the places.
func (x *locationIndex) eachProblem(now string, covers func(place) bool, yield func(problem) (more bool)) {
	for i := range min(x.size(), int64(len(now)/ledger.StateBytes)) {
		state := ledger.StateAt(x.states, i)
		if ledger.StateAt(now, i) != state {
			continue
		}
		if at, ok := home(state.Letter()); ok && covers(at) {
			if !x.found.has(i) && !yield(problem{x.first + i, at, "missing", state}) {
				return
			}
			if x.duplicated.has(i) && !yield(problem{x.first + i, at, "duplicated", state}) {
				return
			}
		}
		for pl := range places {
			if x.misplaced[pl].has(i) && !yield(problem{x.first + i, pl, "misplaced", state}) {
				return
			}
		}
	}
}

func (p problem) detail() string {
	switch p.what {
	case "missing":
		return fmt.Sprintf("it is %s, but not in %s", describe(p.state), placeNames[p.place])
	case "duplicated":
		return fmt.Sprintf("it is %s, and more than once in %s", describe(p.state), placeNames[p.place])
	}
	return fmt.Sprintf("it is %s, but something of it lies in %s", describe(p.state), placeNames[p.place])
}

func (ps *pass) reportJob(group, tenant string, types []string, p problem) {
	f := finding{p.place.law(), group, p.ordinal, fmt.Sprint(p.what, p.place, p.state)}
	ps.found.add(f, "%s", p.detail())
	if p.what != "missing" && p.place != inLines {
		ps.mend(f, ps.cureLeftover(job{group, p.ordinal}, ps.shelves(p.place, group, tenant, p.ordinal, types)...))
	}
	ps.markUncertain(p.place.law(), tenant, types...)
	if p.what == "missing" && p.place != inLines && (p.place != inFailures || ps.opts.only == nil) {
		ps.missed.add(group, tenant, types, p)
	}
}
