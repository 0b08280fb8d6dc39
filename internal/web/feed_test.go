package web

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const shortest, longest = 200 * time.Millisecond, time.Second // between two polls

func newTestFeed() *Feed[int] { return NewFeed[int](shortest, longest) }

func next(v *Viewer[int]) (int, error) {
	for {
		value, changed, err := v.Next()
		if changed == nil || err != nil {
			return value, err
		}
		<-changed
	}
}

// counter returns a function that makes polls, which return 1, 2 and so on up to last, and the
// numbers of calls: of all polls, and of newPoll. With last 0 the polls have no end.
func counter(last int) (newPoll func() Poll[int], polls, pollers *atomic.Int64) {
	polls, pollers = new(atomic.Int64), new(atomic.Int64)
	return func() Poll[int] {
		pollers.Add(1)
		n := 0
		return func(context.Context) (State[int], error) {
			polls.Add(1)
			n++
			return State[int]{Value: n, Changed: true, Last: n == last}, nil
		}
	}, polls, pollers
}

func TestViewersShareAPoller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestFeed()
		newPoll, polls, pollers := counter(0)
		viewers := make([]*Viewer[int], 100)
		for i := range viewers {
			viewers[i] = f.Watch("a", newPoll)
		}
		other := f.Watch("b", newPoll)
		for want := range 3 {
			for _, v := range viewers {
				got, err := next(v)
				require.NoError(t, err)
				require.Equal(t, want+1, got)
			}
		}
		require.EqualValues(t, 2, pollers.Load())
		require.LessOrEqual(t, polls.Load(), int64(6))
		for _, v := range append(viewers, other) {
			v.Close()
		}
		seen := polls.Load()
		<-time.After(time.Minute)
		require.Equal(t, seen, polls.Load(), "nobody is watching")

		v := f.Watch("a", newPoll)
		defer v.Close()
		got, _ := next(v)
		require.Equal(t, 1, got, "another poller has begun")
	})
}

// TestSlowViewerGetsTheLastValue: a slow viewer gets the newest value. If a topic's poller has
// ended, a slow viewer still gets the poller's last value, even if another viewer has started a new
// poller for the topic.
func TestSlowViewerGetsTheLastValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestFeed()
		newPoll, _, pollers := counter(7)
		slow := f.Watch("a", newPoll)
		defer slow.Close()
		got, err := next(slow)
		require.NoError(t, err)
		require.Equal(t, 1, got)
		<-time.After(time.Minute)
		again := f.Watch("a", newPoll)
		defer again.Close()
		got, _ = next(again)
		require.Equal(t, 1, got, "the topic had ended")
		require.EqualValues(t, 2, pollers.Load())
		got, _ = next(slow)
		require.Equal(t, 7, got)
	})
}

func TestErrors(t *testing.T) {
	away := fmt.Errorf("read: %w", api.ErrUnavailable)
	gone := errors.New("gone")
	for name, c := range map[string]struct {
		polls []error // a nil error comes with a new value
		want  []any
	}{
		"unavailable at first":     {[]error{away}, []any{away}},
		"unavailable in between":   {[]error{nil, away, away, nil, gone}, []any{1, 4, gone}},
		"gone":                     {[]error{nil, nil, gone}, []any{1, 2, gone}},
		"unavailable, then gone":   {[]error{nil, away, gone}, []any{1, gone}},
		"an error does not expire": {[]error{gone}, []any{gone, gone}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := 0
				v := newTestFeed().Watch("a", func() Poll[int] {
					return func(context.Context) (State[int], error) {
						n++
						return State[int]{Value: n, Changed: true}, c.polls[n-1]
					}
				})
				defer v.Close()
				for _, want := range c.want {
					got, err := next(v)
					if wantErr, ok := want.(error); ok {
						require.ErrorIs(t, err, wantErr)
						continue
					}
					require.NoError(t, err)
					require.Equal(t, want, got)
				}
			})
		})
	}
}

func TestTopicThatDoesNotChangeIsPolledLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		polls := 0
		v := newTestFeed().Watch("a", func() Poll[int] {
			return func(context.Context) (State[int], error) {
				polls++
				return State[int]{Changed: polls == 1}, nil
			}
		})
		<-time.After(time.Minute)
		v.Close()
		require.InDelta(t, time.Minute/longest, polls, 3)
	})
}

func TestPanicEndsThePoller(t *testing.T) {
	v := newTestFeed().Watch("a", func() Poll[int] {
		return func(context.Context) (State[int], error) { panic("secret-payload") }
	})
	defer v.Close()
	_, err := next(v)
	require.ErrorContains(t, err, "poll panicked")
	require.NotContains(t, err.Error(), "secret-payload")
}

// TestCloseStopsAPoll: Close of the last viewer ends the ctx of a poll that is running.
func TestCloseStopsAPoll(t *testing.T) {
	begun := make(chan struct{})
	v := newTestFeed().Watch("a", func() Poll[int] {
		return func(ctx context.Context) (State[int], error) {
			close(begun)
			<-ctx.Done()
			return State[int]{}, ctx.Err()
		}
	})
	<-begun
	v.Close()
}
