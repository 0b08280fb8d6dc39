package guard

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// reference is the reference model of a guard for TestModel: plain Go code, written from the design
// and not from the scripts. Times are µs of guard time, unless their names say ms.
type reference struct {
	known              bool
	rev                int64
	spec               string
	rules              refRules
	leaseMS, waitMS    int64
	fence, seq         int64
	clk, offset, since int64
	counts             map[string]int64
	members            map[string]*refMember
	leases             map[string]*refLease
	queue              []*refWaiter
	clients            map[string]int64 // last sign of life, ms
	raw, begun, now    int64            // of the present call; each grant adds 1 µs to now
	granted            []*refLease      // by the present call
	ended              []refEnd         // by the present call
	limitChanged       map[string]bool  // members whose limit was changed by the present call
	claimMS, silentMS  int64
}

type refRules struct {
	limit                        refLimit
	failures, openFor, successes int64
	concurrency                  int64 // 0 = unbounded
}

type refMember struct {
	id, override       string
	declared           int64
	rules              refRules
	permits            refPermits
	where              string // free, cooling, or neither
	due                int64  // cooling
	used, uses, held   int64
	throttled          int64
	off                string
	breaker            string
	fails, good, open  int64
	generation, probes int64
}

type refLease struct {
	call, member, client     string
	fence, generation, probe int64
	granted, expiryMS        int64
	claimed                  bool
	limited                  bool // its permit can be moved or given back
	entry                    *refEntry
}

type refEnd struct {
	lease   *refLease
	outcome string
}

type refWaiter struct {
	call, client    string
	seq, deadlineMS int64
}

func newReference() *reference {
	return &reference{
		counts: map[string]int64{}, members: map[string]*refMember{}, leases: map[string]*refLease{},
		clients: map[string]int64{}, limitChanged: map[string]bool{}, claimMS: 2000, silentMS: 5000,
	}
}

// read sets the rules that the text, a packed spec or override, gives. The others stay.
func (r *refRules) read(text string) {
	f := strings.Split(text, "|")
	n := func(i int) int64 { v, _ := strconv.ParseInt(f[i], 10, 64); return v }
	if f[0] != "" {
		r.limit = refLimit{kind: f[0], permits: n(1), window: n(2) * 1000, burst: n(3)}
	}
	if f[4] != "" {
		r.failures, r.openFor, r.successes = n(4), n(5)*1000, n(6)
	}
	if f[7] != "" {
		r.concurrency = n(7)
	}
}

func (g *reference) setSpec(rev int64, spec string) {
	g.known, g.rev, g.spec, g.rules = true, rev, spec, refRules{}
	g.rules.read(spec)
	f := strings.Split(spec, "|")
	g.leaseMS, _ = strconv.ParseInt(f[8], 10, 64)
	g.waitMS, _ = strconv.ParseInt(f[9], 10, 64)
}

func (g *reference) ms() int64 { return g.begun / 1000 }

// begin begins a script call: it computes guard time from raw, Redis's time.
func (g *reference) begin(raw int64) {
	g.granted, g.ended, g.limitChanged = nil, nil, map[string]bool{}
	g.raw, g.now = raw, raw+g.offset
	if g.now < g.clk {
		g.now = g.clk + 1
		g.offset = g.now - raw
	}
	if g.now-g.clk > 2_000_000 {
		g.since = g.now
	}
	g.begun = g.now
}

// configure applies the spec and the override to a member.
func (g *reference) configure(m *refMember) {
	m.rules = g.rules
	if m.override != "" {
		m.rules.read(m.override)
	}
	if m.permits.limit != m.rules.limit {
		g.limitChanged[m.id] = true
	}
	if !m.permits.change(g.now, m.rules.limit) {
		for _, l := range g.leases {
			if l.member == m.id {
				l.limited = false
			}
		}
	}
	g.dropPolicy(m)
}

// dropPolicy closes, in the reference model, the breaker of a member that has no breaker policy any
// more. An open breaker stays open until its time is over.
func (g *reference) dropPolicy(m *refMember) {
	if m.rules.failures == 0 && (m.breaker == "H" || m.breaker == "O" && m.open <= g.now) {
		g.turn(m, "C")
	}
}

// turn changes the state of a breaker.
func (g *reference) turn(m *refMember, to string) {
	m.breaker, m.good, m.probes = to, 0, 0
	m.generation++
	switch to {
	case "C":
		m.fails = 0
	case "O":
		m.open = g.now + m.rules.openFor
	}
}

func (m *refMember) probesLeft() int64 { return max(1, m.rules.successes-m.good) - m.probes }

