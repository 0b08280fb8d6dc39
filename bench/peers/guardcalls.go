package main

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/guard"
)

// Numbers of goroutines and settings of the comparison of package guard. A peer has one connection
// for each goroutine.
const (
	guardCallers    = 64
	lockWaiters     = 16
	failingCallers  = 8
	guardKeys       = 1000
	guardHold       = time.Millisecond // of the contended lock, and the time of a guarded call
	breakerFailures = 10
)

// guardRun is one measurement.
type guardRun struct {
	guardOptions
	rdb *redis.Client
}

// perSecond calls `one` in n goroutines, again and again, until the time g.Seconds is over. It
// returns the calls a second.
func (g *guardRun) perSecond(ctx context.Context, n int, one func(ctx context.Context, goroutine int) error) (
	float64, error,
) {
	var calls atomic.Int64
	end := time.Now().Add(time.Duration(g.Seconds * float64(time.Second)))
	all, ctx := errgroup.WithContext(ctx)
	for i := range n {
		all.Go(func() error {
			for {
				err := one(ctx, i)
				if time.Now().After(end) {
					return nil // calls may be cut off at the end
				}
				if err != nil {
					return err
				}
				calls.Add(1)
			}
		})
	}
	err := all.Wait()
	return float64(calls.Load()) / g.Seconds, err
}

// waitP99 locks and unlocks one lock in some goroutines. It returns the 99th percentile of the ms
// that a call of lock takes.
func (g *guardRun) waitP99(ctx context.Context, lock func(context.Context) (unlock func() error, err error)) (
	float64, error,
) {
	var mu sync.Mutex
	var waits []float64
	_, err := g.perSecond(ctx, lockWaiters, func(ctx context.Context, _ int) error {
		began := time.Now()
		unlock, err := lock(ctx)
		if err != nil {
			return err
		}
		mu.Lock()
		waits = append(waits, float64(time.Since(began).Microseconds())/1000)
		mu.Unlock()
		<-time.After(guardHold)
		return unlock()
	})
	return measure.Percentile(waits, 99), err
}

// withGuards calls do with a client, and closes it.
func (g *guardRun) withGuards(ctx context.Context, do func(*guard.Client) (float64, error)) (float64, error) {
	c := guard.New(g.rdb)
	figure, err := do(c)
	return figure, errors.Join(err, c.Close(context.WithoutCancel(ctx)))
}

var errLimited = errors.New("the limit was reached")

func ourTakes(ctx context.Context, g *guardRun) (float64, error) {
	return g.withGuards(ctx, func(c *guard.Client) (float64, error) {
		limiter := c.Limiter("l", guard.Bucket(1_000_000, time.Second), guard.OnOutage(guard.Closed))
		var n atomic.Int64
		return g.perSecond(ctx, guardCallers, func(ctx context.Context, _ int) error {
			d, err := limiter.Take(ctx, strconv.FormatInt(n.Add(1)%guardKeys, 10), 1)
			if err == nil && !d.Allowed {
				err = errLimited
			}
			return err
		})
	})
}

func redisRateTakes(ctx context.Context, g *guardRun) (float64, error) {
	limiter, limit := redis_rate.NewLimiter(g.rdb), redis_rate.PerSecond(1_000_000)
	var n atomic.Int64
	return g.perSecond(ctx, guardCallers, func(ctx context.Context, _ int) error {
		r, err := limiter.Allow(ctx, strconv.FormatInt(n.Add(1)%guardKeys, 10), limit)
		if err == nil && r.Allowed == 0 {
			err = errLimited
		}
		return err
	})
}

// lockName returns a name that no other goroutine uses.
func lockName(goroutine int, turn int64) string {
	return strconv.Itoa(goroutine) + "-" + strconv.FormatInt(turn%(guardKeys/guardCallers), 10)
}

func ourLocks(ctx context.Context, g *guardRun) (float64, error) {
	return g.withGuards(ctx, func(c *guard.Client) (float64, error) {
		var n atomic.Int64
		return g.perSecond(ctx, guardCallers, func(ctx context.Context, i int) error {
			lease, err := c.Lock(lockName(i, n.Add(1))).Lock(ctx)
			if err != nil {
				return err
			}
			return lease.Release(ctx, guard.Neutral)
		})
	})
}

func redsyncLocks(ctx context.Context, g *guardRun) (float64, error) {
	locks := redsync.New(goredis.NewPool(g.rdb))
	var n atomic.Int64
	return g.perSecond(ctx, guardCallers, func(ctx context.Context, i int) error {
		m := locks.NewMutex(lockName(i, n.Add(1)))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		_, err := m.UnlockContext(ctx)
		return err
	})
}

func ourWaits(ctx context.Context, g *guardRun) (float64, error) {
	return g.withGuards(ctx, func(c *guard.Client) (float64, error) {
		lock := c.Lock("l")
		return g.waitP99(ctx, func(ctx context.Context) (func() error, error) {
			lease, err := lock.Lock(ctx)
			if err != nil {
				return nil, err
			}
			return func() error { return lease.Release(ctx, guard.Neutral) }, nil
		})
	})
}

