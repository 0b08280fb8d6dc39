package bench_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
)

func roomOptions(t *testing.T, only ...string) bench.RoomOptions {
	return bench.RoomOptions{
		Options: options(t, ""), Users: 500, Brokers: 2, Events: 50, Capacity: 125, Rate: 1000,
		Session: 500 * time.Millisecond, Churn: 0.1, Kill: 1, Only: only,
	}
}

// requireNoFaults requires that the benchmark has found no violation and no fault.
func requireNoFaults(t *testing.T, r bench.Room) {
	t.Helper()
	require.Empty(t, r.Violations)
	require.Zero(t, r.RoomFaults)
}

// TestRoomSurvivesAKilledBroker lets 500 users wait at two brokers and kills one of these. The
// benchmark checks each frame and each token. Speeds are not compared with goals here.
func TestRoomSurvivesAKilledBroker(t *testing.T) {
	t.Parallel()
	r, err := bench.RunRoom(t.Context(), roomOptions(t, "kill"))
	require.NoError(t, err)
	requireNoFaults(t, r)
	require.Equal(t, 500, r.Streams)
	require.Positive(t, r.Scripts.Broken)
	require.InDelta(t, 1, r.PlacesKept, 0)
	require.Positive(t, r.ReturnedP99S)
	require.Zero(t, r.Scripts.SlotsLeaked)
	require.Nil(t, r.RoomEnter, "it was not asked for")

	b, err := json.Marshal(r)
	require.NoError(t, err)
	for _, name := range []string{"users", "brokers", "streams", "position_rises", "lost", "places_kept", "scripts", "violations"} {
		require.Contains(t, string(b), `"`+name+`":`)
	}
}
