package backpressure

import (
	"math"
	"slices"
	"time"
)

const (
	tick    = 100 * time.Millisecond // promises that fall due within one are looked at together
	early   = 100 * time.Millisecond // clocks and timers differ a little
	hold    = 150 * time.Millisecond // a promise that is not claimed for so long keeps its room from nobody
	grace   = time.Second            // and lapses after this
	margin  = 800 * time.Millisecond // a promise falls due so much after its room should be free
	maxWait = 10 * time.Minute       // nothing is promised beyond
	blind   = 10 * time.Second       // what is said while nobody works

	maxTrust, minTrust = 0.9, 0.1 // how much of the measured drain is promised
)

// line is where those stand who were refused. Each was told when to come again, and the room that
// the workers make until then is kept for it: newcomers get what is left over. So a producer that
// does as it was told is refused once, however many come at the same time. A place in the line is
// an amount of jobs that falls due, by the drain of the backlog.
type line struct {
	slots []slot // one a tick, without gaps
	first int64  // tick of the first slot
	owed  int64  // jobs, in all slots
	by    map[string][]*promise
	trust float64
}

type slot struct {
	owed int64
	all  []*promise
}

type promise struct {
	claim
	jobs int64
	due  time.Time
	gone bool // claimed or taken back
}

// offer is what one wants to add, and the view that it is judged by.
type offer struct {
	claim
	jobs  int64
	room  int64         // that is free now
	drain float64       // jobs a second that leave
	shut  time.Duration // there will be no room before; 0: there may be
}

func newLine() *line { return &line{by: map[string][]*promise{}, trust: maxTrust} }

// admit lets an offer in, or says how long it has to wait, in whole seconds. The room is the
// caller's to count.
func (l *line) admit(now time.Time, o offer) (wait time.Duration, ok bool) {
	l.lapse(now)
	drain := o.drain * l.trust
	fits := o.jobs <= o.room && o.shut == 0
	if p := l.promised(now, o.claim, o.jobs); p != nil {
		if o.base == p.base && o.part < p.part {
			return 0, true // a piece that was let in before, of a body that is sent again: it adds nothing
		}
		l.drop(p)
		if fits && (o.jobs <= p.jobs || l.leaves(now, o, drain, nil)) {
			l.trust = min(maxTrust, l.trust*1.02)
			return 0, true
		}
		if o.jobs <= p.jobs {
			l.trust = max(minTrust, l.trust*0.9) // the backlog drains more slowly than it seems to
		}
		return l.promise(now, o, l.overdue(now), drain), false // in front of those who come later
	}
	p := l.standing(o.claim)
	if fits && l.leaves(now, o, drain, p) {
		if p != nil {
			l.drop(p)
		}
		return 0, true
	}
	if p != nil {
		return seconds(p.due.Sub(now)), false // it came too early, and keeps its place
	}
	return l.promise(now, o, l.owed, drain), false
}

// leaves tells whether what is promised, but for o's own, can be kept when o is let in beside it.
func (l *line) leaves(now time.Time, o offer, drain float64, own *promise) bool {
	if own != nil {
		s := &l.slots[ticks(own.due)-l.first]
		s.owed -= own.jobs
		defer func() { s.owed += own.jobs }()
	}
	left, owed := float64(o.room-o.jobs), 0.0
	for i := range l.slots {
		if l.slots[i].owed == 0 || l.time(i).Add(tick+hold).Before(now) {
			continue
		}
		owed += float64(l.slots[i].owed)
		until := max(0, l.time(i).Sub(now)-margin)
		if left+drain*until.Seconds() < owed {
			return false
		}
	}
	return true
}

// promise makes a place behind what is ahead, and returns when it falls due.
func (l *line) promise(now time.Time, o offer, ahead int64, drain float64) time.Duration {
	if drain < 1 {
		return max(blind, seconds(o.shut))
	}
	need := max(0, float64(ahead+o.jobs-max(0, o.room))/drain)
	if need += (margin + o.shut).Seconds(); need > maxWait.Seconds() {
		return maxWait
	}
	wait := seconds(time.Duration(need * float64(time.Second)))
	if o.patient {
		return wait
	}
	p := &promise{claim: o.claim, jobs: o.jobs, due: now.Add(wait)}
	t := ticks(p.due)
	if len(l.slots) == 0 {
		l.first = t
	}
	for ; l.first > t; l.first-- {
		l.slots = slices.Insert(l.slots, 0, slot{})
	}
	for t >= l.first+int64(len(l.slots)) {
		l.slots = append(l.slots, slot{})
	}
	s := &l.slots[t-l.first]
	s.all, s.owed, l.owed = append(s.all, p), s.owed+p.jobs, l.owed+p.jobs
	l.by[p.who] = append(l.by[p.who], p)
	return wait
}

// promised is the promise that c may claim now, the one of as many jobs if there is.
func (l *line) promised(now time.Time, c claim, jobs int64) *promise {
	var found *promise
	for _, p := range l.by[c.who] {
		switch {
		case p.due.After(now.Add(early)):
		case found == nil, p.jobs == jobs && found.jobs != jobs,
			p.due.Before(found.due) && (found.jobs != jobs || p.jobs == jobs):
			found = p
		}
	}
	return found
}

// standing is the promise of one who is known for certain: others of the same name are not to
// share a place.
func (l *line) standing(c claim) *promise {
	for _, p := range l.by[c.who] {
		if c.sure || c.base != "" && c.base == p.base {
			return p
		}
	}
	return nil
}

// overdue is what may be claimed now.
func (l *line) overdue(now time.Time) (jobs int64) {
	for i := range l.slots {
		if l.time(i).After(now) {
			break
		}
		jobs += l.slots[i].owed
	}
	return jobs
}

func (l *line) drop(p *promise) {
	p.gone = true
	l.owed -= p.jobs
	l.slots[ticks(p.due)-l.first].owed -= p.jobs
	rest := slices.DeleteFunc(l.by[p.who], func(q *promise) bool { return q == p })
	if l.by[p.who] = rest; len(rest) == 0 {
		delete(l.by, p.who)
	}
}

// lapse forgets what was not claimed in time.
func (l *line) lapse(now time.Time) {
	for len(l.slots) > 0 && l.time(0).Add(tick+grace).Before(now) {
		for _, p := range l.slots[0].all {
			if !p.gone {
				l.drop(p)
			}
		}
		l.slots[0].all = nil
		l.slots, l.first = l.slots[1:], l.first+1
	}
}

func (l *line) time(i int) time.Time {
	return time.UnixMilli((l.first + int64(i)) * tick.Milliseconds())
}

func ticks(t time.Time) int64 { return t.UnixMilli() / tick.Milliseconds() }

// seconds are whole ones, upwards, since that is what Retry-After can say.
func seconds(d time.Duration) time.Duration {
	return time.Duration(max(1, math.Ceil(d.Seconds()))) * time.Second
}
