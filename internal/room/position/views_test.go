package position

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// bubble runs a parallel test in a bubble, whose time passes at once.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, test)
}

var errAway = errors.New("redis is away")

// requireExact requires that the views return the true present position of every number in the
// queues.
func requireExact(t require.TestingT, w *world, views *Views) {
	for name, q := range w.queues {
		e := views.Open(name)
		for i, n := range q.numbers() {
			want := Place{Known: true, Position: int64(i) + 1, Total: int64(len(q.in))}
			got := e.Place(n, q.change)
			if got.At, got.pace = want.At, want.pace; got != want {
				require.Equal(t, want, got, "number %d of %s", n, name)
			}
		}
		for n := int64(1); n <= q.tail; n++ {
			if got := e.Place(n, q.change); !q.in[n] && !got.Left {
				require.True(t, got.Left, "number %d of %s has left", n, name)
			}
		}
		e.Close()
	}
}

// rounds calls Round again and again for this long. It accepts no error but errAway.
func rounds(t require.TestingT, views *Views, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		if err := views.Round(context.Background()); err != nil {
			require.ErrorIs(t, err, errAway)
		}
	}
}

// TestRoundFollows: after a second of rounds, all positions are exact, also after four numbers have
// left. Until then, the place is unknown to a caller that knows of this change.
func TestRoundFollows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(100)
		views := New(w)
		e := views.Open("a")
		require.Equal(t, Place{}, e.Place(1, 0))
		_, ok := e.Snapshot()
		require.False(t, ok)
		rounds(t, views, time.Second)
		requireExact(t, w, views)
		w.leave("a", 1, 2, 3, 50)
		require.Equal(t, Place{}, e.Place(60, 1), "the view does not include the change")
		at := time.Now()
		rounds(t, views, time.Second)
		requireExact(t, w, views)
		require.False(t, e.Place(60, 1).At.Before(at.Truncate(time.Millisecond)))
		s, ok := e.Snapshot()
		require.True(t, ok)
		require.Equal(t, "a", s.Event)
	})
}

// TestRoundIsCheap counts the calls of the source. While nothing happens, Moves and Snapshot are
// called about once a second each. While an entry arrives every millisecond, Moves is called at
// most six times a second, and Numbers not at all.
func TestRoundIsCheap(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(10_000)
		views := New(w)
		defer views.Open("a").Close()
		rounds(t, views, 2*time.Second)
		clear(w.calls)
		rounds(t, views, 10*time.Second)
		require.LessOrEqual(t, w.calls["moves"], 12)
		require.LessOrEqual(t, w.calls["snapshot"], 11)
		clear(w.calls)
		next := int64(0)
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
			next++
			w.leave("a", next)
			rounds(t, views, time.Millisecond)
		}
		require.LessOrEqual(t, w.calls["moves"], 30)
		require.Zero(t, w.calls["numbers"], "no load was needed")
	})
}

// TestFirstCallsFail: if the first calls of the source fail, Round returns the error, and the view
// is loaded within 10 ms after the source works again.
func TestFirstCallsFail(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(10)
		views := New(w)
		e := views.Open("a")
		w.err = errAway
		require.ErrorIs(t, views.Round(t.Context()), errAway)
		w.err = errAway
		require.False(t, e.Wait(t.Context(), 0))
		require.Equal(t, map[string]int{"snapshot": 2}, w.calls)
		rounds(t, views, 10*time.Millisecond)
		require.LessOrEqual(t, w.calls["moves"], 2)
		requireExact(t, w, views)
	})
}

// TestUnusedViewIsDropped: a view is dropped a minute after its last use, and then Round asks the
// source for nothing.
func TestUnusedViewIsDropped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(10)
		views := New(w)
		e := views.Open("a")
		rounds(t, views, 100*time.Second)
		e.Close()
		rounds(t, views, 59*time.Second)
		views.Open("a").Close() // a poll
		rounds(t, views, 59*time.Second)
		require.Equal(t, 1, views.Len())
		require.Equal(t, 1, w.calls["numbers"], "one load in all")
		rounds(t, views, 3*time.Second)
		require.Zero(t, views.Len())
		clear(w.calls)
		w.leave("a", 5)
		rounds(t, views, 10*time.Second)
		require.Empty(t, w.calls)

		e = views.Open("a")
		require.True(t, e.Wait(t.Context(), 1))
		requireExact(t, w, views)
	})
}

