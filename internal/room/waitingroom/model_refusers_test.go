package waitingroom

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// refEntry is what enter answers for a user.
type refEntry struct {
	code     string
	user     *refUser
	replaced string
	isNew    int
}

// enter does in the reference what the script enter does, and returns its reply. poll is in ms.
func (p *refRooms) enter(event, mode string, poll int64, visitors []Visitor) []any {
	e := p.events[event]
	if e == nil {
		return []any{"UNKNOWN"}
	}
	kept := p.now + max(e.num("grace"), 3*poll)
	var all []refEntry
	for _, v := range visitors {
		all = append(all, p.enterOne(e, mode, kept, v))
	}
	p.finish(e)
	reply := []any{"OK", e.change}
	for _, r := range all {
		number, fence, expires := int64(0), "", int64(0)
		if u := r.user; u != nil {
			number, expires = u.number, u.expires
			if u.fence != 0 {
				fence = strconv.FormatInt(u.fence, 10)
			}
		}
		reply = append(reply, r.code, number, fence, expires, r.replaced, r.isNew)
	}
	return reply
}

func (p *refRooms) enterOne(e *refEvent, mode string, kept int64, v Visitor) refEntry {
	u := e.users[v.User]
	over := u != nil && u.letter == 'P' && u.expires <= p.now
	switch {
	case over && mode == "new":
		e.counts["expired"]++
		e.remove(v.User)
		return p.newcomer(e, kept, v)
	case u != nil && mode == "again" && u.conn != v.Conn:
		return refEntry{code: "STALE"}
	case u == nil && mode == "new":
		return p.newcomer(e, kept, v)
	case u == nil || over:
		return refEntry{code: "NONE"}
	case u.queued() && e.ended():
		return refEntry{code: strings.ToUpper(e.mode()), user: shallow(u)}
	}
	r := refEntry{code: "BACK"}
	polls := v.Conn == "" && u.queued() && (u.letter == 'A' || u.conn == "")
	if v.Conn != "" && u.conn != v.Conn {
		r.replaced = u.conn
	} else if !polls && u.letter != 'A' && (mode != "again" || u.letter != 'W') {
		p.state(&r, u)
		return r
	}
	u.since, u.kept = p.now, 0
	if v.Conn != "" || polls {
		u.conn = v.Conn
	}
	if u.inside() {
		p.renewSlot(e, u)
	} else {
		u.letter = 'W'
		if polls {
			u.kept = kept
		}
	}
	p.state(&r, u)
	return r
}

// state says what enter answers for a record.
func (*refRooms) state(r *refEntry, u *refUser) {
	switch u.letter {
	case 'R':
		r.code = "READY"
	case 'P':
		r.code = "IN_PROGRESS"
	}
	r.user = shallow(u)
}

func shallow(u *refUser) *refUser { c := *u; return &c }

// renewSlot computes in the reference when a user's slot ends. A script does so each time it writes
// the record, because the leeway in the settings may have changed.
func (p *refRooms) renewSlot(e *refEvent, u *refUser) {
	u.slot = u.expires
	if u.letter == 'P' {
		u.slot += e.num("leeway")
	}
}

func (p *refRooms) newcomer(e *refEvent, kept int64, v Visitor) refEntry {
	refuse := func(code string) refEntry {
		e.counts["refused"]++
		return refEntry{code: code}
	}
	if e.ended() {
		return refuse(strings.ToUpper(e.mode()))
	}
	ready := e.mode() == "open" && e.size("W") == 0 && e.free() > 0
	if ready {
		n, _ := p.permits(e)
		ready = n > 0
	}
	if !ready && e.size("WA") >= e.num("max_waiting") {
		return refuse("FULL")
	}
	e.tail++
	e.counts["entered"]++
	u := &refUser{letter: 'W', number: e.tail, conn: v.Conn, since: p.now}
	e.users[v.User] = u
	code := "ENTERED"
	if ready {
		code = "READY"
		p.spend(e, 1)
		u.letter, u.fence, u.expires = 'R', p.nextFence(e), p.now+e.num("ready")
		u.slot = u.expires
		e.gone = append(e.gone, u.number)
		e.counts["promoted"]++
	} else if v.Conn == "" {
		u.kept = kept
	}
	return refEntry{code, shallow(u), "", 1}
}

func (p *refRooms) disconnect(event string, visitors []Visitor) []any {
	reply := []any{}
	e := p.events[event]
	for _, v := range visitors {
		var u *refUser
		if e != nil {
			u = e.users[v.User]
		}
		code := "NOTED"
		switch {
		case u == nil || v.Conn == "" || u.conn != v.Conn:
			code = "STALE"
		case u.letter == 'W' && e.num("grace") > 0:
			code = "AWAY"
			u.letter, u.kept = 'A', p.now+e.num("grace")
		case u.letter == 'W', u.letter == 'P' && e.settings["on_close"] == "release":
			code = "GONE"
			e.counts["left"]++
			e.remove(v.User)
		case u.letter == 'R' && e.settings["no_show"] == "release":
			code = "NO_SHOW"
			e.counts["no_shows"]++
			e.remove(v.User)
		}
		reply = append(reply, code)
	}
	if e != nil {
		p.finish(e)
	}
	return reply
}

