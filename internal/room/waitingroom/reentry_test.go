package waitingroom_test

import (
	"fmt"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// TestReentryDuringASweep: a broker that was silent repeats enter for user a, while another broker
// sweeps with an older list of live brokers that does not contain the first. User a stays waiting;
// user b, for whom enter was not repeated, becomes away.
func TestReentryDuringASweep(t *testing.T) {
	onBoth(t, func(w *world) {
		w.declare(defaults(0))
		w.enter("a", "b")
		key := w.p.RoomUsers(event)
		since := regexp.MustCompile(`\|\d{13}\|`)
		for _, user := range []string{"a", "b"} { // their streams are old
			record := w.rdb.HGet(t.Context(), key, user).Val()
			require.Regexp(t, since, record)
			require.NoError(t, w.rdb.HSet(t.Context(), key, user, since.ReplaceAllString(record, "|1000|")).Err())
		}
		reply, err := w.Enter(t.Context(), event, waitingroom.EnterAgain, 0, visitor("a"))
		require.NoError(t, err)
		require.Equal(t, waitingroom.Back, reply.Entries[0].Code)

		_, n, _, err := w.Sweep(t.Context(), event, 0, []string{"00000002"})
		require.NoError(t, err)
		require.Equal(t, 1, n, "only b, who has not entered again, is away")
		state, err := w.State(t.Context(), event, "a")
		require.NoError(t, err)
		require.Equal(t, waitingroom.Entered, state)
	})
}

// TestSweepInPages: a sweep looks at 1,000 users a call, and moves at most 200.
func TestSweepInPages(t *testing.T) {
	onBoth(t, func(w *world) {
		w.declare(defaults(0))
		var users []string
		for i := range 1100 {
			users = append(users, fmt.Sprint(i))
		}
		for chunk := range slices.Chunk(users, waitingroom.MostUsers) {
			w.enter(chunk...)
		}
		key := w.p.RoomUsers(event)
		records := w.rdb.HGetAll(t.Context(), key).Val()
		for user, record := range records { // their streams are old
			records[user] = regexp.MustCompile(`\|\d{13}\|`).ReplaceAllString(record, "|1000|")
		}
		require.NoError(t, w.rdb.HSet(t.Context(), key, records).Err())
		sweep := func(alive string) (moved []int) {
			for from := int64(0); ; {
				next, n, _, err := w.Sweep(t.Context(), event, from, []string{alive})
				require.NoError(t, err)
				if moved = append(moved, n); next == 0 {
					return moved
				}
				require.Greater(t, next, from)
				from = next
			}
		}
		require.Equal(t, []int{0, 0}, sweep("00000001"))
		require.Equal(t, []int{200, 200, 200, 200, 200, 100}, sweep("00000002"))
		require.EqualValues(t, 1100, w.snapshot().Away)
	})
}
