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

// simulation has the settings of a simulated backlog with many producers and some ingest processes.
// The simulation has its own clock.
type simulation struct {
	limit          int64   // of the backlog, in jobs
	drainRate      float64 // mean, in jobs per second
	drainVariation float64 // part of the mean by which the drain rate varies
	processes      int     // ingest processes
	sameProcess    bool    // a producer returns to the process that refused it
	atStart        int     // producers that come in the first two seconds
	newcomers      float64 // rate of the jobs of later producers, as a multiple of the drain rate
	smallest       int     // jobs of the smallest request
	largest        int     // jobs of the largest request
	sameKey        bool    // all producers have the same key
	duration       time.Duration
}

// arrival is one attempt of a producer to add its jobs, at one of the ingest processes.
type arrival struct {
	at       time.Time
	client   client
	jobs     int64
	process  int
	tries    int  // earlier tries
	newcomer bool // it is not one of those at the start
}

type arrivals []arrival

func (v arrivals) Len() int           { return len(v) }
func (v arrivals) Less(i, j int) bool { return v[i].at.Before(v[j].at) }
func (v arrivals) Swap(i, j int)      { v[i], v[j] = v[j], v[i] }
func (v *arrivals) Push(x any)        { *v = append(*v, x.(arrival)) }
func (v *arrivals) Pop() any {
	last := (*v)[len(*v)-1]
	*v = (*v)[:len(*v)-1]
	return last
}

// simulationResult counts what happened in a simulation.
type simulationResult struct {
	firstTries, refused int           // first tries, and how many of them were refused
	kept, notKept       int           // second tries that were accepted, or refused again
	peak                int64         // largest backlog, in jobs
	accepted            float64       // rate of accepted jobs, as a multiple of the drain rate
	longest             time.Duration // longest wait that a producer was told
}

// keptRatio returns the part of the second tries that were accepted.
func (o simulationResult) keptRatio() float64 { return float64(o.kept) / float64(o.kept+o.notKept) }