func (p *refRooms) leave(event, user string) []any {
	e := p.events[event]
	if e == nil || e.users[user] == nil {
		return []any{"NONE", ""}
	}
	conn := e.users[user].conn
	e.remove(user)
	e.counts["left"]++
	p.finish(e)
	return []any{"LEFT", conn}
}

// byScore returns the users for whom score returns true, in the order of a Redis sorted set: by
// score, then by id.
func (e *refEvent) byScore(score func(u *refUser) (int64, bool)) []string {
	var users []string
	for user, u := range e.users {
		if _, ok := score(u); ok {
			users = append(users, user)
		}
	}
	slices.SortFunc(users, func(a, b string) int {
		first, _ := score(e.users[a])
		second, _ := score(e.users[b])
		return cmp.Or(cmp.Compare(first, second), cmp.Compare(a, b))
	})
	return users
}

func (e *refEvent) waiting() []string {
	return e.byScore(func(u *refUser) (int64, bool) { return u.number, u.letter == 'W' })
}

func (p *refRooms) promote(event string, most int64) []any {
	e := p.events[event]
	if e == nil {
		delete(p.scores, event)
		return []any{0, -1, p.now, ""}
	}
	n := int64(0)
	if e.mode() == "open" && e.size("W") > 0 && e.free() > 0 {
		permits, _ := p.permits(e)
		n = min(e.free(), e.size("W"), most, permits)
	}
	messages, order := map[string][]string{}, []string{}
	for _, user := range e.waiting()[:n] {
		u := e.users[user]
		e.gone = append(e.gone, u.number)
		u.letter, u.fence, u.expires, u.kept = 'R', p.nextFence(e), p.now+e.num("ready"), 0
		u.slot = u.expires
		to, _, ok := strings.Cut(u.conn, ".")
		if !ok {
			continue
		}
		if messages[to] == nil {
			order = append(order, to)
		}
		messages[to] = append(messages[to], fmt.Sprintf(`{"user":"%s","conn":"%s","fence":%d,"until":%d}`, user, u.conn, u.fence, u.expires))
	}
	if n > 0 {
		p.spend(e, n)
	}
	e.counts["promoted"] += n
	wait := p.finish(e)
	for _, to := range order {
		for some := range slices.Chunk(messages[to], 100) {
			p.entry = append(p.entry, fmt.Sprintf(`entry.promoted {"event":"%s","to":"%s","users":[%s]}`, event, to, strings.Join(some, ",")))
		}
	}
	return []any{n, wait, p.now, e.mode()}
}

func (p *refRooms) claim(event string, visitors []Visitor) []any {
	reply := []any{}
	e := p.events[event]
	for _, v := range visitors {
		var u *refUser
		if e != nil {
			u = e.users[v.User]
		}
		switch {
		case u != nil && v.Conn != "" && u.conn != v.Conn:
			reply = append(reply, "STALE", "", 0)
			continue
		case u == nil, u.queued(), u.letter == 'P' && u.expires <= p.now:
			reply = append(reply, "NONE", "", 0)
			continue
		case u.letter == 'R':
			e.counts["admitted"]++
			u.letter, u.expires, u.first = 'P', p.now+e.num("token_ttl"), p.now
			p.renewSlot(e, u)
		}
		reply = append(reply, "CLAIMED", u.fence, u.expires)
	}
	if e != nil {
		p.finish(e)
	}
	return reply
}

func (p *refRooms) token(event, user, fence string) (*refEvent, *refUser) {
	e := p.events[event]
	if e == nil || e.users[user] == nil || e.users[user].letter != 'P' || fmt.Sprint(e.users[user].fence) != fence {
		return e, nil
	}
	return e, e.users[user]
}

func (p *refRooms) renew(event, user, fence string) []any {
	e, u := p.token(event, user, fence)
	if u == nil || u.expires <= p.now {
		return []any{"NONE", 0}
	}
	expires := p.now + e.num("token_ttl")
	if most := e.num("max_session"); most > 0 {
		if u.first+most <= p.now {
			return []any{"OVER", 0}
		}
		expires = min(expires, u.first+most)
	}
	u.expires = max(u.expires, expires)
	p.renewSlot(e, u)
	p.finish(e)
	return []any{"RENEWED", u.expires}
}

