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

	mu    sync.Mutex
	slots map[string]int
	rate  map[string]float64
	run   map[string]time.Duration // mean run time
	lost  map[string]int           // jobs that workers hold who are not seen any more
	paces map[string]*pace

	serving map[string]bool // ids of workers at the last refresh
	check   time.Time       // until when jobs that they left are looked for
}

// NewCapacity knows nothing until its first Refresh.
func NewCapacity(conn *redisx.Conn, space keyspace.Space) *Capacity {
	return &Capacity{conn: conn, space: space, paces: map[string]*pace{}}
}

// pace is how fast the jobs of a type go that this process hands out. Workers report once a second;
// after a pause that is too late.
type pace struct {
	from      time.Time
	n         int
	perSecond float64
}

const (
	paceSpan = 50 * time.Millisecond
	paceAge  = time.Second // so long, a pace counts
)

func (p *pace) now() float64 {
	if p == nil || time.Since(p.from) > paceAge {
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
	p := c.paces[typ]
	if p == nil || time.Since(p.from) > paceAge {
		p = &pace{from: time.Now(), n: -max(bound.Cap, bound.Ahead) * c.space.Partitions()}
		c.paces[typ] = p
	}
	p.n += n
	if age := time.Since(p.from); age >= paceSpan {
		*p = pace{from: time.Now(), perSecond: float64(max(0, p.n)) / age.Seconds()}
	}
}

// Refresh reads the workers' reports.
func (c *Capacity) Refresh(ctx context.Context) error {
	workers, err := Workers(ctx, c.conn, c.space)
	if err != nil {
		return err
	}
	slots, rate, run, ran := map[string]int{}, map[string]float64{}, map[string]time.Duration{}, map[string]float64{}
	serving := map[string]bool{}
	for _, w := range workers {
		if len(w.Types) > 0 {
			serving[w.ID] = true
		}
		for _, typ := range w.Types {
			slots[typ] += w.WorkerStatus.Workers
			rate[typ] += w.StartedPerSecond[typ]
			if ms := w.RunMS[typ]; ms > 0 { // processes count by what they run
				n := max(w.StartedPerSecond[typ], 0.01)
				run[typ] += time.Duration(n * ms * float64(time.Millisecond))
				ran[typ] += n
			}
		}
	}
	for typ := range run {
		run[typ] = time.Duration(float64(run[typ]) / ran[typ])
	}
	lost, err := c.left(ctx, serving, slots)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.slots, c.rate, c.run, c.lost = slots, rate, run, lost
	c.mu.Unlock()
	return nil
}

// left counts what workers hold who serve no more: they are dead, or finish what they run.
// Their jobs lie in the ready stream and take nobody's place. It asks only for a while after a
// worker has gone.
func (c *Capacity) left(ctx context.Context, serving map[string]bool, slots map[string]int) (map[string]int, error) {
	if c.space.Partitions() > 1 {
		return nil, nil
	}
	for id := range c.serving {
		if !serving[id] {
			c.check = time.Now().Add(leftFor)
		}
	}
	if c.serving == nil {
		c.check = time.Now().Add(leftFor)
	}
	c.serving = serving
	if time.Now().After(c.check) {
		return nil, nil
	}
	lost := map[string]int{}
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
				lost[typ] += int(n)
				c.check = time.Now().Add(leftFor)
			}
		}
	}
	return lost, nil
}

// leftFor is how long jobs of a worker that has gone are looked for.
const leftFor = 10 * time.Second

// readyFor is how much work lies ready for the workers. A slot that becomes free finds the next job
// there, and the fetcher is woken when a quarter is gone; anything more only makes those wait who
// come next, past the reach of fairness and of the rate limit.
const readyFor = 5 * time.Millisecond

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
	slots, rate, run, lost, drained := c.slots[typ], c.rate[typ], c.run[typ], c.lost[typ], c.paces[typ].now()
	c.mu.Unlock()
	if slots == 0 {
		return ReadyBound{Cap: min(most, max(least, int(drained/10)))} // somebody may have come who has not reported yet
	}
	partitions := c.space.Partitions()
	bound := max(least, slots, int(max(rate, drained)/10)/partitions)
	if run > 0 {
		bound = min(bound, int(float64(slots)*float64(readyFor)/float64(run))/partitions)
	}
	if partitions > 1 { // workers of all: how many are busy here says nothing
		bound = min(most, max(1, bound))
		return ReadyBound{Cap: bound, Ahead: bound}
	}
	return ReadyBound{Cap: min(most, max(least, slots, bound)), Slots: slots + lost, Ahead: min(most, bound)}
}
