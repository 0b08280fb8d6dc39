package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestGroupState(t *testing.T) {
	both(t, func(w *world) {
		read := func(group string) (ledger.GroupState, bool) {
			var state func() (ledger.GroupState, bool)
			_, err := w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
				state = ledger.QueueGroupState(w.Context(), pipe, w.p, group)
				return nil
			})
			require.NoError(w, err)
			return state()
		}
		_, exists := read("g")
		require.False(w, exists)

		w.create("g", "acme", "T", "total", "2")
		g, exists := read("g")
		require.True(w, exists)
		require.Equal(w, ledger.GroupState{Status: api.StatusCreated, Round: 1, Announced: true}, g)
		w.appendJobs(ledger.AppendArgs{Group: "g", Request: ledger.SubmissionPrefix + "0", Mode: ledger.AppendSeal, Jobs: jobs(2)})
		w.pause(ledger.PauseGroup, "g")
		g, _ = read("g")
		require.Equal(w, ledger.GroupState{Status: g.Status, Round: 1, Sealed: true, Announced: true, Paused: true, Submitted: true}, g)
		w.cancel("g")
		g, _ = read("g")
		require.Equal(w, ledger.GroupState{Status: api.StatusCancelled, Round: 1, Sealed: true, Announced: true, Submitted: true}, g)
	})
}
