package waitingroom

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"pgregory.net/rapid"
)

// The model has few users, events and brokers, so that even a short random sequence uses the same
// ones again.
var (
	modelUsers     = []string{"a", "b", "c", "d", "f", "g", "h"}
	modelInstances = []string{"00000001", "00000002", "00000003"}
)

func draw[T any](m *model, what string, from ...T) T { return rapid.SampledFrom(from).Draw(m.rt, what) }

func (m *model) drawEvent() string { return draw(m, "event", "e", "e", "e", "e", "e", "e", "e", "o") }

func (m *model) record(event, user string) record {
	e := m.view.events[event]
	if e == nil {
		return record{}
	}
	r, _ := parseRecord(e.users[user])
	return r
}

func (m *model) drawConn() string {
	return draw(m, "instance", modelInstances...) + "." + draw(m, "number", "1", "2")
}

// drawUser draws a random user: mostly one whose record has one of the state letters, sometimes
// any.
func (m *model) drawUser(event, letters string) string {
	e := m.view.events[event]
	if e == nil || rapid.IntRange(0, 7).Draw(m.rt, "anybody") == 0 {
		return draw(m, "user", modelUsers...)
	}
	var fit []string
	for _, user := range slices.Sorted(maps.Keys(e.users)) {
		if r, ok := parseRecord(e.users[user]); ok && slices.Contains([]byte(letters), r.letter) {
			fit = append(fit, user)
		}
	}
	if len(fit) == 0 {
		fit = modelUsers
	}
	return draw(m, "user", fit...)
}

// drawVisitors draws one to three random visitors, mostly with the conns that their records have.
func (m *model) drawVisitors(event, letters string) (list []Visitor) {
	for range rapid.IntRange(1, 3).Draw(m.rt, "visitors") {
		v := Visitor{User: m.drawUser(event, letters)}
		switch v.Conn = m.record(event, v.User).conn; rapid.IntRange(0, 5).Draw(m.rt, "conn") {
		case 0:
			v.Conn = m.drawConn()
		case 1:
			v.Conn = ""
		}
		list = append(list, v)
	}
	return list
}

func visitorArgs(list []Visitor) (args []any) { return withVisitors(nil, list) }

func namesOf(list []Visitor) (users []string) {
	for _, v := range list {
		users = append(users, v.User)
	}
	return users
}

// do runs a call, and remembers it for repetitions.
func (m *model) do(c oneCall) {
	m.calls = append(m.calls, c)
	m.run(c)
}

func (m *model) actEnter(mode Mode) {
	event, list := m.drawEvent(), []Visitor(nil)
	switch mode {
	case EnterNew:
		for range rapid.IntRange(1, 3).Draw(m.rt, "visitors") {
			v := Visitor{User: draw(m, "user", modelUsers...)}
			if rapid.IntRange(0, 3).Draw(m.rt, "polls") > 0 {
				v.Conn = m.drawConn()
			}
			list = append(list, v)
		}
	case EnterKnown:
		list = []Visitor{{User: m.drawUser(event, "WARP")}}
	default:
		list = m.drawVisitors(event, "WARP")
	}
	poll := draw[int64](m, "poll", 1000, 1000, 20_000)
	args := append([]any{event, string(mode), poll}, visitorArgs(list)...)
	c := oneCall{"enter", args, func(p *refRooms) []any { return p.enter(event, string(mode), poll, list) }, nil}
	if mode == EnterNew {
		c.gives = namesOf(list)
	}
	m.do(c)
}

func (m *model) actDisconnect() {
	event := m.drawEvent()
	list := m.drawVisitors(event, "WARP")
	args := append([]any{event}, visitorArgs(list)...)
	m.do(oneCall{"disconnect", args, func(p *refRooms) []any { return p.disconnect(event, list) }, namesOf(list)})
}

func (m *model) actLeave() {
	event := m.drawEvent()
	user := m.drawUser(event, "WARP")
	m.do(oneCall{"leave", []any{event, user}, func(p *refRooms) []any { return p.leave(event, user) }, []string{user}})
}

func (m *model) actPromote() {
	event, most := m.drawEvent(), draw[int64](m, "most", 200, 200, 1)
	m.do(oneCall{"promote_users", []any{event, most}, func(p *refRooms) []any { return p.promote(event, most) }, nil})
}

func (m *model) actClaim() {
	event := m.drawEvent()
	list := m.drawVisitors(event, "RRP")
	args := append([]any{event}, visitorArgs(list)...)
	m.do(oneCall{"claim", args, func(p *refRooms) []any { return p.claim(event, list) }, nil})
}

// drawToken draws a random user and a fence, mostly a user with a token and the token's fence.
func (m *model) drawToken(event string) (user, fence string) {
	user = m.drawUser(event, "P")
	if fence = m.record(event, user).fence; fence == "" || rapid.IntRange(0, 5).Draw(m.rt, "fence") == 0 {
		fence = draw(m, "fence", "", "0", "1", fence+"0")
	}
	return user, fence
}

