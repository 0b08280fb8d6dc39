package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// guardQueue is the queue of the lock that tasks of kind queue use. This process holds the lock, so
// that the calls of the loaders wait.
type guardQueue struct {
	*guardBench
	base   string // of the lock's keys
	client *guard.Client
	lease  *guard.Lease
	close  func()
}

// queueLock returns the lock that tasks of kind queue use. All processes pass the same options,
// because Redis stores those that were passed last.
func queueLock(c *guard.Client) *guard.Lock {
	return c.Lock("queue", guard.LockMaxWait(10*time.Minute))
}

// holdQueue takes the lock in this process, and then begins tasks of kind queue in n processes.
// Their calls will wait for the lock.
func (b *guardBench) holdQueue(ctx context.Context, n int) (*guardQueue, error) {
	prefix := b.newPrefix()
	client := guard.New(b.conn.Cmd, guard.Prefix(prefix))
	lease, err := queueLock(client).TryLock(ctx)
	if err != nil {
		return nil, err
	}
	q := &guardQueue{guardBench: b, base: keyspace.GuardBase(prefix, "lock", "queue"), client: client, lease: lease}
	q.close = func() {
		ending := context.WithoutCancel(ctx)
		_ = lease.Release(ending, guard.Neutral) // it may be released already
		_ = client.Close(ending)                 // it holds no lease
	}
	if err = b.prepare(n, guardTask{Kind: "queue", Prefix: prefix}); err == nil {
		err = b.begin(n)
	}
	if err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

// join tells a process to put calls into the lock's queue, and waits until Redis has counted them
// there.
func (q *guardQueue) join(ctx context.Context, process int, s guardStep) error {
	joined := func() (int, error) {
		v, err := q.client.Inspect(ctx, "lock/queue")
		return int(v.Counters["queued"]), err
	}
	before, err := joined()
	if err != nil {
		return err
	}
	if err := q.loaders[process].send.Encode(s); err != nil {
		return err
	}
	return q.await(ctx, "calls to join the queue", 2*time.Millisecond, func() (int, error) {
		now, err := joined()
		return before + s.Count - now, err
	})
}

// finish ends the tasks of the first n processes, and returns the sum of their reports.
func (q *guardQueue) finish(n int) (guardReport, error) {
	for _, l := range q.loaders[:n] {
		if err := l.send.Encode(guardStep{Last: true}); err != nil {
			return guardReport{}, err
		}
	}
	return q.end(n)
}

const manyWaiters = 1000

func (b *guardBench) waiting(ctx context.Context) (out GuardWaiting, err error) {
	q, err := b.holdQueue(ctx, guardProcesses)
	if err != nil {
		return out, err
	}
	defer q.close()
	for i := range guardProcesses {
		if err := q.join(ctx, i, guardStep{Count: manyWaiters / guardProcesses}); err != nil {
			return out, err
		}
	}
	if err := redisx.Sleep(ctx, heartbeats); err != nil {
		return out, err
	}
	// At most 60 s, and 5 s if the measurement is quick.
	span := min(30*b.Seconds, 60)
	if b.Quick {
		span = min(10*b.Seconds, 5)
	}
	used, err := b.used(ctx, "commandstats", func() error { return redisx.Sleep(ctx, seconds(span)) })
	if err != nil {
		return out, err
	}
	out.WaitingPerSecond = measure.Round2(float64(used.ByName["evalsha"].Calls) / span / guardProcesses)
	_, err = q.finish(guardProcesses)
	return out, err
}

// heartbeats is a time in which each client with waiting calls sends at least one heartbeat.
const heartbeats = time.Second

// The part memory puts these numbers of leases, of waiters (from memoryProcesses processes) and of
// window entries into Redis.
const (
	memoryLeases    = 10_000
	memoryProcesses = 4
	memoryWaiters   = 2_000
	memorySlots     = 64 // entries of a sliding limit
)

func (b *guardBench) memory(ctx context.Context) (out GuardMemory, err error) {
	if out.Bytes.Waiter, err = b.memoryOfWaiter(ctx); err != nil {
		return out, err
	}
	client := guard.New(b.conn.Cmd, guard.Prefix(b.newPrefix()))
	defer client.Close(context.WithoutCancel(ctx)) //nolint:errcheck // all leases are released
	leases := make([]*guard.Lease, memoryLeases)
	// use acquires n leases of a pool. It releases them unless keep is set.
	use := func(name string, s guard.Spec, n int, keep bool) error {
		pool, err := client.Pool(ctx, name, s)
		if err != nil {
			return err
		}
		all, ctx := errgroup.WithContext(ctx)
		all.SetLimit(smallPool)
		for i := range n {
			all.Go(func() (err error) {
				if leases[i], err = pool.TryAcquire(ctx); err != nil || keep {
					return err
				}
				return leases[i].Release(ctx, guard.Success)
			})
		}
		return all.Wait()
	}
	one := guard.Spec{Members: guardMembers(1), Concurrency: guard.Unbounded}
	// A first round makes Redis allocate what does not belong to the data: scripts and connections'
	// buffers.
	if err := use("warm", one, memoryLeases/10, false); err != nil {
		return out, err
	}
	members := guard.Spec{Members: guardMembers(largePool), Rate: wideBucket, Breaker: wideBreaker}
	out.Bytes.Member, err = b.memoryOf(ctx, largePool, func() error {
		return use("members", members, largePool, false)
	})
	if err != nil {
		return out, err
	}
	out.Bytes.Lease, err = b.memoryOf(ctx, memoryLeases, func() error { return use("leases", one, memoryLeases, true) })
	if err != nil {
		return out, err
	}
	for _, l := range leases {
		if err := l.Release(ctx, guard.Neutral); err != nil {
			return out, err
		}
	}
	out.Bytes.Entry, err = b.memoryOfEntry(ctx, client)
	return out, err
}

// memoryOf returns the bytes that Redis's memory grows by while do runs, without the buffers of
// connections, divided by n.
func (b *guardBench) memoryOf(ctx context.Context, n int, do func() error) (float64, error) {
	read := func() (float64, error) {
		info, err := b.conn.Cmd.InfoMap(ctx, "memory").Result()
		if err != nil {
			return 0, fmt.Errorf("read Redis's statistics: %w", err)
		}
		all, err1 := strconv.ParseFloat(info["Memory"]["used_memory"], 64)
		connections, err2 := strconv.ParseFloat(info["Memory"]["mem_clients_normal"], 64)
		return all - connections, errors.Join(err1, err2)
	}
	before, err := read()
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := read()
	return math.Round((after - before) / float64(n)), err
}

func (b *guardBench) memoryOfWaiter(ctx context.Context) (bytes float64, err error) {
	q, err := b.holdQueue(ctx, memoryProcesses)
	if err != nil {
		return 0, err
	}
	defer q.close()
	join := func(count int) error {
		for i := range memoryProcesses {
			if err := q.join(ctx, i, guardStep{Number: i * memoryWaiters, Count: count}); err != nil {
				return err
			}
		}
		return redisx.Sleep(ctx, heartbeats)
	}
	// The first calls make connections and subscriptions.
	if err := join(memoryWaiters / 10); err != nil {
		return 0, err
	}
	bytes, err = b.memoryOf(ctx, memoryWaiters, func() error { return join(memoryWaiters / memoryProcesses) })
	if err != nil {
		return 0, err
	}
	_, err = q.finish(memoryProcesses)
	return bytes, err
}

// memoryOfEntry returns the bytes of one entry of a sliding limit. It fills a window of one key
// with calls, and compares the key's memory with that of a key with a single call.
func (b *guardBench) memoryOfEntry(ctx context.Context, client *guard.Client) (float64, error) {
	const window = memorySlots * 10 * time.Millisecond
	limiter := client.Limiter("entries", guard.PerWindow(1_000_000, window))
	var size [2]float64
	for i, key := range []string{"few", "many"} {
		for began := time.Now(); ; {
			if _, err := limiter.Take(ctx, key, 1); err != nil {
				return 0, err
			}
			if i == 0 || time.Since(began) > window {
				break
			}
			if err := redisx.Sleep(ctx, window/memorySlots/4); err != nil {
				return 0, err
			}
		}
		found, err := b.conn.Cmd.Keys(ctx, "*limit:{entries/"+key+"}").Result()
		if err != nil || len(found) != 1 {
			return 0, fmt.Errorf("find the key of limiter %s: %s: %w", strconv.Quote(key), found, err)
		}
		bytes, err := b.conn.Cmd.MemoryUsage(ctx, found[0]).Result()
		if err != nil {
			return 0, err
		}
		size[i] = float64(bytes)
	}
	return measure.Round2((size[1] - size[0]) / (memorySlots - 1)), nil
}
