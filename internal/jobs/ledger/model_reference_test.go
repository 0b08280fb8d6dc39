package ledger_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// reference is the Go reference model of the ledger: every job as the accepted transitions have
// left it. It computes what each fenced transition must answer and change. Which jobs become ready
// is the scripts' choice: moved copies it after it has checked that the choice was allowed.
type reference struct {
	groups      map[string]*book
	paused      map[string]bool             // tenants and types
	unacked     map[string]map[string]taken // by type and entry: entries that were read, until they are deleted from the stream
	stale, lost map[string]int64            // by type: refused reports and lost leases
}

// book is a group in the reference.
type book struct {
	tenant, status                              string
	jobs                                        []job
	round                                       int
	sealed, submitted, started, requeue, paused bool
}

// job is a job of the reference model: its state and the values of its blob.
type job struct {
	typ                        string
	letter                     ledger.Letter
	attempt                    int
	retries, throttles, losses int
	errs                       string // reason and attempt of each kept error, newest first, such as "E3 A2 "
}

// note adds the error, or the deferral (reason G), with which the job's attempt has ended to the
// last errors. A new record replaces an older deferral.
func (j *job) note(reason ledger.Reason, attempt int) {
	kept := []string{fmt.Sprintf("%c%d ", reason, attempt)}
	for _, e := range strings.SplitAfter(j.errs, " ") {
		if e != "" && e[0] != byte(ledger.ReasonResource) {
			kept = append(kept, e)
		}
	}
	j.errs = strings.Join(kept[:min(len(kept), ledger.KeptErrors)], "")
}

// repeated stands for a job that a batch names for the second time: a script finds no valid attempt
// of it.
var repeated = job{letter: ledger.Ready, attempt: -1}

func (j job) is(letter ledger.Letter, attempt int) bool {
	return j.letter == letter && j.attempt >= 0 && j.attempt%90 == attempt%90
}

// owned reports whether the job is ready or in flight under this attempt, so that a report of the
// attempt may be valid.
func (j job) owned(attempt int) bool {
	return j.is(ledger.Ready, attempt) || j.is(ledger.InFlight, attempt)
}

// open reports whether the job is ready or in flight. If it is, only reclaim may remove entries of
// its other attempts.
func (j job) open() bool { return j.letter == ledger.Ready || j.letter == ledger.InFlight }

func (b *book) live() bool { return b.status != "CANCELLED" }
func (b *book) ended() bool {
	return slices.Contains([]string{"COMPLETED", "FAILED", "CANCELLED"}, b.status)
}

// states returns the string states:GROUP that the group's jobs must have in Redis.
func (b *book) states() string {
	s := make([]byte, 0, 2*len(b.jobs))
	for _, j := range b.jobs {
		s = append(s, byte(j.letter), byte(33+j.attempt%90))
	}
	return string(s)
}

// counts returns how many jobs of the model's group are in each state, by the field of the group's
// hash that counts them. Reduced jobs count as done, and also in reduced.
func (b *book) counts() (by map[string]int64, reduced int64) {
	by = map[string]int64{}
	for _, j := range b.jobs {
		by[places[j.letter]]++
		if j.letter == ledger.Reduced {
			reduced++
		}
	}
	return by, reduced
}

// batch returns the n jobs whose ordinals the function ordinal returns, as a script sees them:
// where an ordinal comes for the second time, the job is repeated.
func (b *book) batch(n int, ordinal func(i int) int64) []job {
	seen, named := make([]job, n), map[int64]bool{}
	for i := range n {
		if o := ordinal(i); named[o] {
			seen[i] = repeated
		} else {
			seen[i], named[o] = b.jobs[o], true
		}
	}
	return seen
}

// held reports whether a ready job may not start, because its group, tenant or type is paused.
func (l *reference) held(b *book, typ string) bool {
	return b.paused || l.paused["type "+typ] || l.paused["tenant "+b.tenant]
}

