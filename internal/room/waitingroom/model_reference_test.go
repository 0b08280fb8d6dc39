package waitingroom

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// The reference is a Go model of the scripts, written from the design and the scripts' headers. It
// stores an event as one map of users, and computes everything else from this map.

const (
	refNever = int64(9007199254740991)
	refPage  = 200
	refSweep = 1000 // users whom a sweep looks at
)

// refUser is a user's record.
type refUser struct {
	letter         byte // W, A, R or P
	number         int64
	conn           string
	since          int64
	fence          int64 // 0: none
	expires, first int64 // 0: none
	kept           int64 // until when the place is kept, ms: of away users, and of waiting ones who poll
	slot           int64 // of R and P: the end of the slot
}

func (u *refUser) queued() bool { return u != nil && (u.letter == 'W' || u.letter == 'A') }
func (u *refUser) inside() bool { return u != nil && !u.queued() }

type refEvent struct {
	id       string
	settings map[string]string // as declared
	users    map[string]*refUser
	counts   map[string]int64
	rev      int64
	tail     int64
	change   int64
	fence    int64
	permitAt int64 // the token bucket is empty until then, less its depth, µs
	closed   int64
	steps    int64
	gone     []int64 // numbers that have left the queue in this call
}

func (e *refEvent) num(setting string) int64 {
	n, _ := strconv.ParseInt(e.settings[setting], 10, 64)
	return n
}

func (e *refEvent) mode() string { return e.settings["mode"] }
func (e *refEvent) ended() bool  { return e.mode() == "closed" || e.mode() == "sold_out" }

func (e *refEvent) size(letters string) (n int64) {
	for _, u := range e.users {
		if strings.IndexByte(letters, u.letter) >= 0 {
			n++
		}
	}
	return n
}

func (e *refEvent) limit() int64 {
	if e.settings["stock"] == "" {
		return e.num("capacity")
	}
	return min(e.num("capacity"), e.num("stock"))
}

func (e *refEvent) free() int64 { return max(0, e.limit()-e.size("RP")) }

// refRooms is a partition.
type refRooms struct {
	us, now int64 // time of the call, µs and ms
	events  map[string]*refEvent
	scores  map[string]int64 // of rooms
	ran     bool             // expire has run
	lastRun int64
	hold    int64
	steps   int64
	woken   bool // there is a wake token of the promoter
	entry   []string
	moves   []string
}

func newReference() *refRooms {
	return &refRooms{events: map[string]*refEvent{}, scores: map[string]int64{}}
}

func (p *refRooms) begin(us int64) { p.us, p.now = us, us/1000 }

// every returns the time between two permits of the event's rate, in µs; 0: there is no limit.
func (e *refEvent) every() int64 {
	rate, _ := strconv.ParseFloat(e.settings["rate"], 64)
	if rate == 0 {
		return 0
	}
	return int64(1_000_000 / rate)
}

// permits returns how many users the event's rate allows to promote now, and when it allows the
// next one, in Unix ms.
func (p *refRooms) permits(e *refEvent) (n, next int64) {
	every := e.every()
	if every == 0 {
		return refNever, p.now
	}
	depth := e.num("burst") * every
	if e.permitAt > p.us+depth { // the clock has stepped back
		e.permitAt = p.us + depth
	}
	from := max(e.permitAt, p.us)
	return (p.us + depth - from) / every, (from + every - depth + 999) / 1000
}

func (p *refRooms) spend(e *refEvent, n int64) {
	if every := e.every(); every > 0 {
		e.permitAt = max(e.permitAt, p.us) + n*every
	}
}

func (p *refRooms) nextFence(e *refEvent) int64 {
	e.fence = max(e.fence+1, p.us)
	return e.fence
}

// remove ends a user's record.
func (e *refEvent) remove(user string) {
	if u := e.users[user]; u.queued() {
		e.gone = append(e.gone, u.number)
	}
	delete(e.users, user)
}

// earliest returns the lowest deadline of away and of slots.
func (e *refEvent) earliest() (kept, slot int64) {
	kept, slot = refNever, refNever
	for _, u := range e.users {
		if u.kept != 0 {
			kept = min(kept, u.kept)
		}
		if u.inside() {
			slot = min(slot, u.slot)
		}
	}
	return kept, slot
}

// due returns the time in ms at which the reference next has something to do for an event. During a
// hold, an event with overdue places is due each second, because tokens still end.
func (p *refRooms) due(e *refEvent) int64 {
	ends := min(e.earliest())
	if ends <= p.now && p.hold > p.now {
		ends = min(p.now+1000, p.hold)
	}
	switch {
	case e.ended() && e.size("WA") > 0:
		return p.now
	case e.ended() && len(e.users) > 0:
		return ends
	case e.ended():
		return e.closed + e.num("retention")
	}
	if e.mode() == "open" && e.size("W") > 0 && e.free() > 0 {
		n, next := p.permits(e)
		if n > 0 {
			return p.now
		}
		ends = min(ends, next)
	}
	return ends
}

