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
	"github.com/bulkaction/bulkaction/internal/aggregate"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/reducer"
)

// countFields lists the fields of a group's hash that count jobs, each with the state letters that
// it counts.
var countFields = []struct{ name, letters string }{
	{"waiting", string(ledger.Waiting)}, {"non_ready", string(ledger.NonReady)}, {"ready", string(ledger.Ready)},
	{"in_flight", string(ledger.InFlight)},
	{"done", string(ledger.Done) + string(ledger.Reduced)}, {"failed", string(ledger.Failed)},
	{"cancelled", string(ledger.Cancelled)},
}

// checkCounts compares a group's counts with each other, with its states, and its error codes with
// its failed jobs.
func (ps *pass) checkCounts(g *group) {
	accepted, sum := g.intField("accepted"), int64(0)
	var parts []string
	for _, f := range countFields {
		n := g.intField(f.name)
		sum += n
		if n != 0 {
			parts = append(parts, fmt.Sprintf("%s %d", f.name, n))
		}
		if n < 0 {
			ps.reportGroup(g, LawConservation, f.name, "%s is %d", f.name, n)
		}
	}
	if sum != accepted {
		ps.reportGroup(g, LawConservation, fmt.Sprint("sum ", sum-accepted),
			"accepted is %d, the other counts add up to %d: %s",
			accepted, sum, strings.Join(parts, ", "))
	}
	if len(g.states) != int(2*accepted) {
		ps.reportGroup(g, LawStates, fmt.Sprint("length ", int64(len(g.states))-2*accepted),
			"accepted is %d, but there are %d bytes of states, two a job", accepted, len(g.states))
	}
	known := "A"
	reduced := struct{ name, letters string }{"reduced", string(ledger.Reduced)}
	for _, f := range append(slices.Clone(countFields), reduced) {
		have, n := g.jobsIn(f.letters), g.intField(f.name)
		known += f.letters
		if have != n {
			ps.reportGroup(g, LawStates, fmt.Sprint(f.name, " ", n-have), "%s is %d, but %d jobs are in such a state",
				f.name, n, have)
		}
	}
	for at := 0; at+1 < len(g.states); at += 2 {
		if letter := g.states[at]; strings.IndexByte(known, letter) < 0 {
			ps.found.add(finding{LawStates, g.id, int64(at / 2), string(letter)}, "its state is %q, which is none",
				letter)
			ps.markUncertain(LawStates, g.tenant, g.types...)
		}
	}
	var coded int64
	for _, code := range slices.Sorted(maps.Keys(g.codes)) {
		n := read.Int(g.codes[code])
		coded += n
		if n < 0 {
			ps.reportGroup(g, LawLocation, "code "+code, "%d jobs have failed with code %s", n, code)
			ps.addWrong(finding{LawLocation, g.id, noOrdinal, "code " + code}, WrongCodes{g.id, g.tenant})
		}
	}
	if failed := g.counts[ledger.Failed]; coded != failed {
		key := fmt.Sprint("codes ", coded-failed)
		ps.reportGroup(g, LawLocation, key, "%d jobs have failed, but by their codes %d", failed, coded)
		ps.addWrong(finding{LawLocation, g.id, noOrdinal, key}, WrongCodes{g.id, g.tenant})
	}
}

// statusOrder is the order in which a group that is not cancelled passes through its states before
// the final one.
var statusOrder = []api.Status{api.StatusCreated, api.StatusDispatched, api.StatusRunning, api.StatusAggregating}

// checkLifecycle compares a group's status with its timestamps, its jobs and the lists that it is
// on.
func (ps *pass) checkLifecycle(g *group) {
	status := api.Status(g.status())
	cancelled, sweeping := status == api.StatusCancelled, g.hash["sweep"] != ""
	rank := slices.Index(statusOrder, status)
	if status.Ended() {
		rank = len(statusOrder)
	} else if rank < 0 {
		ps.reportGroup(g, LawLifecycle, "status", "its status is %q, which is none", status)
		return
	}
	ps.checkTimestamps(g, status, rank)
	if g.hash["sealed"] == "" && rank > 0 {
		ps.reportGroup(g, LawLifecycle, "sealed", "it is %s without being sealed", status)
	}
	if open := !status.Ended() || sweeping; open != g.open || open == g.ended {
		ps.reportGroup(g, LawLifecycle, "lists", "it is %s, but %s", status, describeLists(g))
		ps.addWrongGroup(g, LawLifecycle, "lists")
	}
	unfinished, unreduced := g.unfinished(), g.counts[ledger.Done]
	switch {
	case cancelled:
		if !sweeping && unfinished > 0 {
			ps.reportGroup(g, LawLifecycle, "unended", "it was cancelled and settled, but %d jobs have not ended",
				unfinished)
			ps.addWrongGroup(g, LawLifecycle, "unended")
		}
	case rank >= 3 && unfinished > 0:
		ps.reportGroup(g, LawLifecycle, "unended", "it is %s, but %d jobs have not ended", status, unfinished)
	case rank == len(statusOrder) && unreduced > 0:
		ps.reportGroup(g, LawLifecycle, "unreduced", "it is %s, but %d results are not reduced", status, unreduced)
	case rank == len(statusOrder):
		threshold, err := strconv.ParseFloat(g.hash["failure_threshold"], 64)
		if err != nil {
			threshold = 1
		}
		failed, all := g.counts[ledger.Failed], len(g.states)/2
		if tooMany := failed > 0 && float64(failed)/float64(all) >= threshold; tooMany != (status == api.StatusFailed) {
			ps.reportGroup(g, LawLifecycle, "threshold", "it is %s with %d of %d jobs failed and a threshold of %g",
				status, failed, all, threshold)
		}
	case g.hash["sealed"] != "" && g.hash["requeue"] == "" && unfinished+unreduced == 0 && !g.dirty:
		ps.reportGroup(g, LawLifecycle, "stuck",
			"it is %s, sealed, and all its jobs have ended and are reduced, but it is not among the "+
				"dirty groups", status)
		ps.addWrongGroup(g, LawLifecycle, "stuck")
	}
}