// start returns the tokens that Start must give to the jobs of a batch: the attempt, or negative if
// the start is refused. Tokens are in the order of the batch, which is sorted by job. It updates
// the reference.
func (l *reference) start(typ string, batch []taken) []int64 {
	var tokens []int64
	for len(batch) > 0 {
		group := batch[0].Group
		b, n := l.groups[group], 0
		for n < len(batch) && batch[n].Group == group {
			n++
		}
		for i, seen := range b.batch(n, func(i int) int64 { return batch[i].Ordinal }) {
			j, token, gone := batch[i], -1, !b.live() || !seen.open()
			switch {
			case !b.live():
				if seen.is(ledger.Ready, j.Attempt) || seen.is(ledger.Cancelled, j.Attempt) {
					token = -2
				}
			case seen.is(ledger.Ready, j.Attempt) && l.held(b, typ):
				b.jobs[j.Ordinal].letter, gone = ledger.NonReady, true
			case seen.is(ledger.Ready, j.Attempt):
				token, b.started = j.Attempt, true
			case seen.is(ledger.InFlight, j.Attempt):
				token = j.Attempt + 1
			}
			if token >= 0 {
				b.jobs[j.Ordinal].letter, b.jobs[j.Ordinal].attempt = ledger.InFlight, token
			}
			if gone {
				delete(l.unacked[typ], j.entry)
			}
			tokens = append(tokens, int64(token))
		}
		batch = batch[n:]
	}
	return tokens
}

// noted has the outcomes that put an error into the record of the job in errors:GROUP, with the
// reason of that error.
var noted = map[ledger.OutcomeKind]ledger.Reason{
	ledger.OutcomeRetry:     ledger.ReasonError,
	ledger.OutcomeThrottled: ledger.ReasonThrottled,
	ledger.OutcomeDeferred:  ledger.ReasonResource,
}

// outcome returns the expected reply of the script outcome, and updates the reference.
func (l *reference) outcome(typ string, groups []ledger.GroupOutcome) ledger.OutcomeReply {
	var r ledger.OutcomeReply
	// settle moves a job of a batch to its next state, if the outcome is valid. unstarted: the
	// outcome is also valid for a job that was not started.
	settle := func(b *book, seen job, entry string, ordinal int64, attempt int, to ledger.Letter, unstarted bool) bool {
		if !b.live() || seen.attempt%90 == attempt%90 || !seen.open() {
			delete(l.unacked[typ], entry)
		}
		mine := seen.is(ledger.InFlight, attempt) || unstarted && seen.owned(attempt)
		if !b.live() || !mine {
			r.Stale++
			if b.live() {
				l.stale[typ]++
			}
			return false
		}
		r.Owned++
		j := &b.jobs[ordinal]
		switch {
		case to != ledger.Ready:
			j.letter = to
		case seen.letter == ledger.InFlight: // the start whose reply was lost has taken effect
			j.letter = ledger.NonReady
		default:
			j.letter, j.attempt = ledger.Ready, attempt+1
		}
		return true
	}
	for _, g := range groups {
		b := l.groups[g.Group]
		for i, seen := range b.batch(len(g.Done), func(i int) int64 { return g.Done[i].Ordinal }) {
			d := g.Done[i]
			if settle(b, seen, d.Entry, d.Ordinal, d.Attempt, ledger.Done, false) {
				b.jobs[d.Ordinal].errs = ""
			}
		}
		for i, seen := range b.batch(len(g.Others), func(i int) int64 { return g.Others[i].Ordinal }) {
			o, to := g.Others[i], ledger.NonReady
			switch o.Kind {
			case ledger.OutcomeFailed:
				to = ledger.Failed
			case ledger.OutcomeUnstarted:
				to = ledger.Ready
			}
			unstarted := o.Kind == ledger.OutcomeUnstarted || o.Kind == ledger.OutcomeDeferred
			if settle(b, seen, o.Entry, o.Ordinal, o.Attempt, to, unstarted) {
				j := &b.jobs[o.Ordinal]
				j.retries, j.throttles, j.losses = o.Retries, o.Throttles, o.Losses
				if reason, ok := noted[o.Kind]; ok {
					j.note(reason, o.Attempt)
				}
				if to == ledger.Failed {
					r.Failed++
					j.retries, j.throttles, j.losses = 0, 0, 0
				}
			}
		}
	}
	return r
}