// finish ends a call in the reference: it adds the numbers that left the queue to the stream moves,
// and sets when the event is due next. It returns for how many ms nothing is due; -1: for ever.
func (p *refRooms) finish(e *refEvent) int64 {
	if len(e.gone) > 0 {
		slices.Sort(e.gone)
		e.change++
		p.moves = append(p.moves, fmt.Sprint(e.id, " ", e.change, " ", rangesOf(e.gone)))
		e.gone = nil
	}
	at := max(p.now, p.due(e))
	p.scores[e.id] = at
	if at == p.now {
		p.woken = true
	}
	if at == refNever {
		return -1
	}
	return at - p.now
}

func rangesOf(sorted []int64) string {
	var b strings.Builder
	for i := 0; i < len(sorted); {
		n := 1
		for i+n < len(sorted) && sorted[i+n] == sorted[i]+int64(n) {
			n++
		}
		fmt.Fprintf(&b, " %d %d", sorted[i], n)
		i += n
	}
	return b.String()[1:]
}

type declareCall struct {
	event, how string
	rev        int64
	fields     [][2]string
}

func (p *refRooms) declare(c declareCall) []any {
	e := p.events[c.event]
	known := e != nil
	if !known {
		if c.how == "change" {
			return []any{"UNKNOWN", 0, 0}
		}
		e = &refEvent{
			id: c.event, settings: map[string]string{}, users: map[string]*refUser{}, counts: map[string]int64{}, change: p.us,
		}
	}
	over := func() int64 { return max(0, e.size("RP")-e.limit()) }
	switch {
	case c.rev > 0 && c.rev != e.rev:
		return []any{"CONFLICT", e.rev, 0}
	case known && c.how == "absent":
		return []any{"SAME", e.rev, over()}
	}
	settings, mode := maps.Clone(e.settings), cmp.Or(e.mode(), "open")
	for _, f := range c.fields {
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch {
		case f[0] == "left":
			settings["stock"], settings["declared_stock"] = f[1], fmt.Sprint(n+e.counts["sold"])
		case f[0] == "stock" && f[1] != "":
			settings["stock"], settings["declared_stock"] = fmt.Sprint(max(0, n-e.counts["sold"])), f[1]
		case f[0] == "stock":
			settings["stock"], settings["declared_stock"] = "", ""
		default:
			settings[f[0]] = f[1]
		}
	}
	next := cmp.Or(settings["mode"], "open")
	now, before := settings["stock"], e.settings["stock"]
	asked := slices.Contains(c.fields, [2]string{"mode", "sold_out"})
	if next == "sold_out" && (now != "" && now != "0" || now == "" && before != "" && !asked) {
		next = "open"
	} else if next != "closed" && settings["stock"] == "0" {
		next = "sold_out"
	}
	settings["mode"] = next
	maps.DeleteFunc(settings, func(_, v string) bool { return v == "" })
	if known && maps.Equal(settings, e.settings) {
		return []any{"SAME", e.rev, over()}
	}
	e.settings, e.rev = settings, max(e.rev+1, p.now)
	if next != mode {
		e.closed = 0
		if e.ended() {
			e.closed = p.now
		}
	}
	p.events[c.event] = e
	p.finish(e)
	if known {
		return []any{"CHANGED", e.rev, over()}
	}
	return []any{"CREATED", e.rev, over()}
}

// shown is a record as Redis holds it.
func (u *refUser) shown() string {
	opt := func(n int64) string {
		if n == 0 {
			return ""
		}
		return strconv.FormatInt(n, 10)
	}
	return strings.Join([]string{
		string(u.letter), fmt.Sprint(u.number), u.conn, fmt.Sprint(u.since), opt(u.fence), opt(u.expires), opt(u.first),
	}, "|")
}

// String shows the state as stored.String does.
func (p *refRooms) String() string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for id, e := range p.events {
		for name, value := range e.settings {
			add("%s setting %s=%s", id, name, value)
		}
		for name, n := range map[string]int64{
			"rev": e.rev, "tail": e.tail, "change": e.change, "fence": e.fence, "t": e.permitAt, "closed": e.closed,
			"steps": e.steps,
		} {
			if n != 0 {
				add("%s state %s=%d", id, name, n)
			}
		}
		for name, n := range e.counts {
			if n != 0 {
				add("%s count %s=%d", id, name, n)
			}
		}
		for user, u := range e.users {
			add("%s user %s=%s", id, user, u.shown())
			if u.letter == 'W' {
				add("%s waiting %s=%d", id, user, u.number)
			}
			if u.kept != 0 {
				add("%s away %s=%d", id, user, u.kept)
			}
			if u.inside() {
				add("%s slots %s=%d", id, user, u.slot)
			}
		}
	}
	for id, at := range p.scores {
		add("rooms %s=%d", id, at)
	}
	if p.ran {
		add("cleanup last_run=%d hold_until=%d steps=%d", p.lastRun, p.hold, p.steps)
	}
	add("woken %v", p.woken)
	for i, m := range p.moves {
		add("moves %03d %s", i, m)
	}
	for i, m := range p.entry {
		add("entry %03d %s", i, m)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