// TestWaitLoadsAShortQueue: Wait itself loads the view of a short queue, without a call of Round;
// the view of a long queue is loaded by Round.
func TestWaitLoadsAShortQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("short", "long")
		w.page = 10_000
		w.queues["short"].enter(maxLoadByWaiter)
		w.queues["long"].enter(maxLoadByWaiter + 1)
		views := New(w)
		short, long := views.Open("short"), views.Open("long")
		require.True(t, short.Wait(t.Context(), 0))
		require.True(t, short.Place(maxLoadByWaiter, 0).Known)
		begin := time.Now()
		require.False(t, long.Wait(t.Context(), 0))
		require.Equal(t, MaxWait, time.Since(begin))
		require.Equal(t, 1, w.calls["numbers"])
		require.False(t, long.Wait(t.Context(), 0))
		require.Equal(t, 2, w.calls["snapshot"], "the length is asked once")
		rounds(t, views, time.Second)
		require.True(t, long.Wait(t.Context(), 0))
	})
}

// TestWaitIsWoken: Wait for a change returns true within wakeInterval, because it makes Round read
// moves sooner than readInterval after the last read. Wait for a change that does not come returns
// false after MaxWait.
func TestWaitIsWoken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(100)
		views := New(w)
		e := views.Open("a")
		rounds(t, views, time.Second)
		w.leave("a", 1)
		require.NoError(t, views.Round(t.Context()))
		w.leave("a", 2)
		ctx, cancel := context.WithCancel(t.Context())
		var loop sync.WaitGroup
		loop.Go(func() {
			for views.Round(ctx) == nil {
			}
		})
		begin := time.Now()
		require.True(t, e.Wait(t.Context(), 2))
		require.LessOrEqual(t, time.Since(begin), wakeInterval)
		begin = time.Now()
		require.False(t, e.Wait(t.Context(), 3), "there is no such change")
		require.Equal(t, MaxWait, time.Since(begin))
		cancel()
		loop.Wait()
		require.False(t, e.Wait(ctx, 3))
	})
}

// TestUnknownEvent: an event that Redis does not have gets no view. Its view is loaded after it has
// been declared.
func TestUnknownEvent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld()
		views := New(w)
		e := views.Open("a")
		require.False(t, e.Wait(t.Context(), 0))
		rounds(t, views, 3*time.Second)
		s, ok := e.Snapshot()
		require.True(t, ok)
		require.Empty(t, s.Event)
		w.queues["a"] = newQueue()
		w.queues["a"].enter(5)
		rounds(t, views, 3*time.Second)
		requireExact(t, w, views)
		delete(w.queues, "a")
		rounds(t, views, 2*time.Second)
		require.False(t, e.Place(1, 0).Known)
		require.Zero(t, w.calls["numbers"]-1)
		e.Close()
		rounds(t, views, 2*time.Second)
		require.Zero(t, views.Len(), "an unknown event is not kept")
	})
}

// TestClockThatWentBack: after a failover, new entries of moves have ids below the last one that
// was read. Round continues at the end of the stream and sees them.
func TestClockThatWentBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a", "b")
		w.queues["a"].enter(100)
		w.queues["b"].enter(100)
		views := New(w)
		views.Open("a")
		views.Open("b")
		backup := w.backup()
		rounds(t, views, time.Second)
		w.leave("a", 1, 2)
		w.leave("b", 1, 2)
		rounds(t, views, time.Second)
		requireExact(t, w, views)
		w.restore(backup)
		w.behind = time.Hour
		w.leave("a", 1)
		w.leave("a", 2)
		rounds(t, views, 3*time.Second)
		requireExact(t, w, views)
		w.leave("a", 7)
		w.leave("b", 9)
		rounds(t, views, time.Second)
		requireExact(t, w, views)
	})
}

// TestFailingEventHarmsNoOther: the view of an event that can't be loaded is tried again only after
// growing waits, and the other events are followed as usual.
func TestFailingEventHarmsNoOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a", "bad")
		w.queues["a"].enter(100)
		w.queues["bad"].enter(1)
		w.queues["bad"].tail = 2 * maxSpan
		views := New(w)
		views.Open("a")
		views.Open("bad")
		failures := 0
		for end := time.Now().Add(40 * time.Second); time.Now().Before(end); {
			if err := views.Round(t.Context()); err != nil {
				require.ErrorIs(t, err, ErrSpan)
				require.ErrorContains(t, err, "event bad")
				failures++
			}
		}
		require.Contains(t, []int{6, 7, 8}, failures)
		w.leave("a", 1)
		rounds(t, views, time.Second)
		delete(w.queues, "bad")
		requireExact(t, w, views)
	})
}

