package audit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// Finding is a violation of a law: what breaks it, at which locations, and how that is repaired.
type Finding struct {
	Violation
	Tenant    string          // of the group; "" where it is not known
	Locations []read.Location // hold a job, or an element that is no job, that does not belong there
	Repair    Repair
}

// RepairKind is a kind of repair.
type RepairKind int

// The kinds of repair.
const (
	NoRepair      RepairKind = iota // the right value is not certain
	RepairGroup                     // the group's counts differ from its states, or its lists are wrong
	RepairDeleted                   // the group does not exist, but it is on the list of groups
	RepairCodes                     // the group's error codes don't agree with its failures
	RepairCounter                   // a counter of a tenant or type differs from the recounted value
	RepairOwner                     // the group's owner key doesn't name its tenant
	Redeliver                       // a callback is not where its state says, or its queue is not in its place
	Quarantine                      // what does not belong at Locations is to be quarantined
)

// Repair says how a finding can be repaired: the kind of repair, and the data that it needs.
// Package repair has a table with an action for each RepairKind.
type Repair struct {
	Kind        RepairKind
	Differences map[string]int64 // RepairGroup: by field of the group's hash, what must be added to it
	Version     int64            // RepairGroup: the version of the group's repairs when it was read
	Counter     ledger.Counter   // RepairCounter
	Owner       string           // RepairOwner: whom the key names; "" if there is no such key
	Callback    string           // Redeliver: it, or the first of its queue
}

// noOrdinal is the ordinal of a finding that is not about a single job.
const noOrdinal = int64(-1)

// identity is the key by which a finding is recognized in the next pass. It contains the job's
// state or the size of the error: if these change, it is another finding.
type identity struct {
	law, group string // group is "" if the finding is not about a group
	ordinal    int64
	key        string // what is wrong, with the job's state and attempt or the size of the error
}

// compareIdentities orders findings by group and ordinal.
func compareIdentities(a, b identity) int {
	return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.ordinal, b.ordinal), cmp.Compare(a.law, b.law),
		cmp.Compare(a.key, b.key))
}

func (f *Finding) identity() identity {
	id := identity{f.Law, f.Group, noOrdinal, f.Key}
	if f.Ordinal != nil {
		id.ordinal = *f.Ordinal
	}
	return id
}

// Job returns the job that the finding is about; the zero Job if it is about no single job.
func (f *Finding) Job() read.Job {
	if f.Ordinal == nil {
		return read.Job{}
	}
	return read.Job{Group: f.Group, Ordinal: *f.Ordinal}
}

// newFinding returns a finding about a group ("": about none). The key distinguishes it from other
// findings about this law and group.
func newFinding(law, group, tenant, key, format string, args ...any) Finding {
	return Finding{
		Violation: Violation{Law: law, Group: group, Key: key, Detail: fmt.Sprintf(format, args...)}, Tenant: tenant,
	}
}

// aboutJob returns a copy of the finding that names this job of the finding's group.
func (f Finding) aboutJob(ordinal int64) Finding {
	f.Ordinal = &ordinal
	return f
}

// quarantinedAt returns a copy of the finding with these locations and the repair Quarantine: the
// job, or unreadable element, does not belong at them.
func (f Finding) quarantinedAt(locations ...read.Location) Finding {
	f.Locations, f.Repair.Kind = locations, Quarantine
	return f
}

func (f Finding) repairedBy(r Repair) Finding {
	f.Repair = r
	return f
}

// Limits on the number of findings reported for one partition. Findings beyond them are only
// counted, in a summary.
const (
	maxPerGroupAndLaw = 100    // findings that break the same law in the same group
	maxFindings       = 10_000 // findings in all; a group may exceed it for a law that it has broken already
)

// lawAndGroup identifies the findings that break one law in one group.
type lawAndGroup struct{ law, group string }

// findings is what one pass has found: findings up to the limits, all missing and misplaced jobs,
// and the tenants and types whose counters it must not judge.
type findings struct {
	all     map[identity]Finding
	counts  map[lawAndGroup]int // how many were added, including those over maxPerGroupAndLaw
	omitted int                 // how many were left out because of maxFindings

	missing   missingJobs
	misplaced map[read.Location]map[read.Job]bool // see PartitionReport
	// uncertainTenants and uncertainTypes name the tenants and types of which a job, group or key
	// breaks the law conservation, states or location, or a group is missing on a list: their counters
	// are not judged.
	uncertainTenants, uncertainTypes map[string]bool
}

