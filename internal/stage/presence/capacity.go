package presence

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Capacity computes, from the reports of workers, how many jobs of each type fetchers and
// dispatchers should make ready. It is safe for concurrent use, except Refresh, which only one
// goroutine may call.
type Capacity struct {
	conn  *redisx.Conn
	space keyspace.Space

	mu         sync.Mutex // guards the next two fields and all drainRates
	types      map[string]typeCapacity
	drainRates map[string]*drainRate // by type: how fast workers take the jobs that this process admits

	// Only Refresh uses these.
	serving    map[string]bool // by id: the workers that served a type at the last Refresh
	checkUntil time.Time       // until then, Refresh counts the unserved jobs
}

// typeCapacity is what the live workers that serve a type have reported.
type typeCapacity struct {
	slots     int
	startRate float64 // jobs started per second
	// runTime is the sum of the mean run times (ms) of all workers, each multiplied by its weight:
	// the jobs that this worker starts a second. weight is the sum of these weights.
	runTime, weight float64
	unserved        int // jobs held by workers that no longer serve the type
	// permissions is how many permissions a second the jobs of a gated type can get; of the
	// workers' numbers, the highest. Negative: no bound, or the type is not gated
	permissions float64
}

// NewCapacity returns a Capacity that knows no workers until its first Refresh.
func NewCapacity(conn *redisx.Conn, space keyspace.Space) *Capacity {
	return &Capacity{conn: conn, space: space, drainRates: map[string]*drainRate{}}
}

// drainRate measures how fast workers take the jobs of one type that this process admits. It reacts
// within about drainSpan; the reports of workers come only every half second.
type drainRate struct {
	since time.Time // begin of the current measurement
	// entries is the number of jobs admitted since then: the jobs that workers took. The first
	// measurement subtracts the streams' bounds, so it is negative while the streams fill
	entries   int
	perSecond float64 // result of the last measurement
}

const (
	// drainSpan is the shortest measurement.
	drainSpan = 50 * time.Millisecond
	// drainRateTTL is how long a rate stays valid.
	drainRateTTL = time.Second
)

// current returns the rate in jobs per second; 0 if there is none, or if it is too old.
func (p *drainRate) current() float64 {
	if p == nil || time.Since(p.since) > drainRateTTL {
		return 0
	}
	return p.perSecond
}

// Admitted records that n jobs of type typ were put into a ready stream of the given bound. From
// these calls it measures how fast workers take jobs: they have taken what exceeds the bounds of
// all partitions, and later as many as are admitted.
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

// Refresh reads the reports of all live workers, and counts the jobs of workers that have left (see
// countUnserved). After an error the old numbers stay.
func (c *Capacity) Refresh(ctx context.Context) error {
	workers, err := Workers(ctx, c.conn, c.space)
	if err != nil {
		return err
	}
	types, serving := map[string]typeCapacity{}, map[string]bool{}
	for _, w := range workers {
		for _, typ := range w.Types {
			serving[w.ID] = true
			t, known := types[typ]
			if !known {
				t.permissions = -1
			}
			if n, bounded := w.PermissionsPerSecond[typ]; bounded {
				t.permissions = max(t.permissions, n)
			}
			t.slots += w.WorkerStatus.Workers
			t.startRate += w.StartedPerSecond[typ]
			if ms := w.RunMS[typ]; ms > 0 {
				weight := max(w.StartedPerSecond[typ], 0.01)
				t.runTime += weight * ms
				t.weight += weight
			}
			types[typ] = t
		}
	}
	if err := c.countUnserved(ctx, serving, types); err != nil {
		return err
	}
	c.mu.Lock()
	c.types = types
	c.mu.Unlock()
	return nil
}

// Served returns the types that live workers served at the last Refresh, in no order.
func (c *Capacity) Served() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.types))
}

// countUnserved sets, by type, how many jobs are held by workers that no longer serve the type: by
// dead workers, and by stopping workers that finish their jobs. These jobs are still in the ready
// stream, but need no slot of the serving workers. It counts only for unservedCheck after a worker
// has left, and only if there is one partition.
func (c *Capacity) countUnserved(
	ctx context.Context, serving map[string]bool, types map[string]typeCapacity,
) error {
	if c.space.Partitions() > 1 {
		return nil
	}
	left := c.serving == nil
	for id := range c.serving {
		left = left || !serving[id]
	}
	c.serving = serving
	if left {
		c.checkUntil = time.Now().Add(unservedCheck)
	}
	if time.Now().After(c.checkUntil) {
		return nil
	}
	for typ, t := range types {
		p, err := c.conn.Cmd.XPending(ctx, c.space.Partition(0).Ready(typ), keyspace.GroupWorkers).Result()
		if call.IsUnavailable(err) {
			return fmt.Errorf("read what workers hold: %w", err)
		}
		if err != nil {
			continue // no consumer group: no worker has read the stream yet
		}
		for consumer, n := range p.Consumers {
			if !serving[consumer] {
				t.unserved += int(n)
				c.checkUntil = time.Now().Add(unservedCheck)
			}
		}
		types[typ] = t
	}
	return nil
}