func (m *model) actRenew() {
	event := m.drawEvent()
	user, fence := m.drawToken(event)
	m.do(oneCall{
		"renew_token", []any{event, user, fence},
		func(p *refRooms) []any { return p.renew(event, user, fence) }, nil,
	})
}

func (m *model) actComplete() {
	event, sold := m.drawEvent(), rapid.IntRange(0, 1).Draw(m.rt, "sold")
	user, fence := m.drawToken(event)
	m.do(oneCall{
		"complete", []any{event, user, fence, sold},
		func(p *refRooms) []any { return p.complete(event, user, fence, sold == 1) }, []string{user},
	})
}

func (m *model) actExpire() {
	event := draw(m, "event", "e", "e", "e", "", "o")
	m.do(oneCall{"expire_users", []any{event}, func(p *refRooms) []any { return p.expire(event) }, nil})
}

func (m *model) actSweep() {
	event, from := m.drawEvent(), draw[int64](m, "from", 0, 0, 0, 3)
	var alive []string
	for _, instance := range modelInstances {
		if rapid.Bool().Draw(m.rt, "alive") {
			alive = append(alive, instance)
		}
	}
	args := []any{event, from}
	for _, instance := range alive {
		args = append(args, instance)
	}
	m.do(oneCall{"sweep_room", args, func(p *refRooms) []any { return p.sweep(event, from, alive) }, nil})
}

func (m *model) actForget() {
	event := m.drawEvent()
	m.do(oneCall{"forget", []any{event}, func(p *refRooms) []any { return p.forget(event) }, nil})
}

// actAudit audits an event. Only damage breaks a law.
func (m *model) actAudit() {
	event := m.drawEvent()
	for _, list := range []string{"event", "users", "waiting", "away", "slots"} {
		m.run(oneCall{
			"audit_room", []any{event, list, 0, 200}, func(*refRooms) []any { return []any{} }, nil,
		})
	}
}

func (m *model) actSnapshot() {
	ids := draw(m, "events", []string{"e"}, []string{"o", "e"}, []string{})
	args := []any{}
	for _, id := range ids {
		args = append(args, id)
	}
	m.do(oneCall{"snapshot", args, func(p *refRooms) []any { return p.snapshot(ids) }, nil})
}

// declare declares an event.
func (m *model) declare(d declareCall) {
	args := []any{d.event, d.how, d.rev}
	for _, f := range d.fields {
		args = append(args, f[0], f[1])
	}
	m.do(oneCall{"declare_room", args, func(p *refRooms) []any { return p.declare(d) }, nil})
}

// drawSettings draws random settings of an event with short times. The fields are those that
// Settings.fields returns.
func (m *model) drawSettings() [][2]string {
	n := func(what string, from ...int) string { return strconv.Itoa(draw(m, what, from...)) }
	rate, burst := draw(m, "rate", "", "", "1", "4", "0.5"), ""
	if rate != "" {
		burst = n("burst", 1, 2, 5)
	}
	fields := [][2]string{
		{"capacity", n("capacity", 0, 1, 2, 3, 10)}, {"stock", draw(m, "stock", "", "", "0", "1", "2", "4")},
		{"rate", rate}, {"burst", burst}, {"max_waiting", n("max waiting", 0, 1, 2, 100, 100)},
		{"token_ttl", n("token ttl", 1000, 2000, 5000)}, {"leeway", n("leeway", 0, 1000, 2000)},
		{"max_session", n("max session", 0, 2500, 6000)}, {"ready", n("ready", 1000, 3000)},
		{"grace", n("grace", 0, 2000, 90_000)}, {"on_close", draw(m, "on close", "keep", "release")},
		{"no_show", draw(m, "no show", "wait", "release")}, {"return_url", draw(m, "url", "", "https://x")},
		{"retention", n("retention", 0, 3000)}, {"seats", draw(m, "seats", "", "1")},
	}
	if rapid.IntRange(0, 5).Draw(m.rt, "a mode") == 0 {
		fields = append(fields, [2]string{"mode", draw(m, "mode", "open", "paused", "closed", "sold_out")})
	}
	return fields
}

func (m *model) actDeclare() {
	d := declareCall{m.drawEvent(), draw(m, "how", "put", "put", "absent"), 0, nil}
	if e := m.view.events[d.event]; e != nil && rapid.Bool().Draw(m.rt, "with rev") {
		d.rev, _ = strconv.ParseInt(e.hash["rev"], 10, 64)
	} else if rapid.IntRange(0, 5).Draw(m.rt, "another rev") == 0 {
		d.rev = 7
	}
	d.fields = m.drawSettings()
	m.declare(d)
}

// actChange changes one setting, as operators do.
func (m *model) actChange() {
	field := draw(m, "change", "mode", "mode", "capacity", "left", "stock", "stock", "retention", "seats")
	value := map[string][]string{
		"mode": {"open", "open", "paused", "closed"}, "capacity": {"0", "1", "2", "5"}, "left": {"0", "1", "3"}, "stock": {"", "1", "3"},
		"retention": {"0", "2000"}, "seats": {""},
	}[field]
	m.declare(declareCall{m.drawEvent(), "change", 0, [][2]string{{field, draw(m, "value", value...)}}})
}