func (g *reference) state(m *refMember) (where string, due int64) {
	switch {
	case m.off != "":
		return "off", 0
	case m.rules.concurrency > 0 && m.held >= m.rules.concurrency, m.breaker == "H" && m.probesLeft() <= 0:
		return "busy", 0
	}
	due = m.throttled
	if m.breaker == "O" {
		due = max(due, m.open)
	}
	if m.rules.limit.kind != "none" && m.permits.left(g.now) < 1 {
		due = max(due, m.permits.when(g.now, 1))
	}
	if due > g.now {
		return "cooling", due
	}
	return "free", 0
}

func (g *reference) settle(m *refMember) { m.where, m.due = g.state(m) }

// fit returns the least recently used member of the reference model that can be lent; nil if none
// can.
func (g *reference) fit() *refMember {
	for {
		var best *refMember
		for _, m := range g.members {
			if m.where == "free" && (best == nil || m.used < best.used || m.used == best.used && m.id < best.id) {
				best = m
			}
		}
		if best == nil {
			return nil
		}
		if g.settle(best); best.where == "free" {
			return best
		}
	}
}

func (g *reference) grant(m *refMember, call, client string, ms int64, claimed bool) *refLease {
	g.now++
	g.fence = max(g.fence+1, g.raw)
	g.counts["granted"]++
	if m.breaker == "O" {
		g.turn(m, "H")
	}
	l := &refLease{
		call: call, member: m.id, client: client, fence: g.fence, generation: m.generation,
		granted: g.now, expiryMS: g.ms() + ms, claimed: claimed,
	}
	if m.breaker == "H" {
		l.probe = 1
		m.probes++
	}
	m.held++
	m.uses++
	m.used = g.now
	if m.rules.limit.kind != "none" {
		l.limited, l.entry = true, m.permits.spend(g.begun, g.now, 1)
	}
	g.leases[call] = l
	g.granted = append(g.granted, l)
	g.settle(m)
	return l
}

func (g *reference) end(l *refLease, outcome string, delayMS int64) (breaker string, changed, stale bool) {
	m := g.members[l.member]
	g.dropPolicy(m)
	delete(g.leases, l.call)
	g.ended = append(g.ended, refEnd{l, outcome})
	m.held--
	if l.limited {
		switch {
		case outcome == "u" && m.rules.limit.kind == "sliding":
			m.permits.takeOut(g.now, l.entry)
		case outcome == "u" && m.used == l.granted && m.permits.due > g.now:
			m.permits.due -= m.permits.each()
		case outcome != "u" && m.rules.limit.kind == "sliding":
			m.permits.takeOut(g.now, l.entry)
			m.permits.spend(g.begun, g.now, 1)
		}
	}
	stale = l.generation != m.generation
	if !stale {
		changed = g.count(m, l.probe == 1, outcome, delayMS)
	}
	if m.off == "R" && m.held == 0 {
		delete(g.members, m.id)
	} else {
		g.settle(m)
	}
	return m.breaker, changed, stale
}

// count applies an outcome to the breaker of a member, and stores until when a throttled one waits.
func (g *reference) count(m *refMember, probe bool, outcome string, delayMS int64) (changed bool) {
	before := m.generation
	if outcome == "t" {
		m.throttled = g.now + min(delayMS, 86_400_000)*1000
	}
	switch {
	case m.rules.failures == 0:
	case probe && (outcome == "f" || outcome == "l"):
		g.turn(m, "O")
	case probe:
		m.probes--
		if outcome == "s" {
			if m.good++; m.good >= m.rules.successes {
				g.turn(m, "C")
			}
		}
	case m.breaker == "C" && outcome == "s":
		m.fails = 0
	case m.breaker == "C" && outcome == "f":
		if m.fails++; m.fails >= m.rules.failures {
			g.turn(m, "O")
		}
	}
	return m.generation != before
}

func (g *reference) dead(w *refWaiter) bool {
	sign, ok := g.clients[w.client]
	return w.deadlineMS <= g.ms() || !ok || g.ms()-max(sign, g.since/1000) > g.silentMS
}

func (g *reference) maintain() {
	for _, l := range g.byExpiry() {
		if l.expiryMS > g.ms() {
			break
		}
		if l.claimed {
			g.counts["lost"]++
			g.end(l, "l", 0)
		} else {
			g.counts["expired"]++
			g.end(l, "u", 0)
			if sign, ok := g.clients[l.client]; ok && g.ms()-max(sign, g.since/1000) >= g.claimMS {
				delete(g.clients, l.client)
			}
		}
	}
	if g.ms()-g.since/1000 > g.silentMS { // a pause of Redis silences nobody
		maps.DeleteFunc(g.clients, func(_ string, sign int64) bool { return sign <= g.ms()-g.waitMS-g.silentMS })
	}
	for _, m := range g.members {
		if m.where == "cooling" && m.due <= g.now {
			g.dropPolicy(m)
			g.settle(m)
		}
	}
}

