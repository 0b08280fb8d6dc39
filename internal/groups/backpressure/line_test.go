package backpressure

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// market is many producers before some ingest processes, on a clock of its own.
type market struct {
	limit     int64
	drain     float64 // jobs a second
	wobble    float64 // by what part the drain comes and goes
	processes int
	sticky    bool    // a producer comes back to the process that it came to first
	crowd     int     // producers that come at once, at the start
	newcomers float64 // jobs a second that come all the time, as a part of the drain
	smallest  int
	largest   int
	unsure    bool // producers give their requests no names
	lasts     time.Duration
}

// visit is a producer that comes at a time.
type visit struct {
	at       time.Time
	who      claim
	jobs     int64
	process  int
	tries    int
	newcomer bool
}

type visits []visit

func (v visits) Len() int           { return len(v) }
func (v visits) Less(i, j int) bool { return v[i].at.Before(v[j].at) }
func (v visits) Swap(i, j int)      { v[i], v[j] = v[j], v[i] }
func (v *visits) Push(x any)        { *v = append(*v, x.(visit)) }
func (v *visits) Pop() any {
	last := (*v)[len(*v)-1]
	*v = (*v)[:len(*v)-1]
	return last
}

// marketOutcome is what came of it.
type marketOutcome struct {
	first, refused, kept, broken int // visits: the first ones, those of them refused, and what became of the second
	peak                         int64
	accepted                     float64 // jobs a second, as a part of the drain
	longest                      time.Duration
}

// share is how many of the refused found room when they came again.
func (o marketOutcome) share() float64 { return float64(o.kept) / float64(o.kept+o.broken) }

func (m market) run(seed uint64) marketOutcome {
	r := rand.New(rand.NewPCG(seed, 1))
	start := time.Unix(1_700_000_000, 0)
	backlog, at := float64(m.limit), start
	gates, seen := make([]gate, m.processes), make([]time.Time, m.processes)
	for i := range gates {
		gates[i] = newGate(m.limit)
	}
	size := func() int64 { return int64(m.smallest + r.IntN(m.largest-m.smallest+1)) }
	name := func(i int) claim {
		if m.unsure {
			return claim{who: "all of them"}
		}
		return claim{who: fmt.Sprint(i), sure: true}
	}
	speed := func(t time.Time) float64 {
		return m.drain * (1 + m.wobble*math.Sin(t.Sub(start).Seconds()))
	}
	var due visits
	for i := range m.crowd {
		heap.Push(&due, visit{at: start.Add(time.Duration(r.IntN(2000)) * time.Millisecond), who: name(i), jobs: size(), process: r.IntN(m.processes)})
	}
	mean := float64(m.smallest+m.largest) / 2
	next := m.crowd
	arrive := func(after time.Time) {
		if m.newcomers > 0 {
			gap := r.ExpFloat64() * mean / (m.newcomers * m.drain)
			heap.Push(&due, visit{at: after.Add(time.Duration(gap * float64(time.Second))), who: name(next), jobs: size(), process: r.IntN(m.processes), newcomer: true})
			next++
		}
	}
	arrive(start)
	var out marketOutcome
	var accepted int64
	for len(due) > 0 {
		v := heap.Pop(&due).(visit)
		if v.at.Sub(start) > m.lasts {
			break
		}
		for ; v.at.Sub(at) > 10*time.Millisecond; at = at.Add(10 * time.Millisecond) {
			backlog = max(0, backlog-speed(at)*0.01)
		}
		if v.newcomer && v.tries == 0 {
			arrive(v.at)
		}
		g := &gates[v.process]
		age := pressureAge
		if g.large(v.jobs) {
			age = freshAge
		}
		if since := v.at.Sub(seen[v.process]); since > age {
			// The workers' reports are of the half second before the last.
			g.see(int64(math.Ceil(backlog)), int64(m.processes), speed(v.at.Add(-500*time.Millisecond)), since)
			seen[v.process] = v.at
		}
		wait, ok := g.admit(v.at, v.who, v.jobs, 0)
		if v.tries == 0 {
			out.first++
		}
		if v.tries == 1 && ok {
			out.kept++
		} else if v.tries == 1 {
			out.broken++
		}
		if ok {
			backlog += float64(v.jobs)
			accepted += v.jobs
			out.peak = max(out.peak, int64(math.Floor(backlog)))
			continue
		}
		if v.tries == 0 {
			out.refused++
		}
		out.longest = max(out.longest, wait)
		v.tries++
		v.at = v.at.Add(wait + time.Duration(r.ExpFloat64()*float64(30*time.Millisecond))) // timers and networks are late
		if !m.sticky {
			v.process = r.IntN(m.processes)
		}
		heap.Push(&due, v)
	}
	out.accepted = float64(accepted) / at.Sub(start).Seconds() / m.drain
	return out
}

