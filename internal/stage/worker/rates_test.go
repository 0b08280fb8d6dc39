package worker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStartRates(t *testing.T) {
	t.Parallel()
	var s startRates
	now := time.Unix(1_900_000_000, 0)
	require.Empty(t, s.perSecond(now))

	// Steady: 10 every 100 ms.
	run := func(n int, span time.Duration) {
		for range int(span / (100 * time.Millisecond)) {
			s.addAt(now, "T", n)
			now = now.Add(100 * time.Millisecond)
		}
	}
	run(10, time.Second)
	require.InDelta(t, 100, s.perSecond(now)["T"], 1, "right after the start it is known")
	run(10, 9*time.Second)
	require.InDelta(t, 100, s.perSecond(now)["T"], 6)
	run(20, 2*time.Second)
	require.Greater(t, s.perSecond(now)["T"], 130.0, "it rises before a whole span has passed")
	run(20, 8*time.Second)
	require.InDelta(t, 200, s.perSecond(now)["T"], 12)

	now = now.Add(rateSpan + time.Second)
	require.Empty(t, s.perSecond(now), "a type that rests has none")
}

// Starts that come at the beginning of each second are no other rate between two of these.
func TestStartRatesAreSteadyDespiteBursts(t *testing.T) {
	t.Parallel()
	var s startRates
	start := time.Unix(1_900_000_000, 0)
	for at := time.Duration(0); at < 20*time.Second; at += 100 * time.Millisecond {
		if at%time.Second == 0 {
			s.addAt(start.Add(at), "T", 6)
		}
		if at > rateSpan {
			require.InDelta(t, 6, s.perSecond(start.Add(at))["T"], 1.5, "%v", at)
		}
	}
}

func TestStartRatesCountAtLeastHalfASecond(t *testing.T) {
	t.Parallel()
	var s startRates
	now := time.Unix(1_900_000_000, 0)
	s.addAt(now, "T", 5)
	require.InDelta(t, 10, s.perSecond(now)["T"], 0.001, "no less than half a second counts")
	require.InDelta(t, 10, s.perSecond(now)["T"], 0.001, "asking changes nothing")
}
