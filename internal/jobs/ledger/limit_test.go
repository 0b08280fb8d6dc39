package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestRate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rps        int64
		window     time.Duration
		partitions int
		perWindow  int64
		rpsOf      int64
	}{
		{0, time.Second, 3, 0, 0},
		{10_000, time.Second, 1, 10_000, 10_000},
		{10_000, 100 * time.Millisecond, 3, 1000, 3333},
		{17, time.Second, 16, 17, 1},
		{1, 10 * time.Millisecond, 1, 1, 1}, // at least one permit a window
	} {
		r := ledger.Rate{RPS: c.rps, Window: c.window}
		require.Equal(t, c.perWindow, r.PerWindow(), "%+v", c)
		require.Equal(t, c.rpsOf, r.RPSOf(c.partitions), "%+v", c)
		sum := int64(0)
		for i := range c.partitions {
			part := r.Of(i, c.partitions)
			require.Equal(t, c.window, part.Window)
			require.Equal(t, c.perWindow, part.Permits, "of all partitions together: %+v", c)
			require.Equal(t, c.partitions > 1, part.Tag != "", "what is divided has a name: %+v", c)
			sum += part.Part
		}
		require.Equal(t, c.perWindow, sum, "the parts add up to the whole: %+v", c)
	}
}
