package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

const (
	batchUsers   = 100_000
	batchCallers = 4
)

// batches calls the scripts enter and promote directly, without brokers, in keys with a prefix of
// its own. It measures their speed, and the memory of waiting users.
func (b *roomBench) batches(ctx context.Context) (*RoomMemory, *RoomBatches, error) {
	const event = "scripts"
	scratch, err := newEventCalls(b.fleet, "scripts:")
	if err != nil {
		return nil, nil, err
	}
	if err := scratch.declare(ctx, event, func(s *waitingroom.Settings) { s.Capacity = batchUsers }); err != nil {
		return nil, nil, err
	}
	out := &RoomBatches{}
	used, took, err := b.timed(ctx, func() error { return scratch.enterBatches(ctx, event) })
	if err != nil {
		return nil, nil, err
	}
	out.ScriptEnterPerSecond = measure.Round2(batchUsers / took.Seconds())
	out.ScriptEnterUS = measure.PerJob(used.redisTotal().CPU, batchUsers)
	memory := &RoomMemory{RedisBytesPerUser: measure.Round2(float64(used.redisTotal().Memory) / batchUsers)}

	if err := scratch.setMode(ctx, event, api.ModeOpen); err != nil {
		return nil, nil, err
	}
	if used, took, err = b.timed(ctx, func() error { return scratch.promoteBatches(ctx, event) }); err != nil {
		return nil, nil, err
	}
	out.ScriptPromotePerSecond = measure.Round2(batchUsers / took.Seconds())
	out.ScriptPromoteUS = measure.PerJob(used.redisTotal().CPU, batchUsers)
	return memory, out, b.removeKeys(ctx, scratch.space.Prefix())
}

// timed runs do. It returns what the fleet has used meanwhile, and how long do took.
func (b *roomBench) timed(ctx context.Context, do func() error) (used fleetUse, took time.Duration, err error) {
	used, err = b.measure(ctx, func() error {
		began := time.Now()
		err := do()
		took = time.Since(began)
		return err
	})
	return used, took, err
}

// enterBatches makes all users of the part scripts enter, 200 a call. Their ids have 22 characters.
func (e eventCalls) enterBatches(ctx context.Context, event string) error {
	var next atomic.Int64
	var all errgroup.Group
	for range batchCallers {
		all.Go(func() error {
			visitors := make([]waitingroom.Visitor, waitingroom.MostUsers)
			for {
				first := next.Add(waitingroom.MostUsers) - waitingroom.MostUsers
				if first >= batchUsers {
					return nil
				}
				for i := range visitors {
					n := first + int64(i)
					visitors[i] = waitingroom.Visitor{
						User: fmt.Sprintf("visitor-%014d", n), Conn: fmt.Sprintf("0a1b2c3d.%d", n),
					}
				}
				reply, err := e.rooms.Enter(ctx, event, waitingroom.EnterNew, 0, visitors...)
				if err != nil {
					return err
				}
				for _, entry := range reply.Entries {
					if entry.Code != waitingroom.Entered {
						return fmt.Errorf("enter: a new user is answered %s", entry.Code)
					}
				}
			}
		})
	}
	return all.Wait()
}

// promoteBatches promotes all users, 200 a call.
func (e eventCalls) promoteBatches(ctx context.Context, event string) error {
	var promoted atomic.Int64
	var all errgroup.Group
	for range batchCallers {
		all.Go(func() error {
			for {
				p, err := e.rooms.Promote(ctx, event)
				if err != nil || p.N == 0 {
					return err
				}
				promoted.Add(int64(p.N))
			}
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	if n := promoted.Load(); n != batchUsers {
		return errors.New("promote: " + fmt.Sprint(n) + " users were promoted")
	}
	return nil
}
