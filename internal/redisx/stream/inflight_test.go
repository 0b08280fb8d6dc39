package stream

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestInFlightRoom(t *testing.T) {
	t.Parallel()
	over, end := context.WithCancel(context.Background())
	end()
	const size = 8 << 10
	f := newInFlight(100, 16*size) // handlers may have a quarter: two entries, each of which counts size + workCost
	room := func() int { return f.awaitRoom(over, size) }
	add := func(id string) []Entry {
		return f.begin([]Entry{{ID: id, Fields: []string{"data", strings.Repeat("x", size)}}})
	}
	require.Equal(t, 2, room())
	first, second := add("1"), add("2")
	require.Zero(t, room())
	f.remove([]string{"1"})
	require.Equal(t, 1, room())

	// Entries that wait to be delivered again count only towards maxBytes, not towards the part for
	// handlers.
	f.pause(first) // changes nothing, because first was removed
	f.pause(second)
	f.pause(second)
	require.Equal(t, 2, room())
	for i := 3; room() > 0; i++ {
		f.pause(add(fmt.Sprint(i)))
	}
	ids, working := f.held()
	require.Len(t, ids, 16)
	require.Zero(t, working)
	require.Equal(t, second, f.resume(second))
	_, working = f.held()
	require.Equal(t, 1, working)
	f.remove(ids)
	require.Equal(t, 2, room())

	// One entry fits, however large it is.
	require.Equal(t, 1, f.awaitRoom(over, 100*size))
}

func TestInFlightBoundsBytes(t *testing.T) {
	f := newInFlight(100, 1000)
	big := []Entry{{ID: "1-0", Fields: []string{"data", string(make([]byte, 2000))}}}
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.Equal(t, big, f.begin(big))
	require.Empty(t, f.begin(big))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.Zero(t, f.awaitRoom(ended, 2000))
	go f.remove([]string{"1-0", "unknown"})
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.Zero(t, f.bytes)
}

// TestBytesInWorkAreBounded: of entries of 8 KiB, handlers have two at a time if MaxBytes is 128
// KiB. Those that wait to be delivered again do not block the entries behind them.
func TestBytesInWorkAreBounded(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publishData(t, c, stream, 0, 14, strings.Repeat("x", 8<<10))
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{MaxBytes: 128 << 10, RetryAfter: patience})
		for i := range 7 {
			held := receive(t, out)
			last := receive(t, out)
			require.EqualValues(t, 2*i+2, pending(t, c, stream))
			held.Nack()
			last.Nack()
		}
	})
}

// TestInFlightForgetsLost: an entry that waits to be delivered again is dropped if another consumer
// has claimed it meanwhile.
func TestInFlightForgetsLost(t *testing.T) {
	t.Parallel()
	f := newInFlight(100, 1<<20)
	var entries []Entry
	var ids []string
	for i := range 4 {
		ids = append(ids, fmt.Sprintf("%d-0", i+1))
		entries = append(entries, Entry{ID: ids[i]})
	}
	require.Len(t, f.begin(entries), 4)
	f.pause(entries)
	lost := ids[:3]
	require.Equal(t, 3, f.setLost(lost))
	require.Zero(t, f.setLost(lost))
	require.Empty(t, f.begin(entries[1:2]), "taken back")
	require.Equal(t, []Entry{entries[1], entries[3]}, f.resume(entries))
	held, working := f.held()
	require.ElementsMatch(t, []string{ids[1], ids[3]}, held)
	require.Equal(t, 2, working)
}
