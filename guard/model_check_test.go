package guard

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// check has the assertions of the tests of scripts. A failed one ends the test t.
type check struct{ t require.TestingT }

func (c check) no(err error) {
	if err != nil {
		require.NoError(c.t, err)
	}
}

// equal fails the test if want and got differ. It calls require.Equal only then, because that costs
// more than a call to Redis.
func (c check) equal(want, got any, what string, args ...any) {
	if want != got {
		require.Equal(c.t, want, got, fmt.Sprintf(what, args...))
	}
}

func (c check) number(text string) int64 {
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		f, floatErr := strconv.ParseFloat(text, 64)
		c.no(floatErr)
		c.equal(f, float64(int64(f)), "a whole number: %s", text)
		n = int64(f)
	}
	return n
}

// allScripts are the scripts of guards and limiters that tests run.
var allScripts = []*call.Script{
	acquireScript, controlScript, declareScript, inspectScript, releaseScript, renewScript, takeScript, waitScript,
}

// stored is the state of a guard in Redis.
type stored struct {
	guard, waiters  map[string]string
	members         map[string]map[string]string
	free, cooling   map[string]int64
	until           map[string]int64 // leases
	leases          map[string][]string
	queue           []string // in order
	seqs            map[string]int64
	clients, naming map[string]int64
	permits         map[string]refPermits
}

// readStored turns the dumped keys of a guard into a struct, and fails if there are keys under the
// guard's prefix that it does not know.
func readStored(t check, base string, keys map[string]rapidtest.Key) *stored {
	s := &stored{members: map[string]map[string]string{}, permits: map[string]refPermits{}}
	scores := func(name string) map[string]int64 {
		out := map[string]int64{}
		for id, score := range keys[base+name].Hash() {
			out[id] = t.number(score)
		}
		return out
	}
	s.guard, s.waiters = keys[base+"guard"].Hash(), keys[base+"waiters"].Hash()
	s.free, s.cooling, s.until, s.seqs = scores("free"), scores("cooling"), scores("leases"), scores("queue")
	s.clients, s.naming = scores("clients"), scores("members")
	for i := 0; i < len(keys[base+"queue"].Content); i += 2 {
		s.queue = append(s.queue, keys[base+"queue"].Content[i])
	}
	s.leases = map[string][]string{}
	for call, text := range keys[base+"lease"].Hash() {
		s.leases[call] = strings.Split(text, "|")
	}
	for name, k := range keys {
		rest, ok := strings.CutPrefix(name, base)
		if !ok {
			continue
		}
		if id, ok := strings.CutPrefix(rest, "m:"); ok {
			h := k.Hash()
			s.members[id] = h
			limit := strings.Split(h["lim"], "|")
			window := int64(0)
			if len(limit) > 2 {
				window = t.number(limit[2]) * 1000
			}
			s.permits[id] = storedPermits(t, limit[0], window, h)
			continue
		}
		known := []string{"guard", "free", "cooling", "leases", "lease", "queue", "waiters", "clients", "members"}
		t.equal(true, slices.Contains(known, rest), "a key of the design: %s", name)
	}
	return s
}

func or0(text string) string { return cmp.Or(text, "0") }

