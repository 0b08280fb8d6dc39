package position_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// partition is the source of a partition of rooms.
type partition struct {
	*waitingroom.Rooms
	p keyspace.Partition
}

func (p partition) Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error) {
	return p.Rooms.Snapshot(ctx, p.p, events...)
}

func (p partition) Moves(ctx context.Context, after string, block time.Duration) ([]waitingroom.Move, error) {
	return p.Rooms.Moves(ctx, p.p, after, block)
}

const event = "sale"

// TestOnRedis loads the view of a queue of 6,000 users again and again, while users enter, go away,
// come back, leave and are promoted. A user who stays never sees the position rise, whichever view
// answers. At the end, each user's position equals the one found by counting the queue.
func TestOnRedis(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	url, prefix := redistest.Shared(t)
	conn, err := redisx.Connect(ctx, redisx.Config{URL: url, PoolMaxIdle: 2, PoolMaxActive: 10})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	rooms := waitingroom.New(conn, space, nil)
	_, err = rooms.Declare(ctx, event, waitingroom.Settings{
		Capacity: 1000, MaxWaiting: 1_000_000, TokenTTL: time.Minute, Ready: time.Minute, Grace: time.Minute,
		OnClose: "keep", NoShow: "wait", Mode: api.ModePaused, Retention: time.Hour,
	}, waitingroom.DeclareOptions{})
	require.NoError(t, err)
	const users, staying = 6000, 3000 // users from staying on neither leave nor are promoted
	numbers := make([]atomic.Int64, users)
	enter := func(from, to int) (change int64, err error) {
		visitors := make([]waitingroom.Visitor, 0, to-from)
		for u := from; u < to; u++ {
			visitors = append(visitors, visitor(u))
		}
		reply, err := rooms.Enter(ctx, event, waitingroom.EnterNew, 0, visitors...)
		for i, entry := range reply.Entries {
			numbers[from+i].Store(entry.Number)
		}
		return reply.Change, err
	}
	for u := 0; u < users; u += waitingroom.MostUsers {
		_, err := enter(u, u+waitingroom.MostUsers)
		require.NoError(t, err)
	}
	_, err = rooms.Change(ctx, event, waitingroom.Changes{Mode: api.ModeOpen})
	require.NoError(t, err)

	source := partition{rooms, space.Partition(0)}
	looping, stop := context.WithCancel(ctx)
	var loop, movers sync.WaitGroup
	defer loop.Wait()
	defer stop()
	start := func() *position.Views {
		views := position.New(source)
		loop.Go(func() {
			for looping.Err() == nil {
				if err := views.Round(looping); err != nil && looping.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
		return views
	}
	movers.Go(func() { // users leave, and are promoted
		for u := range staying {
			if u%2 == 0 {
				if _, _, err := rooms.Leave(ctx, event, visitor(u).User); err != nil {
					t.Error(err)
					return
				}
			}
			if u%300 == 0 {
				if _, err := rooms.Promote(ctx, event); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	movers.Go(func() { // users go away and come back
		random := rand.New(rand.NewPCG(1, 1))
		for range 200 {
			u := staying + random.IntN(users-staying-10)
			_, err := rooms.Disconnect(ctx, event, visitor(u), visitor(u+1))
			if err == nil {
				_, err = enter(u, u+2)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	moved := make(chan struct{})
	go func() { movers.Wait(); close(moved) }()

	shown := map[int]int64{}
	look := func(views *position.Views) {
		e := views.Open(event)
		defer e.Close()
		change, err := enter(users-1, users) // as a user who comes back to a broker
		require.NoError(t, err)
		seen := false
		for try := 0; !seen && try < 20; try++ { // Wait gives up after MaxWait, which a busy machine may need
			seen = e.Wait(ctx, change)
		}
		require.True(t, seen)
		for u := staying; u < users; u += 7 {
			p := e.Place(numbers[u].Load(), change)
			require.True(t, p.Known)
			require.False(t, p.Left, "user %d", u)
			require.LessOrEqual(t, p.Position, p.Total)
			if before, ok := shown[u]; ok {
				require.LessOrEqual(t, p.Position, before, "the position of user %d rises", u)
			}
			shown[u] = p.Position
		}
	}
	views := start()
	for busy := true; busy; {
		look(views)
		look(position.New(source)) // a broker that has just started
		select {
		case <-moved:
			busy = false
		default:
		}
	}
	look(views)

	s, err := rooms.Snapshot(ctx, space.Partition(0), event)
	require.NoError(t, err)
	in := map[int64]bool{}
	require.NoError(t, rooms.Numbers(ctx, event, func(page []int64) {
		for _, n := range page {
			in[n] = true
		}
	}))
	e := views.Open(event)
	require.True(t, e.Wait(ctx, s.Events[0].Change))
	lower := int64(0)
	for n := int64(1); n <= s.Events[0].Tail; n++ {
		p := e.Place(n, 0)
		require.Equal(t, !in[n], p.Left)
		if in[n] {
			lower++
			require.Equal(t, lower, p.Position)
			require.Equal(t, int64(len(in)), p.Total)
		}
	}
	require.LessOrEqual(t, lower, int64(users-staying/2), "half of the first users have left")
}

func visitor(u int) waitingroom.Visitor {
	return waitingroom.Visitor{User: fmt.Sprintf("user-%d", u), Conn: fmt.Sprintf("00000001.%d", u)}
}

// TestLagOfPromotion: a user waits, and a slot becomes free, but no broker promotes. The lag grows
// until somebody promotes.
func TestLagOfPromotion(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	url, prefix := redistest.Shared(t)
	conn, err := redisx.Connect(ctx, redisx.Config{URL: url, PoolMaxIdle: 2, PoolMaxActive: 10})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	rooms := waitingroom.New(conn, space, nil)
	_, err = rooms.Declare(ctx, event, waitingroom.Settings{
		MaxWaiting: 10, TokenTTL: time.Minute, Ready: time.Minute, Grace: time.Minute, OnClose: "keep", NoShow: "wait",
		Mode: api.ModeOpen, Retention: time.Hour,
	}, waitingroom.DeclareOptions{})
	require.NoError(t, err)
	_, err = rooms.Enter(ctx, event, waitingroom.EnterNew, 0, visitor(1), visitor(2))
	require.NoError(t, err)
	views := position.New(partition{rooms, space.Partition(0)})
	e := views.Open(event)
	until := func(holds func() bool) {
		for began := time.Now(); !holds(); {
			require.Less(t, time.Since(began), 30*time.Second)
			require.NoError(t, views.Round(ctx))
		}
	}
	until(func() bool { s, seen := e.Snapshot(); return seen && s.Waiting == 2 })
	require.Zero(t, e.Lag(), "no slot is free")
	one := int64(1)
	_, err = rooms.Change(ctx, event, waitingroom.Changes{Capacity: &one})
	require.NoError(t, err)
	until(func() bool { return e.Lag() > 1500*time.Millisecond })
	_, err = rooms.Promote(ctx, event)
	require.NoError(t, err)
	until(func() bool { return e.Lag() == 0 })
}
