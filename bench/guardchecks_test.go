package bench

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/guard"
)

func grantsAt(name string, ms ...int64) (events []guardEvent) {
	for _, at := range ms {
		events = append(events, guardEvent{Name: name, Granted: at * 1000, Works: at * 1000, Ends: at*1000 + 1, Released: at*1000 + 2})
	}
	return events
}

func TestOverdrawsOfAWindow(t *testing.T) {
	of := guardTask{Kind: "take", Rate: guard.PerWindow(2, time.Second)}
	require.Zero(t, overdraws(grantsAt("a", 0, 999, 1000, 1999), of))
	require.Equal(t, 1, overdraws(grantsAt("a", 0, 998, 999, 1999), of), "the third call is within a second of the first")
	require.Zero(t, overdraws(append(grantsAt("a", 0, 1), grantsAt("b", 0, 1)...), of), "each key has a limit of its own")
}

func TestOverdrawsOfABucket(t *testing.T) {
	of := guardTask{Kind: "take", Rate: guard.Rate{Permits: 10, Window: time.Second, Burst: 3}}
	require.Zero(t, overdraws(grantsAt("a", 0, 0, 0, 100, 200, 1000, 1000, 1000), of))
	require.Equal(t, 1, overdraws(grantsAt("a", 0, 0, 0, 99), of))
}

func TestOverdrawsOfLeases(t *testing.T) {
	of := guardTask{Kind: "lease", Rate: guard.PerWindow(2, time.Second), Capacity: 1}
	events := grantsAt("a", 0, 100)
	require.Zero(t, overdraws(events, of))
	events[0].Ends = 150_000
	require.Equal(t, 1, overdraws(events, of), "the second lease began while the first was held")
	events = grantsAt("a", 0, 500, 1100)
	require.Zero(t, overdraws(events, of))
	events[0].Works = 900_000
	require.Equal(t, 1, overdraws(events, of), "the first holder worked late")
	events[0].Released = 1_000_000
	require.Zero(t, overdraws(events, of), "a lease that was held for a whole window is outside the promise")
}

func TestInversions(t *testing.T) {
	events := []guardEvent{{Number: 2, Granted: 20}, {Number: 0, Granted: 10}, {Number: 5, Granted: 30}, {Number: 6, Granted: 40}}
	require.Zero(t, inversions(events), "calls that left are not missed")
	require.Equal(t, 2, inversions(append(events, guardEvent{Number: 3, Granted: 41}, guardEvent{Number: 4, Granted: 42})))
}

func TestProbesOver(t *testing.T) {
	b := guard.BreakerPolicy{Failures: 1, OpenFor: 100 * time.Millisecond, Successes: 2}
	require.Zero(t, probesOver(grantsAt("1", 0, 5, 105, 106, 300), b))
	require.Equal(t, 1, probesOver(grantsAt("1", 0, 5, 104), b))
}

func TestMediansOfRounds(t *testing.T) {
	rounds := []GuardCosts{{RedisUS: CallCosts{Take: 3}}, {RedisUS: CallCosts{Take: 9}}, {RedisUS: CallCosts{Take: 4}}}
	b, i := &guardBench{GuardsOptions: GuardsOptions{Rounds: 3}}, 0
	got, err := inRounds(t.Context(), b, "costs", func(context.Context) (GuardCosts, error) {
		i++
		return rounds[i-1], nil
	})
	require.NoError(t, err)
	require.InDelta(t, 4, got.RedisUS.Take, 1e-9)
}
