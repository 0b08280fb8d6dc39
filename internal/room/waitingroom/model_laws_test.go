package waitingroom

import (
	"maps"
	"slices"
	"strconv"
	"strings"
)

// lawsOf is what the test remembers of an event's earlier states, to check laws about changes, such
// as that no fence is used twice.
type lawsOf struct {
	moved   int              // entries of moves from before the event was created
	owner   map[int64]string // by number
	fences  map[int64]bool   // all of READY and IN_PROGRESS users so far
	highest int64            // fence
	tokens  map[string]*refToken
	leeway  int64 // the shortest one since the event was created
}

// refToken is an entry token that was not given back and may still be valid.
type refToken struct {
	user           string
	expires, until int64
}

// lawful checks the laws R1 to R7 of the design in the state that is stored in Redis, without the
// reference model. It skips users whose data the test has damaged.
func (m *model) lawful(c oneCall, before, after *stored) {
	for id := range m.laws {
		if after.events[id] == nil {
			delete(m.laws, id)
		}
	}
	for _, id := range after.eventIDs() {
		e := after.events[id]
		if e.hash["rev"] == "" {
			if m.damaged == nil {
				m.fail("keys of the event %s, which does not exist", id)
			}
			continue
		}
		l := m.laws[id]
		if l == nil {
			l = &lawsOf{
				moved: len(before.moves), owner: map[int64]string{}, fences: map[int64]bool{},
				tokens: map[string]*refToken{}, leeway: 1 << 40,
			}
			m.laws[id] = l
		}
		m.lawfulStates(id, e)
		m.lawfulNumbers(id, e, l, after.moves[min(l.moved, len(after.moves)):])
		was := before.events[id]
		if was == nil {
			was = &storedEvent{}
		}
		m.lawfulSlots(c, id, was, e, l)
	}
}

func (m *model) sound(user string) bool { return !m.damaged[user] }

// lawfulStates checks R1 and R5: each user has a record, is in exactly the sorted sets that fit its
// state, and waits with its number.
func (m *model) lawfulStates(id string, e *storedEvent) {
	in := func(set map[string]int64, user string) bool { _, ok := set[user]; return ok }
	for user, text := range e.users {
		if !m.sound(user) {
			continue
		}
		r, ok := parseRecord(text)
		if !ok {
			m.fail("%s: %s has the record %q", id, user, text)
		}
		polls := r.letter == 'W' && r.conn == ""
		got := [3]bool{in(e.waiting, user), in(e.away, user), in(e.slots, user)}
		want := [3]bool{r.letter == 'W', r.letter == 'A' || polls, r.letter == 'R' || r.letter == 'P'}
		if got != want {
			m.fail("%s: %s has the record %q and is in the sets %v", id, user, text, got)
		}
		if r.letter == 'W' && e.waiting[user] != r.number {
			m.fail("%s: %s waits with another number than %d", id, user, r.number)
		}
	}
	for _, set := range []map[string]int64{e.waiting, e.away, e.slots} {
		for user := range set {
			if _, ok := e.users[user]; !ok && m.sound(user) {
				m.fail("%s: %s has no record", id, user)
			}
		}
	}
}

// lawfulNumbers checks the laws R3 and R7: each number that was given is either in the queue or in
// exactly one entry of the stream moves, no two users have one number, and the change numbers in
// moves have no gap.
func (m *model) lawfulNumbers(id string, e *storedEvent, l *lawsOf, moves []string) {
	tail, _ := strconv.ParseInt(e.hash["tail"], 10, 64)
	places, holders := map[int64]int{}, map[int64]string{}
	for user, text := range e.users {
		r, ok := parseRecord(text)
		if ok && (m.sound(user) || l.owner[r.number] == "") {
			l.owner[r.number] = user
		}
		if !ok || !m.sound(user) {
			continue
		}
		if holders[r.number] != "" || r.number < 1 || r.number > tail {
			m.fail("%s: %s has the number %d, as %q", id, user, r.number, holders[r.number])
		}
		holders[r.number] = user
		if r.letter == 'W' || r.letter == 'A' {
			places[r.number]++
		}
	}
	change := int64(0)
	for _, text := range moves {
		f := strings.Fields(text) // event E change N gone first count …
		if f[1] != id {
			continue
		}
		n, _ := strconv.ParseInt(f[3], 10, 64)
		if change > 0 && n != change+1 {
			m.fail("%s: change %d follows %d", id, n, change)
		}
		change = n
		for i := 5; i < len(f); i += 2 {
			first, _ := strconv.ParseInt(f[i], 10, 64)
			count, _ := strconv.ParseInt(f[i+1], 10, 64)
			for number := first; number < first+count; number++ {
				places[number]++
			}
		}
	}
	if change > 0 && e.hash["change"] != strconv.FormatInt(change, 10) {
		m.fail("%s: the change number is not that of moves, %d", id, change)
	}
	for number := int64(1); number <= tail; number++ {
		if places[number] != 1 && m.sound(l.owner[number]) {
			m.fail("%s: number %d is %d times in the queue and in moves", id, number, places[number])
		}
		delete(places, number)
	}
	if m.damaged == nil && len(places) > 0 {
		m.fail("%s: numbers above the tail: %v", id, places)
	}
}

// lawfulSlots checks R2, R4 and R6: fences grow, nobody is promoted before a lower number, there
// are no promotions beyond the limit, and a valid token has its slot until it is given back.
func (m *model) lawfulSlots(c oneCall, id string, was, e *storedEvent, l *lawsOf) {
	num := func(name string) int64 { n, _ := strconv.ParseInt(e.hash[name], 10, 64); return n }
	l.leeway = min(l.leeway, num("leeway"))
	promoted, now := 0, m.micros/1000
	for _, user := range slices.Sorted(maps.Keys(e.slots)) {
		r, ok := parseRecord(e.users[user])
		if !ok || !m.sound(user) {
			continue
		}
		fence, _ := strconv.ParseInt(r.fence, 10, 64)
		if !l.fences[fence] {
			promoted++
			l.fences[fence] = true
			if fence <= l.highest && m.damaged == nil {
				m.fail("%s: the fence %d comes after %d", id, fence, l.highest)
			}
			for other, number := range e.waiting {
				if _, waited := was.waiting[other]; waited && number < r.number && m.sound(other) {
					m.fail("%s: number %d is promoted, but %s waits with %d", id, r.number, other, number)
				}
			}
		}
		if r.letter == 'P' {
			expires := r.expires.UnixMilli()
			l.tokens[r.fence] = &refToken{user, expires, expires + l.leeway}
		}
	}
	for fence := range l.fences {
		l.highest = max(l.highest, fence)
	}
	limit := num("capacity")
	if e.hash["stock"] != "" {
		limit = min(limit, num("stock"))
	}
	if promoted > 0 && int64(len(e.slots)) > limit && m.damaged == nil {
		m.fail("%s: %d of %d slots are used", id, len(e.slots), limit)
	}
	for fence, t := range l.tokens {
		r, _ := parseRecord(e.users[t.user])
		_, held := e.slots[t.user]
		if held && r.fence == fence && r.letter == 'P' || !m.sound(t.user) {
			continue
		}
		givenBack := slices.Contains(c.gives, t.user) && c.args[0] == id && (c.script != "enter" || t.expires <= now)
		if now < t.until && !givenBack {
			m.fail("%s: %s has a token until %d, but no slot at %d", id, t.user, t.until, now)
		}
		delete(l.tokens, fence)
	}
}