// serve grants members to waiters.
func (g *reference) serve() {
	for len(g.queue) > 0 {
		w := g.queue[0]
		if g.dead(w) {
			g.queue = g.queue[1:]
			continue
		}
		m := g.fit()
		if m == nil {
			return
		}
		g.queue = g.queue[1:]
		g.grant(m, w.call, w.client, g.claimMS, false)
	}
}

func (g *reference) free() int {
	n := 0
	for _, m := range g.members {
		if m.where == "free" {
			n++
		}
	}
	return n
}

// byExpiry returns the leases, the first to expire first.
func (g *reference) byExpiry() []*refLease {
	return slices.SortedFunc(maps.Values(g.leases), func(a, b *refLease) int {
		return cmp.Or(cmp.Compare(a.expiryMS, b.expiryMS), cmp.Compare(a.call, b.call))
	})
}

func (g *reference) firstCooling() *refMember {
	var first *refMember
	for _, m := range g.members {
		if m.where == "cooling" && (first == nil || m.due < first.due || m.due == first.due && m.id < first.id) {
			first = m
		}
	}
	return first
}

// chance returns, in the reference model, the member that can be lent next, and when: a cooling
// member when it is due, or a lent one when its lease expires. It returns nil when all members are
// off.
func (g *reference) chance() (*refMember, int64) {
	cooling := g.firstCooling()
	for _, l := range g.byExpiry() {
		if cooling != nil && cooling.due <= l.expiryMS*1000 {
			break
		}
		if m := g.members[l.member]; m.off == "" {
			return m, l.expiryMS * 1000
		}
	}
	if cooling == nil {
		return nil, 0
	}
	return cooling, cooling.due
}

func (g *reference) until(at int64) int64 { return max(1, (at-g.now+999)/1000) }

func (g *reference) next() int64 {
	at := int64(0)
	if m := g.firstCooling(); m != nil {
		at = m.due
	}
	if leases := g.byExpiry(); len(leases) > 0 && (at == 0 || leases[0].expiryMS*1000 < at) {
		at = leases[0].expiryMS * 1000
	}
	if at == 0 {
		return -1
	}
	return g.until(at)
}

func (g *reference) why(m *refMember) string {
	where, due := g.state(m)
	full := m.rules.concurrency > 0 && m.held >= m.rules.concurrency
	switch {
	case where == "off":
		return "disabled"
	case m.breaker == "H" && !full:
		return "circuit_open"
	case where == "busy":
		return "busy"
	case m.breaker == "O" && where == "cooling" && m.open >= due:
		return "circuit_open"
	}
	return "rate_limited"
}

// String shows the state.
func (g *reference) String() string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	add("guard rev=%d spec=%s fence=%d seq=%d clk=%d offset=%d since=%d", g.rev, g.spec, g.fence, g.seq,
		g.clk, g.offset, g.since)
	for _, name := range []string{"granted", "denied", "queued", "expired", "stale", "lost"} {
		add("count %s=%d", name, g.counts[name])
	}
	for _, m := range g.members {
		add("member %s declared=%d override=%s", m.id, m.declared, m.override)
		where, due := m.where, m.due
		if where == "busy" || where == "off" {
			where = "-"
		}
		if where == "free" {
			due = m.used
		}
		add("member %s in=%s due=%d h=%d u=%d uses=%d c=%d off=%s", m.id, where, due, m.held, m.used, m.uses,
			m.throttled, m.off)
		add("member %s b=%s f=%d k=%d o=%d g=%d p=%d", m.id, m.breaker, m.fails, m.good, m.open, m.generation,
			m.probes)
		add("member %s %s", m.id, m.permits.at(g.now))
	}
	for _, l := range g.leases {
		claimed := 0
		if l.claimed {
			claimed = 1
		}
		add("lease %s until=%d %d|%s|%d|%d|%s|%d|%d", l.call, l.expiryMS, l.fence, l.member, l.generation, l.probe,
			l.client, l.granted, claimed)
	}
	for i, w := range g.queue {
		add("queue %d %s seq=%d %s|%d", i, w.call, w.seq, w.client, w.deadlineMS)
	}
	for id, sign := range g.clients {
		add("client %s %d", id, sign)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
