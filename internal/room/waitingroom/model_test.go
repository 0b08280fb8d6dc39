package waitingroom

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestModel runs random sequences of script calls, many of them repeated or late, with a clock that
// also jumps. It compares each reply, and the whole state after each script, with a reference model
// in Go, and checks the laws R1 to R7 in every state.
func TestModel(t *testing.T) {
	t.Parallel()
	rapidtest.Model(t, 10, allScripts, func(rt *rapid.T, s *rapidtest.Scripts) { newModel(rt, s).play() })
}

// TestModelWithDamage runs random sequences while another program changes or deletes records of
// some users. No script fails, the laws hold for all other users, and at the end the event can be
// deleted.
func TestModelWithDamage(t *testing.T) {
	t.Parallel()
	rapidtest.OnRedis(t, 2, func(o *redis.Options) *rapidtest.Scripts {
		return rapidtest.NewScripts(t, o, nil, allScripts...)
	}, func(rt *rapid.T, s *rapidtest.Scripts) {
		m := newModel(rt, s)
		m.play()
		m.damaged = map[string]bool{}
		m.acts["damage"] = (*model).actDamage
		m.actDamage()
		m.play()
		m.end()
	})
}

// model is a partition under test, with its reference.
type model struct {
	t      require.TestingT
	rt     *rapid.T // nil: the calls are not random
	s      *rapidtest.Scripts
	acts   map[string]func(*model)
	names  []string
	micros int64 // Redis time

	ref     *refRooms
	view    *stored // the state after the last call
	calls   []oneCall
	damaged map[string]bool // users whose records another program has changed; nil: there is none

	laws map[string]*lawsOf // by event
}

type oneCall struct {
	script string
	args   []any
	byRef  func(*refRooms) []any
	gives  []string // users whose tokens the call may give back
}

// acts are what a sequence consists of.
var acts = map[string]func(*model){
	"enter":        func(m *model) { m.actEnter(EnterNew) },
	"enter more":   func(m *model) { m.actEnter(EnterNew) },
	"known":        func(m *model) { m.actEnter(EnterKnown) },
	"again":        func(m *model) { m.actEnter(EnterAgain) },
	"disconnect":   (*model).actDisconnect,
	"leave":        (*model).actLeave,
	"promote":      (*model).actPromote,
	"promote more": (*model).actPromote,
	"claim":        (*model).actClaim,
	"claim more":   (*model).actClaim,
	"renew":        (*model).actRenew,
	"renew more":   (*model).actRenew,
	"complete":     (*model).actComplete,
	"expire":       (*model).actExpire,
	"expire more":  (*model).actExpire,
	"sweep":        (*model).actSweep,
	"forget":       (*model).actForget,
	"audit":        (*model).actAudit,
	"snapshot":     (*model).actSnapshot,
	"declare":      (*model).actDeclare,
	"change":       (*model).actChange,
	"again, twice": (*model).actRepeat,
	"late call":    (*model).actRepeat,
	"time passes":  (*model).actTime,
	"due":          (*model).actDue,
	"due, too":     (*model).actDue,
	"jump":         (*model).actJump,
	"gap":          (*model).actGap,
	"woken":        (*model).actWoken,
}

func newModel(rt *rapid.T, s *rapidtest.Scripts) *model {
	require.NoError(rt, s.FlushDB(rt.Context()).Err())
	m := newCalls(rt, s)
	m.rt, m.acts = rt, maps.Clone(acts)
	m.micros += rapid.Int64Range(0, 2_000_000).Draw(rt, "begin")
	m.declare(declareCall{"e", "put", 0, m.drawSettings()})
	return m
}

// newCalls returns a model whose calls the test chooses.
func newCalls(t require.TestingT, s *rapidtest.Scripts) *model {
	return &model{
		t: t, s: s, ref: newReference(), view: &stored{events: map[string]*storedEvent{}}, laws: map[string]*lawsOf{},
		micros: 1_700_000_000_000_000,
	}
}

// play makes 20 to 40 random acts.
func (m *model) play() {
	m.names = slices.Sorted(maps.Keys(m.acts))
	for _, name := range rapid.SliceOfN(rapid.SampledFrom(m.names), 20, 40).Draw(m.rt, "acts") {
		m.acts[name](m)
	}
}

func (m *model) fail(format string, args ...any) {
	m.t.Errorf("%s\nstate:\n%s", fmt.Sprintf(format, args...), m.view)
	m.t.FailNow()
}

// run runs a script in Redis and the same call in the reference, and fails the test if the replies
// or the states differ, or a law does not hold. After damage it checks only the laws. It returns
// the reply of Redis.
func (m *model) run(c oneCall) any {
	if m.rt != nil {
		m.micros += draw[int64](m, "µs before the call", 0, 0, 1000, 7000)
	}
	before := m.view
	reply, keys, err := m.s.Run(m.micros, c.script, modelKeys, c.args)
	after, malformed := readStored(keys)
	if err = cmp.Or(err, malformed); err != nil {
		m.fail("%s%v: %v", c.script, c.args, err)
	}
	m.view = after
	if m.damaged == nil {
		m.ref.begin(m.micros)
		want := fmt.Sprint(c.byRef(m.ref))
		if got := fmt.Sprint(m.shownReply(c, reply)); want != got {
			m.fail("reply of %s%v at %d: %s, not %s", c.script, c.args, m.ref.now, got, want)
		}
		if want, got := m.ref.String(), after.String(); want != got {
			require.Equal(m.t, want, got, "the state after %s%v at %d", c.script, c.args, m.ref.now)
		}
	}
	m.lawful(c, before, after)
	return reply
}