// reclaim returns the expected reply of the script reclaim, for all entries that were read and are
// still in the stream, and updates the reference. A job with more losses than `most` fails.
func (l *reference) reclaim(typ string, most int) ledger.ReclaimReply {
	var r ledger.ReclaimReply
	entries := make([]taken, 0, len(l.unacked[typ]))
	for _, e := range l.unacked[typ] {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b taken) int { return compareIDs(a.entry, b.entry) })
	for _, e := range entries {
		b := l.groups[e.Group]
		j := &b.jobs[e.Ordinal]
		if !b.live() || (!j.owned(e.Attempt) && !j.is(ledger.InFlight, e.Attempt+1)) {
			r.Stale++
			continue
		}
		lost := j.letter == ledger.InFlight // only jobs in flight have lost a worker
		if lost {
			j.losses++
		}
		if j.losses > most {
			j.letter, j.retries, j.throttles, j.losses = ledger.Failed, 0, 0, 0
			r.Failed++
			continue
		}
		if lost {
			j.note(ledger.ReasonError, j.attempt)
		}
		j.letter = ledger.NonReady
		r.Taken++
	}
	clear(l.unacked[typ])
	return r
}

func compareIDs(a, b string) int {
	ams, an, _ := strings.Cut(a, "-")
	bms, bn, _ := strings.Cut(b, "-")
	return cmp.Or(cmp.Compare(number(ams), number(bms)), cmp.Compare(number(an), number(bn)))
}

// renew returns the expected reply of the script renew: the indexes of the jobs whose lease is
// lost. It counts them in l.lost.
func (l *reference) renew(typ string, jobs []ledger.Held) []int {
	lost := []int{}
	for i, h := range jobs {
		if !l.groups[h.Group].jobs[h.Ordinal].owned(h.Attempt) {
			lost = append(lost, i)
		}
	}
	l.lost[typ] += int64(len(lost))
	return lost
}

// reduce returns the ordinals of jobs that may not be reduced. If there are none, it makes all of
// the jobs reduced in the reference.
func (l *reference) reduce(group string, ordinals []int64) (bad []int64) {
	b := l.groups[group]
	for _, o := range ordinals {
		if b.jobs[o].letter != ledger.Done {
			bad = append(bad, o)
		}
	}
	if bad == nil {
		for _, o := range ordinals {
			b.jobs[o].letter = ledger.Reduced
		}
	}
	return bad
}

// advance moves a group of the reference to its next states and returns the number of transitions.
func (l *reference) advance(group string) (n int) {
	b := l.groups[group]
	by, reduced := b.counts()
	all := int64(len(b.jobs)) == by["done"]+by["failed"]+by["cancelled"]
	for {
		switch {
		case b.status == "CREATED" && b.sealed && !b.requeue:
			b.status = "DISPATCHED"
		case b.status == "DISPATCHED" && (b.started || all):
			b.status = "RUNNING"
		case b.status == "RUNNING" && all:
			b.status = "AGGREGATING"
		case b.status == "AGGREGATING" && reduced == by["done"] && by["failed"] > 0 && by["failed"] == int64(len(b.jobs)):
			b.status, b.paused = "FAILED", false
		case b.status == "AGGREGATING" && reduced == by["done"]:
			b.status, b.paused = "COMPLETED", false
		default:
			return n
		}
		n++
	}
}

// forget removes the errors of all jobs of a group whose state letter is in `from`.
func (b *book) forget(from string) {
	for i := range b.jobs {
		if strings.IndexByte(from, byte(b.jobs[i].letter)) >= 0 {
			b.jobs[i].errs = ""
		}
	}
}

// settle sets the state of all jobs of a group whose state letter is in `from` to the letter `to`.
func (b *book) settle(from string, to ledger.Letter) {
	for i := range b.jobs {
		if strings.IndexByte(from, byte(b.jobs[i].letter)) >= 0 {
			b.jobs[i].letter = to
		}
	}
}
