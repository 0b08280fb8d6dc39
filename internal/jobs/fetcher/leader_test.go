package fetcher

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/api"
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
		quotas []share
		want   []int64
	}{
		"demand is met":                  {100, []share{{Held: 25, Demand: 20}, {Held: 75}}, []int64{25, 75}},
		"demand in one partition":        {1000, []share{{Held: 250, Demand: 9999, Active: 1}, {Held: 250}, {Held: 250}, {Held: 250}}, []int64{994, 2, 2, 2}},
		"weighted by active tenants":     {100, []share{{Held: 50, Demand: 999, Active: 1}, {Held: 50, Demand: 999, Active: 3}}, []int64{25, 75}},
		"permits that one does not need": {90, []share{{Held: 30, Demand: 10, Active: 1}, {Held: 30, Demand: 999, Active: 1}, {Held: 30, Demand: 999, Active: 1}}, []int64{10, 40, 40}},
		"fewer permits than partitions":  {2, []share{{Demand: 9, Active: 1}, {Held: 1}, {Held: 1}}, []int64{2, 0, 0}},
		"few permits, small demand":      {2, []share{{Demand: 5, Active: 1}, {Held: 1, Demand: 999, Active: 1}, {Held: 1, Demand: 999, Active: 1}}, []int64{1, 1, 0}},
		"permits that are not assigned":  {100, []share{{Held: 10, Demand: 999, Active: 1}, {Held: 10, Demand: 5, Active: 1}}, []int64{95, 5}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, divide(c.all, c.quotas, 0)) })
	}
}

// TestDivideTakesTurns: with 10 permits for 16 partitions, each partition gets at least one permit
// in 160 turns.
func TestDivideTakesTurns(t *testing.T) {
	t.Parallel()
	quotas, got := make([]share, 16), make([]int64, 16)
	for turn := range 160 {
		for i, n := range divide(10, quotas, turn) {
			quotas[i] = share{Held: n, Demand: 1000, Active: 1}
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
		quotas := make([]share, rapid.IntRange(1, 20).Draw(t, "partitions"))
		short := false
		for i := range quotas {
			p := &quotas[i]
			p.Held = rapid.Int64Range(0, left).Draw(t, "effective")
			p.Demand, p.Active = rapid.Int64Range(0, 2*all).Draw(t, "demand"), rapid.Int64Range(0, 50).Draw(t, "active")
			left -= p.Held
			short = short || min(all, p.Demand) > p.Held
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

// TestLeaderFollowsTheDemand: the leader moves all quota of four partitions to one with a
// demand, then half of it to a second one, then all. The effective quotas never exceed the limit.
func TestLeaderFollowsTheDemand(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		const all = 100
		w := stagetest.New(t, url, prefix, 4)
		cfg := Config{Meter: ledger.Meter{Window: 100 * time.Millisecond}, Configured: api.ConfiguredLimits{RPS: 10 * all}}
		d, other := newLeader(cfg, w.Conn, w.Space, "d"), newLeader(cfg, w.Conn, w.Space, "other")
		demand := func(partition int, jobs int64) {
			p := w.Space.Partition(partition)
			require.NoError(t, w.Conn.Cmd.ZAdd(t.Context(), p.Types(), redis.Z{Score: 1, Member: "T"}).Err())
			stagetest.SetWaiting(t, w.Conn.Cmd, p, "T", jobs)
			require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), p.Active(), "acme").Err())
		}
		quotas := func() (out []int64) {
			sum := int64(0)
			for _, p := range w.Space.All() {
				n, err := w.Conn.Cmd.HGet(t.Context(), p.Rate(), "q").Int64()
				require.NoError(t, err)
				out = append(out, n)
				sum += n
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
		follow([]int64{25, 25, 25, 25})
		demand(1, 1_000_000)
		follow([]int64{0, 100, 0, 0})
		demand(3, 1_000_000)
		follow([]int64{0, 50, 0, 50})
		demand(1, 0)
		follow([]int64{0, 0, 0, 100})
		d.resign(t.Context())
		fence, err := ledger.LeadRebalancing(t.Context(), w.Conn.Cmd, w.Space.Partition(0), "other", leaderLease, 0)
		require.NoError(t, err)
		require.Positive(t, fence, "another process can lead")
	})
}

// cutter is a hook that loses the request, or the reply, of one of the next scripts: as if the process
// were killed there.
type cutter struct {
	in    atomic.Int64 // scripts until then; below 0: never
	reply atomic.Bool
}

var errCut = errors.New("cut")

func (c *cutter) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}
func (c *cutter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (c *cutter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "evalsha" && cmd.Name() != "eval" {
			return next(ctx, cmd)
		}
		if c.in.Add(-1) != -1 {
			return next(ctx, cmd)
		}
		if c.reply.Load() {
			_ = next(ctx, cmd)
		}
		cmd.SetErr(errCut)
		return errCut
	}
}

