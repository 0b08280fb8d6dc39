package audit

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// PartitionReport is what an audit found in one partition, as package repair needs it.
type PartitionReport struct {
	Partition keyspace.Partition
	Findings  []Finding // ordered by group and ordinal
	Missing   []Missing // the part of [Report.Missing] that is in this partition
	// Misplaced holds, by location, the jobs that may be misplaced or duplicated there. It also has
	// those that Findings leaves out because they are too many.
	Misplaced map[Location]map[Job]bool
}

// Finding is a violation, and what is wrong with the data.
type Finding struct {
	Violation
	Wrong Wrong // nil if the right value is not certain
}

// Wrong says which data are wrong and what the right value is: [WrongGroup], [DeletedGroup],
// [WrongCodes], [WrongCounter], [WrongOwner] or [MisplacedJob].
type Wrong interface{ wrong() }

// WrongGroup is a group whose counts differ from its states, or that is not on the right lists.
type WrongGroup struct {
	Group, Tenant string
	Repaired      int64            // the version of the group's repairs when it was read
	Differences   map[string]int64 // by field of the group's hash: what must be added to it
}

// DeletedGroup is a group that does not exist, but is on the list of groups.
type DeletedGroup struct{ Group, Tenant string }

// WrongCodes is a group whose error codes don't agree with its failures.
type WrongCodes struct{ Group, Tenant string }

// WrongCounter is a counter of a tenant or type that differs from the recounted value.
type WrongCounter ledger.Counter

// WrongOwner is a group whose owner key names Owner instead of Tenant; "" if there is no such key.
type WrongOwner struct{ Group, Tenant, Owner string }

// MisplacedJob is a job that is misplaced or duplicated at one of these locations.
type MisplacedJob struct {
	Job       Job
	Locations []Location
}

func (WrongGroup) wrong()   {}
func (DeletedGroup) wrong() {}
func (WrongCodes) wrong()   {}
func (WrongCounter) wrong() {}
func (WrongOwner) wrong()   {}
func (MisplacedJob) wrong() {}

// Job identifies a job. The zero Job stands for elements that can't be read as a job.
type Job struct {
	Group   string
	Ordinal int64
}

// Location identifies a key that holds jobs, as [ledger.Misplaced] does.
type Location struct {
	Name  string // queue, non-ready, suspended, ready, results or failures
	Owner string // the group of a queue or of failures, the tenant of a sorted set, the type of a stream
	Type  string // the type of a queue; for failures the ordinal, "" for all unreadable ones
}

// addWrong adds to a finding of this pass what is wrong. It does nothing if the finding was left
// out.
func (ps *pass) addWrong(f finding, w Wrong) {
	if _, kept := ps.found.details[f]; !kept {
		return // the finding was left out because of the bounds
	}
	if ps.wrong == nil {
		ps.wrong = map[finding]Wrong{}
	}
	ps.wrong[f] = w
}

// wrongGroup returns the differences between a group's counts and its states. ok is false if the
// states themselves may be wrong.
func (g *group) wrongGroup() (w WrongGroup, ok bool) {
	differences, sum, counted := map[string]int64{}, int64(0), int64(0)
	add := func(name string, n int64) {
		if n != 0 {
			differences[name] = n
		}
	}
	for _, f := range countFields {
		have := g.jobsIn(f.letters)
		sum, counted = sum+g.intField(f.name), counted+have
		add(f.name, have-g.intField(f.name))
	}
	add("reduced", g.counts[ledger.Reduced]-g.intField("reduced"))
	accepted, jobs := g.intField("accepted"), int64(len(g.states)/2)
	// The states are trusted on two conditions: each state has a known letter, and the number of
	// states is the count accepted or the sum of the other counts.
	if counted != jobs || accepted != jobs && sum != jobs {
		return WrongGroup{}, false
	}
	add("accepted", jobs-accepted)
	return WrongGroup{g.id, g.tenant, g.intField("repaired"), differences}, true
}

// jobsIn returns the number of jobs with one of these state letters.
func (g *group) jobsIn(letters string) (n int64) {
	for _, letter := range []byte(letters) {
		n += g.counts[letter]
	}
	return n
}

// addMisplaced adds to a finding that a job, or what can't be read as one, is misplaced or
// duplicated at one of these locations. The locations remember the job also if the finding was left
// out.
func (ps *pass) addMisplaced(f finding, j Job, locations ...Location) {
	if ps.misplaced == nil {
		ps.misplaced = map[Location]map[Job]bool{}
	}
	for _, at := range locations {
		if ps.misplaced[at] == nil {
			ps.misplaced[at] = map[Job]bool{}
		}
		ps.misplaced[at][j] = true
	}
	ps.addWrong(f, MisplacedJob{j, locations})
}

// locationsOf returns the locations of this kind at which a job of the group can be.
func (ps *pass) locationsOf(kind locationKind, group, tenant string, ordinal int64, types []string) (all []Location) {
	switch kind {
	case atQueue:
		for _, typ := range types {
			all = append(all, Location{"queue", group, typ})
		}
	case atNonReady:
		all = []Location{{"non-ready", tenant, ""}, {"suspended", tenant, ""}}
	case atReady:
		for _, typ := range slices.Sorted(maps.Keys(ps.types)) {
			all = append(all, Location{"ready", typ, ""})
		}
	case atResultsStream:
		all = []Location{{"results", "", ""}}
	case atFailures:
		all = []Location{{"failures", group, strconv.FormatInt(ordinal, 10)}}
	}
	return all
}

// locationOfKey returns the location that is stored under the key of a shared location.
func (ps *pass) locationOfKey(kind locationKind, key string) Location {
	name := ps.shortKey(key)
	_, owner, _ := strings.Cut(name, ":")
	switch {
	case kind == atReady:
		return Location{"ready", owner, ""}
	case kind == atResultsStream:
		return Location{"results", "", ""}
	case strings.HasPrefix(name, "suspended:"):
		return Location{"suspended", owner, ""}
	}
	return Location{"non-ready", owner, ""}
}