func (m simulation) run(seed uint64) simulationResult {
	r := rand.New(rand.NewPCG(seed, 1))
	start := time.Unix(1_700_000_000, 0)
	backlog, at := float64(m.limit), start
	admissions, updatedAt := make([]admission, m.processes), make([]time.Time, m.processes)
	for i := range admissions {
		admissions[i] = newAdmission(m.limit)
	}
	size := func() int64 { return int64(m.smallest + r.IntN(m.largest-m.smallest+1)) }
	name := func(i int) client {
		if m.sameKey {
			return client{key: "all of them"}
		}
		return client{key: fmt.Sprint(i), unique: true}
	}
	speed := func(t time.Time) float64 {
		return m.drainRate * (1 + m.drainVariation*math.Sin(t.Sub(start).Seconds()))
	}
	var due arrivals
	for i := range m.atStart {
		heap.Push(&due, arrival{at: start.Add(time.Duration(r.IntN(2000)) * time.Millisecond), client: name(i), jobs: size(), process: r.IntN(m.processes)})
	}
	mean := float64(m.smallest+m.largest) / 2
	next := m.atStart
	arrive := func(after time.Time) {
		if m.newcomers > 0 {
			gap := r.ExpFloat64() * mean / (m.newcomers * m.drainRate)
			heap.Push(&due, arrival{at: after.Add(time.Duration(gap * float64(time.Second))), client: name(next), jobs: size(), process: r.IntN(m.processes), newcomer: true})
			next++
		}
	}
	arrive(start)
	var out simulationResult
	var accepted int64
	for len(due) > 0 {
		v := heap.Pop(&due).(arrival)
		if v.at.Sub(start) > m.duration {
			break
		}
		for ; v.at.Sub(at) > 10*time.Millisecond; at = at.Add(10 * time.Millisecond) {
			backlog = max(0, backlog-speed(at)*0.01)
		}
		if v.newcomer && v.tries == 0 {
			arrive(v.at)
		}
		a := &admissions[v.process]
		age := viewMaxAge
		if a.exceedsShare(v.jobs) {
			age = freshViewMaxAge
		}
		if since := v.at.Sub(updatedAt[v.process]); since > age {
			// The workers' reports are half a second old.
			a.update(int64(math.Ceil(backlog)), int64(m.processes), speed(v.at.Add(-500*time.Millisecond)), since)
			updatedAt[v.process] = v.at
		}
		wait, ok := a.accept(v.at, v.client, v.jobs, 0)
		if v.tries == 0 {
			out.firstTries++
		}
		if v.tries == 1 && ok {
			out.kept++
		} else if v.tries == 1 {
			out.notKept++
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
		v.at = v.at.Add(wait + time.Duration(r.ExpFloat64()*float64(30*time.Millisecond))) // timers and networks add some delay
		if !m.sameProcess {
			v.process = r.IntN(m.processes)
		}
		heap.Push(&due, v)
	}
	out.accepted = float64(accepted) / at.Sub(start).Seconds() / m.drainRate
	return out
}

// TestReservationsAreKept: of the producers that return when they were told to, at least 95% are
// accepted, although other producers come meanwhile. The backlog never exceeds its limit.
func TestReservationsAreKept(t *testing.T) {
	standard := simulation{limit: 100_000, drainRate: 2000, drainVariation: 0.1, processes: 1, sameProcess: true, atStart: 1000, smallest: 1, largest: 500, duration: 3 * time.Minute}
	for name, change := range map[string]func(*simulation){
		"a draining backlog":                     func(*simulation) {},
		"newcomers at half the drain":            func(m *simulation) { m.newcomers = 0.5 },
		"newcomers at 1.5 times the drain":       func(m *simulation) { m.newcomers = 1.5 },
		"newcomers at 5 times the drain":         func(m *simulation) { m.newcomers = 5 },
		"small requests":                         func(m *simulation) { m.newcomers, m.smallest, m.largest = 1.5, 1, 10 },
		"large requests":                         func(m *simulation) { m.newcomers, m.smallest, m.largest = 1.5, 1000, 5000 },
		"a varying drain rate":                   func(m *simulation) { m.drainVariation, m.newcomers = 0.5, 1.5 },
		"a slow drain":                           func(m *simulation) { m.limit, m.drainRate, m.largest, m.atStart = 1000, 20, 5, 300 },
		"three processes":                        func(m *simulation) { m.processes = 3 },
		"three processes and newcomers":          func(m *simulation) { m.processes, m.newcomers = 3, 1.5 },
		"three processes, return to any of them": func(m *simulation) { m.processes, m.sameProcess = 3, false },
		"all producers with one key":             func(m *simulation) { m.sameKey = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := standard
			change(&m)
			for seed := range uint64(3) {
				o := m.run(seed)
				require.LessOrEqual(t, o.peak, m.limit)
				require.Greater(t, o.kept+o.notKept, 50, "%+v", o)
				require.GreaterOrEqual(t, o.keptRatio(), 0.95, "%+v", o)
				if m.newcomers > 1 {
					require.Greater(t, o.accepted, 0.85, "space that is not reserved is given to newcomers: %+v", o)
				}
				require.Greater(t, o.longest, 10*time.Second, "%+v", o)
			}
		})
	}

	// When all producers have the same key, the admission controller can't tell newcomers from
	// returning producers, so fewer of these are accepted.
	m := standard
	m.sameKey, m.newcomers = true, 1.5
	o := m.run(1)
	require.LessOrEqual(t, o.peak, m.limit)
	require.Less(t, o.keptRatio(), 0.95, "%+v", o)
}

