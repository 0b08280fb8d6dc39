package waitingroom_test

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

// A broker that was silent lets its users enter again, while another broker still sweeps with the
// list of brokers from before. The users stay present.
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
