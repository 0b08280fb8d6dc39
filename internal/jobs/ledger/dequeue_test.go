package ledger_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDequeueInNoOrder: a queue holds 12 of a group's 40 jobs, not sorted by ordinal, as after a
// requeue. Admit makes these 12 ready in their order, each with its own ordinal and payload.
func TestDequeueInNoOrder(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 40)
		queue := w.p.Queue("g", "T")
		blobs := w.c.LRange(w.Context(), queue, 0, -1).Val()
		order := []int{15, 26, 17, 9, 10, 20, 31, 22, 33, 24, 5, 16}
		for i, ordinal := range order {
			w.c.LSet(w.Context(), queue, int64(i), blobs[ordinal])
		}
		w.c.LTrim(w.Context(), queue, 0, int64(len(order)-1))
		require.Equal(w, len(order), w.admit("T", 40, noLimit).Moved)
		for i, j := range w.read("T", "c") {
			require.EqualValues(w, order[i], j.Ordinal)
			require.Equal(w, fmt.Sprintf(`{"n":%d}`, order[i]), j.Payload)
		}
		states := w.states("g")
		for i := range 40 {
			want := byte('W')
			for _, ordinal := range order {
				if ordinal == i {
					want = 'R'
				}
			}
			require.Equal(w, string(want), states[i:i+1], "job %d", i)
		}
	})
}
