package groups_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestStatsOfPermits: Stats adds up the permits that all partitions have spent, with each limiter.
func TestStatsOfPermits(t *testing.T) {
	t.Parallel()
	for _, limiter := range []string{ledger.LimiterFixed, ledger.LimiterSliding, ledger.LimiterToken} {
		t.Run(limiter, func(t *testing.T) {
			t.Parallel()
			url, prefix := redistest.Shared(t)
			w := stagetest.New(t, url, prefix, 3)
			const n = 12 // groups of one tenant each, with 10 jobs
			for i := range n {
				w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", i), Type: "T", Jobs: stagetest.Numbered(10)})
			}
			used := func(rate ledger.Rate) int64 {
				st, err := w.NewStore(groups.Config{Rate: rate, Limiter: rate.Limiter}).Stats(stagetest.Trusted(t))
				require.NoError(t, err)
				return st.RateLimit.Used
			}

			long := ledger.Rate{RPS: 1, Window: time.Hour, Limiter: limiter}
			start := time.Now()
			require.Zero(t, used(long))
			spent := spend(w, long, 10)
			require.EqualValues(t, 3*10, spent)
			got, back := used(long), int64(0)
			if limiter == ledger.LimiterToken { // its permits come back one by one
				back = int64(math.Ceil(time.Since(start).Seconds()))
			}
			require.LessOrEqual(t, got, spent)
			require.GreaterOrEqual(t, got, spent-back)
			require.Zero(t, used(ledger.Rate{Limiter: limiter}), "without a limit")

			short := ledger.Rate{RPS: 100, Window: 300 * time.Millisecond, Limiter: limiter}
			w.Await("permits to be used", func() bool {
				spend(w, short, 1)
				return used(short) > 0
			})
			w.Await("the end of the window", func() bool { return used(short) == 0 })
		})
	}
}

// spend admits up to n jobs in each partition under a limit and returns the number of permits that
// they have spent.
func spend(w *stagetest.World, rate ledger.Rate, n int) (spent int64) {
	w.T.Helper()
	for _, p := range w.Space.All() {
		r, err := ledger.Admit(context.WithoutCancel(stagetest.Trusted(w.T)), w.Conn.Cmd, p, ledger.AdmitArgs{
			Type:        "T",
			Most:        n,
			Cap:         1 << 30,
			Limit:       rate.Of(p.Index(), w.Space.Partitions()),
			Seed:        "0badcafe",
			LaneWeights: [3]int{6, 3, 1},
		})
		require.NoError(w.T, err)
		for _, permit := range r.Permits {
			spent += permit.N
		}
	}
	return spent
}