func (p *refRooms) complete(event, user, fence string, sold bool) []any {
	e, u := p.token(event, user, fence)
	if u == nil {
		return []any{"NONE"}
	}
	e.remove(user)
	e.counts["completed"]++
	if sold {
		e.counts["sold"]++
	}
	if sold && e.settings["stock"] != "" {
		left := max(0, e.num("stock")-1)
		e.settings["stock"] = fmt.Sprint(left)
		if left == 0 && e.mode() != "closed" {
			e.settings["mode"], e.closed = "sold_out", p.now
		}
	}
	p.finish(e)
	return []any{"DONE"}
}

func (p *refRooms) expire(event string) []any {
	if !p.ran {
		p.ran, p.lastRun = true, p.now
	}
	p.hold = min(p.hold, p.now+15_000)
	if p.now-p.lastRun > 5000 {
		p.hold = p.now + 15_000
	}
	if p.lastRun-p.now > 1000 { // the clock has stepped back
		p.steps++
		p.woken = true
		for id, at := range p.scores {
			if at != refNever {
				p.scores[id] = min(at, p.now)
			}
		}
	}
	p.lastRun = p.now
	e := p.events[event]
	if e == nil {
		delete(p.scores, event)
		return []any{0, -1, p.now, "", 0}
	}
	if e.steps != p.steps {
		e.steps = p.steps
		for _, u := range e.users {
			if u.kept != 0 {
				u.kept = min(u.kept, p.now+max(e.num("grace"), 60_000))
			}
			if u.letter == 'R' {
				u.expires = min(u.expires, p.now+e.num("ready"))
				u.slot = min(u.slot, u.expires)
			}
		}
	}
	n, noShows := p.endDue(e)
	return []any{n, p.finish(e), p.now, e.mode(), noShows}
}

// endDue does in the reference what the script expire_users does for one event: it removes away
// users after their grace, no-shows, and users whose token has expired, 200 at most. During a hold
// it removes only users with expired tokens. n counts all of them, no-shows included.
func (p *refRooms) endDue(e *refEvent) (n, noShows int) {
	away := e.byScore(func(u *refUser) (int64, bool) { return u.kept, u.kept != 0 && u.kept <= p.now })
	if p.hold > p.now {
		away = nil
	}
	for _, user := range away[:min(len(away), refPage)] {
		e.remove(user)
		e.counts["expired"]++
		n++
	}
	for _, user := range e.byScore(func(u *refUser) (int64, bool) { return u.slot, u.inside() && u.slot <= p.now }) {
		ready := e.users[user].letter == 'R'
		switch {
		case n == refPage || ready && p.hold > p.now:
			continue
		case ready:
			e.counts["no_shows"]++
			noShows++
		default:
			e.counts["expired"]++
		}
		e.remove(user)
		n++
	}
	return n, noShows
}

func (p *refRooms) sweep(event string, from int64, alive []string) []any {
	e := p.events[event]
	if e == nil {
		return []any{0, 0, 0}
	}
	if p.hold > p.now {
		return []any{0, 0, p.hold - p.now}
	}
	page := slices.DeleteFunc(e.waiting(), func(user string) bool { return e.users[user].number <= from })
	next := int64(0)
	if len(page) >= refSweep {
		page = page[:refSweep]
		next = e.users[page[refSweep-1]].number
	}
	n := 0
	for i, user := range page {
		u := e.users[user]
		if n == refPage {
			next = e.users[page[i-1]].number
			break
		}
		of, _, _ := strings.Cut(u.conn, ".")
		age := p.now - u.since
		if u.conn == "" || slices.Contains(alive, of) || age > -10_000 && age < 10_000 {
			continue
		}
		u.letter, u.kept = 'A', p.now+max(e.num("grace"), 10_000)
		n++
	}
	if n > 0 {
		p.finish(e)
	}
	return []any{next, n, 0}
}

func (p *refRooms) forget(event string) []any {
	e := p.events[event]
	switch {
	case e == nil:
		delete(p.scores, event)
		return []any{0, -1}
	case !e.ended():
		return []any{len(e.users), -1}
	case len(e.users) == 0 && p.now >= e.closed+e.num("retention"):
		delete(p.events, event)
		delete(p.scores, event)
		return []any{0, -1}
	}
	users := e.waiting()
	if len(users) == 0 {
		users = e.byScore(func(u *refUser) (int64, bool) { return u.kept, u.letter == 'A' })
	}
	for _, user := range users[:min(len(users), refPage)] {
		e.remove(user)
		e.counts["left"]++
	}
	wait := p.finish(e)
	return []any{len(e.users), wait}
}

func (p *refRooms) snapshot(ids []string) []any {
	reply := []any{}
	for _, id := range ids {
		e := p.events[id]
		if e == nil {
			reply = append(reply, 0, 0, 0)
			continue
		}
		reply = append(reply, e.size("W"), e.size("RP"), len(e.users))
	}
	return reply
}
