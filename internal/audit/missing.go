package audit

import (
	"maps"
	"slices"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// Missing lists jobs of one group that are not at the location of their state: Redis has lost them,
// or another program has deleted them. Reduced jobs are not listed.
type Missing struct {
	Partition     int
	Group, Tenant string
	Type          string          // the group's type; "" if it has several
	Jobs          []ledger.Missed // by ordinal
}

// missingJobs holds all missing jobs of a pass, by group. (The findings name only some of them.)
type missingJobs map[string]*Missing

// add adds a job of a group with these types.
func (mj missingJobs) add(group, tenant string, types []string, p problem) {
	g := mj[group]
	if g == nil {
		g = &Missing{Group: group, Tenant: tenant}
		if len(types) == 1 {
			g.Type = types[0]
		}
		mj[group] = g
	}
	g.Jobs = append(g.Jobs, ledger.Missed{Ordinal: p.ordinal, State: p.state})
}

// intersect returns the jobs that are missing in a later pass too, with the same state. It removes
// the other jobs from later. A nil mj stands for no earlier pass: then all jobs of the later one
// are returned.
func (mj missingJobs) intersect(later missingJobs) missingJobs {
	if mj == nil {
		return later
	}
	both := missingJobs{}
	for id, g := range later {
		earlier := mj[id]
		if earlier == nil {
			continue
		}
		wasMissing := make(map[ledger.Missed]bool, len(earlier.Jobs))
		for _, j := range earlier.Jobs {
			wasMissing[j] = true
		}
		g.Jobs = slices.DeleteFunc(g.Jobs, func(j ledger.Missed) bool { return !wasMissing[j] })
		if len(g.Jobs) > 0 {
			both[id] = g
		}
	}
	return both
}

// list returns the missing jobs ordered by group and ordinal.
func (mj missingJobs) list(partition int) []Missing {
	var all []Missing
	for _, id := range slices.Sorted(maps.Keys(mj)) {
		g := mj[id]
		g.Partition = partition
		slices.SortFunc(g.Jobs, func(a, b ledger.Missed) int { return int(a.Ordinal - b.Ordinal) })
		all = append(all, *g)
	}
	return all
}
