package groups_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// sampled returns the Stats, `second` seconds after its start, of an installation that accepts 2
// jobs a second and ends one a second.
func sampled(second int64) api.Stats {
	return api.Stats{
		ActiveTenants: 3, Totals: api.JobTotals{Accepted: 2 * second, Done: second},
		Types:   []api.TypeStats{{Waiting: second}, {Waiting: 1, NonReady: 2, Ready: 3, InFlight: 4}},
		Workers: []api.WorkerStatus{{Workers: 5, Active: 2}, {Workers: 6}},
	}
}

// TestHistory: the history has the right rates, whether the samples are seconds or minutes apart,
// late, repeated, or from several processes. Each time slot keeps one sample.
func TestHistory(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := stagetest.Trusted(w.T)
		now, err := w.Store.Now(ctx)
		require.NoError(w.T, err)
		begin := now.Truncate(10 * time.Second).Add(-10 * time.Minute)
		// The numbers are the times of the samples in seconds: after a change of leader some come
		// from another process, some twice, one late, and none for a while. Of each 10 s only the
		// first sample is stored.
		for _, second := range []int64{0, 3, 11, 19, 20, 11, 47, 300, 301, 309, 290} {
			at := begin.Add(time.Duration(second) * time.Second)
			require.NoError(w.T, w.Store.Record(ctx, at, sampled(second)))
			require.NoError(w.T, w.Store.Record(ctx, at, api.Stats{}), "twice: nothing")
		}
		h, err := w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Equal(w.T, 10, h.StepSeconds)
		var at []int64
		for _, p := range h.Points {
			second := int64(p.T.Sub(begin).Seconds())
			at = append(at, second)
			require.Equal(w.T, api.HistoryPoint{T: p.T, Accepted: 2, Done: 1, Gauges: api.Gauges{
				Waiting: second + 1, NonReady: 2, Ready: 3, InFlight: 4, ActiveTenants: 3, Pool: 11, Busy: 2,
			}}, p)
		}
		require.Equal(w.T, []int64{11, 20, 47, 300}, at)

		// A failover has lost the latest writes, so totals go back: a rate is never negative.
		require.NoError(w.T, w.Store.Record(ctx, begin.Add(320*time.Second), sampled(100)))
		h, err = w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Zero(w.T, h.Points[len(h.Points)-1].Accepted)

		// The clock of Redis was set back: samples of the future don't stop the history.
		require.NoError(w.T, w.Store.Record(ctx, now.Add(time.Hour), sampled(0)))
		require.NoError(w.T, w.Store.Record(ctx, begin.Add(330*time.Second), sampled(110)))
		h, err = w.Store.History(ctx, 15)
		require.NoError(w.T, err)
		require.Equal(w.T, begin.Add(330*time.Second).UTC(), h.Points[len(h.Points)-1].T)

		// What is no sample is left out.
		require.NoError(w.T, w.Conn.Cmd.RPush(ctx, w.Space.History(), "x", "1 {", "").Err())
		_, err = w.Store.History(ctx, 1440)
		require.NoError(w.T, err)
	})
}

// TestLongHistory: a day has 8,640 samples, and an answer about 1,500 points at most.
func TestLongHistory(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	ctx := stagetest.Trusted(t)
	now, err := w.Store.Now(ctx)
	require.NoError(t, err)
	const n = ledger.MaxSamples + 50
	for i := range int64(n) {
		at := now.Add(-time.Duration(int64(n)-1-i) * 10 * time.Second)
		require.NoError(t, w.Store.Record(ctx, at, sampled(10*i)))
	}
	require.EqualValues(t, ledger.MaxSamples, w.Conn.Cmd.LLen(ctx, w.Space.History()).Val())
	for minutes, want := range map[int]struct{ step, least, most int }{
		15: {10, 89, 91}, 60: {10, 359, 361}, 240: {10, 1439, 1441}, 251: {20, 752, 755}, 1440: {60, 1438, 1441},
	} {
		h, err := w.Store.History(ctx, minutes)
		require.NoError(t, err)
		require.Equal(t, want.step, h.StepSeconds, minutes)
		require.GreaterOrEqual(t, len(h.Points), want.least, minutes)
		require.LessOrEqual(t, len(h.Points), want.most, minutes)
		for i, p := range h.Points {
			require.InDelta(t, 2, p.Accepted, 0.001, fmt.Sprint(minutes, " ", i))
			require.InDelta(t, 1, p.Done, 0.001)
		}
	}
}

func TestHistoryIsForMetrics(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	_, err := w.Store.History(auth.With(t.Context(), auth.Principal{Role: auth.Metrics}), 15)
	require.NoError(t, err)
	for _, p := range []auth.Principal{{}, {Role: auth.Producer, Tenant: "a"}, {Role: auth.Reader, Tenant: "a"}} {
		_, err := w.Store.History(auth.With(t.Context(), p), 15)
		require.ErrorIs(t, err, api.ErrNotAllowed)
	}
	_, err = w.Store.History(t.Context(), 15)
	require.Error(t, err)
}
