package bench_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestGuards runs seven parts once, for a moment: each has figures, no limit is overdrawn, the
// queue keeps its order and no probe is too many. Speeds are not compared with goals here.
func TestGuards(t *testing.T) {
	r, err := bench.RunGuards(t.Context(), bench.GuardsOptions{
		Options: options(t, ""), Quick: true, Rounds: 1, Seconds: 0.1,
		Only: []string{"take", "pairs", "lock", "handover", "limits", "order", "probes"},
	})
	require.NoError(t, err)
	require.Positive(t, r.TakePerSecond)
	require.Positive(t, r.TakeP99MS)
	require.Positive(t, r.PairsPerSecond)
	require.Positive(t, r.Pairs10000Ratio)
	require.Positive(t, r.LockPairsPerSecond)
	require.Positive(t, r.LockP99MS)
	require.Positive(t, r.HandoverP50MS)
	require.Zero(t, r.Overdraws)
	require.Positive(t, r.Allowed)
	require.Zero(t, r.FIFOInversions)
	require.GreaterOrEqual(t, r.FIFOGrants, 40)
	require.Zero(t, r.ProbesOver)
	require.Nil(t, r.GuardMemory, "it was not asked for")

	b, err := json.Marshal(r)
	require.NoError(t, err)
	for _, name := range []string{"take_per_second", "overdraws", "fifo_inversions", "probes_over", "overrides"} {
		require.Contains(t, string(b), `"`+name+`":`)
	}
}

func TestGuardsLeaveNothingOnASharedRedis(t *testing.T) {
	server := redistest.Server(t)
	r, err := bench.RunGuards(t.Context(), bench.GuardsOptions{
		Options: options(t, server.URL()), Quick: true, Rounds: 1, Seconds: 0.1, Only: []string{"costs", "waiting"},
	})
	require.NoError(t, err)
	require.Positive(t, r.RedisUS.Take)
	require.Positive(t, r.ProcessUS.Settle)
	require.NotNil(t, r.GuardWaiting)
	require.Empty(t, server.Client().Keys(t.Context(), "*").Val())
}

// TestGuardsInThePipeline runs the parts pipeline and push: accounts keep their limits when workers
// send with them, and each push is accepted once, or called once if it gets 410, over one
// connection. Speeds are not compared.
func TestGuardsInThePipeline(t *testing.T) {
	r, err := bench.RunGuards(t.Context(), bench.GuardsOptions{
		Options: options(t, ""), Quick: true, Rounds: 1, Only: []string{"pipeline", "push"},
	})
	require.NoError(t, err)
	require.Zero(t, r.Pipeline.OverRate)
	require.Zero(t, r.Pipeline.ProbesOver)
	require.Positive(t, r.Pipeline.MakespanRatio)
	require.Zero(t, r.Push.Wrong)
	require.Equal(t, 1, r.Push.Connections)
	require.Positive(t, r.Push.PerSecond)
	require.Contains(t, r.Overrides["pipeline"], "BULKACTION_SMTP_ACCOUNT_RATE")
	require.Equal(t, "20/1s/3", r.Overrides["push"]["BULKACTION_PUSH_ACCOUNT_BREAKER"])
}