// TestManyEvents: the views of 1,000 events are each loaded once and are exact. No call of Snapshot
// asks for more than 200 events.
func TestManyEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(names(1000)...)
		views := New(w)
		for name, q := range w.queues {
			q.enter(50)
			views.Open(name)
		}
		rounds(t, views, 6*time.Second)
		requireExact(t, w, views)
		require.Equal(t, 1000, w.calls["numbers"])
	})
}

// lockedWorld is a fake Source that several goroutines may use: a world with a mutex.
type lockedWorld struct {
	mu sync.Mutex
	w  *world
}

func (l *lockedWorld) Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Snapshot(ctx, events...)
}

func (l *lockedWorld) Numbers(ctx context.Context, event string, yield func([]int64)) error {
	l.mu.Lock()
	numbers := l.w.queues[event].numbers()
	l.mu.Unlock()
	for page := range slices.Chunk(numbers, 7) {
		l.mu.Lock()
		page = slices.DeleteFunc(page, func(n int64) bool { return !l.w.queues[event].in[n] })
		l.mu.Unlock()
		yield(page)
	}
	return nil
}

func (l *lockedWorld) Moves(ctx context.Context, after string, block time.Duration) ([]waitingroom.Move, error) {
	l.mu.Lock()
	moves, err := l.w.Moves(ctx, after, -1)
	l.mu.Unlock()
	if len(moves) == 0 && block > 0 {
		time.Sleep(min(block, 5*time.Millisecond))
	}
	return moves, err
}

// TestViewsAreSafe calls Round, Wait, Place and others in concurrent goroutines, while users leave
// and the stream moves is trimmed. No position rises. It is a test for the race detector.
func TestViewsAreSafe(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a", "b")
		source := &lockedWorld{w: w}
		w.queues["a"].enter(2000)
		w.queues["b"].enter(2000)
		views := New(source)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			for views.Round(ctx) == nil {
			}
		})
		for i := range 8 {
			name := []string{"a", "b"}[i%2]
			wg.Go(func() { // a user who polls
				shown := int64(2000)
				for ctx.Err() == nil {
					source.mu.Lock()
					change := w.queues[name].change
					source.mu.Unlock()
					e := views.Open(name)
					if e.Wait(ctx, change) {
						p := e.Place(1999, change)
						if !p.Known || p.Left || p.Position > shown {
							t.Errorf("place %+v, shown before: %d", p, shown)
						}
						shown = p.Position
					}
					e.Pace()
					e.Snapshot()
					e.Close()
					time.Sleep(time.Duration(i+1) * 3 * time.Millisecond)
				}
			})
		}
		for n := int64(1); n < 1500; n++ {
			source.mu.Lock()
			w.leave("a", n)
			w.leave("b", n)
			if n%100 == 0 {
				w.trim(1)
			}
			source.mu.Unlock()
			time.Sleep(10 * time.Millisecond)
		}
		wg.Wait()
		require.Equal(t, int64(1999-1499), views.Open("a").Place(1999, 0).Position)
	})
}

// BenchmarkPlace looks positions up from all cores, while changes arrive every 5 ms.
func BenchmarkPlace(b *testing.B) {
	views := New(newWorld("a"))
	e := views.Open("a")
	e.view = million(b)
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			change := e.view.Change() + 1
			m := waitingroom.Move{Change: change, Gone: gone(change*200, 200, 1_000_000, 1)}
			e.read(entry{stream.ID{MS: uint64(change), Seq: 0}, m})
			<-tick.C
		}
	})
	b.RunParallel(func(pb *testing.PB) {
		for n := int64(1); pb.Next(); n = (n + 7919) % 1_000_000 {
			if !e.Place(n, 0).Known {
				b.Error("the place is not known")
			}
		}
	})
	cancel()
	wg.Wait()
}

// TestOneLoadIsEnough: users leave before, during and after a load, and no second load is needed,
// although entries that were written before the load's snapshot are read after it.
func TestOneLoadIsEnough(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a", "b")
		w.queues["a"].enter(200)
		w.queues["b"].enter(200)
		views := New(w)
		views.Open("a")
		rounds(t, views, time.Second)
		for n := int64(1); n < 20; n++ {
			w.leave("b", n)
		}
		clear(w.calls)
		n := int64(50)
		w.between = func() {
			if n < 150 {
				w.leave("a", n)
				w.leave("b", n)
				n++
				time.Sleep(20 * time.Millisecond)
			}
		}
		require.True(t, views.Open("b").Wait(t.Context(), 0)) // loads
		rounds(t, views, 20*time.Second)
		requireExact(t, w, views)
		require.Equal(t, int64(150), n)
		require.Equal(t, 1, w.calls["numbers"])
	})
}

