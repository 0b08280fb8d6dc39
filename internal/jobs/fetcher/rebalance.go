package fetcher

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// rebalancer divides the global rate limit among partitions by demand: each partition has a quota,
// and one process at a time moves quota to the partitions where jobs wait. Each fetcher process has one if
// there are several partitions and a global limit, but only the leader's moves quota. It reduces
// quotas before it increases others, and only after it has read the quotas of all partitions. So
// the effective quotas never add up to more than the limit.
type rebalancer struct {
	rate  ledger.Rate
	conn  *redisx.Conn
	space keyspace.Space
	id    string

	peaks []demandPeak // for each partition
}

// newRebalancer returns a rebalancer of the limit rate, for the process named id.
func newRebalancer(rate ledger.Rate, conn *redisx.Conn, space keyspace.Space, id string) *rebalancer {
	return &rebalancer{rate: rate, conn: conn, space: space, id: id}
}

const (
	rebalanceLease = 3 * time.Second // after this time without a step, another process may replace the leader
	rebalancePause = time.Second     // pause without demand, or while another process leads
)

// rebalanceWake returns the key of the list whose wake tokens end the rebalancer's pause early.
func rebalanceWake(space keyspace.Space) string { return space.Partition(0).Wake("rebalancer") }

// pause returns the pause between two steps while there is demand.
func (r *rebalancer) pause() time.Duration {
	return min(max(r.rate.Window/8, 20*time.Millisecond), 200*time.Millisecond)
}

// step asks for the leadership or renews it; while another process is the leader, it does nothing
// else. The leader reads the quotas and the demand of all partitions, and moves quota if that is
// worthwhile and all earlier increases are effective. step returns the pause until the next step.
func (r *rebalancer) step(ctx context.Context) (time.Duration, error) {
	fence, err := ledger.LeadRebalancing(ctx, r.conn.Cmd, r.space.Partition(0), r.id, rebalanceLease)
	if err != nil || fence == 0 { // another process is the leader
		return rebalancePause, err
	}
	quotas := make([]ledger.Quota, r.space.Partitions())
	allEffective, idle := true, true
	for i := range quotas {
		limit := r.rate.Of(i, len(quotas))
		quotas[i], err = ledger.ReadQuota(ctx, r.conn.Cmd, r.space.Partition(i), fence, limit)
		if err != nil || quotas[i].Fenced {
			return rebalancePause, err
		}
		allEffective = allEffective && quotas[i].FromUS == 0
		idle = idle && quotas[i].Demand == 0
	}
	r.applyPeaks(quotas)
	if allEffective {
		window := int(time.Now().UnixNano() / int64(r.rate.Window))
		if err := r.moveQuotas(ctx, fence, quotas, divide(r.rate.PerWindow(), quotas, window)); err != nil {
			return 0, err
		}
	}
	if idle {
		return rebalancePause, nil
	}
	return r.pause(), nil
}

// applyPeaks replaces the demand of each partition in quotas by its largest recent demand: of about
// the last window, or the last second if that is shorter. A partition that has just admitted all
// its jobs is likely to need its quota again.
func (r *rebalancer) applyPeaks(quotas []ledger.Quota) {
	if r.peaks == nil {
		r.peaks = make([]demandPeak, len(quotas))
	}
	now := time.Now()
	for i := range quotas {
		if k := &r.peaks[i]; quotas[i].Demand >= k.demand || now.Sub(k.at) > min(r.rate.Window, time.Second) {
			*k = demandPeak{quotas[i].Demand, now}
		}
		quotas[i].Demand = r.peaks[i].demand
	}
}

// demandPeak is the largest recent demand of a partition.
type demandPeak struct {
	demand int64 // permits that its jobs could use
	at     time.Time
}

