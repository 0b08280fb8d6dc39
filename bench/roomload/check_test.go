package roomload

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

const second = 1_000_000

// waited returns the visit of a user with this number, who entered and got a token (admitted) at
// times in seconds; 0: never. The stream is open until the token, or until second 100.
func waited(number int64, entered, admitted float64) Visit {
	v := Visit{
		User: fmt.Sprintf("u%d", number), Number: number, Sent: int64(entered*second) - 1000, Entered: int64(entered * second),
		Streams: []Span{{From: int64(entered * second), To: 100 * second}},
	}
	if admitted > 0 {
		v.Admitted = int64(admitted * second)
		v.Fence, v.Expires = v.Admitted-10_000, v.Admitted+60*second
		v.Streams[0].To = v.Admitted
	}
	return v
}

func TestOverCapacity(t *testing.T) {
	t.Parallel()
	a, b, c := waited(1, 1, 10), waited(2, 1, 20), waited(3, 1, 30)
	require.Zero(t, OverCapacity([]Visit{a, b, c}, 3))
	require.Equal(t, 1, OverCapacity([]Visit{a, b, c}, 2), "the third token is one too many")
	a.Freed = 30 * second
	require.Zero(t, OverCapacity([]Visit{a, b, c}, 2), "the first user gave the slot back")
	a.Freed, a.Expires = 0, 25*second
	require.Zero(t, OverCapacity([]Visit{a, b, c}, 2), "the first token has expired, with leeway")
	a.Expires++
	require.Equal(t, 1, OverCapacity([]Visit{a, b, c}, 2), "a verifier accepts the first token in the leeway")
	require.Zero(t, OverCapacity([]Visit{waited(1, 1, 0)}, 0), "a user without a token")
}

func TestInversions(t *testing.T) {
	t.Parallel()
	first, middle, last := waited(1, 1, 10), waited(2, 2, 10.001), waited(3, 3, 10.5)
	require.Zero(t, Inversions([]Visit{last, first, middle}), "the order of the list does not matter")
	last.Admitted = first.Admitted - 1
	require.Zero(t, Inversions([]Visit{last, first, middle}), "the order of the receipts does not matter")

	passed := waited(1, 1, 11)
	require.Equal(t, 2, Inversions([]Visit{passed, middle, last}), "two users passed the first one")
	passed = waited(1, 1, 0)
	require.Equal(t, 2, Inversions([]Visit{passed, middle, last}), "a user who is never promoted is passed, too")
	passed.Streams[0].To = 12 * second
	require.Zero(t, Inversions([]Visit{passed, middle, last}), "the user may have been promoted before the tab was closed")
	passed.Streams[0].To = 5 * second
	require.Zero(t, Inversions([]Visit{passed, middle, last}), "a user who is not present may be passed")

	passed = waited(1, 1, 30)
	passed.Streams = []Span{{From: second, To: 2 * second}, {From: 11 * second, To: 30 * second}}
	require.Zero(t, Inversions([]Visit{passed, middle}), "the second user was promoted before the first returned")
	passed.Streams[1].From = 9 * second
	require.Equal(t, 1, Inversions([]Visit{passed, middle}))
}

func TestInversionsWithoutNumbers(t *testing.T) {
	t.Parallel()
	a, b := waited(1, 1, 10), waited(2, 2, 9)
	a.Number = 0
	require.Equal(t, 1, Inversions([]Visit{a, b}), "the first user had entered before the second one asked")
	b.Sent = a.Entered - 1
	require.Zero(t, Inversions([]Visit{a, b}), "both asked at the same time: the order is unknown")
}

func TestLost(t *testing.T) {
	t.Parallel()
	admitted, waits, ended, closed := waited(1, 1, 2), waited(2, 1, 0), waited(3, 1, 0), waited(4, 1, 0)
	waits.Open, ended.Ended, closed.Closed = true, "gone", true
	outside := Visit{User: "u5", Sent: 1}
	all := []Visit{admitted, waits, ended, closed, outside}
	require.Equal(t, []string{"u3", "u5"}, Lost(all, false))
	require.Equal(t, []string{"u2", "u3", "u5"}, Lost(all, true))
}

func TestUtilisation(t *testing.T) {
	t.Parallel()
	a, b, c := waited(1, 1, 10), waited(2, 1, 15), waited(3, 1, 20)
	a.Freed = 15 * second
	require.InDelta(t, 1, Utilisation([]Visit{a, b, c}, 1), 1e-9)
	require.InDelta(t, 0.5, Utilisation([]Visit{a, b, c}, 2), 1e-9)
	a.Freed = 12 * second
	require.InDelta(t, 0.7, Utilisation([]Visit{a, b, c}, 1), 1e-9, "the slot was empty for 3 of 10 seconds")
	require.Zero(t, Utilisation([]Visit{a}, 1), "nothing to measure")
}

func TestWrongPositions(t *testing.T) {
	t.Parallel()
	a, b, away := waited(5, 1, 0), waited(9, 1, 0), waited(7, 1, 0)
	a.Open, a.Position, b.Open, b.Position = true, 1, true, 3
	numbers := map[string]int64{"u5": 5, "u7": 7, "u9": 9}
	require.Empty(t, WrongPositions([]Visit{a, b, away}, numbers), "users who are away count")
	b.Position = 2
	require.Equal(t, []string{"u9"}, WrongPositions([]Visit{a, b, away}, numbers))
}

func TestCheckReturns(t *testing.T) {
	t.Parallel()
	broken := func(number int64) Visit {
		v := waited(number, 1, 0)
		v.Streams = []Span{{From: second, To: 10 * second}, {From: 12 * second, To: 12 * second}, {From: 12 * second, To: 100 * second, Shown: 13 * second, Before: 7, First: 6}}
		return v
	}
	own, gone, rose, promoted, early := broken(2), broken(3), broken(4), broken(5), broken(6)
	own.Streams[0].Own = true
	gone.Streams = gone.Streams[:2]
	rose.Streams[2].First = 8
	promoted.Admitted = 14 * second
	early.Admitted = 5 * second
	before := map[string]int64{"u1": 1, "u2": 2, "u3": 3, "u4": 4, "u5": 5, "u7": 7}
	after := map[string]int64{"u1": 1, "u2": 2, "u4": 4, "u7": 70}
	all := []Visit{broken(1), own, gone, rose, promoted, early, broken(7), waited(8, 1, 0)}
	require.Equal(t, Returns{
		Users: 5, Back: 4, Kept: 2, Seconds: []float64{3, 3, 3, 3}, NotKept: []string{"u4", "u7"}, NotBack: []string{"u3"},
	}, CheckReturns(all, 9*second, 11*second, before, after))
	require.Equal(t, Returns{}, CheckReturns(all, 50*second, 60*second, before, after))
}