// shownReply returns the part of a reply that the test compares: it omits what the comparison of
// the states covers. Of the reply of audit_room only the findings remain.
func (m *model) shownReply(c oneCall, reply any) any {
	switch all := reply.([]any); c.script {
	case "audit_room":
		return all[3:]
	case "snapshot":
		short := []any{}
		for i := 2; i+3 < len(all); i += 4 {
			short = append(short, all[i+1:i+4]...)
		}
		return short
	}
	return reply
}

// TestModelOfManyUsers: 450 users. Calls of promote_users, expire_users, sweep_room and forget
// handle at most 200 of them each. The test compares replies and states with the reference.
func TestModelOfManyUsers(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	redistest.Server(t, redistest.Args("--unixsocket", socket))
	m := newCalls(t, rapidtest.NewScripts(t, &redis.Options{Network: "unix", Addr: socket}, nil, allScripts...))
	settings := [][2]string{
		{"capacity", "0"}, {"max_waiting", "1000"}, {"token_ttl", "5000"}, {"leeway", "1000"}, {"max_session", "0"},
		{"ready", "3000"}, {"grace", "2000"}, {"on_close", "keep"}, {"no_show", "wait"}, {"retention", "0"},
	}
	m.declare(declareCall{"e", "put", 0, settings})
	var all []Visitor
	for i := range 450 {
		v := Visitor{User: fmt.Sprintf("u%03d", i*7%450), Conn: fmt.Sprintf("0000000%d.%d", 1+i%2, i)}
		if i%45 == 0 {
			v.Conn = ""
		}
		all = append(all, v)
	}
	batches := func(call func(list []Visitor)) {
		for from := 0; from < len(all); from += 200 {
			call(all[from:min(from+200, len(all))])
		}
	}
	enter := func() {
		batches(func(list []Visitor) {
			m.do(oneCall{
				"enter", append([]any{"e", "new", 20_000}, visitorArgs(list)...),
				func(p *refRooms) []any { return p.enter("e", "new", 20_000, list) }, namesOf(list),
			})
		})
	}
	change := func(field, value string) { m.declare(declareCall{"e", "change", 0, [][2]string{{field, value}}}) }
	number := func(reply any, i int) string { return fmt.Sprint(reply.([]any)[i]) }
	until := func(last string, script string, byRef func(p *refRooms) []any, args ...any) (calls int) {
		for n := ""; n != last; calls++ {
			require.Less(t, calls, 10)
			n = number(m.run(oneCall{script, args, byRef, nil}), 0)
		}
		return calls
	}
	promote := func(p *refRooms) []any { return p.promote("e", 200) }
	expire := func(p *refRooms) []any { return p.expire("e") }
	forget := func(p *refRooms) []any { return p.forget("e") }
	sweep := func() (calls int) {
		for from := int64(0); from != 0 || calls == 0; calls++ {
			reply := m.run(oneCall{
				"sweep_room", []any{"e", from, "00000002"},
				func(p *refRooms) []any { return p.sweep("e", from, []string{"00000002"}) }, nil,
			})
			_, err := fmt.Sscan(number(reply, 0), &from)
			require.NoError(t, err)
		}
		return calls
	}

	m.run(oneCall{"expire_users", []any{"e"}, expire, nil})
	enter()
	change("capacity", "1000")
	require.Equal(t, 4, until("0", "promote_users", promote, "e", 200))
	batches(func(list []Visitor) {
		m.do(oneCall{
			"claim", append([]any{"e"}, visitorArgs(list[:100*len(list)/200])...),
			func(p *refRooms) []any { return p.claim("e", list[:100*len(list)/200]) }, nil,
		})
	})
	m.micros += 3_500_000 // the others are no-shows
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))
	m.micros += 4_000_000
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))

	change("capacity", "0")
	enter()
	m.micros += 4_900_000
	m.run(oneCall{"expire_users", []any{""}, func(p *refRooms) []any { return p.expire("") }, nil})
	m.micros += 4_900_000
	m.run(oneCall{"expire_users", []any{""}, func(p *refRooms) []any { return p.expire("") }, nil})
	m.micros += 500_000
	require.Equal(t, 2, sweep()) // half of the users are away
	batches(func(list []Visitor) {
		m.do(oneCall{
			"disconnect", append([]any{"e"}, visitorArgs(list)...),
			func(p *refRooms) []any { return p.disconnect("e", list) }, nil,
		})
	})
	m.micros += 4_000_000
	require.Equal(t, 3, until("0", "expire_users", expire, "e"))
	enter()
	m.do(oneCall{
		"disconnect", append([]any{"e"}, visitorArgs(all[200:400])...),
		func(p *refRooms) []any { return p.disconnect("e", all[200:400]) }, nil,
	})
	change("mode", "closed")
	require.Equal(t, 3, until("0", "forget", forget, "e"))
	m.run(oneCall{"forget", []any{"e"}, forget, nil})
	require.Empty(t, m.view.rooms)
}

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
