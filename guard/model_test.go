package guard

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// TestModel runs random sequences of the scripts, many of them repeated or late, with a clock that
// also jumps. It compares each reply and the whole state after each script with a reference in
// memory, and checks what must hold in every state.
func TestModel(t *testing.T) {
	t.Parallel()
	rapidtest.Model(t, 30, allScripts, checkModel)
}

func checkModel(rt *rapid.T, s *rapidtest.Scripts) {
	require.NoError(rt, s.FlushDB(rt.Context()).Err())
	m := newModel(rt, s)
	for _, name := range rapid.SliceOfN(rapid.SampledFrom(m.names), 15, 35).Draw(rt, "acts") {
		m.acts[name](m)
	}
}

// model holds a guard and a limiter under test in Redis, with their reference models.
type model struct {
	check
	rt     *rapid.T
	s      *rapidtest.Scripts
	pool   bool
	base   string
	acts   map[string]func(*model)
	names  []string
	micros int64 // Redis time

	ref   *reference
	calls []acquireArgs
	past  []*refLease // leases that have ended

	fence   int64            // the highest so far
	served  int64            // seq of the last waiter that was granted
	seqs    map[string]int64 // of all calls that ever stood in the queue
	spent   map[string][]*spending
	limiter *refTake
}

// spending is a lease as the downstream API may see it: one call at an unknown time between from
// and to.
type spending struct {
	lease *refLease
	from  int64
	to    int64 // 0 = still held
}

var acts = map[string]func(*model){
	"acquire":       func(m *model) { m.actAcquire("") },
	"acquire more":  func(m *model) { m.actAcquire("") },
	"try":           (*model).actTry,
	"acquire again": (*model).actAcquireAgain,
	"late":          (*model).actLate,
	"wait":          (*model).actWait,
	"wait more":     (*model).actWait,
	"release":       (*model).actRelease,
	"release more":  (*model).actRelease,
	"succeed":       func(m *model) { m.releaseAll("s") },
	"fail":          func(m *model) { m.releaseAll("f") },
	"release again": (*model).actReleaseAgain,
	"cancel":        (*model).actCancel,
	"renew":         (*model).actRenew,
	"control":       (*model).actControl,
	"inspect":       (*model).actInspect,
	"time passes":   (*model).actTime,
	"jump":          (*model).actJump,
	"take":          (*model).actTake,
}

// The packed specs and members' overrides from which TestModel draws. The members' limits, breakers
// and numbers of leases are small, so that short sequences reach them.
var (
	rates        = []string{"none|0|0|0", "sliding|2|1000|0", "sliding|3|2000|0", "sliding|1|2000|0", "token|2|1000|2", "token|4|2000|1"}
	breakers     = []string{"0|0|0", "2|500|2", "1|1500|1", "2|3000|2"}
	concurrences = []string{"1", "1", "2", "0"}
	overrides    = []string{"", "", "", "|||||||2", "sliding|1|1000|0||||", "||||1|700|1|", "none|0|0|0|0|0|0|0", "token|1|1000|1||||1"}
)

const modelLease, modelWait = 3000, 20_000

func newModel(rt *rapid.T, s *rapidtest.Scripts) *model {
	m := &model{
		check: check{rapidtest.Quick{T: rt}}, rt: rt, s: s, ref: newReference(), seqs: map[string]int64{}, acts: maps.Clone(acts),
		spent: map[string][]*spending{},
	}
	m.micros = 1_700_000_000_000_000 + rapid.Int64Range(0, 2_000_000).Draw(rt, "begin")
	m.pool = rapid.Bool().Draw(rt, "pool")
	m.limiter = &refTake{refPermits: refPermits{limit: rapid.SampledFrom([]refLimit{
		{"sliding", 2, 1_000_000, 0}, {"sliding", 5, 2_000_000, 0}, {"token", 2, 1_000_000, 2}, {"token", 5, 1_000_000, 3},
	}).Draw(rt, "limit of take")}}
	if m.pool {
		m.base = "t:guard:{pool/p}:"
		m.acts["declare"] = (*model).actDeclare
		m.names = slices.Sorted(maps.Keys(m.acts))
		m.actDeclare()
		return m
	}
	m.base = "t:guard:{lock/p}:"
	spec := m.drawSpec(time.Hour)
	m.acts["acquire"] = func(m *model) { m.actAcquire(spec) }
	m.acts["acquire more"] = m.acts["acquire"]
	m.acts["new spec"] = func(m *model) {
		spec = m.drawSpec(time.Hour)
		m.actAcquire(spec)
	}
	m.names = slices.Sorted(maps.Keys(m.acts))
	m.actAcquire(spec)
	return m
}

func (m *model) pick(what string, from []string) string {
	return rapid.SampledFrom(from).Draw(m.rt, what)
}

func (m *model) drawSpec(ttl time.Duration) string {
	return strings.Join([]string{
		m.pick("rate", rates), m.pick("breaker", breakers), m.pick("concurrency", concurrences),
		strconv.Itoa(modelLease), strconv.Itoa(modelWait), "3", strconv.FormatInt(ttl.Milliseconds(), 10),
	}, "|")
}