// actRepeat repeats one of the last six calls, as a broker does after a lost answer.
func (m *model) actRepeat() {
	m.run(draw(m, "call", m.calls[max(0, len(m.calls)-6):]...))
}

func (m *model) actTime() {
	m.micros += 1000 * draw[int64](m, "ms", 1, 10, 250, 500, 1000, 1500, 2000, 3000)
}

// actDue moves the clock to about the time at which a place, a slot or a token ends.
func (m *model) actDue() {
	var times []int64
	for _, id := range m.view.eventIDs() {
		e := m.view.events[id]
		for _, set := range []map[string]int64{e.away, e.slots} {
			times = append(times, slices.Collect(maps.Values(set))...)
		}
		for _, text := range e.users {
			if r, ok := parseRecord(text); ok && r.letter == 'P' {
				times = append(times, r.expires.UnixMilli())
			}
		}
	}
	now := m.micros / 1000
	times = slices.DeleteFunc(times, func(at int64) bool { return at <= now || at > now+1_000_000 })
	if len(times) > 0 {
		slices.Sort(times)
		m.micros = 1000 * (draw(m, "until", times...) + draw[int64](m, "ms", -1, 0, 1))
	}
}

// actJump moves Redis's clock back or forward. Before a step back it runs expire once, because
// brokers run it every second. Otherwise the clock could step forward and back between two runs,
// which a script can't distinguish from passed time: the audit would then rightly report that
// something is late.
func (m *model) actJump() {
	by := draw[int64](m, "ms", -1, -900, -1500, -4000, -3_600_000, 6000, 11_000, 20_000, 7_200_000)
	if by < 0 {
		m.do(oneCall{"expire_users", []any{""}, func(p *refRooms) []any { return p.expire("") }, nil})
	}
	m.micros += 1000 * by
}

// actGap lets more than 5 s pass without a call of expire, or moves the clock back, and then runs
// expire: as after a standstill of all brokers.
func (m *model) actGap() {
	m.micros += 1000 * draw[int64](m, "ms", 5001, 6000, 6000, -1001, -4000, -3_600_000)
	for _, event := range []string{"", "e"} {
		m.do(oneCall{"expire_users", []any{event}, func(p *refRooms) []any { return p.expire(event) }, nil})
	}
}

// actWoken takes the wake token, as the promoter does.
func (m *model) actWoken() {
	if err := m.s.Del(m.rt.Context(), modelBase+"wake:promoter").Err(); err != nil {
		m.fail("%v", err)
	}
	m.ref.woken, m.view.wake = false, 0
}

// actDamage deletes or overwrites the record of a random user or the user's entry in a sorted set,
// as another program might do.
func (m *model) actDamage() {
	user, ctx := draw(m, "user", modelUsers...), m.rt.Context()
	m.damaged[user] = true
	room := modelBase + "room:e"
	var set string
	if rapid.Bool().Draw(m.rt, "the record") {
		set = room + ":users"
	} else {
		set = room + ":" + draw(m, "set", "waiting", "away", "slots")
	}
	// The damaged records have numbers that no user has: if two users had one number, the test
	// could not say what is right for either.
	at := draw[int64](m, "score", 1_000_001, 1_000_002, m.micros/1000, m.micros/1000+5000)
	var err error
	switch {
	case rapid.Bool().Draw(m.rt, "delete") && set == room+":users":
		err = m.s.HDel(ctx, set, user).Err()
	case set == room+":users":
		text := draw(m, "record", "", "nonsense", "X|1||||", "W|1000009||0|||", "A|1000009|00000001.1|0|||", "R|1000009||0|5|9|", "P|1000009||0|5|9|9",
			fmt.Sprintf("P|1000009|00000001.1|0|5|%d|9", m.micros/1000+5000))
		err = m.s.HSet(ctx, set, user, text).Err()
	case rapid.Bool().Draw(m.rt, "remove"):
		err = m.s.ZRem(ctx, set, user).Err()
	default:
		err = m.s.Do(ctx, "zadd", set, at, user).Err()
	}
	if err != nil {
		m.fail("%v", err)
	}
}

// end closes the event, lets much time pass and runs the cleanup scripts. Then nothing may be left
// of the event in Redis.
func (m *model) end() {
	m.declare(declareCall{"e", "put", 0, m.drawSettings()}) // it may have been deleted
	m.declare(declareCall{"e", "change", 0, [][2]string{{"mode", "closed"}, {"retention", "0"}}})
	m.micros += 100 * 3600 * 1_000_000 // also after steps back
	for range 8 {
		m.micros += 4 * 1_000_000
		m.run(oneCall{"expire_users", []any{"e"}, func(p *refRooms) []any { return p.expire("e") }, nil})
		m.run(oneCall{"forget", []any{"e"}, func(p *refRooms) []any { return p.forget("e") }, nil})
	}
	if _, due := m.view.rooms["e"]; due || m.view.events["e"] != nil {
		m.fail("the event is still there")
	}
}