// describeLists says in words on which of the lists of open and of ended groups a group is.
func describeLists(g *group) string {
	switch {
	case g.open && g.ended:
		return "on the lists of open and of ended groups"
	case g.open:
		return "on the list of open groups"
	case g.ended:
		return "on the list of ended groups"
	}
	return "neither on the list of open nor on that of ended groups"
}

// checkTimestamps checks the times at which a group entered its states in this round. There must be
// one for each state on its way, in this order, and none for any other. Rank is the index of the
// group's status in statusOrder; len(statusOrder) for a final one.
func (ps *pass) checkTimestamps(g *group, status api.Status, rank int) {
	at := func(s api.Status) string { return g.hash["at:"+strings.ToLower(string(s))] }
	var last int64
	passed := true // all states before s have a time
	for i, s := range statusOrder {
		has := at(s) != ""
		switch {
		case status == api.StatusCancelled && has && !passed, has && i > rank:
			ps.reportGroup(g, LawLifecycle, "time of "+string(s), "it is %s, but has a time of %s", status, s)
		case !has && (i == 0 || i <= rank && status != api.StatusCancelled):
			ps.reportGroup(g, LawLifecycle, "time of "+string(s), "it is %s, but has no time of %s", status, s)
		}
		passed = passed && has
		if has {
			last = ps.checkTimeOrder(g, s, last, read.Int(at(s)))
		}
	}
	for _, s := range []api.Status{api.StatusCompleted, api.StatusFailed, api.StatusCancelled} {
		if has := at(s) != ""; has != (s == status) {
			ps.reportGroup(g, LawLifecycle, "time of "+string(s), "it is %s, but its time of %s is %q", status, s,
				at(s))
		} else if has {
			ps.checkTimeOrder(g, s, last, read.Int(at(s)))
		}
	}
}

// checkTimeOrder reports a time of the state s that is before last, the time of the state before
// it. Both are Unix ms. It returns at.
func (ps *pass) checkTimeOrder(g *group, s api.Status, last, at int64) int64 {
	if at < last {
		ps.reportGroup(g, LawLifecycle, "order of "+string(s), "it became %s %d ms before the state that comes first",
			s, last-at)
	}
	return at
}

// checkAggregate compares the number of reduced jobs with what the group's partial aggregates hold,
// and with the aggregates that count results.
func (ps *pass) checkAggregate(g *group) {
	var all *reducer.State
	plan, err := aggregate.Plan(ps.opts.Reducers, g.hash["aggregate"])
	if err == nil {
		all = plan.New()
	} // else a reducer is unknown to this program: only the numbers of results are checked
	var counted int64
	for _, field := range slices.Sorted(maps.Keys(g.partials)) {
		if !strings.HasPrefix(field, "partial:") {
			continue
		}
		n, err := mergePartial(plan, all, []byte(g.partials[field]))
		if err != nil {
			ps.reportGroup(g, LawResults, field, "%s of its aggregate can't be read", field)
			return
		}
		counted += n
	}
	reduced := g.counts[ledger.Reduced]
	if counted != reduced {
		ps.reportGroup(g, LawResults, fmt.Sprint("aggregate ", counted-reduced),
			"%d jobs are reduced, but its aggregate holds %d", reduced, counted)
	}
	if all == nil {
		return
	}
	values, _ := all.Values() // an aggregate that can't be computed is not compared
	for _, as := range countAggregates(g.hash["aggregate"]) {
		if n := string(values[as]); n != strconv.FormatInt(reduced, 10) {
			ps.reportGroup(g, LawResults, "count "+as+" "+n, "%d jobs are reduced, but its aggregate %q counts %s",
				reduced, as, n)
		}
	}
}

// mergePartial adds one partial aggregate to all, and returns the number of results in it. If all
// is nil, since a reducer is unknown, it only reads the number.
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

// countAggregates returns the names of the group's aggregates that count all results. Asked is the
// JSON of the aggregates that the submission asked for.
func countAggregates(asked string) []string {
	var specs []struct{ As, Op, Field string }
	if json.Unmarshal([]byte(asked), &specs) != nil {
		return nil // the group has no aggregates
	}
	var names []string
	for _, s := range specs {
		if s.Op == "count" && s.Field == "" {
			names = append(names, s.As)
		}
	}
	return names
}