// parts returns what each partition has of the global limit, of the rate of the type T and of its places
// (with entries beyond them).
func parts(t *testing.T, w *stagetest.World) (sums [3]int64, each [3][]int64) {
	t.Helper()
	at, err := w.Conn.Cmd.Time(t.Context()).Result()
	require.NoError(t, err)
	for _, p := range w.Space.All() {
		for i, key := range []string{p.Rate(), p.Base() + "rate:T"} {
			h, err := w.Conn.Cmd.HGetAll(t.Context(), key).Result()
			require.NoError(t, err)
			q, _ := strconv.ParseInt(h["q"], 10, 64)
			if from, _ := strconv.ParseInt(h["qf"], 10, 64); h["q2"] != "" && at.UnixMicro() >= from {
				q, _ = strconv.ParseInt(h["q2"], 10, 64)
			}
			sums[i] += q
			each[i] = append(each[i], q)
		}
		var rated, places int64
		_, _ = fmt.Sscanf(w.Conn.Cmd.HGet(t.Context(), p.Rate(), "type:T").Val(), "%d %d", &rated, &places)
		places = max(places, w.Conn.Cmd.XLen(t.Context(), p.Ready("T")).Val())
		sums[2] += places
		each[2] = append(each[2], places)
	}
	return sums, each
}

// wants gives partition i a demand of jobs of type T, and of another type.
func wants(t *testing.T, w *stagetest.World, i int, jobs int64) {
	t.Helper()
	p := w.Space.Partition(i)
	for _, typ := range []string{"T", "U"} {
		require.NoError(t, w.Conn.Cmd.ZAdd(t.Context(), p.Types(), redis.Z{Score: 1, Member: typ}).Err())
		stagetest.SetWaiting(t, w.Conn.Cmd, p, typ, jobs)
	}
	require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), p.Active(), "acme").Err())
}

// TestLeaderCarriesOutChanges: limits change at random under a random demand, while leaders are cut off
// at any script, take over from each other, and a partition's data is lost or comes back old. The
// parts never exceed the larger one of the limits that may be in effect, and are all of the new one soon.
func TestLeaderCarriesOutChanges(t *testing.T) {
	t.Parallel()
	for _, limiter := range []string{ledger.LimiterFixed, ledger.LimiterSliding, ledger.LimiterToken} {
		t.Run(limiter, func(t *testing.T) {
			t.Parallel()
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				w := stagetest.New(t, url, prefix, 4)
				cut := &cutter{}
				cut.in.Store(-1)
				w.Conn.Cmd.AddHook(cut)
				cfg := Config{Meter: ledger.Meter{Limiter: limiter, Window: time.Second}, Configured: api.ConfiguredLimits{RPS: 100}}
				leaders := []*leader{newLeader(cfg, w.Conn, w.Space, "a"), newLeader(cfg, w.Conn, w.Space, "b")}
				random := rand.New(rand.NewPCG(43, uint64(len(limiter))))
				lead := 0
				now, most := [3]int64{100, 40, 10}, [3]int64{100, 1 << 40, 1 << 40} // a first limit of a type may come at different times
				set := func() {
					s, err := ledger.ReadLimitSettings(t.Context(), w.Conn.Cmd, w.Space)
					require.NoError(t, err)
					ok, err := ledger.SetLimits(t.Context(), w.Conn.Cmd, w.Space, s.Rev, api.GlobalPatch{RPS: api.SetTo(now[0])},
						map[string]api.TypePatch{"T": {RPS: api.SetTo(now[1]), InFlight: api.SetTo(now[2])}})
					require.NoError(t, err)
					require.True(t, ok)
				}
				check := func() {
					t.Helper()
					sums, each := parts(t, w)
					for i := range sums {
						require.LessOrEqual(t, sums[i], most[i], "limit %d: %v", i, each[i])
					}
				}
				settle := func() {
					t.Helper()
					require.Eventually(t, func() bool {
						_, err := leaders[lead].step(t.Context())
						require.NoError(t, err)
						check()
						s, err := ledger.ReadLimitSettings(t.Context(), w.Conn.Cmd, w.Space)
						require.NoError(t, err)
						sums, _ := parts(t, w)
						return s.Applied == s.Rev && sums == now
					}, 20*time.Second, time.Millisecond)
					most = now
				}
				set()
				settle()
				for range 20 {
					for i := range now {
						now[i] = 1 + random.Int64N([]int64{300, 60, 12}[i])
						most[i] = max(most[i], now[i])
					}
					set()
					for range random.IntN(6) {
						wants(t, w, random.IntN(4), random.Int64N(500)*random.Int64N(2))
						if random.IntN(3) == 0 {
							leaders[lead].resign(t.Context())
							lead = 1 - lead
						}
						if random.IntN(4) == 0 {
							p := w.Space.Partition(random.IntN(4))
							require.NoError(t, w.Conn.Cmd.Del(t.Context(), p.Rate(), p.Base()+"rate:T", p.Base()+"rebalance").Err())
						}
						cut.in.Store(random.Int64N(14))
						cut.reply.Store(random.IntN(2) == 0)
						_, err := leaders[lead].step(t.Context())
						if err != nil {
							require.ErrorIs(t, err, errCut)
						}
						cut.in.Store(-1)
						check()
					}
					settle()
				}
			})
		})
	}
}