func newFindings() findings {
	return findings{
		all: map[identity]Finding{}, counts: map[lawAndGroup]int{}, missing: missingJobs{},
		misplaced:        map[read.Location]map[read.Job]bool{},
		uncertainTenants: map[string]bool{}, uncertainTypes: map[string]bool{},
	}
}

// add adds a finding. Beyond the limits it only counts the finding, but still records its job as
// misplaced at the finding's Locations. The types are those of the group or job: after some laws,
// their counters and the tenant's become uncertain.
func (fs *findings) add(f Finding, types ...string) {
	fs.markUncertain(f.Law, f.Tenant, types...)
	for _, at := range f.Locations {
		if fs.misplaced[at] == nil {
			fs.misplaced[at] = map[read.Job]bool{}
		}
		fs.misplaced[at][f.Job()] = true
	}
	id, key := f.identity(), lawAndGroup{f.Law, f.Group}
	if _, ok := fs.all[id]; ok {
		return
	}
	switch {
	case fs.counts[key] == 0 && len(fs.all) >= maxFindings:
		fs.omitted++
		return
	case fs.counts[key] < maxPerGroupAndLaw:
		fs.all[id] = f
	}
	fs.counts[key]++
}

// markUncertain excludes the counters of a tenant and of types from this pass, if a violation of
// this law may explain why they are wrong.
func (fs *findings) markUncertain(law, tenant string, types ...string) {
	if law != LawConservation && law != LawStates && law != LawLocation {
		return
	}
	fs.uncertainTenants[tenant] = true
	for _, typ := range types {
		fs.uncertainTypes[typ] = true
	}
}

// addWrongTypes adds a finding for each of keys, which have the wrong Redis type. keys maps each
// key to its group ("": none). base is the prefix of the partition's keys, which the text leaves
// out.
func (fs *findings) addWrongTypes(keys map[string]string, base string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		fs.add(newFinding(LawLocation, keys[key], "", "key "+key,
			"the key %s is of another type than it must be", strings.TrimPrefix(key, base)))
	}
}

// withSummaries returns the findings, with summaries that count the findings beyond the limits.
func (fs *findings) withSummaries() map[identity]Finding {
	summarize := func(law, group, key string, n int, format string) {
		f := newFinding(law, group, "", key, format, n)
		f.Count = int64(n)
		fs.all[f.identity()] = f
	}
	for key, n := range fs.counts {
		if n > maxPerGroupAndLaw {
			summarize(key.law, key.group, "more", n-maxPerGroupAndLaw, "and %d more like these")
		}
	}
	if fs.omitted > 0 {
		summarize(LawLocation, "", "omitted", fs.omitted, "and %d findings about more groups")
	}
	return fs.all
}

// Missing is the list of the jobs of one group that are not at the location of their state: Redis
// has lost them, or another program has deleted them. Reduced jobs are not listed; failed ones only
// by a full audit.
type Missing struct {
	Partition     int
	Group, Tenant string
	Type          string          // the group's type; "" if it has several
	Jobs          []ledger.Missed // by ordinal
}

// missingJobs holds all missing jobs of a pass, by group. (The findings name only some of them.)
type missingJobs map[string]*Missing

func (mj missingJobs) add(h read.Header, p problem) {
	g := mj[h.ID]
	if g == nil {
		g = &Missing{Group: h.ID, Tenant: h.Tenant}
		if types := h.TypeList(); len(types) == 1 {
			g.Type = types[0]
		}
		mj[h.ID] = g
	}
	g.Jobs = append(g.Jobs, ledger.Missed{Ordinal: p.ordinal, State: p.state})
}

// keep removes each job that the earlier pass did not find missing too, in the same state.
func (mj missingJobs) keep(earlier missingJobs) {
	for id, g := range mj {
		was := map[ledger.Missed]bool{}
		if earlier[id] != nil {
			for _, j := range earlier[id].Jobs {
				was[j] = true
			}
		}
		if g.Jobs = slices.DeleteFunc(g.Jobs, func(j ledger.Missed) bool { return !was[j] }); len(g.Jobs) == 0 {
			delete(mj, id)
		}
	}
}

// list returns the missing jobs ordered by group and ordinal.
func (mj missingJobs) list(partition int) []Missing {
	var all []Missing
	for _, id := range slices.Sorted(maps.Keys(mj)) {
		g := mj[id]
		g.Partition = partition
		slices.SortFunc(g.Jobs, func(a, b ledger.Missed) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
		all = append(all, *g)
	}
	return all
}
