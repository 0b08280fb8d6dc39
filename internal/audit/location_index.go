package audit

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
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

// kindNames describes each kind of location in words, for the text of a violation.
var kindNames = [locationKinds]string{
	"the group's queues", "non-ready", "the ready stream",
	"the group's failures", "the results stream", "the group's results",
}

// kindOf maps each name of a location, as package read has them, to its kind.
var kindOf = map[string]locationKind{
	read.Queue: atQueue, read.NonReady: atNonReady, read.Suspended: atNonReady, read.Ready: atReady,
	read.Failures: atFailures, read.Results: atResultsStream, read.ResultLines: atGroupResults,
}

// law returns the law that a job at a wrong location of this kind breaks.
func (kind locationKind) law() string {
	if kind == atResultsStream || kind == atGroupResults {
		return LawResults
	}
	return LawLocation
}

// letters describes each state letter: its meaning in words, and home, the kind of location at
// which a job in this state must be. placed is false if a job in this state is at no location.
var letters = [256]struct {
	name   string
	placed bool
	home   locationKind
}{
	ledger.Waiting:   {"waiting", true, atQueue},
	ledger.NonReady:  {"non-ready", true, atNonReady},
	ledger.Ready:     {"ready", true, atReady},
	ledger.InFlight:  {"in flight", true, atReady},
	ledger.Done:      {"done and not reduced", true, atResultsStream},
	ledger.Reduced:   {"done and reduced", true, atGroupResults},
	ledger.Failed:    {"failed", true, atFailures},
	ledger.Cancelled: {"cancelled", false, 0},
}

// fits reports whether a job at a location of this kind, recorded with this attempt, is where its
// state says.
func fits(kind locationKind, state ledger.State, attempt int) bool {
	if l := letters[state.Letter()]; !l.placed || l.home != kind {
		return false
	}
	// If a worker starts the same entry twice, the second start increases the attempt in the state,
	// and the entry still has the first attempt.
	return attempt == read.UnknownAttempt || state.IsOf(attempt) ||
		state.Letter() == ledger.InFlight && state.IsOf(attempt+1)
}