// TestLeaderWhatWasSpentIsHeld: in windows of an hour, a partition that has spent its part keeps it
// from the others through all changes, until the window ends.
func TestLeaderWhatWasSpentIsHeld(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		w := stagetest.New(t, url, prefix, 2)
		cfg := Config{Meter: ledger.Meter{Window: time.Hour}}
		l := newLeader(cfg, w.Conn, w.Space, "a")
		a, b := w.Space.Partition(0), w.Space.Partition(1)
		set := func(perHour int64) {
			l.cfg.Configured.RPS, l.rev = perHour, -1
			_, err := l.step(t.Context())
			require.NoError(t, err)
		}
		step := func() {
			_, err := l.step(t.Context())
			require.NoError(t, err)
		}
		wants(t, w, 0, 1e9)
		set(10)
		require.Eventually(t, func() bool {
			step()
			sums, each := parts(t, w)
			return sums[0] == 36_000 && each[0][0] > 35_000
		}, 20*time.Second, time.Millisecond)
		_, each := parts(t, w)
		spent, at := each[0][0], time.Now().UnixMilli()
		require.NoError(t, w.Conn.Cmd.HSet(t.Context(), a.Rate(), "w", at-at%time.Hour.Milliseconds(), "n", spent).Err())
		wants(t, w, 1, 1e9)
		most := int64(36_000)
		for i, rps := range []int64{10, 10, 11, 11, 12, 9, 10, 8, 15, 14, 15, 16} {
			set(rps)
			for range 3 {
				step()
			}
			most = max(most, 3600*rps)
			q, err := w.Conn.Cmd.HGet(t.Context(), b.Rate(), "q").Int64()
			require.NoError(t, err)
			mine, err := w.Conn.Cmd.HGet(t.Context(), a.Rate(), "q").Int64()
			require.NoError(t, err)
			require.LessOrEqual(t, q+max(spent, mine), most, "change %d, to %d: %d and %d", i, rps, mine, q)
		}
	})
}

// TestLeaderAdoptsAnOldInstallation: the parts of an installation that kept its limit in a tag stay, and
// what one partition has spent without any counts.
func TestLeaderAdoptsAnOldInstallation(t *testing.T) {
	t.Parallel()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		const hour = 3600
		w := stagetest.New(t, url, prefix, 2)
		for i, p := range w.Space.All() {
			require.NoError(t, w.Conn.Cmd.Del(t.Context(), p.Rate()).Err())
			require.NoError(t, w.Conn.Cmd.HSet(t.Context(), p.Rate(), "qt", "3600/3600000/fixed/2", "q", []int64{3000, 600}[i], "qx", 7).Err())
		}
		l := newLeader(Config{Meter: ledger.Meter{Window: time.Hour}, Configured: api.ConfiguredLimits{RPS: 1}}, w.Conn, w.Space, "a")
		for range 3 {
			_, err := l.step(t.Context())
			require.NoError(t, err)
		}
		_, each := parts(t, w)
		require.Equal(t, []int64{3000, 600}, each[0])

		one := stagetest.New(t, url, prefix+"one:", 1)
		require.NoError(t, one.Conn.Cmd.Del(t.Context(), one.P.Rate()).Err())
		at := time.Now().UnixMilli()
		require.NoError(t, one.Conn.Cmd.HSet(t.Context(), one.P.Rate(), "w", at-at%(hour*1000), "n", 1000).Err())
		l = newLeader(l.cfg, one.Conn, one.Space, "a")
		_, err := l.step(t.Context())
		require.NoError(t, err)
		st, err := ledger.ReadLimits(t.Context(), one.Conn.Cmd, one.P, l.cfg.Meter, "")
		require.NoError(t, err)
		require.EqualValues(t, 1000, st.Used)
		sums, _ := parts(t, one)
		require.EqualValues(t, hour, sums[0])
	})
}
