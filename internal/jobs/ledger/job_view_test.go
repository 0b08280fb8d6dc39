package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func (w *world) job(group string, ordinal int64) ledger.JobStatus {
	w.Helper()
	j, err := ledger.ReadJob(w.Context(), w.c, w.p, group, ordinal)
	require.NoError(w, err)
	return j
}

func TestReadJob(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 4)
		held := w.begin("T", "c", 3)
		w.outcome("T", done(held[0]))
		w.outcome("T", other(ledger.OutcomeFailed, held[1], 0))
		w.outcomeIn(ledger.Congestion{Cap: time.Hour}, "T", other(ledger.OutcomeRetry, held[2], time.Minute))

		require.Equal(w, ledger.Done, w.job("g", 0).State.Letter())
		require.Nil(w, w.job("g", 0).LastError())
		failed := w.job("g", 1)
		require.Equal(w, ledger.Failed, failed.State.Letter())
		require.Equal(w, 1, failed.State.Attempt())
		require.Equal(w, "BOOM", failed.LastError().Code)
		require.Equal(w, "it broke", failed.LastError().Error)
		require.EqualValues(w, 1, failed.LastError().Ordinal)
		require.Zero(w, failed.LastError().Until)
		retried := w.job("g", 2)
		require.Equal(w, ledger.NonReady, retried.State.Letter())
		require.Equal(w, "E", retried.LastError().Reason)
		require.Equal(w, time.Minute, time.UnixMilli(retried.LastError().Until).Sub(retried.LastError().Time()))
		require.Equal(w, ledger.Waiting, w.job("g", 3).State.Letter())

		w.c.HSet(w.Context(), w.p.Errors("g"), "2", "no JSON")
		require.Equal(w, ledger.JobStatus{State: retried.State}, w.job("g", 2), "the state holds although the record can't be read")
		for _, unknown := range []struct {
			group   string
			ordinal int64
		}{{"g", 4}, {"g", 1 << 30}, {"h", 0}} {
			_, err := ledger.ReadJob(w.Context(), w.c, w.p, unknown.group, unknown.ordinal)
			require.ErrorIs(w, err, api.ErrNotFound)
			letter, err := ledger.ReadLetter(w.Context(), w.c, w.p, unknown.group, unknown.ordinal)
			require.NoError(w, err)
			require.Zero(w, letter)
		}
		letter, err := ledger.ReadLetter(w.Context(), w.c, w.p, "g", 1)
		require.NoError(w, err)
		require.Equal(w, ledger.Failed, letter)
		w.c.Del(w.Context(), w.p.Failures("g"))
		w.c.Set(w.Context(), w.p.Failures("g"), "x", 0)
		_, err = ledger.ReadJob(w.Context(), w.c, w.p, "g", 1)
		require.ErrorContains(w, err, "read job g.1: WRONGTYPE")
	})
}

// TestCountWaiting: CountWaiting counts the waiting jobs below an ordinal, among 40,000 states:
// more than one command reads.
func TestCountWaiting(t *testing.T) {
	both(t, func(w *world) {
		const n = 40_000
		states := make([]byte, 0, 2*n)
		for i := range n {
			states = append(states, "WNWR"[i%4], '!')
		}
		w.c.Set(w.Context(), w.p.States("g"), string(states), 0)
		for before, want := range map[int64]int64{0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 32_768: 16_384, 32_769: 16_385, 32_771: 16_386, n: n / 2, 2 * n: n / 2} {
			got, err := ledger.CountWaiting(w.Context(), w.c, w.p, "g", before)
			require.NoError(w, err)
			require.Equal(w, want, got, "before %d", before)
		}
	})
}
