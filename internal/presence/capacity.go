package presence

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Capacity knows how much the workers can take, by type, from their reports.
type Capacity struct {
	conn  *redisx.Conn
	space keyspace.Space

	mu         sync.Mutex
	slots      map[string]int
	startRate  map[string]float64
	runTime    map[string]time.Duration // mean run time
	abandoned  map[string]int           // jobs that workers hold who are not seen any more
	drainRates map[string]*drainRate

	serving    map[string]bool // ids of workers at the last refresh
	checkUntil time.Time       // until when jobs that they left are looked for
}

// NewCapacity knows nothing until its first Refresh.
func NewCapacity(conn *redisx.Conn, space keyspace.Space) *Capacity {
	return &Capacity{conn: conn, space: space, drainRates: map[string]*drainRate{}}
}

// pace is how fast the jobs of a type go that this process hands out. Workers report once a second;
// after a pause that is too late.
type drainRate struct {
	since     time.Time
	entries   int
	perSecond float64
}

const (
	drainSpan    = 50 * time.Millisecond
	drainRateTTL = time.Second // so long, a pace counts
)

func (p *drainRate) current() float64 {
	if p == nil || time.Since(p.since) > drainRateTTL {
		return 0
	}
	return p.perSecond
}

// HandedOut tells that n jobs of a type went into its ready stream, which had this room in each
// partition: what goes in beyond that, the workers have taken out.
func (c *Capacity) Admitted(typ string, n int, bound ReadyBound) {
	if n == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.drainRates[typ]
	if p == nil || time.Since(p.since) > drainRateTTL {
		p = &drainRate{since: time.Now(), entries: -max(bound.Cap, bound.Ahead) * c.space.Partitions()}
		c.drainRates[typ] = p
	}
	p.entries += n
	if age := time.Since(p.since); age >= drainSpan {
		*p = drainRate{since: time.Now(), perSecond: float64(max(0, p.entries)) / age.Seconds()}
	}
}

// Refresh reads the workers' reports.
func (c *Capacity) Refresh(ctx context.Context) error {
	workers, err := Workers(ctx, c.conn, c.space)
	if err != nil {
		return err
	}
	slots, startRate, runTime, weight := map[string]int{}, map[string]float64{}, map[string]time.Duration{}, map[string]float64{}
	serving := map[string]bool{}
	for _, w := range workers {
		if len(w.Types) > 0 {
			serving[w.ID] = true
		}
		for _, typ := range w.Types {
			slots[typ] += w.WorkerStatus.Workers
			startRate[typ] += w.StartedPerSecond[typ]
			if ms := w.RunMS[typ]; ms > 0 { // processes count by what they run
				n := max(w.StartedPerSecond[typ], 0.01)
				runTime[typ] += time.Duration(n * ms * float64(time.Millisecond))
				weight[typ] += n
			}
		}
	}
	for typ := range runTime {
		runTime[typ] = time.Duration(float64(runTime[typ]) / weight[typ])
	}
	abandoned, err := c.countAbandoned(ctx, serving, slots)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.slots, c.startRate, c.runTime, c.abandoned = slots, startRate, runTime, abandoned
	c.mu.Unlock()
	return nil
}

// left counts what workers hold who serve no more: they are dead, or finish what they run.
// Their jobs lie in the ready stream and take nobody's place. It asks only for a while after a
// worker has gone.
func (c *Capacity) countAbandoned(ctx context.Context, serving map[string]bool, slots map[string]int) (map[string]int, error) {
	if c.space.Partitions() > 1 {
		return nil, nil
	}
	for id := range c.serving {
		if !serving[id] {
			c.checkUntil = time.Now().Add(abandonedCheck)
		}
	}
	if c.serving == nil {
		c.checkUntil = time.Now().Add(abandonedCheck)
	}
	c.serving = serving
	if time.Now().After(c.checkUntil) {
		return nil, nil
	}
	abandoned := map[string]int{}
	for typ := range slots {
		p, err := c.conn.Cmd.XPending(ctx, c.space.Partition(0).Ready(typ), keyspace.GroupWorkers).Result()
		if call.IsUnavailable(err) {
			return nil, fmt.Errorf("read what workers hold: %w", err)
		}
		if err != nil {
			continue // nobody has read the stream yet
		}
		for consumer, n := range p.Consumers {
			if !serving[consumer] {
				abandoned[typ] += int(n)
				c.checkUntil = time.Now().Add(abandonedCheck)
			}
		}
	}
	return abandoned, nil
}

// leftFor is how long jobs of a worker that has gone are looked for.
const abandonedCheck = 10 * time.Second

// readyFor is how much work lies ready for the workers. A slot that becomes free finds the next job
// there, and the fetcher is woken when a quarter is gone; anything more only makes those wait who
// come next, past the reach of fairness and of the rate limit.
const readyWork = 5 * time.Millisecond

// Room is how many jobs of a type may lie in one partition's ready stream.
type ReadyBound struct {
	Cap   int // that nobody has read yet
	Slots int // jobs that the workers run side by side; 0: not known, or not by partition
	Ahead int // jobs that may lie there beyond those that run; 0: there are no workers
}

// Room is what the workers drain in 100 ms, their number at least, and at most most. Of jobs that
// take their time it is less: what keeps the workers busy for 5 ms. Without a worker it is least,
// so that the work shows.
func (c *Capacity) ReadyBound(typ string, least, most int) ReadyBound {
	c.mu.Lock()
	slots, startRate, runTime, abandoned, drained := c.slots[typ], c.startRate[typ], c.runTime[typ], c.abandoned[typ], c.drainRates[typ].current()
	c.mu.Unlock()
	if slots == 0 {
		return ReadyBound{Cap: min(most, max(least, int(drained/10)))} // somebody may have come who has not reported yet
	}
	partitions := c.space.Partitions()
	bound := max(least, slots, int(max(startRate, drained)/10)/partitions)
	if runTime > 0 {
		bound = min(bound, int(float64(slots)*float64(readyWork)/float64(runTime))/partitions)
	}
	if partitions > 1 { // workers of all: how many are busy here says nothing
		bound = min(most, max(1, bound))
		return ReadyBound{Cap: bound, Ahead: bound}
	}
	return ReadyBound{Cap: min(most, max(least, slots, bound)), Slots: slots + abandoned, Ahead: min(most, bound)}
}