// Producers that come back when they were told to find room, whoever else comes meanwhile; and
// there is never more than the limit.
func TestPromisesAreKept(t *testing.T) {
	base := market{limit: 100_000, drain: 2000, wobble: 0.1, processes: 1, sticky: true, crowd: 1000, smallest: 1, largest: 500, lasts: 3 * time.Minute}
	for name, change := range map[string]func(*market){
		"a backlog that drains":                func(*market) {},
		"newcomers at half the drain":          func(m *market) { m.newcomers = 0.5 },
		"newcomers at 1.5 times the drain":     func(m *market) { m.newcomers = 1.5 },
		"newcomers at 5 times the drain":       func(m *market) { m.newcomers = 5 },
		"small requests":                       func(m *market) { m.newcomers, m.smallest, m.largest = 1.5, 1, 10 },
		"large requests":                       func(m *market) { m.newcomers, m.smallest, m.largest = 1.5, 1000, 5000 },
		"a drain that comes and goes":          func(m *market) { m.wobble, m.newcomers = 0.5, 1.5 },
		"a slow drain":                         func(m *market) { m.limit, m.drain, m.largest, m.crowd = 1000, 20, 5, 300 },
		"three processes":                      func(m *market) { m.processes = 3 },
		"three processes and newcomers":        func(m *market) { m.processes, m.newcomers = 3, 1.5 },
		"three processes, back to any of them": func(m *market) { m.processes, m.sticky = 3, false },
		"producers without a name":             func(m *market) { m.unsure = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := base
			change(&m)
			for seed := range uint64(3) {
				o := m.run(seed)
				require.LessOrEqual(t, o.peak, m.limit)
				require.Greater(t, o.kept+o.broken, 50, "%+v", o)
				require.GreaterOrEqual(t, o.share(), 0.95, "%+v", o)
				if m.newcomers > 1 {
					require.Greater(t, o.accepted, 0.85, "room is given away, not hoarded: %+v", o)
				}
				require.Greater(t, o.longest, 10*time.Second, "%+v", o)
			}
		})
	}

	// Newcomers can't be told from those who come back where nobody has a name.
	m := base
	m.unsure, m.newcomers = true, 1.5
	o := m.run(1)
	require.LessOrEqual(t, o.peak, m.limit)
	require.Less(t, o.share(), 0.95, "%+v", o)
}

func TestLine(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	known := func(who string) claim { return claim{who: who, sure: true} }
	full := func(who claim, jobs int64) offer { return offer{claim: who, jobs: jobs, drain: 100 / maxTrust} }
	ask := func(l *line, at time.Time, o offer) time.Duration {
		wait, ok := l.admit(at, o)
		require.Equal(t, wait == 0, ok)
		return wait
	}
	t.Run("waits grow along the line", func(t *testing.T) {
		l := newLine()
		require.Equal(t, 2*time.Second, ask(l, now, full(known("a"), 100)))
		require.Equal(t, 3*time.Second, ask(l, now, full(known("b"), 100)))
		require.Equal(t, 13*time.Second, ask(l, now, full(known("c"), 1000)))
		require.Equal(t, 3*time.Second, ask(l, now, full(known("b"), 100)), "whoever is impatient keeps the place")
		require.EqualValues(t, 1200, l.owed)
	})
	t.Run("what is promised is not given to a newcomer", func(t *testing.T) {
		l := newLine()
		require.Equal(t, 2*time.Second, ask(l, now, full(known("a"), 100)))
		due := now.Add(2 * time.Second)
		o := full(known("b"), 100)
		o.room = 150
		require.NotZero(t, ask(l, due, o))
		o = full(known("a"), 100)
		o.room = 150
		require.Zero(t, ask(l, due, o))
		o = full(known("c"), 50)
		o.room = 50
		require.Zero(t, ask(l, due, o), "the rest is not promised before it drains anew")
	})
	t.Run("what is not claimed is anybody's", func(t *testing.T) {
		l := newLine()
		require.Equal(t, 2*time.Second, ask(l, now, full(known("a"), 100)))
		o := full(known("b"), 100)
		o.room = 100
		require.Zero(t, ask(l, now.Add(2*time.Second+hold+2*tick), o))
		_, ok := l.admit(now.Add(2*time.Second+grace+3*tick), full(known("c"), 1))
		require.False(t, ok)
		require.Empty(t, l.by["a"])
		require.EqualValues(t, 1, l.owed)
	})
	t.Run("who finds no room goes to the front", func(t *testing.T) {
		l := newLine()
		require.Equal(t, 2*time.Second, ask(l, now, full(known("a"), 100)))
		require.Equal(t, 52*time.Second, ask(l, now, full(known("b"), 5000)))
		require.Less(t, ask(l, now.Add(2*time.Second), full(known("a"), 100)), 4*time.Second)
		require.Less(t, l.trust, maxTrust)
	})
	t.Run("pieces of a body that is sent again", func(t *testing.T) {
		l := newLine()
		piece := func(part int64) claim { return claim{who: "append g", base: "body", part: part} }
		require.Equal(t, 2*time.Second, ask(l, now, full(piece(1), 100)))
		due := now.Add(2 * time.Second)
		require.Zero(t, ask(l, due, full(piece(0), 100)), "it was let in before")
		o := full(piece(1), 100)
		o.room = 100
		require.Zero(t, ask(l, due, o))
	})
	t.Run("nothing is promised to who looks by itself, nor while nobody works, nor too far ahead", func(t *testing.T) {
		l := newLine()
		require.Equal(t, 2*time.Second, ask(l, now, full(claim{patient: true}, 100)))
		require.Equal(t, blind, ask(l, now, offer{claim: known("a"), jobs: 1}))
		require.Equal(t, maxWait, ask(l, now, full(known("b"), 1_000_000)))
		require.Zero(t, l.owed)
	})
	t.Run("memory is full", func(t *testing.T) {
		l := newLine()
		o := full(known("a"), 100)
		o.room, o.shut = 1000, 5*time.Second
		require.Equal(t, 6*time.Second, ask(l, now, o))
		o.claim, o.room = known("b"), 0
		require.Equal(t, 8*time.Second, ask(l, now, o))
	})
}