// run runs a script and the same call of the reference model, and compares the reply and the stored
// state.
func (m *model) run(script string, args []any, byReference func(micros int64) []any) {
	m.micros += rapid.SampledFrom([]int64{0, 0, 1000, 7000}).Draw(m.rt, "µs before the call")
	clk, offset, since := m.ref.clk, m.ref.offset, m.ref.since
	want := byReference(m.micros)
	reply, keys, err := m.s.Run(m.micros, script, guardKeys(m.base), args)
	m.no(err)
	if script == "inspect" {
		m.equalView(reply)
	} else {
		m.equal(fmt.Sprint(want), fmt.Sprint(reply), "reply of %s%v", script, args)
	}
	s := readStored(m.check, m.base, keys)
	if m.number(s.guard["clk"]) == clk && clk != m.ref.now {
		m.ref.clk, m.ref.offset, m.ref.since = clk, offset, since // the script has written nothing
	} else {
		m.ref.clk = m.ref.now
	}
	m.equal(m.ref.String(), s.show(m.ref.now), "the state after %s%v", script, args)
	s.lawful(m.check, func(member string) refRules { return m.ref.members[member].rules })
	m.equalLimiter(keys)
	if !m.pool {
		for name, k := range keys {
			m.equal(true, k.TTL > 0 || name == limiterKey, "%s has a time to live", name)
		}
	}
	m.lawfulGrants(s)
}

// lawfulGrants checks the new leases: their fences, the order in which waiting calls got them, and
// the limits of their members.
func (m *model) lawfulGrants(s *stored) {
	for call := range s.seqs {
		m.seqs[call] = s.seqs[call]
	}
	for _, e := range m.ref.ended {
		m.past = append(m.past, e.lease)
		for i, sp := range m.spent[e.lease.member] {
			if sp.lease == e.lease {
				sp.to = m.ref.now
				if e.outcome == "u" {
					m.spent[e.lease.member] = slices.Delete(m.spent[e.lease.member], i, i+1)
				}
				break
			}
		}
	}
	for member := range m.ref.limitChanged {
		delete(m.spent, member)
	}
	for _, l := range m.ref.granted {
		m.equal(true, l.fence > m.fence, "fence %d after %d", l.fence, m.fence)
		m.fence = l.fence
		if seq, queued := m.seqs[l.call]; queued && !l.claimed {
			m.equal(true, seq > m.served, "%s has seq %d, granted after %d", l.call, seq, m.served)
			m.served = seq
		}
		if r := m.ref.members[l.member]; r != nil {
			m.withinLimit(r.rules.limit, l)
		}
	}
	for _, seq := range s.seqs {
		m.equal(true, seq > m.served, "a waiter with seq %d still waits after %d was granted", seq, m.served)
	}
}

// withinLimit records a new lease, and fails if it exceeds the rate limit of its member. With a
// sliding limit, a lease's permit counts until a window after the release, and for a lease still
// held, until a window after the grant.
func (m *model) withinLimit(limit refLimit, l *refLease) {
	all := append(m.spent[l.member], &spending{lease: l, from: l.granted})
	m.spent[l.member] = all
	switch limit.kind {
	case "sliding":
		n := int64(0)
		for _, s := range all {
			if max(s.from, s.to) > l.granted-limit.window {
				n++
			}
		}
		m.equal(true, n <= limit.permits, "%d of %d permits in a window: %v", n, limit.permits, all)
	case "token":
		for i, s := range all {
			early := limit.window / limit.permits / 1_000_000 // see refPermits.left
			n, most := int64(len(all)-i), limit.burst+(l.granted-s.from+early)*limit.permits/limit.window
			m.equal(true, n <= max(most, 1), "%d permits in %d µs, at most %d", n, l.granted-s.from, most)
		}
	}
}

// refLimit is a rate limit of the reference. Times are in µs.
type refLimit struct {
	kind                   string // sliding, token or none
	permits, window, burst int64
}

// refEntry is an entry of the log of a sliding limiter in the reference model: n permits that were
// spent in one 64th of the window, and when the latest of them was.
type refEntry struct{ at, n int64 }

// refPermits is the state of one limiter.
type refPermits struct {
	limit refLimit
	log   []*refEntry // sliding
	due   int64       // token: the theoretical arrival time
}

func (p *refPermits) each() int64 { return p.limit.window / p.limit.permits }

// inWindow returns the log's entries inside the window. It does not remove the others: that happens
// when the log is written next, so a limit with a longer window may count them again.
func (p *refPermits) inWindow(now int64) []*refEntry {
	log := p.log
	for len(log) > 0 && log[0].at <= now-p.limit.window {
		log = log[1:]
	}
	return log
}

