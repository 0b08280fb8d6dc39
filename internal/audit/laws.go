package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/reducer"
)

// countField is a field of a group's hash that is a count of jobs, and the state letters of the
// jobs that it counts.
type countField struct{ name, letters string }

// countFields lists the counts of a group whose sum must be the field accepted.
var countFields = []countField{
	{"waiting", string(ledger.Waiting)}, {"non_ready", string(ledger.NonReady)}, {"ready", string(ledger.Ready)},
	{"in_flight", string(ledger.InFlight)},
	{"done", string(ledger.Done) + string(ledger.Reduced)}, {"failed", string(ledger.Failed)},
	{"cancelled", string(ledger.Cancelled)},
}

// unfinishedLetters are the letters of states that are not final.
const unfinishedLetters = string(ledger.Waiting) + string(ledger.NonReady) + string(ledger.Ready) +
	string(ledger.InFlight)

// groupLaws is the check of one group as of one instant: its methods compare the counts, states,
// error codes, lifecycle and aggregate with the laws.
type groupLaws struct {
	*group
	found  *findings
	counts Repair // of the group's counts and lists
}

// report adds a finding about the group as a whole that can't be repaired.
func (l *groupLaws) report(law, key, format string, args ...any) {
	l.reportRepairable(Repair{}, law, key, format, args...)
}

// reportRepairable adds a finding about the group as a whole, with its repair.
func (l *groupLaws) reportRepairable(r Repair, law, key, format string, args ...any) {
	l.found.add(newFinding(law, l.ID, l.Tenant, key, format, args...).repairedBy(r), l.TypeList()...)
}

// checkCounts compares the group's counts with each other and with its states.
func (l *groupLaws) checkCounts() {
	accepted, sum := l.Int("accepted"), int64(0)
	var parts []string
	for _, f := range countFields {
		n := l.Int(f.name)
		sum += n
		if n != 0 {
			parts = append(parts, fmt.Sprintf("%s %d", f.name, n))
		}
		if n < 0 {
			l.reportRepairable(l.counts, LawConservation, f.name, "%s is %d", f.name, n)
		}
	}
	if sum != accepted {
		l.reportRepairable(l.counts, LawConservation, fmt.Sprint("sum ", sum-accepted),
			"accepted is %d, the other counts add up to %d: %s", accepted, sum, strings.Join(parts, ", "))
	}
	if surplus := l.StateBytes - ledger.StateBytes*accepted; surplus != 0 {
		l.reportRepairable(l.counts, LawStates, fmt.Sprint("length ", surplus),
			"accepted is %d, but there are %d bytes of states, two a job", accepted, l.StateBytes)
	}
	known := ""
	for _, f := range append(slices.Clone(countFields), countField{"reduced", string(ledger.Reduced)}) {
		known += f.letters
		if jobs, n := l.jobsIn(f.letters), l.Int(f.name); jobs != n {
			l.reportRepairable(l.counts, LawStates, fmt.Sprint(f.name, " ", n-jobs),
				"%s is %d, but %d jobs are in such a state", f.name, n, jobs)
		}
	}
	for i := range l.size() {
		if letter := ledger.StateAt(l.States, i)[0]; strings.IndexByte(known, letter) < 0 {
			l.found.add(newFinding(LawStates, l.ID, l.Tenant, string(letter), "its state is %q, which is none",
				letter).aboutJob(i), l.TypeList()...)
		}
	}
}

// checkCodes compares the group's error codes with its failed jobs.
func (l *groupLaws) checkCodes() {
	var coded int64
	for _, code := range slices.Sorted(maps.Keys(l.Codes)) {
		n := read.Int(l.Codes[code])
		coded += n
		if n < 0 {
			l.reportRepairable(Repair{Kind: RepairCodes}, LawLocation, "code "+code,
				"%d jobs have failed with code %s", n, code)
		}
	}
	if failed := l.jobs[ledger.Failed]; coded != failed {
		l.reportRepairable(Repair{Kind: RepairCodes}, LawLocation, fmt.Sprint("codes ", coded-failed),
			"%d jobs have failed, but by their codes %d", failed, coded)
	}
}

// statusOrder is the order in which a group that is not cancelled passes through its states before
// the final one.
var statusOrder = []api.Status{api.StatusCreated, api.StatusDispatched, api.StatusRunning, api.StatusAggregating}

