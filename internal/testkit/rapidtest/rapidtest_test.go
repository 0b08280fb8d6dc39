package rapidtest

import (
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawn returns the numbers that a round of this test draws.
func drawn(t *testing.T, round int) (all []uint64) {
	Check(t, round, func(rt *rapid.T) { all = append(all, rapid.Uint64().Draw(rt, "n")) })
	return all
}

// TestCheck: each of ten rounds draws the same numbers alone and while the nine others run at the
// same time, and no two rounds draw the same.
func TestCheck(t *testing.T) {
	alone := map[int][]uint64{}
	for round := range 10 {
		alone[round] = drawn(t, round)
		require.GreaterOrEqual(t, len(alone[round]), 20) // 100, or with -short a fifth
		for other := range round {
			require.False(t, slices.Equal(alone[other], alone[round]), "rounds %d and %d", other, round)
		}
	}
	beside := make([][]uint64, len(alone))
	var wg sync.WaitGroup
	for round := range beside {
		wg.Go(func() { beside[round] = drawn(t, round) })
	}
	wg.Wait()
	for round := range beside {
		require.Equal(t, alone[round], beside[round])
	}
}

// TestSequencesAreFixed: the first eight numbers that round 0 draws are those written in the test.
// If a seed is given, they differ.
func TestSequencesAreFixed(t *testing.T) {
	fixed, got := []uint64{0x2, 0x5, 0x0, 0x56e5, 0xd, 0x180464, 0x6a7b9, 0xe99}, drawn(t, 0)[:8]
	if given() == 0 {
		require.Equal(t, fixed, got)
	} else {
		require.NotEqual(t, fixed, got)
	}
}