func (p *refPermits) left(now int64) int64 {
	if p.limit.kind == "sliding" {
		left := p.limit.permits
		for _, e := range p.inWindow(now) {
			left -= e.n
		}
		return left
	}
	early := p.each() / 1_000_000 // the scripts round up a permit that lacks a millionth
	return (now + p.limit.burst*p.each() - max(p.due, now) + early) / p.each()
}

// when returns the first time at which n permits are left in the reference model, if none is spent
// before.
func (p *refPermits) when(now, n int64) int64 {
	if p.limit.kind == "sliding" {
		left, at := p.left(now), now
		for _, e := range p.inWindow(now) {
			if left >= n {
				break
			}
			left, at = left+e.n, e.at+p.limit.window
		}
		return at
	}
	return max(p.due, now) + n*p.each() - p.limit.burst*p.each()
}

// spend spends n permits in the reference model and returns the log entry that counts them; nil for
// a token bucket. As the script does, it removes entries that had left the window at the time read.
func (p *refPermits) spend(read, now, n int64) *refEntry {
	if p.limit.kind == "token" {
		p.due = max(p.due, now) + n*p.each()
		return nil
	}
	p.log = p.inWindow(read)
	slot := p.limit.window / 64
	if k := len(p.log); k > 0 && p.log[k-1].at/slot == now/slot {
		p.log[k-1].at = now
		p.log[k-1].n += n
		return p.log[k-1]
	}
	e := &refEntry{now, n}
	p.log = append(p.log, e)
	return e
}

// takeOut gives one permit back in the reference model: it takes it out of its log entry, unless
// the entry has left the window.
func (p *refPermits) takeOut(now int64, e *refEntry) {
	for i, other := range p.inWindow(now) {
		if other == e {
			p.log = p.inWindow(now)
			if e.n--; e.n == 0 {
				p.log = append(p.log[:i:i], p.log[i+1:]...)
			}
			return
		}
	}
}

// change replaces the limit in the reference model. It returns whether permits that were spent
// before can still be moved or given back.
func (p *refPermits) change(now int64, to refLimit) (same bool) {
	from := p.limit
	switch {
	case from == to:
		return true
	case from.kind == to.kind:
		p.limit = to
		if to.kind == "token" { // a bucket is never emptier than empty
			p.due = min(p.due, now+to.burst*p.each())
		}
		return to.kind == "sliding" && from.window == to.window
	}
	left, limited := int64(0), from.kind == "sliding" || from.kind == "token"
	if limited {
		left = max(0, p.left(now))
	}
	*p = refPermits{limit: to}
	if limited && to.kind != "none" && p.left(now) > left {
		p.spend(now, now, p.left(now)-left)
	}
	return false
}

// at returns a text of the permits that count at the time now.
func (p *refPermits) at(now int64) string {
	switch p.limit.kind {
	case "sliding":
		text := "sliding"
		for _, e := range p.inWindow(now) {
			text += fmt.Sprintf(" %d:%d", e.at, e.n)
		}
		return text
	case "token":
		return fmt.Sprintf("token %d", max(p.due, now))
	}
	return "none"
}

// storedPermits reads the state of a limiter from its hash in Redis, and checks that the stored sum
// equals that of its log.
func storedPermits(t check, kind string, window int64, h map[string]string) refPermits {
	p := refPermits{limit: refLimit{kind: kind, window: window}}
	if kind == "token" && h["t"] != "" {
		due, err := strconv.ParseFloat(h["t"], 64)
		t.no(err)
		p.due = int64(due)
		t.equal(due, float64(p.due), "a whole number of µs")
	}
	sum := int64(0)
	for text := range strings.SplitSeq(strings.TrimSuffix(h["s"], ";"), ";") {
		if at, n, ok := strings.Cut(text, ":"); ok && kind == "sliding" {
			p.log = append(p.log, &refEntry{t.number(at), t.number(n)})
			sum += t.number(n)
		}
	}
	if kind == "sliding" && h["n"] != "" {
		t.equal(sum, t.number(h["n"]), "the sum of the log")
	}
	return p
}

// refTake is a Limiter of the reference.
type refTake struct {
	refPermits
	clk, offset int64
}

// take is the script take in the reference model: it returns the script's reply, and the time to
// live of the key in ms; 0 = the script does not set it.
func (l *refTake) take(raw, n int64) (reply string, ttl int64) {
	now, offset := raw+l.offset, l.offset
	stepped := now < l.clk
	if stepped {
		now = l.clk + 1
		offset = now - raw
	}
	allowed := l.left(now) >= n
	retry := int64(0)
	if allowed {
		l.spend(now, now, n)
	} else {
		retry = l.when(now, n) - now
	}
	reset := int64(0)
	if l.limit.kind == "token" {
		reset = max(0, l.due-now)
	} else if k := len(l.log); k > 0 {
		reset = l.log[k-1].at + l.limit.window - now
	}
	if allowed || stepped {
		l.clk, l.offset = now, offset
		ttl = 60_000 + (reset+999)/1000
	}
	ok := 0
	if allowed {
		ok = 1
	}
	return fmt.Sprint([]any{ok, max(0, l.left(now)), retry, reset, now}), ttl
}