func TestReservationQueue(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	unique := func(cl string) client { return client{key: cl, unique: true} }
	full := func(cl client, jobs int64) demand {
		return demand{client: cl, jobs: jobs, drainRate: 100 / maxDrainFactor}
	}
	accept := func(q *reservationQueue, at time.Time, d demand) time.Duration {
		wait, ok := q.accept(at, d)
		require.Equal(t, wait == 0, ok)
		return wait
	}
	t.Run("waits grow with the queue", func(t *testing.T) {
		q := newReservationQueue()
		require.Equal(t, 2*time.Second, accept(q, now, full(unique("a"), 100)))
		require.Equal(t, 3*time.Second, accept(q, now, full(unique("b"), 100)))
		require.Equal(t, 13*time.Second, accept(q, now, full(unique("c"), 1000)))
		require.Equal(t, 3*time.Second, accept(q, now, full(unique("b"), 100)), "a client that returns too early keeps its reservation")
		require.EqualValues(t, 1200, q.reserved)
	})
	t.Run("reserved space is not given to a newcomer", func(t *testing.T) {
		q := newReservationQueue()
		require.Equal(t, 2*time.Second, accept(q, now, full(unique("a"), 100)))
		due := now.Add(2 * time.Second)
		d := full(unique("b"), 100)
		d.free = 150
		require.NotZero(t, accept(q, due, d))
		d = full(unique("a"), 100)
		d.free = 150
		require.Zero(t, accept(q, due, d))
		d = full(unique("c"), 50)
		d.free = 50
		require.Zero(t, accept(q, due, d), "space that is not reserved is given to a newcomer")
	})
	t.Run("an unused reservation expires", func(t *testing.T) {
		q := newReservationQueue()
		require.Equal(t, 2*time.Second, accept(q, now, full(unique("a"), 100)))
		d := full(unique("b"), 100)
		d.free = 100
		require.Zero(t, accept(q, now.Add(2*time.Second+holdTime+2*bucketWidth), d))
		_, ok := q.accept(now.Add(2*time.Second+expiryTime+3*bucketWidth), full(unique("c"), 1))
		require.False(t, ok)
		require.Empty(t, q.byKey["a"])
		require.EqualValues(t, 1, q.reserved)
	})
	t.Run("a client whose space is not free in time gets an early reservation", func(t *testing.T) {
		q := newReservationQueue()
		require.Equal(t, 2*time.Second, accept(q, now, full(unique("a"), 100)))
		require.Equal(t, 52*time.Second, accept(q, now, full(unique("b"), 5000)))
		require.Less(t, accept(q, now.Add(2*time.Second), full(unique("a"), 100)), 4*time.Second)
		require.Less(t, q.drainFactor, maxDrainFactor)
	})
	t.Run("pieces of a body that is sent again", func(t *testing.T) {
		q := newReservationQueue()
		piece := func(part int64) client { return client{key: "append g", body: "body", piece: part} }
		require.Equal(t, 2*time.Second, accept(q, now, full(piece(1), 100)))
		due := now.Add(2 * time.Second)
		require.Zero(t, accept(q, due, full(piece(0), 100)), "the piece was accepted before")
		d := full(piece(1), 100)
		d.free = 100
		require.Zero(t, accept(q, due, d))
	})
	t.Run("no reservation for a client that retries by itself, without workers, or too far ahead", func(t *testing.T) {
		q := newReservationQueue()
		require.Equal(t, 2*time.Second, accept(q, now, full(client{retries: true}, 100)))
		require.Equal(t, noDrainWait, accept(q, now, demand{client: unique("a"), jobs: 1}))
		require.Equal(t, maxReservedWait, accept(q, now, full(unique("b"), 1_000_000)))
		require.Zero(t, q.reserved)
	})
	t.Run("memory is full", func(t *testing.T) {
		q := newReservationQueue()
		d := full(unique("a"), 100)
		d.free, d.blocked = 1000, 5*time.Second
		require.Equal(t, 6*time.Second, accept(q, now, d))
		d.client, d.free = unique("b"), 0
		require.Equal(t, 8*time.Second, accept(q, now, d))
	})
}