// TestOthersGoOnDuringALoad: while the view of a long queue is loaded, the views of other events
// stay current.
func TestOthersGoOnDuringALoad(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a", "long")
		w.queues["a"].enter(200)
		w.queues["long"].enter(2000)
		views := New(w)
		a := views.Open("a")
		rounds(t, views, time.Second)
		views.Open("long")
		next := int64(0)
		w.between = func() {
			time.Sleep(50 * time.Millisecond)
			if next++; next%4 == 0 {
				w.leave("a", next/4)
			}
			if behind := w.queues["a"].change - a.view.Change(); behind > 3 {
				t.Errorf("the view is %d changes behind", behind)
			}
		}
		rounds(t, views, 20*time.Second)
		require.Equal(t, 2, w.calls["numbers"])
		require.Positive(t, w.queues["a"].change)
	})
}

// TestHistoryThatWasReplaced: Redis loses changes that a view includes, and then makes other
// changes with the same numbers before the next snapshot. The view is loaded again when the first
// of these is read.
func TestHistoryThatWasReplaced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(100)
		views := New(w)
		e := views.Open("a")
		rounds(t, views, time.Second)
		backup := w.backup()
		w.leave("a", 1)
		w.leave("a", 2)
		require.NoError(t, views.Round(t.Context()))
		require.Equal(t, int64(2), e.view.Change())
		w.restore(backup)
		time.Sleep(time.Millisecond)
		w.leave("a", 3)
		w.leave("a", 4)
		w.leave("a", 5)
		require.NoError(t, views.Round(t.Context()))
		require.False(t, e.Place(50, 0).Known)
		rounds(t, views, time.Second)
		requireExact(t, w, views)
	})
}

// TestLengthIsCompared: an event is declared again, and by chance its new changes continue the
// numbers of the view's changes. The view's length differs from the queue's, so it is loaded again.
// If the loads do not help, there are at most as many of them as intervals doubtInterval.
func TestLengthIsCompared(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld("a")
		w.queues["a"].enter(100)
		w.leave("a", 1, 2, 3)
		views := New(w)
		views.Open("a")
		rounds(t, views, 3*time.Second)
		w.queues["a"] = newQueue()
		w.queues["a"].enter(120)
		w.leave("a", 17, 18)
		w.leave("a", 50)
		w.trim(1)
		rounds(t, views, 3*time.Second)
		requireExact(t, w, views)

		clear(w.calls)
		w.ghosts = 1
		rounds(t, views, 10*doubtInterval)
		require.LessOrEqual(t, w.calls["numbers"], 10)
		requireExact(t, w, views)
	})
}

// TestQueueOfALoadIsBounded: if more than maxQueued entries of moves arrive during a load, its view
// is not used, and the event needs another load.
func TestQueueOfALoadIsBounded(t *testing.T) {
	t.Parallel()
	e := New(newWorld()).Open("a")
	require.True(t, e.beginLoad())
	require.False(t, e.beginLoad(), "a load runs")
	for i := range maxQueued + 10 {
		e.read(entry{stream.ID{MS: 1, Seq: uint64(i)}, waitingroom.Move{Change: int64(i) + 1}})
		require.LessOrEqual(t, len(e.load.queue), maxQueued)
	}
	e.install(&View{}, waitingroom.Snapshot{}, time.Time{}, stream.ID{})
	require.False(t, e.Place(1, 0).Known)
	require.True(t, e.needsLoad())
}

// TestLateSnapshot: while a snapshot for Round is on its way, a caller of Wait loads the event. The
// snapshot is older than this view and must not cause it to be dropped.
func TestLateSnapshot(t *testing.T) {
	t.Parallel()
	for name, declared := range map[string]bool{"known event": true, "unknown event": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				if declared {
					w.queues["a"] = newQueue()
				}
				views := New(w)
				e := views.Open("a")
				w.late = func() {
					w.queues["a"] = newQueue()
					w.queues["a"].enter(10)
					w.leave("a", 1)
					require.True(t, e.Wait(t.Context(), 1))
				}
				require.NoError(t, views.Round(t.Context()))
				requireExact(t, w, views)
				rounds(t, views, 3*time.Second)
				requireExact(t, w, views)
				require.Equal(t, 1, w.calls["numbers"])
			})
		})
	}
}