// checkLifecycle compares the group's status with its timestamps, its jobs and the lists that it is
// on.
func (l *groupLaws) checkLifecycle() {
	status, sealed, sweeping := api.Status(l.status()), l.Fields["sealed"] != "", l.Fields["sweep"] != ""
	rank := slices.Index(statusOrder, status)
	if status.Ended() {
		rank = len(statusOrder)
	} else if rank < 0 {
		l.report(LawLifecycle, "status", "its status is %q, which is none", status)
		return
	}
	l.checkTimestamps(status, rank)
	if !sealed && rank > 0 {
		l.report(LawLifecycle, "sealed", "it is %s without being sealed", status)
	}
	if open := !status.Ended() || sweeping; open != l.Open || open == l.Ended {
		l.reportRepairable(l.relist(), LawLifecycle, "lists", "it is %s, but %s", status, l.describeLists())
		l.found.markUncertain(LawLocation, l.Tenant, l.TypeList()...)
	}
	if failed := status == api.StatusFailed; failed != l.OnFailed {
		on := "not on"
		if l.OnFailed {
			on = "on"
		}
		l.reportRepairable(l.counts, LawLifecycle, "failed list",
			"it is %s, but %s the list of failed groups", status, on)
	}
	unfinished, unreduced := l.jobsIn(unfinishedLetters), l.jobs[ledger.Done]
	switch {
	case status == api.StatusCancelled:
		if !sweeping && unfinished > 0 {
			l.reportRepairable(l.counts, LawLifecycle, "unended",
				"it was cancelled and settled, but %d jobs have not ended", unfinished)
		}
		reduced, failed := l.Int("failures_reduced"), l.jobs[ledger.Failed]
		if !sweeping && l.Fields["reduce_failures"] != "" && reduced != failed && !l.Dirty {
			l.reportRepairable(l.counts, LawLifecycle, "stuck",
				"it was cancelled, but its aggregates have %d of %d failed jobs, and it is not among the dirty groups", reduced, failed)
		}
	case rank >= 3 && unfinished > 0:
		l.report(LawLifecycle, "unended", "it is %s, but %d jobs have not ended", status, unfinished)
	case rank == len(statusOrder) && unreduced > 0:
		l.report(LawLifecycle, "unreduced", "it is %s, but %d results are not reduced", status, unreduced)
	case rank == len(statusOrder):
		threshold, err := strconv.ParseFloat(l.Fields["failure_threshold"], 64)
		if err != nil {
			threshold = 1
		}
		failed, all := l.jobs[ledger.Failed], l.size()
		if tooMany := failed > 0 && float64(failed)/float64(all) >= threshold; tooMany != (status == api.StatusFailed) {
			l.report(LawLifecycle, "threshold", "it is %s with %d of %d jobs failed and a threshold of %g",
				status, failed, all, threshold)
		}
	case l.Fields["reduce_failures"] != "" && l.Int("failures_reduced") != l.jobs[ledger.Failed] && unreduced == 0:
		// It waits for a watcher that has its reducers: each pass over all open groups tries again.
	case sealed && l.Fields["requeue"] == "" && unfinished+unreduced == 0 && !l.Dirty:
		l.reportRepairable(l.counts, LawLifecycle, "stuck",
			"it is %s, sealed, and all its jobs have ended and are reduced, but it is not among the "+
				"dirty groups", status)
	}
}

// checkTurns reports waiting jobs that never get their turn, because the fair queue has lost their
// group or tenant. A group that is paused or scheduled is not in it.
func (l *groupLaws) checkTurns() {
	if api.Status(l.status()).Ended() || l.Fields["paused"] != "" || l.Scheduled {
		return
	}
	for i, inOrder := range l.InOrder {
		if l.Queues[i] > 0 && (!inOrder || !l.TenantPaused && !l.InLane[i]) {
			typ := l.TypeList()[i]
			l.reportRepairable(l.relist(), LawRegistry, "turn "+typ,
				"%d jobs of type %s wait, but the fair queue does not have it: they are not served", l.Queues[i], typ)
			l.found.markUncertain(LawLocation, l.Tenant) // its active jobs are not known
		}
	}
}

