package bench

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/guard"
)

const (
	speedProcesses = 4 // make calls while speed is measured
	smallPool      = 40
	largePool      = 10_000
)

// Limits and a breaker that no part reaches.
var (
	wideBucket  = guard.Bucket(1_000_000, time.Second)
	wideWindow  = guard.PerWindow(1_000_000_000, time.Second)
	wideBreaker = guard.BreakerPolicy{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}
)

func (b *guardBench) takes(context.Context) (out GuardTakes, err error) {
	t := guardTask{Kind: "take", Goroutines: 16, Names: 1000, Rate: wideBucket}
	if out.TakePerSecond, err = b.perSecond(speedProcesses, t); err != nil {
		return out, err
	}
	t.PerSecond, t.Seconds = 5000/speedProcesses, b.Seconds
	r, err := b.run(speedProcesses, t)
	if err != nil {
		return out, err
	}
	out.TakeP99MS = measure.Percentile(r.Waits, 99)
	t.PerSecond, t.Rate = 0, wideWindow
	out.SlidingTakePerSecond, err = b.perSecond(speedProcesses, t)
	return out, err
}

func (b *guardBench) pairs(context.Context) (out GuardPairs, err error) {
	t := guardTask{Kind: "pair", Goroutines: 8, Members: smallPool, Capacity: 1, Rate: wideBucket, Breaker: wideBreaker}
	if out.PairsPerSecond, err = b.perSecond(speedProcesses, t); err != nil {
		return out, err
	}
	t.Members = largePool
	large, err := b.perSecond(speedProcesses, t)
	if err != nil {
		return out, err
	}
	out.Pairs10000Ratio = measure.Ratio(out.PairsPerSecond, large)
	t.Members, t.Rate, t.Breaker = smallPool, guard.Rate{}, guard.BreakerPolicy{}
	out.PlainPairsPerSecond, err = b.perSecond(speedProcesses, t)
	return out, err
}

func (b *guardBench) locks(context.Context) (out GuardLocks, err error) {
	t := guardTask{Kind: "lock", Goroutines: 16, Names: 1000}
	if out.LockPairsPerSecond, err = b.perSecond(speedProcesses, t); err != nil {
		return out, err
	}
	t.PerSecond, t.Seconds = 1000/speedProcesses, b.Seconds
	r, err := b.run(speedProcesses, t)
	out.LockP99MS = measure.Percentile(r.Waits, 99)
	return out, err
}

func (b *guardBench) handovers(context.Context) (out GuardHandovers, err error) {
	r, err := b.run(guardProcesses, guardTask{
		Kind: "handover", Goroutines: 64 / guardProcesses, Names: 1, Seconds: b.Seconds, Hold: time.Millisecond,
	})
	out.HandoverP50MS, out.HandoverP99MS = measure.Percentile(r.Waits, 50), measure.Percentile(r.Waits, 99)
	return out, err
}

// used returns what Redis has used while do runs, as a section of INFO shows it.
func (b *guardBench) used(ctx context.Context, section string, do func() error) (measure.Redis, error) {
	read := func() (measure.Redis, error) {
		info, err := b.conn.Cmd.Info(ctx, section).Result()
		if err != nil {
			return measure.Redis{}, fmt.Errorf("read Redis's statistics: %w", err)
		}
		return measure.ReadInfo(info), nil
	}
	before, err := read()
	if err != nil {
		return before, err
	}
	if err := do(); err != nil {
		return before, err
	}
	after, err := read()
	return after.Add(before, -1), err
}

// costBatches is the number of batches that the part costs measures of each kind of call, with 40
// concurrent calls in a batch. Its figures are those of the median batch.
const costBatches = 40

func (b *guardBench) costs(ctx context.Context) (out GuardCosts, err error) {
	client := guard.New(b.conn.Cmd, guard.Prefix(b.newPrefix()))
	defer client.Close(context.WithoutCancel(ctx)) //nolint:errcheck // all leases are released
	limiter := client.Limiter("l", wideBucket)
	if out.RedisUS.Take, out.ProcessUS.Take, err = b.cost(ctx, func(ctx context.Context, i int) error {
		_, err := limiter.Take(ctx, fmt.Sprint(i), 1)
		return err
	}, nil, new(float64), new(float64)); err != nil {
		return out, err
	}
	for _, n := range []int{smallPool, largePool} {
		pool, err := client.Pool(ctx, fmt.Sprint("p", n), guard.Spec{
			Members: guardMembers(n), Rate: wideBucket, Breaker: wideBreaker,
		})
		if err != nil {
			return out, err
		}
		var leases [smallPool]*guard.Lease
		acquire := func(ctx context.Context, i int) (err error) {
			leases[i], err = pool.Acquire(ctx)
			return err
		}
		settle := func(ctx context.Context, i int) error { return leases[i].Release(ctx, guard.Success) }
		r, p := &out.RedisUS, &out.ProcessUS
		acquireRedis, acquireProcess, settleRedis, settleProcess := &r.Acquire, &p.Acquire, &r.Settle, &p.Settle
		if n == largePool {
			acquireRedis, acquireProcess = &r.Acquire10000, &p.Acquire10000
			settleRedis, settleProcess = &r.Settle10000, &p.Settle10000
		}
		*acquireRedis, *acquireProcess, err = b.cost(ctx, acquire, settle, settleRedis, settleProcess)
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// cost returns the CPU time (µs) of Redis and of this process for one call of do. After each batch
// of do, a batch of undo runs, for example to release leases; its costs are stored in undoRedis and
// undoProcess.
func (b *guardBench) cost(
	ctx context.Context, do, undo func(context.Context, int) error, undoRedis, undoProcess *float64,
) (inRedis, inProcess float64, err error) {
	calls := []func(context.Context, int) error{do}
	if undo != nil {
		calls = append(calls, undo)
	}
	redisTimes, processTimes := make([][]float64, len(calls)), make([][]float64, len(calls))
	for range costBatches {
		for i, one := range calls {
			var cpu time.Duration
			used, err := b.used(ctx, "cpu", func() error {
				before := ownCPU()
				all, ctx := errgroup.WithContext(ctx)
				for k := range smallPool {
					all.Go(func() error { return one(ctx, k) })
				}
				err := all.Wait()
				cpu = ownCPU() - before
				return err
			})
			if err != nil {
				return 0, 0, err
			}
			redisTimes[i] = append(redisTimes[i], float64(used.CPU.Nanoseconds())/1000/smallPool)
			processTimes[i] = append(processTimes[i], float64(cpu.Microseconds())/smallPool)
		}
	}
	if undo != nil {
		*undoRedis, *undoProcess = measure.Median(redisTimes[1]), measure.Median(processTimes[1])
	}
	return measure.Median(redisTimes[0]), measure.Median(processTimes[0]), nil
}