// moveQuotas changes the quotas to want: first those that get smaller, then those that get larger.
// It does nothing when no partition would gain at least a fiftieth of the limit, unless a partition
// without any quota is to get some. With the limiter fixed, the permits that a partition has spent
// become free when the window ends: an increase may become effective then. With sliding, they
// become free in several steps: a call may give a partition less than want. With token, an increase
// is effective at once. If this process is not the leader any more, moveQuotas stops and returns
// nil.
func (r *rebalancer) moveQuotas(ctx context.Context, fence int64, quotas []ledger.Quota, want []int64) error {
	all, minMove := r.rate.PerWindow(), max(1, r.rate.PerWindow()/50)
	worthwhile, increases, spare := false, int64(0), all
	for i, p := range quotas {
		worthwhile = worthwhile || want[i]-p.Effective >= minMove || p.Effective == 0 && want[i] > 0
		increases += max(0, want[i]-p.Effective)
		spare -= p.Effective
	}
	if !worthwhile {
		return nil
	}
	notBefore := int64(0)
	for i, p := range quotas {
		if want[i] >= p.Effective {
			continue
		}
		taken, err := r.setQuota(ctx, fence, i, want[i], ledger.Increase{})
		if err != nil || taken.Fenced {
			return err
		}
		spare += taken.Freed
		notBefore = max(notBefore, taken.FromUS)
	}
	spare = max(0, spare)
	for i, p := range quotas {
		increase := want[i] - p.Effective
		if increase <= 0 {
			continue
		}
		now := min(increase, spare*increase/increases)
		to, terms := want[i], ledger.Increase{NotBeforeUS: notBefore, AtOnce: now}
		if r.rate.Limiter == ledger.LimiterSliding {
			to = p.Effective + now
		}
		if given, err := r.setQuota(ctx, fence, i, to, terms); err != nil || given.Fenced {
			return err
		}
	}
	return nil
}

// setQuota changes the quota of one partition to permits a window. If the reply is Fenced, this
// process is not the leader any more, and nothing has changed.
func (r *rebalancer) setQuota(
	ctx context.Context, fence int64, partition int, permits int64, increase ledger.Increase,
) (ledger.Quota, error) {
	return ledger.SetQuota(ctx, r.conn.Cmd, r.space.Partition(partition), fence,
		r.rate.Of(partition, r.space.Partitions()), permits, increase)
}

// resign gives up the leadership, so that another process can lead at once. After an error, the
// leader lease ends by itself.
func (r *rebalancer) resign(ctx context.Context) {
	_, _ = ledger.LeadRebalancing(ctx, r.conn.Cmd, r.space.Partition(0), r.id, 0)
}

// divide returns the quota, in permits, that each partition should have of the limit. It divides by
// max-min fairness (water-filling): partitions with demand come first, weighted by their active
// tenants; permits that one does not need go to those that can use more. While every quota covers
// its demand and their sum is within the limit, all quotas stay as they are. If the limit is large
// enough, a hundredth of it, divided evenly, is the least demand of the partitions, so that a new
// tenant in one without demand need not wait for the next step. If there are fewer permits than
// partitions, the partitions take turns: turn is the number of the turn.
func divide(limit int64, quotas []ledger.Quota, turn int) []int64 {
	n := int64(len(quotas))
	reserved := limit / 100 / n
	want, out := make([]int64, n), make([]int64, n)
	shortage := false
	assigned := int64(0)
	for i, p := range quotas {
		want[i] = min(limit, max(p.Demand, reserved))
		out[i] = p.Effective
		shortage = shortage || want[i] > p.Effective
		assigned += p.Effective
	}
	if !shortage && assigned <= limit {
		return out
	}
	// In ascending order of demand per active tenant, each partition gets its demand, but at most
	// its part of the permits that are left, by its number of active tenants.
	weight := func(i int) int64 { return max(1, quotas[i].Active) }
	order := make([]int, n)
	weights := int64(0)
	for i := range order {
		order[i] = i
		weights += weight(i)
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(float64(want[a])/float64(weight(a)), float64(want[b])/float64(weight(b)))
	})
	rest := limit
	for _, i := range order {
		out[i] = min(want[i], rest*weight(i)/weights)
		rest -= out[i]
		weights -= weight(i)
	}
	// The rest, for which there is no demand now, is divided evenly among all partitions.
	for k, i := range order {
		extra := rest / (n - int64(k))
		out[i] += extra
		rest -= extra
	}
	// If partitions with demand have no permit, one of them takes a permit from a partition with
	// the largest quota. turn selects both.
	var withoutQuota, richest []int
	largest := max(1, slices.Max(out))
	for i := range out {
		if out[i] == 0 && want[i] > 0 {
			withoutQuota = append(withoutQuota, i)
		}
		if out[i] == largest {
			richest = append(richest, i)
		}
	}
	if len(withoutQuota) > 0 && len(richest) > 0 {
		out[withoutQuota[turn%len(withoutQuota)]]++
		out[richest[turn%len(richest)]]--
	}
	return out
}