// describeLists says in words on which of the lists of open and of ended groups the group is.
func (l *groupLaws) describeLists() string {
	switch {
	case l.Open && l.Ended:
		return "on the lists of open and of ended groups"
	case l.Open:
		return "on the list of open groups"
	case l.Ended:
		return "on the list of ended groups"
	}
	return "neither on the list of open nor on that of ended groups"
}

// checkTimestamps checks the times at which the group entered its states in this round. There must
// be one for each state on its way, in this order, and none for any other. Rank is the index of the
// group's status in statusOrder; len(statusOrder) for a final one.
func (l *groupLaws) checkTimestamps(status api.Status, rank int) {
	at := func(s api.Status) string { return l.Fields["at:"+strings.ToLower(string(s))] }
	var last int64
	passed := true // all states before s have a time
	for i, s := range statusOrder {
		has := at(s) != ""
		switch {
		case status == api.StatusCancelled && has && !passed, has && i > rank:
			l.report(LawLifecycle, "time of "+string(s), "it is %s, but has a time of %s", status, s)
		case !has && (i == 0 || i <= rank && status != api.StatusCancelled):
			l.report(LawLifecycle, "time of "+string(s), "it is %s, but has no time of %s", status, s)
		}
		passed = passed && has
		if has {
			last = l.checkTimeOrder(s, last, read.Int(at(s)))
		}
	}
	for _, s := range []api.Status{api.StatusCompleted, api.StatusFailed, api.StatusCancelled} {
		if has := at(s) != ""; has != (s == status) {
			l.report(LawLifecycle, "time of "+string(s), "it is %s, but its time of %s is %q", status, s, at(s))
		} else if has {
			l.checkTimeOrder(s, last, read.Int(at(s)))
		}
	}
}

// checkTimeOrder reports the time at which the group entered state s (at) if it is before the time
// of the preceding state (last). Both are Unix ms. It returns at.
func (l *groupLaws) checkTimeOrder(s api.Status, last, at int64) int64 {
	if at < last {
		l.report(LawLifecycle, "order of "+string(s),
			"it became %s %d ms before the state that comes first", s, last-at)
	}
	return at
}

// checkAggregate compares the group's count of reduced jobs with the number of results in its
// partial aggregates, and with those aggregates that count results.
func (l *groupLaws) checkAggregate(reducers *reducer.Registry) {
	if l.Fields["aggregate"] == "" {
		return // it has no partial aggregates, or those of an earlier version, which count some results
	}
	var all *reducer.State
	plan, err := ledger.AggregatePlan(reducers, l.Fields["aggregate"])
	if err == nil {
		all = plan.New()
	} // else a reducer is unknown to this program: only the numbers of results are checked
	var counted int64
	for _, field := range slices.Sorted(maps.Keys(l.Partials)) {
		if !strings.HasPrefix(field, "partial:") || field == "partial:failed" {
			continue
		}
		n, err := mergePartial(plan, all, []byte(l.Partials[field]))
		if err != nil {
			l.report(LawResults, field, "%s of its aggregate can't be read", field)
			return
		}
		counted += n
	}
	reduced := l.jobs[ledger.Reduced]
	if counted != reduced {
		l.report(LawResults, fmt.Sprint("aggregate ", counted-reduced),
			"%d jobs are reduced, but its aggregate holds %d", reduced, counted)
	}
	if all == nil {
		return
	}
	values, _ := all.Values() // an aggregate that can't be computed is not compared
	for _, as := range ledger.CountingAggregates(l.Fields["aggregate"]) {
		if n := string(values[as]); n != strconv.FormatInt(reduced, 10) {
			l.report(LawResults, "count "+as+" "+n,
				"%d jobs are reduced, but its aggregate %q counts %s", reduced, as, n)
		}
	}
}

// mergePartial merges one encoded partial aggregate into all, and returns the number of results in
// it. If all is nil, because a reducer is unknown, it only decodes that number.
func mergePartial(plan *reducer.Plan, all *reducer.State, encoded []byte) (int64, error) {
	if all == nil {
		var partial struct{ Count *int64 }
		if err := json.Unmarshal(encoded, &partial); err != nil || partial.Count == nil {
			return 0, errors.New("not a partial aggregate")
		}
		return *partial.Count, nil
	}
	part, err := plan.Decode(encoded)
	if err != nil {
		return 0, err
	}
	n := part.Count()
	return n, all.Merge(part)
}