// show shows the state as reference.String does.
func (s *stored) show(now int64) string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	g := s.guard
	add("guard rev=%s spec=%s fence=%s seq=%s clk=%s offset=%s since=%s", or0(g["rev"]), g["spec"], or0(g["fence"]),
		or0(g["seq"]), or0(g["clk"]), or0(g["offset"]), or0(g["since"]))
	for _, name := range []string{"granted", "denied", "queued", "expired", "stale", "lost"} {
		add("count %s=%s", name, or0(g[name]))
	}
	for id, m := range s.members {
		where, due := "-", int64(0)
		if at, ok := s.free[id]; ok {
			where, due = "free", at
		} else if at, ok := s.cooling[id]; ok {
			where, due = "cooling", at
		}
		add("member %s declared=%d override=%s", id, s.naming[id], m["spec"])
		add("member %s in=%s due=%d h=%s u=%s uses=%s c=%s off=%s", id, where, due, or0(m["h"]), or0(m["u"]),
			or0(m["uses"]), or0(m["c"]), m["off"])
		add("member %s b=%s f=%s k=%s o=%s g=%s p=%s", id, cmp.Or(m["b"], "C"), or0(m["f"]), or0(m["k"]), or0(m["o"]),
			or0(m["g"]), or0(m["p"]))
		permits := s.permits[id]
		add("member %s %s", id, permits.at(now))
	}
	for call, l := range s.leases {
		add("lease %s until=%d %s", call, s.until[call], strings.Join(l, "|"))
	}
	for i, call := range s.queue {
		add("queue %d %s seq=%d %s", i, call, s.seqs[call], s.waiters[call])
	}
	for id, sign := range s.clients {
		add("client %s %d", id, sign)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// lawful checks the laws of guards on the keys that a script has left. They must hold in every
// state, whatever the reference model says.
func (s *stored) lawful(t check, rulesOf func(member string) refRules) {
	held, probes := map[string]int64{}, map[string]int64{}
	t.equal(len(s.until), len(s.leases), "leases = lease")
	for call, l := range s.leases {
		_, ok := s.until[call]
		t.equal(true, ok, "lease %s has an expiry", call)
		t.equal(7, len(l), "fields of lease %s", call)
		held[l[1]]++
		if m := s.members[l[1]]; l[3] == "1" && l[2] == or0(m["g"]) && m["b"] == "H" {
			probes[l[1]]++
		}
	}
	t.equal(len(s.queue), len(s.waiters), "queue = waiters")
	for _, call := range s.queue {
		_, ok := s.waiters[call]
		t.equal(true, ok, "waiter %s", call)
	}
	t.equal(len(s.members), len(s.naming), "members = m:ID")
	for id, m := range s.members {
		_, named := s.naming[id]
		t.equal(true, named, "%s is in members", id)
		t.equal(held[id], t.number(m["h"]), "h of %s", id)
		t.equal(probes[id], t.number(m["p"]), "p of %s", id)
		_, free := s.free[id]
		_, cooling := s.cooling[id]
		t.equal(false, free && cooling, "%s is free and cooling", id)
		r := rulesOf(id)
		allowed := max(1, r.successes-t.number(m["k"]))
		busy := r.concurrency > 0 && held[id] >= r.concurrency || m["b"] == "H" && probes[id] >= allowed
		if free || cooling {
			t.equal("", m["off"], "%s can be lent and is off", id)
			t.equal(false, busy, "%s can be lent and is busy", id)
		} else {
			t.equal(true, busy || m["off"] != "", "%s is in no state: %v", id, m)
		}
		delete(held, id)
	}
	for id := range held {
		t.equal("", id, "a lease of a member that does not exist")
	}
	for id := range s.free {
		t.equal(true, s.members[id] != nil, "free member %s exists", id)
	}
	for id := range s.cooling {
		t.equal(true, s.members[id] != nil, "cooling member %s exists", id)
	}
}

// limiterKey is the key of the limiter under test.
const limiterKey = "t:limit:{l/k}"

var clients = []string{"x", "y", "z"}

func (m *model) acquire(a acquireArgs) {
	m.run("acquire", a.args(), func(micros int64) []any { return m.ref.acquire(micros, a) })
}

func (m *model) drawCall() acquireArgs {
	client := m.pick("client", clients)
	a := acquireArgs{call: fmt.Sprint(client, "-", len(m.calls)), client: client, bound: 3}
	if !m.pool {
		a.spec = m.ref.spec
	}
	return a
}

func (m *model) actAcquire(spec string) {
	a := m.drawCall()
	if spec != "" {
		a.spec = spec
	}
	a.wait = rapid.SampledFrom([]time.Duration{0, 300, 2000, 4000, modelWait}).Draw(m.rt, "wait") * time.Millisecond
	a.lease = rapid.SampledFrom([]time.Duration{0, 0, 0, 1000}).Draw(m.rt, "lease") * time.Millisecond
	m.calls = append(m.calls, a)
	m.acquire(a)
}

func (m *model) actTry() {
	a := m.drawCall()
	a.member = m.pick("member", []string{"a", "b", "c", "1"})
	m.calls = append(m.calls, a)
	m.acquire(a)
}

func (m *model) actAcquireAgain() {
	if len(m.calls) > 0 {
		a := rapid.SampledFrom(m.calls[max(0, len(m.calls)-6):]).Draw(m.rt, "call")
		if !m.pool {
			a.spec = m.ref.spec
		}
		m.acquire(a)
	}
}

func (m *model) actLate() {
	a := m.drawCall()
	a.validUntil = max(1, m.ref.clk+rapid.SampledFrom([]int64{-1_000_000, 3000, 1_000_000}).Draw(m.rt, "valid until"))
	m.calls = append(m.calls, a)
	m.acquire(a)
}

func (m *model) actWait() {
	client := m.pick("client", clients)
	var ids []string
	for _, a := range m.calls {
		if a.client == client {
			ids = append(ids, a.call)
		}
	}
	ids = ids[max(0, len(ids)-5):]
	m.run("wait", waitArgs(client, ids), func(micros int64) []any { return m.ref.wait(micros, client, ids) })
}

func (m *model) release(endings []refEnding) {
	args := []any{len(endings)}
	for _, e := range endings {
		fence := ""
		if e.fence != 0 {
			fence = fmt.Sprint(e.fence)
		}
		args = append(args, e.call, fence, e.outcome, e.delayMS)
	}
	m.run("release", args, func(micros int64) []any { return m.ref.release(micros, endings) })
}

// live returns the leases, ordered by their fences.
func (m *model) live() []*refLease {
	return slices.SortedFunc(maps.Values(m.ref.leases), func(a, b *refLease) int { return int(a.fence - b.fence) })
}

func (m *model) actRelease() {
	var endings []refEnding
	for _, l := range m.live() {
		if len(endings) < 2 && rapid.Bool().Draw(m.rt, "this lease") {
			e := refEnding{call: l.call, fence: l.fence, outcome: m.pick("outcome", []string{"s", "f", "n", "t", "u"})}
			if e.outcome == "t" {
				e.delayMS = rapid.SampledFrom([]int64{0, 100, 1500, 90_000_000}).Draw(m.rt, "delay")
			}
			endings = append(endings, e)
		}
	}
	if len(endings) > 0 {
		m.release(endings)
	}
}

func (m *model) releaseAll(outcome string) {
	var endings []refEnding
	for _, l := range m.live() {
		endings = append(endings, refEnding{call: l.call, fence: l.fence, outcome: outcome})
	}
	if len(endings) > 0 {
		m.release(endings)
	}
}

// actReleaseAgain is a step of TestModel: it releases a lease that has ended already, and one that
// is held with a wrong fence, as far as there are any.
func (m *model) actReleaseAgain() {
	var endings []refEnding
	if len(m.past) > 0 {
		l := rapid.SampledFrom(m.past).Draw(m.rt, "lease")
		endings = append(endings, refEnding{call: l.call, fence: l.fence, outcome: "f"})
	}
	if live := m.live(); len(live) > 0 {
		l := rapid.SampledFrom(live).Draw(m.rt, "wrong fence")
		endings = append(endings, refEnding{call: l.call, fence: l.fence - 1, outcome: "s"})
	}
	m.release(endings)
}

func (m *model) actCancel() {
	if len(m.calls) > 0 {
		a := rapid.SampledFrom(m.calls[max(0, len(m.calls)-8):]).Draw(m.rt, "call")
		m.release([]refEnding{{call: a.call, outcome: "u"}})
	}
}

func (m *model) actRenew() {
	var leases []*refLease
	args := []any{rapid.SampledFrom([]int64{0, 1000}).Draw(m.rt, "lease")}
	for _, l := range append(m.live(), m.past[max(0, len(m.past)-2):]...) {
		if rapid.Bool().Draw(m.rt, "this lease") {
			leases = append(leases, l)
			args = append(args, l.call, fmt.Sprint(l.fence))
		}
	}
	m.run("renew", args, func(micros int64) []any { return m.ref.renew(micros, args[0].(int64), leases) })
}

func (m *model) actControl() {
	member, action := m.pick("member", []string{"a", "b", "c", "1"}), rapid.SampledFrom(Actions).Draw(m.rt, "action")
	m.run("control", []any{member, string(action), 0}, func(micros int64) []any {
		return m.ref.control(micros, member, string(action))
	})
}

func (m *model) actDeclare() {
	var members [][2]string
	for _, id := range []string{"a", "b", "c"} {
		if rapid.IntRange(0, 3).Draw(m.rt, "named") > 0 {
			members = append(members, [2]string{id, m.pick("override", overrides)})
		}
	}
	if len(members) == 0 {
		members = [][2]string{{"a", ""}}
	}
	spec := m.ref.spec
	if spec == "" || rapid.Bool().Draw(m.rt, "other spec") {
		spec = m.drawSpec(0)
	}
	rev := max(0, m.ref.rev+rapid.SampledFrom([]int64{-100, -100, -1, 0, 3}).Draw(m.rt, "rev"))
	piece := func(rev int64, last bool, members [][2]string) {
		args := []any{rev, spec, 0, len(members)}
		if last {
			args[2] = 1
		}
		for _, named := range members {
			args = append(args, named[0], named[1])
		}
		m.run("declare", args, func(micros int64) []any {
			return m.ref.declare(micros, rev, spec, last, members)
		})
	}
	if rapid.IntRange(0, 3).Draw(m.rt, "in pieces") > 0 {
		piece(rev, true, members)
		return
	}
	piece(rev, false, members[:1])
	if rev == 0 || rev == m.ref.rev {
		piece(m.ref.rev, true, members[1:])
		// The last piece of the declaration removes the members that neither piece names.
	}
}

func (m *model) actInspect() {
	m.run("inspect", []any{0, 200}, func(micros int64) []any {
		m.ref.begin(micros)
		return nil
	})
}

// equalView compares a reply of inspect with the reference.
func (m *model) equalView(reply any) {
	if !m.ref.known {
		m.equal(nil, reply, "no guard")
		return
	}
	parts, _ := reply.([]any)
	m.equal(6, len(parts), "parts of the reply")
	list := func(part any) []any { values, _ := part.([]any); return values }
	sizes, rows, leases, waiters, at := list(parts[1]), list(parts[2]), list(parts[3]), list(parts[4]), parts[5]
	m.equal(m.ref.now, at, "guard time")
	m.equal(fmt.Sprint([]int{
		len(m.ref.members), m.ref.free() + m.ref.due(), m.ref.cooling() - m.ref.due(), len(m.ref.leases), len(m.ref.queue), len(m.ref.clients),
	}), fmt.Sprint(sizes), "sizes")
	m.equal(len(m.ref.leases), len(leases), "leases")
	m.equal(len(m.ref.queue), len(waiters), "waiters")
	m.equal(len(m.ref.members), len(rows), "members")
	for _, row := range rows {
		row := list(row)
		of := *m.ref.members[row[0].(string)] // a copy: inspect changes nothing
		m.ref.dropPolicy(&of)
		left, due := int64(-1), int64(0)
		if of.rules.limit.kind != "none" {
			left = max(0, of.permits.left(m.ref.now))
		}
		if of.where == "cooling" {
			due = of.due
		}
		m.equal(fmt.Sprint([]any{
			of.id, of.where, of.breaker, of.fails, of.open, of.held, left, due, of.used, of.uses, of.probes, of.good,
			of.override,
		}), fmt.Sprint(row), "a member")
	}
}

// due returns how many cooling members may be lent by now.
func (g *reference) due() int {
	n := 0
	for _, m := range g.members {
		if m.where == "cooling" && m.due <= g.now {
			n++
		}
	}
	return n
}

func (g *reference) cooling() int {
	n := 0
	for _, m := range g.members {
		if m.where == "cooling" {
			n++
		}
	}
	return n
}

func (m *model) actTime() {
	m.micros += 1000 * rapid.SampledFrom([]int64{10, 100, 250, 500, 1000, 2000, 3000}).Draw(m.rt, "ms")
}

// actJump is a step of TestModel: Redis's clock jumps back by up to 1 h, or forward by 6 s to 2 h.
func (m *model) actJump() {
	m.micros += 1000 * rapid.SampledFrom([]int64{-1, -300, -3000, -3_600_000, 6000, 20_000, 7_200_000}).Draw(m.rt, "ms")
}

func (m *model) actTake() {
	m.micros += rapid.SampledFrom([]int64{0, 0, 1000, 100_000}).Draw(m.rt, "µs before the call")
	n := rapid.Int64Range(1, 2).Draw(m.rt, "tokens")
	l := m.limiter
	want, ttl := l.take(m.micros, n)
	args := []any{n, l.limit.kind, l.limit.permits, l.limit.window / 1000, l.limit.burst}
	reply, keys, err := m.s.Run(m.micros, "take", []string{limiterKey}, args)
	m.no(err)
	m.equal(want, fmt.Sprint(reply), "reply of take%v", args)
	m.equalLimiter(keys)
	if past := ttl - keys[limiterKey].TTL; ttl > 0 {
		m.equal(true, 0 <= past && past < 30_000, "time to live %d, not %d", keys[limiterKey].TTL, ttl)
	}
}

// equalLimiter compares the limiter with the reference.
func (m *model) equalLimiter(keys map[string]rapidtest.Key) {
	l := m.limiter
	h := keys[limiterKey].Hash()
	m.equal(l.clk, m.number(h["clk"]), "clk of the limiter")
	m.equal(l.offset, m.number(h["offset"]), "offset of the limiter")
	stored := storedPermits(m.check, l.limit.kind, l.limit.window, h)
	m.equal(strings.TrimSpace(l.at(l.clk)), strings.TrimSpace(stored.at(l.clk)), "permits of the limiter")
}
