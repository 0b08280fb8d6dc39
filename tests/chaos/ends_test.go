package chaos

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
)

// codeLost is the error code of a job whose data vanished from Redis.
const codeLost = "LOST"

// ends counts how often each job of a group has ended, once by the job's ordinal and once by its
// index in the plan: each must have ended exactly once.
type ends struct {
	g                 *group
	deleted           map[int64]deletion // by ordinal: only these jobs may end as LOST
	ordinals, planned map[int64]int
	crashes           []int
	lost              map[int]bool // the jobs that have ended as LOST, by index
}

func newEnds(g *group, deleted map[int64]deletion) *ends {
	e := &ends{g: g, deleted: deleted, ordinals: map[int64]int{}, planned: map[int64]int{}, lost: map[int]bool{}}
	for n, job := range g.jobs {
		if job.Crash {
			e.crashes = append(e.crashes, n)
		}
	}
	return e
}

// nextCrash returns the index of the next job of the plan that kills its workers, and removes it
// from crashes; -1: no more. The failures of these jobs do not say which job it was, so they are
// matched in order.
func (e *ends) nextCrash() int {
	if len(e.crashes) == 0 {
		return -1
	}
	n := e.crashes[0]
	e.crashes = e.crashes[1:]
	return n
}

// addFailures counts the failed jobs of the group as ended. LOST jobs come first: their deletion
// tells their index, and jobs that kill their workers may be among them.
func (e *ends) addFailures(r *phase, failures []api.Failure) {
	for _, f := range failures {
		if f.Code == codeLost {
			e.addLost(r, f)
		}
	}
	for _, f := range failures {
		if f.Code == codeLost {
			continue
		}
		n, err := strconv.Atoi(f.Error) // the processor's error contains the job's number
		if err != nil {
			n = e.nextCrash()
		}
		e.add(r, f.Ordinal, n, func(want payload) bool { return want.code() == f.Code }, fmt.Sprintf("%s (%s)", f.Code, f.Error))
	}
}

// addLost counts a job that has ended as LOST. If nobody deleted the job's entry, that is a
// violation, and the job counts as missing. It is also a violation if the job ended later than
// endWithin after the deletion.
func (e *ends) addLost(r *phase, f api.Failure) {
	e.ordinals[f.Ordinal]++
	d, ok := e.deleted[f.Ordinal]
	if !ok || d.n < 0 || d.n >= len(e.g.jobs) {
		r.violate("group %s: ordinal %d ended as LOST (%s), and nobody has deleted its entry", e.g.id, f.Ordinal, f.Error)
		return
	}
	e.planned[int64(d.n)]++
	e.lost[d.n] = true
	e.crashes = slices.DeleteFunc(e.crashes, func(n int) bool { return n == d.n })
	r.EndedAsLost++
	after := f.At.Sub(d.at)
	r.LostWithin = max(r.LostWithin, after.Seconds())
	if after > endWithin {
		r.violate("group %s: ordinal %d ended as LOST %s after its entry was deleted", e.g.id, f.Ordinal, after)
	}
}

func (e *ends) add(r *phase, ordinal int64, n int, asPlanned func(payload) bool, what string) {
	e.ordinals[ordinal]++
	e.planned[int64(n)]++
	if n < 0 || n >= len(e.g.jobs) {
		r.violate("group %s: ordinal %d ended with %s, and no such job was planned", e.g.id, ordinal, what)
	} else if want := e.g.jobs[n]; !asPlanned(want) {
		r.violate("group %s: ordinal %d ended with %s, planned was %+v", e.g.id, ordinal, what, want)
	}
}

func (e *ends) judge(r *phase) {
	lost, twice := 0, 0
	for n := range e.g.jobs {
		if e.planned[int64(n)] == 0 {
			lost++
			r.violate("group %s: job %d has neither a result nor a failure", e.g.id, n)
		}
	}
	for _, counted := range []map[int64]int{e.ordinals, e.planned} {
		n := 0
		for _, times := range counted {
			n += times - 1
		}
		twice = max(twice, n)
	}
	if twice > 0 {
		r.violate("group %s: %d results and failures too many", e.g.id, twice)
	}
	r.Lost += lost
	r.DuplicateEffects += twice
}
