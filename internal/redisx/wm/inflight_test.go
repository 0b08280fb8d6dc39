package wm

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestInFlightRoom(t *testing.T) {
	t.Parallel()
	over, end := context.WithCancel(context.Background())
	end()
	const size = 8 << 10
	f := newInFlight(100, 16*size) // handlers may have a quarter: two messages, each of which counts size + workCost
	room := func() int { return f.awaitRoom(over, size) }
	add := func(id string) *delivery {
		d := f.add(stream.Entry{ID: id, Fields: []string{"data", strings.Repeat("x", size)}})
		f.setWorking(d, true)
		return d
	}
	require.Equal(t, 2, room())
	first, second := add("1"), add("2")
	require.Zero(t, room())
	f.remove([]string{"1"})
	require.Equal(t, 1, room())

	// Messages that wait for redelivery count only towards maxBytes.
	f.setWorking(first, false) // changes nothing, because first was removed
	f.setWorking(second, false)
	f.setWorking(second, false)
	require.Equal(t, 2, room())
	for i := 3; room() > 0; i++ {
		f.setWorking(add(fmt.Sprint(i)), false)
	}
	all, waiting := f.held()
	require.Len(t, all, 16)
	require.Len(t, waiting, 16)
	f.remove(all)
	require.Equal(t, 2, room())

	// One message fits, however large it is.
	require.Equal(t, 1, f.awaitRoom(over, 100*size))
}

// Messages that wait for redelivery do not block the messages behind them, until all
// bytes are used.
func TestBytesInWorkAreBounded(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		data := strings.Repeat("x", 8<<10)
		for range 14 {
			add(t, c, stream, "type", "jobs.append", "data", data)
		}
		out := subscribe(t, subscriber(t, c, SubscriberConfig{MaxBytes: 128 << 10, RedeliverAfter: patience}), stream)
		for i := range 7 {
			held := receive(t, out)
			last := receive(t, out)
			require.EqualValues(t, 2*i+2, pending(t, c, stream))
			held.Nack()
			last.Nack()
		}
	})
}

// A message that waits for redelivery is dropped when another consumer has claimed it.
func TestInFlightForgetsLost(t *testing.T) {
	t.Parallel()
	f := newInFlight(100, 1<<20)
	ids := []string{"1-0", "2-0", "3-0", "4-0"}
	for _, id := range ids {
		require.NotNil(t, f.add(stream.Entry{ID: id}))
	}
	lost := ids[:3]
	require.Equal(t, 3, f.setLost(lost))
	require.Zero(t, f.setLost(lost))
	require.True(t, f.dropLost(f.byID[ids[0]]))
	require.False(t, f.dropLost(f.byID[ids[3]]))
	require.Nil(t, f.add(stream.Entry{ID: ids[1]}), "taken back")
	require.False(t, f.dropLost(f.byID[ids[1]]))
}
