package guard

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// On a real Redis TestModel runs rapid `hundreds` times, divided among `callers` goroutines. Each
// run of rapid tries 100 random sequences, or the number given by -rapid.checks.
const callers, hundreds = 2, 30

// TestModel runs random sequences of the scripts, many of them repeated or late, with a clock that
// also jumps. It compares each reply and the whole state after each script with a reference in
// memory, and checks what must hold in every state.
func TestModel(t *testing.T) {
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		socket := filepath.Join(t.TempDir(), "s")
		redistest.Server(t, redistest.Args("--unixsocket", socket)) // half the CPU time of TCP
		rounds := int64(hundreds)
		if testing.Short() {
			rounds = 5 // of 20 sequences each: rapid tries fewer then
		}
		var next atomic.Int64
		var wg sync.WaitGroup
		for i := range callers {
			s := newScripted(t, &redis.Options{Network: "unix", Addr: socket, DB: i}, nil)
			wg.Go(func() {
				for round := next.Add(1) - 1; round < rounds && !t.Failed(); round = next.Add(1) - 1 {
					checkModel(t, s, int(round))
				}
			})
		}
		wg.Wait()
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		mini := miniredis.RunT(t) // its keys don't expire by themselves
		checkModel(t, newScripted(t, &redis.Options{Addr: mini.Addr()}, mini.SetTime), 0)
	})
}

// quick is a rapid.T whose method Helper does nothing, because it only costs time: rapid itself
// shows where a check has failed.
type quick struct{ *rapid.T }

func (quick) Helper() {}

func checkModel(t *testing.T, s *scripted, round int) {
	rapidtest.Check(t, round, func(rt *rapid.T) {
		require.NoError(rt, s.c.FlushDB(rt.Context()).Err())
		m := newModel(rt, s)
		for _, name := range rapid.SliceOfN(rapid.SampledFrom(m.names), 15, 35).Draw(rt, "acts") {
			m.acts[name](m)
		}
	})
}

// model holds a guard and a limiter under test in Redis, with their reference models.
type model struct {
	check
	rt     *rapid.T
	s      *scripted
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

func newModel(rt *rapid.T, s *scripted) *model {
	m := &model{
		check: check{quick{rt}}, rt: rt, s: s, ref: newReference(), seqs: map[string]int64{}, acts: maps.Clone(acts),
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
	reply, keys := m.s.run(m.check, m.micros, script, guardKeys(m.base), args)
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
			m.equal(true, k.ttl > 0 || name == limiterKey, "%s has a time to live", name)
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