// unservedCheck is for how long, after a worker has left, countUnserved counts its jobs; longer
// while there are such jobs. It also counts for this time after the first Refresh.
const unservedCheck = 10 * time.Second

// readyWork is how much work should wait in the ready streams, as the time in which all slots
// together do it. It is enough that a slot that becomes free finds a job, while the fetcher refills
// a stream when a quarter is gone. More work would delay jobs that come later but should run
// earlier, because fairness and the rate limit have no effect on ready jobs.
const readyWork = 5 * time.Millisecond

// ReadyBound is how many jobs of one type may be in one partition's ready stream.
type ReadyBound struct {
	Cap int // largest number of undelivered jobs
	// Slots is the number of slots of the workers that serve the type, plus the jobs held by
	// workers that no longer do; 0: not known
	Slots int
	Ahead int // if Slots is not 0: jobs beyond those that run, so that the stream holds Slots + Ahead jobs at most
}

// ReadyBound returns the bound of the ready stream of type typ in one partition.
//
// Ahead is the number of jobs that the workers start in 100 ms, but at least `least` and the number
// of slots; then at most what all slots run in readyWork (few jobs, while they are long), and at
// most `most`. With one partition, Cap is Ahead, but at least `least` and the number of slots, and
// at most `most`. With several partitions, the work is divided among them, Ahead is at least 1, Cap
// is Ahead, and Slots is not known. The same holds for a gated type with a bound; its Ahead is at
// most the permissions of a second. Without reports of workers, only Cap is set: it is `least` or
// more, so that some jobs become ready and show that workers are needed.
func (c *Capacity) ReadyBound(typ string, least, most int) ReadyBound {
	c.mu.Lock()
	t, drained := c.types[typ], c.drainRates[typ].current()
	c.mu.Unlock()
	if t.slots == 0 {
		// No worker has reported yet, but a new worker may already take jobs: use the measured
		// rate.
		return ReadyBound{Cap: min(most, max(least, int(drained/10)))}
	}
	partitions := c.space.Partitions()
	bound := max(least, t.slots, int(max(t.startRate, drained)/10)/partitions)
	if t.weight > 0 {
		meanRun := t.runTime / t.weight * float64(time.Millisecond)
		bound = min(bound, int(float64(t.slots)*float64(readyWork)/meanRun)/partitions)
	}
	if t.permissions >= 0 {
		bound = min(bound, int(t.permissions)/partitions)
	}
	if partitions > 1 || t.permissions >= 0 {
		// Leave Slots out: slots serve all partitions, and how many of them run jobs of this
		// partition is unknown.
		bound = min(most, max(1, bound))
		return ReadyBound{Cap: bound, Ahead: bound}
	}
	return ReadyBound{Cap: min(most, max(least, t.slots, bound)), Slots: t.slots + t.unserved, Ahead: min(most, bound)}
}

// poolSizeTTL is the lifetime of a requested number of slots in Redis. A worker process that can't
// reach Redis for longer never learns it.
const poolSizeTTL = time.Hour

// SetPoolSize asks a live worker process to have n slots. The process reads the number with its
// next heartbeat. The error wraps api.ErrNotFound if there is no such process, or it is stopping.
func SetPoolSize(ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, n int) error {
	workers, err := Workers(ctx, conn, space)
	if err != nil {
		return err
	}
	for _, w := range workers {
		if w.ID != id || w.ShuttingDown {
			continue
		}
		// The time makes each request differ from the last one, also if it names the same number
		// again.
		value := fmt.Sprintf("%d %d", n, time.Now().UnixNano())
		if err := conn.Cmd.Set(ctx, space.PoolSize(id), value, poolSizeTTL).Err(); err != nil {
			return fmt.Errorf("resize worker %s: %w", id, err)
		}
		return nil
	}
	return &api.NotFoundError{Text: "worker " + id + ": no live process has this id"}
}

// PoolSizes reads the numbers of slots that SetPoolSize sets for one worker process. Only one
// goroutine may use it.
type PoolSizes struct{ last string }

// Next reads the latest number from Redis and calls resize with it, unless it has done so for this
// call of SetPoolSize. It calls resize once for each number that it reads, even if resize fails.
func (p *PoolSizes) Next(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, id string, resize func(int) error,
) error {
	value, err := conn.Cmd.Get(ctx, space.PoolSize(id)).Result()
	if errors.Is(err, redis.Nil) || err == nil && value == p.last {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pool size: %w", err)
	}
	p.last = value
	var n int
	if _, err := fmt.Sscan(value, &n); err != nil {
		return fmt.Errorf("read pool size %q: %w", value, err)
	}
	return resize(n)
}