// DescribeState says a state in words, for example "waiting at attempt 0".
func DescribeState(state ledger.State) string {
	name := letters[state.Letter()].name
	if name == "" {
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

type kindSet [locationKinds]bool

// locationIndex is a record of where an audit has found the jobs of a group, so that missing,
// duplicated and misplaced jobs can be told apart. It holds a range of ordinals; a bit per job is
// enough, because a job has only one right location.
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

// record records that a job was found at a location. It returns true for a duplicate: the job was
// found at its right location before.
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

// unrecordDuplicate removes a job from the duplicates. It is for a scan that yielded the same
// element twice.
func (idx *locationIndex) unrecordDuplicate(ordinal int64) {
	idx.duplicated[(ordinal-idx.first)/64] &^= 1 << ((ordinal - idx.first) % 64)
}

// fault is what can be wrong with the location of a job.
type fault string

const (
	missing    fault = "missing"    // not at the right location
	duplicated fault = "duplicated" // at the right location more than once
	misplaced  fault = "misplaced"  // at another location
	unknown    fault = "unknown "   // at a location, but its group has no such job
)

// problem is a job whose location is wrong, and how: missing, duplicated, misplaced or unknown.
type problem struct {
	ordinal int64
	kind    locationKind
	fault   fault
	state   ledger.State // unchanged while its locations were read; "" for an unknown job
}

// problems yields the jobs that are missing, duplicated or misplaced. now has the states as read
// after the locations: a job whose state has changed in between is not judged. judged says which
// kinds of location were read; only there can a job be missing.
func (idx *locationIndex) problems(now string, judged kindSet) iter.Seq[problem] {
	return func(yield func(problem) bool) {
		for i := range min(idx.size(), int64(len(now)/ledger.StateBytes)) {
			state := ledger.StateAt(idx.states, i)
			if ledger.StateAt(now, i) != state {
				continue
			}
			at := func(kind locationKind, f fault) problem { return problem{idx.first + i, kind, f, state} }
			if l := letters[state.Letter()]; l.placed && judged[l.home] {
				if !idx.found.has(i) && !yield(at(l.home, missing)) {
					return
				}
				if idx.duplicated.has(i) && !yield(at(l.home, duplicated)) {
					return
				}
			}
			for kind := range locationKinds {
				if idx.misplaced[kind].has(i) && !yield(at(kind, misplaced)) {
					return
				}
			}
		}
	}
}

// detail describes the problem in a sentence.
func (p problem) detail() string {
	where := kindNames[p.kind]
	switch p.fault {
	case missing:
		return fmt.Sprintf("it is %s, but not in %s", DescribeState(p.state), where)
	case duplicated:
		return fmt.Sprintf("it is %s, and more than once in %s", DescribeState(p.state), where)
	case misplaced:
		return fmt.Sprintf("it is %s, but something of it lies in %s", DescribeState(p.state), where)
	}
	return fmt.Sprintf("something of it lies in %s, but the group has no such job", where)
}

// trackedGroup is a group whose states, or a range of them, stay in memory until the locations of
// its jobs have been read.
type trackedGroup struct {
	read.Header
	created string // the field at:created, which identifies this group and round
	index   locationIndex
}

// tracked returns the trackedGroup of the group for a range of its states. first is the ordinal of
// the first state.
func (g *group) tracked(first int64, states string) trackedGroup {
	return trackedGroup{g.Header, g.Fields["at:created"], locationIndex{first: first, states: states}}
}

// reportProblems reports the problems of those jobs of a group whose state did not change between
// two readings; now is the second one. judged says which kinds of location were read.
func (s *scope) reportProblems(g *trackedGroup, now reading, judged kindSet) {
	if now.created != g.created {
		return // the group was deleted, or created again
	}
	for p := range g.index.problems(now.states, judged) {
		// A missing job of a cancelled group is no problem: cancelling removes the queues at once,
		// and each role that reads another job of the group removes that job.
		mayBeGone := p.kind == atQueue || p.kind == atNonReady || p.kind == atReady
		if p.fault != missing || !mayBeGone || !g.index.cancelled && !now.cancelled {
			s.reportJob(g.Header, p, false)
		}
	}
}

// reportJob adds a finding about a job of a group. A missing job also goes to the missing jobs,
// except a reduced one and, in a pass over candidates, a failed one. The repair of any other
// problem is to quarantine the job, except in the group's result lines, and except for an unknown
// job if the states may be wrong instead (statesAreWrong).
func (s *scope) reportJob(h read.Header, p problem, statesAreWrong bool) {
	f := newFinding(p.kind.law(), h.ID, h.Tenant, fmt.Sprint(p.fault, p.kind, p.state), "%s", p.detail())
	f = f.aboutJob(p.ordinal)
	if p.fault != missing && p.kind != atGroupResults && !statesAreWrong {
		f = f.quarantinedAt(s.locationsOf(p.kind, h, strconv.FormatInt(p.ordinal, 10))...)
	}
	s.found.add(f, h.TypeList()...)
	if p.fault == missing && p.kind != atGroupResults && (p.kind != atFailures || s.full()) {
		s.found.missing.add(h, p)
	}
}

// locationsOf returns the locations of this kind at which a job of a group can be; none for result
// lines. For the failures, it is the record of the job with this ordinal ("": all unreadable ones).
func (s *scope) locationsOf(kind locationKind, h read.Header, ordinal string) (all []read.Location) {
	switch kind {
	case atQueue:
		for _, typ := range h.TypeList() {
			all = append(all, read.Location{Name: read.Queue, Owner: h.ID, Type: typ})
		}
	case atNonReady:
		nonReady := read.NonReadyOf(h.Tenant)
		all = nonReady[:]
	case atReady:
		for _, typ := range slices.Sorted(maps.Keys(s.types)) {
			all = append(all, read.Location{Name: read.Ready, Owner: typ})
		}
	case atResultsStream:
		all = []read.Location{{Name: read.Results}}
	case atFailures:
		all = []read.Location{{Name: read.Failures, Owner: h.ID, Type: ordinal}}
	}
	return all
}

// ownLocations is the check of one group: it compares the locations that belong only to this group
// (queues, failures, result lines) with the group's states.
type ownLocations struct {
	*scope
	*group
	whole   trackedGroup // the group with all its states
	judged  kindSet
	unknown []problem // jobs that the states, as first read, don't contain
}

// newOwnLocations returns the check of a group's own locations. A pass over candidates judges the
// queues only if their length differs from the number of waiting jobs, the failures only if it
// differs from that of failed jobs, and result lines not at all.
func newOwnLocations(s *scope, g *group) *ownLocations {
	o, full := &ownLocations{scope: s, group: g, whole: g.tracked(0, g.States)}, s.full()
	o.whole.index.cancelled = g.status() == string(api.StatusCancelled)
	o.judged[atQueue] = full || g.Queued() != g.jobs[ledger.Waiting]
	o.judged[atFailures] = full || g.Failures != g.jobs[ledger.Failed]
	o.judged[atGroupResults] = full && g.Fields["results_expired"] == ""
	return o
}

// check reads the group's own locations. If something looks wrong, it reads the states again, and
// reports only jobs whose state has not changed and ordinals that still don't exist.
func (o *ownLocations) check(ctx context.Context) error {
	if err := o.readAll(ctx); err != nil {
		return err
	}
	suspicious := len(o.unknown) > 0
	for range o.whole.index.problems(o.States, o.judged) {
		suspicious = true
		break
	}
	if !suspicious {
		return nil
	}
	var again func() reading
	err := o.Transaction(ctx, func(p redis.Pipeliner) { again = o.queueReading(ctx, p, o.ID, 0, -1) })
	if err != nil {
		return err
	}
	now := again()
	o.judged[atGroupResults] = o.judged[atGroupResults] && !now.expired
	o.reportProblems(&o.whole, now, o.judged)
	bytes := int64(len(now.states))
	for _, p := range o.unknown {
		if p.ordinal >= bytes/ledger.StateBytes && now.created == o.whole.created {
			o.reportJob(o.Header, p, bytes != ledger.StateBytes*o.Int("accepted"))
		}
	}
	return nil
}

// readAll reads the judged locations. A full audit always reads the result lines, even if they are
// not judged; a pass over candidates never does.
func (o *ownLocations) readAll(ctx context.Context) error {
	if o.judged[atQueue] {
		for i, at := range o.locationsOf(atQueue, o.Header, "") {
			if err := o.read(ctx, at, o.Queues[i]); err != nil {
				return err
			}
		}
	}
	if o.judged[atFailures] && o.Failures > 0 {
		if err := o.read(ctx, read.Location{Name: read.Failures, Owner: o.ID}, 0); err != nil {
			return err
		}
	}
	if !o.full() {
		return nil
	}
	return o.read(ctx, read.Location{Name: read.ResultLines, Owner: o.ID}, o.ResultChunks)
}

// read reads one location and records its jobs in the index. It reports unreadable elements. n is
// the length of a list; 0 for other types.
func (o *ownLocations) read(ctx context.Context, at read.Location, n int64) error {
	kind := kindOf[at.Name]
	seen := bitset(nil) // a scan may yield the same field of a hash twice
	return o.Elements(ctx, o.p, at, n, func(e read.Element) error {
		switch {
		case !e.Readable:
			f := newFinding(kind.law(), o.ID, o.Tenant, fmt.Sprint("unreadable ", kind),
				"something in %s can't be read", kindNames[kind])
			if kind != atGroupResults {
				f = f.quarantinedAt(o.locationsOf(kind, o.Header, "")...)
			}
			o.found.add(f, o.TypeList()...)
		case o.whole.index.state(e.Ordinal) == "":
			if len(o.unknown) < maxPerGroupAndLaw {
				o.unknown = append(o.unknown, problem{ordinal: e.Ordinal, kind: kind, fault: unknown})
			}
		case kind != atFailures:
			o.whole.index.record(kind, e.Ordinal, e.Attempt)
		case !seen.has(e.Ordinal):
			seen.set(e.Ordinal, o.size())
			o.whole.index.record(kind, e.Ordinal, e.Attempt)
		}
		return nil
	})
}

// foundJob is a job as a shared location holds it.
type foundJob struct {
	read.Element
	at   read.Location
	kind locationKind
	// entry is the id of the job's entry in a stream. It is "" for a member of a sorted set, which
	// contains the payload and must not be reported.
	entry  string
	tenant string // whose location it is; "" if the location is of no tenant
	fault  string // what is wrong with the job at this location, whatever its state is; "" for nothing
}

func newFoundJob(e read.Element, at read.Location) foundJob {
	j := foundJob{Element: e, at: at, kind: kindOf[at.Name], entry: e.ID}
	if j.kind == atNonReady {
		j.entry, j.tenant = "", at.Owner
	}
	if j.kind == atReady && e.Type != at.Owner {
		j.fault = "of type " + e.Type
	}
	return j
}

// checkUntracked checks found jobs whose states the pass does not keep: it asks Redis for the state
// of each. If a job seems wrong, it asks again, for the state and the job's presence at the
// location in one transaction, so that both are of one instant. It reports the jobs that are wrong
// then too. A pass over candidates checks none of them.
func (sl *sharedLocations) checkUntracked(ctx context.Context, jobs []foundJob) error {
	if !sl.full() {
		return nil
	}
	ask := func(p redis.Pipeliner, j foundJob) jobReplies { return sl.queueJob(ctx, p, j) }
	replies, err := read.Ask(ctx, sl.Pipeline, read.PageSize/2, jobs, ask)
	if err != nil {
		return err
	}
	var candidates []foundJob
	for i, j := range jobs {
		if j.faultBy(replies[i]) != "" {
			candidates = append(candidates, j)
		}
	}
	for page := range slices.Chunk(candidates, 50) {
		present := make(map[foundJob]func() bool, len(page))
		replies, err := read.Ask(ctx, sl.Transaction, len(page), page, func(p redis.Pipeliner, j foundJob) jobReplies {
			present[j] = sl.queuePresence(ctx, p, j)
			return ask(p, j)
		})
		if err != nil {
			return err
		}
		for i, j := range page {
			if fault := j.faultBy(replies[i]); fault != "" && present[j]() {
				sl.reportMisplaced(j, fault)
			}
		}
	}
	return nil
}

// jobReplies holds Redis's replies about a found job: fields of its group, and its state.
type jobReplies struct {
	group *redis.SliceCmd
	state *redis.StringCmd
}

// queueJob adds to a pipeline the commands that read the group and the state of a found job.
func (sl *sharedLocations) queueJob(ctx context.Context, p redis.Pipeliner, j foundJob) jobReplies {
	from := ledger.StateBytes * min(j.Ordinal, messages.MaxTotal)
	return jobReplies{
		group: p.HMGet(ctx, sl.p.Group(j.Group), "tenant", "status", "sweep"),
		state: p.GetRange(ctx, sl.p.States(j.Group), from, from+ledger.StateBytes-1),
	}
}

// queuePresence adds to a pipeline the command that tells whether a found job is still at its
// location. The returned function returns the answer.
func (sl *sharedLocations) queuePresence(ctx context.Context, p redis.Pipeliner, j foundJob) func() bool {
	if j.kind == atNonReady {
		score := p.ZScore(ctx, j.at.Key(sl.p), j.ID)
		return func() bool { return score.Err() == nil }
	}
	entry := p.XRange(ctx, j.at.Key(sl.p), j.ID, j.ID)
	return func() bool { return len(entry.Val()) > 0 }
}

// faultBy returns what is wrong with a found job according to these replies of Redis; "" for
// nothing.
func (j foundJob) faultBy(replies jobReplies) string {
	if read.IsWrongType(replies.group.Err()) || read.IsWrongType(replies.state.Err()) {
		return "" // a group with a key of the wrong type is not judged
	}
	v, state := replies.group.Val(), ledger.State(replies.state.Val())
	tenant, status, sweeping := read.Text(v[0]), read.Text(v[1]), read.Text(v[2]) != ""
	switch {
	case status == "":
		return "there is no such group"
	case len(state) != ledger.StateBytes:
		return "the group has no such job"
	case j.fault != "":
		return j.fault
	case j.tenant != "" && j.tenant != tenant:
		return "its tenant is " + tenant
	case fits(j.kind, state, j.Attempt):
		return ""
	case status == string(api.StatusCancelled) && j.mayRemain(state.Letter(), sweeping):
		return ""
	}
	return "it is " + DescribeState(state)
}

// mayRemain reports whether a cancelled job may be at this location: in the non-ready set until the
// group's cancellation is completed, in the ready stream until a worker or the dispatcher reads it.
func (j foundJob) mayRemain(letter ledger.Letter, sweeping bool) bool {
	return letter == ledger.Cancelled && (j.kind == atReady || j.kind == atNonReady && sweeping)
}

// reportMisplaced reports that a found job does not belong at its location, for the reason in
// fault. The repair quarantines it.
func (sl *sharedLocations) reportMisplaced(j foundJob, fault string) {
	key := j.at.Key(sl.p)
	where := sl.shortKey(key)
	if j.entry != "" {
		where += " under " + j.entry
	}
	sl.found.add(newFinding(j.kind.law(), j.Group, j.tenant, fmt.Sprint("untracked ", key, j.ID, fault),
		"something of it lies in %s, but %s", where, fault).aboutJob(j.Ordinal).quarantinedAt(j.at), j.Type)
}