// redsyncWaits measures waitP99 of a lock of redsync, with the delays that redsync uses by default.
// When redsync gives up after 32 tries, the measured call begins new tries.
func redsyncWaits(ctx context.Context, g *guardRun) (float64, error) {
	locks := redsync.New(goredis.NewPool(g.rdb))
	return g.waitP99(ctx, func(ctx context.Context) (func() error, error) {
		m := locks.NewMutex("l")
		for {
			err := m.LockContext(ctx)
			var taken *redsync.ErrTaken
			if err == nil {
				break
			}
			if !errors.Is(err, redsync.ErrFailed) && !errors.As(err, &taken) {
				return nil, err
			}
		}
		return func() error {
			_, err := m.UnlockContext(ctx)
			return err
		}, nil
	})
}

func ourBreaker(ctx context.Context, g *guardRun) (float64, error) {
	return g.withGuards(ctx, func(c *guard.Client) (float64, error) {
		b := c.Breaker("b", guard.BreakerPolicy{Failures: breakerFailures, OpenFor: time.Minute, Successes: 1})
		return g.perSecond(ctx, guardCallers, func(ctx context.Context, _ int) error {
			return b.Do(ctx, func(context.Context) error {
				<-time.After(guardHold)
				return nil
			})
		})
	})
}

// gobreakerStore stores the state of gobreaker's breaker in Redis, and locks it with a mutex of
// redsync, as gobreaker's documentation does.
type gobreakerStore struct {
	rdb  *redis.Client
	lock func(name string) (*redsync.Mutex, error)

	mu   sync.Mutex
	held map[string]*redsync.Mutex
}

// newGobreaker returns a breaker of gobreaker. Each of its calls waits for the mutex of its state
// for redsync's 32 tries, and not longer than ctx.
func newGobreaker(ctx context.Context, rdb *redis.Client) (*gobreaker.DistributedCircuitBreaker[any], error) {
	locks := redsync.New(goredis.NewPool(rdb))
	store := &gobreakerStore{rdb: rdb, held: map[string]*redsync.Mutex{}}
	store.lock = func(name string) (*redsync.Mutex, error) {
		m := locks.NewMutex(name, redsync.WithExpiry(5*time.Second))
		return m, m.LockContext(ctx)
	}
	return gobreaker.NewDistributedCircuitBreaker[any](store, gobreaker.Settings{
		Name: "b", ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= breakerFailures },
	})
}

func (s *gobreakerStore) Lock(name string) error {
	m, err := s.lock(name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[name] = m
	return nil
}

func (s *gobreakerStore) Unlock(name string) error {
	s.mu.Lock()
	m := s.held[name]
	s.mu.Unlock()
	_, err := m.Unlock()
	return err
}

func (s *gobreakerStore) GetData(name string) ([]byte, error) {
	return s.rdb.Get(context.Background(), name).Bytes()
}

func (s *gobreakerStore) SetData(name string, data []byte) error {
	return s.rdb.Set(context.Background(), name, data, 0).Err()
}

func gobreakerCalls(ctx context.Context, g *guardRun) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(g.Seconds*float64(time.Second))+time.Second)
	defer cancel()
	breakers, err := newGobreakers(ctx, g.rdb, guardCallers)
	if err != nil {
		return 0, err
	}
	return g.perSecond(ctx, guardCallers, func(_ context.Context, i int) error {
		_, err := breakers[i].Execute(func() (any, error) {
			<-time.After(guardHold)
			return nil, nil
		})
		return err
	})
}

// newGobreakers returns n breakers that share one state in Redis, one for each goroutine, as if
// each were a process.
func newGobreakers(ctx context.Context, rdb *redis.Client, n int) (
	all []*gobreaker.DistributedCircuitBreaker[any], err error,
) {
	all = make([]*gobreaker.DistributedCircuitBreaker[any], n)
	for i := range all {
		if all[i], err = newGobreaker(ctx, rdb); err != nil {
			return all, err
		}
	}
	return all, nil
}

// errCall is the error of calls that fail.
var errCall = errors.New("the call failed")

// together makes failingCallers calls that begin at the same time. Each must fail with errCall.
func together(call func(goroutine int) error) error {
	var all errgroup.Group
	begin := make(chan struct{})
	for i := range failingCallers {
		all.Go(func() error {
			<-begin
			if err := call(i); !errors.Is(err, errCall) {
				return errors.Join(errors.New("a call was not made"), err)
			}
			return nil
		})
	}
	close(begin)
	return all.Wait()
}

// ourFailures makes calls that fail at the same time, and returns how many failures in a row our
// breaker has counted.
func ourFailures(ctx context.Context, g *guardRun) (float64, error) {
	return g.withGuards(ctx, func(c *guard.Client) (float64, error) {
		b := c.Breaker("b", guard.BreakerPolicy{Failures: breakerFailures, OpenFor: time.Minute, Successes: 1})
		fail := func(context.Context) error { return errCall }
		if err := together(func(int) error { return b.Do(ctx, fail) }); err != nil {
			return 0, err
		}
		v, err := c.Inspect(ctx, "breaker/b")
		if err != nil {
			return 0, err
		}
		return float64(v.Members[0].Failures), nil
	})
}

func gobreakerFailures(ctx context.Context, g *guardRun) (float64, error) {
	breakers, err := newGobreakers(ctx, g.rdb, failingCallers)
	if err != nil {
		return 0, err
	}
	err = together(func(i int) error {
		_, err := breakers[i].Execute(func() (any, error) { return nil, errCall })
		return err
	})
	if err != nil {
		return 0, err
	}
	data, err := g.rdb.Get(ctx, "gobreaker:state:b").Bytes()
	if err != nil {
		return 0, err
	}
	var state gobreaker.SharedState
	err = json.Unmarshal(data, &state)
	return float64(state.Counts.ConsecutiveFailures), err
}
