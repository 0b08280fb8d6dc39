package fetcher

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestDivide checks the quotas that divide returns for given quotas and demands.
func TestDivide(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		all    int64
		quotas []ledger.Quota
		want   []int64
	}{
		"demand is met":                  {100, []ledger.Quota{{Effective: 25, Demand: 20}, {Effective: 75}}, []int64{25, 75}},
		"demand in one partition":        {1000, []ledger.Quota{{Effective: 250, Demand: 9999, Active: 1}, {Effective: 250}, {Effective: 250}, {Effective: 250}}, []int64{994, 2, 2, 2}},
		"weighted by active tenants":     {100, []ledger.Quota{{Effective: 50, Demand: 999, Active: 1}, {Effective: 50, Demand: 999, Active: 3}}, []int64{25, 75}},
		"permits that one does not need": {90, []ledger.Quota{{Effective: 30, Demand: 10, Active: 1}, {Effective: 30, Demand: 999, Active: 1}, {Effective: 30, Demand: 999, Active: 1}}, []int64{10, 40, 40}},
		"fewer permits than partitions":  {2, []ledger.Quota{{Demand: 9, Active: 1}, {Effective: 1}, {Effective: 1}}, []int64{2, 0, 0}},
		"few permits, small demand":      {2, []ledger.Quota{{Demand: 5, Active: 1}, {Effective: 1, Demand: 999, Active: 1}, {Effective: 1, Demand: 999, Active: 1}}, []int64{1, 0, 1}},
		"permits that are not assigned":  {100, []ledger.Quota{{Effective: 10, Demand: 999, Active: 1}, {Effective: 10, Demand: 5, Active: 1}}, []int64{95, 5}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, divide(c.all, c.quotas, 0)) })
	}
}

// TestDivideTakesTurns: with 10 permits for 16 partitions, each partition gets at least one permit
// in 160 turns.
func TestDivideTakesTurns(t *testing.T) {
	t.Parallel()
	quotas, got := make([]ledger.Quota, 16), make([]int64, 16)
	for turn := range 160 {
		for i, n := range divide(10, quotas, turn) {
			quotas[i] = ledger.Quota{Effective: n, Demand: 1000, Active: 1}
			got[i] += n
		}
	}
	require.Positive(t, slices.Min(got))
}

// TestDivideNeverGivesMoreThanThereIs: the quotas never exceed the limit, and use all of it while a
// partition's demand is not met.
func TestDivideNeverGivesMoreThanThereIs(t *testing.T) {
	t.Parallel()
	rapidtest.Check(t, 0, func(t *rapid.T) {
		all := rapid.Int64Range(1, 100_000).Draw(t, "all")
		left := all
		quotas := make([]ledger.Quota, rapid.IntRange(1, 20).Draw(t, "partitions"))
		short := false
		for i := range quotas {
			p := &quotas[i]
			p.Effective = rapid.Int64Range(0, left).Draw(t, "effective")
			p.Demand, p.Active = rapid.Int64Range(0, 2*all).Draw(t, "demand"), rapid.Int64Range(0, 50).Draw(t, "active")
			left -= p.Effective
			short = short || min(all, p.Demand) > p.Effective
		}
		sum, unmet := int64(0), false
		out := divide(all, quotas, rapid.IntRange(0, 100).Draw(t, "turn"))
		for i, n := range out {
			require.GreaterOrEqual(t, n, int64(0))
			sum += n
			unmet = unmet || n < min(all, quotas[i].Demand)
		}
		require.LessOrEqual(t, sum, all)
		if short && unmet {
			require.Equal(t, all, sum, "permits are left although a demand is not met")
		}
	})
}

// TestRebalancerFollowsTheDemand: the rebalancer moves all quota of four partitions to one with a
// demand, then half of it to a second one, then all. The effective quotas never exceed the limit.
func TestRebalancerFollowsTheDemand(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		const all = 100
		w := stagetest.New(t, url, prefix, 4)
		d := newRebalancer(ledger.Rate{RPS: 10 * all, Window: 100 * time.Millisecond}, w.Conn, w.Space, "d")
		other := newRebalancer(d.rate, w.Conn, w.Space, "other")
		demand := func(partition int, jobs int64) {
			p := w.Space.Partition(partition)
			require.NoError(t, w.Conn.Cmd.ZAdd(t.Context(), p.Types(), redis.Z{Score: 1, Member: "T"}).Err())
			stagetest.SetWaiting(t, w.Conn.Cmd, p, "T", jobs)
			require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), p.Active(), "acme").Err())
		}
		quotas := func() (out []int64) {
			fence, err := ledger.LeadRebalancing(t.Context(), w.Conn.Cmd, w.Space.Partition(0), "d", rebalanceLease)
			require.NoError(t, err)
			sum := int64(0)
			for i := range 4 {
				p, err := ledger.ReadQuota(t.Context(), w.Conn.Cmd, w.Space.Partition(i), fence, d.rate.Of(i, 4))
				require.NoError(t, err)
				require.False(t, p.Fenced)
				out = append(out, p.Effective)
				sum += p.Effective
			}
			require.LessOrEqual(t, sum, int64(all))
			return out
		}
		follow := func(want []int64) {
			t.Helper()
			require.Eventually(t, func() bool {
				_, err := d.step(t.Context())
				require.NoError(t, err)
				_, err = other.step(t.Context()) // it is not the leader
				require.NoError(t, err)
				return slices.Equal(want, quotas())
			}, 20*time.Second, time.Millisecond)
		}
		require.Equal(t, []int64{25, 25, 25, 25}, quotas())
		demand(1, 1_000_000)
		follow([]int64{0, 100, 0, 0})
		demand(3, 1_000_000)
		follow([]int64{0, 50, 0, 50})
		demand(1, 0)
		follow([]int64{0, 0, 0, 100})
		d.resign(t.Context())
		fence, err := ledger.LeadRebalancing(t.Context(), w.Conn.Cmd, w.Space.Partition(0), "other", rebalanceLease)
		require.NoError(t, err)
		require.Positive(t, fence, "another process can lead")
	})
}
