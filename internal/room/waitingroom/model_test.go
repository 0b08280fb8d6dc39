package waitingroom

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// TestModel runs random sequences of script calls, many of them repeated or late, with a clock that
// also jumps. It compares each reply, and the whole state after each script, with a reference model
// in Go, and checks the laws R1 to R7 in every state.
func TestModel(t *testing.T) {
	t.Parallel()
	play := func(rt *rapid.T, s *scripted) { newModel(rt, s).play() }
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		rapidtest.OnRedis(t, 10, func(o *redis.Options) *scripted { return newScripted(t, o, nil) }, play)
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		mini := miniredis.RunT(t) // its keys don't expire by themselves
		s := newScripted(t, &redis.Options{Addr: mini.Addr()}, mini.SetTime)
		rapidtest.CheckFew(t, func(rt *rapid.T) { play(rt, s) })
	})
}

// TestModelWithDamage runs random sequences while another program changes or deletes records of
// some users. No script fails, the laws hold for all other users, and at the end the event can be
// deleted.
func TestModelWithDamage(t *testing.T) {
	t.Parallel()
	rapidtest.OnRedis(t, 2, func(o *redis.Options) *scripted { return newScripted(t, o, nil) }, func(rt *rapid.T, s *scripted) {
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
	s      *scripted
	acts   map[string]func(*model)
	names  []string
	micros int64 // Redis time

	ref     *refRooms
	view    *stored // the state after the last call
	calls   []oneCall
	damaged map[string]bool // users whose records another program has changed; nil: there is none

	laws map[string]*lawsOf // by event
}

// oneCall is a call of a script.
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

func newModel(rt *rapid.T, s *scripted) *model {
	require.NoError(rt, s.c.FlushDB(rt.Context()).Err())
	m := newCalls(rt, s)
	m.rt, m.acts = rt, maps.Clone(acts)
	m.micros += rapid.Int64Range(0, 2_000_000).Draw(rt, "begin")
	m.declare(declareCall{"e", "put", 0, m.drawSettings()})
	return m
}

// newCalls returns a model whose calls the test chooses.
func newCalls(t require.TestingT, s *scripted) *model {
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
	reply, after, err := m.s.run(m.micros, c.script, c.args)
	if err != nil {
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
