// Package quota divides the global rate limit among partitions by demand: each partition has a quota,
// and one process at a time moves quota to where jobs wait.
package quota

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Rebalancer moves quota between partitions, to where the demand is. One process does so at a time.
// It takes before it gives, and gives only when it has heard from every partition, so that the
// quotas never add up to more than the limit.
type Rebalancer struct {
	rate  ledger.Rate
	conn  *redisx.Conn
	space keyspace.Space
	id    string

	peaks []peak // of each partition's demand
}

// NewRebalancer returns a rebalancer of a limit, for the process id.
func NewRebalancer(rate ledger.Rate, conn *redisx.Conn, space keyspace.Space, id string) *Rebalancer {
	return &Rebalancer{rate: rate, conn: conn, space: space, id: id}
}

const (
	leaderLease = 3 * time.Second // a leader that is silent for longer is replaced
	rest        = time.Second     // the pause while there is no demand
)

// Wake names the list whose tokens end the rebalancer's pause.
func Wake(space keyspace.Space) string { return space.Partition(0).Wake("rebalancer") }

// interval is the pause between two looks while there is demand.
func (r *Rebalancer) interval() time.Duration {
	return min(max(r.rate.Window/8, 20*time.Millisecond), 200*time.Millisecond)
}

// Step looks at all partitions and moves quota where it is needed. It waits for moves that are under
// way. It returns the pause until the next step.
func (r *Rebalancer) Step(ctx context.Context) (time.Duration, error) {
	fence, err := ledger.LeadDivision(ctx, r.conn.Cmd, r.space.Partition(0), r.id, leaderLease)
	if err != nil || fence == 0 { // another one does it
		return rest, err
	}
	parts := make([]ledger.Part, r.space.Partitions())
	settled, idle := true, true
	for i := range parts {
		limit := r.rate.Of(i, len(parts))
		parts[i], err = ledger.LookAtPart(ctx, r.conn.Cmd, r.space.Partition(i), fence, limit)
		if err != nil || parts[i].Fenced {
			return rest, err
		}
		settled = settled && parts[i].FromUS == 0
		idle = idle && parts[i].Demand == 0
	}
	r.smooth(parts)
	if settled {
		window := int(time.Now().UnixNano() / int64(r.rate.Window))
		if err := r.move(ctx, fence, parts, divide(r.rate.PerWindow(), parts, window)); err != nil {
			return 0, err
		}
	}
	if idle {
		return rest, nil
	}
	return r.interval(), nil
}

// smooth lets the most that a partition has wanted within a window, or a second, count: one that
// has just admitted all that it had is not without demand.
func (r *Rebalancer) smooth(parts []ledger.Part) {
	if r.peaks == nil {
		r.peaks = make([]peak, len(parts))
	}
	now := time.Now()
	for i := range parts {
		if k := &r.peaks[i]; parts[i].Demand >= k.demand || now.Sub(k.at) > min(r.rate.Window, time.Second) {
			*k = peak{parts[i].Demand, now}
		}
		parts[i].Demand = r.peaks[i].demand
	}
}

type peak struct {
	demand int64
	at     time.Time
}

// move takes, then gives. What a partition has spent in a window can't be given away before it is
// over (fixed), or only as it falls out of the span (sliding): then others get more with each look.
func (r *Rebalancer) move(ctx context.Context, fence int64, parts []ledger.Part, want []int64) error {
	all, least := r.rate.PerWindow(), max(1, r.rate.PerWindow()/50)
	worth, gains, spare := false, int64(0), all
	for i, p := range parts {
		worth = worth || want[i]-p.InForce >= least || p.InForce == 0 && want[i] > 0
		gains += max(0, want[i]-p.InForce)
		spare -= p.InForce
	}
	if !worth {
		return nil
	}
	notBefore := int64(0)
	for i, p := range parts {
		if want[i] >= p.InForce {
			continue
		}
		taken, err := r.set(ctx, fence, i, want[i], ledger.Gain{})
		if err != nil || taken.Fenced {
			return err
		}
		spare += taken.Freed
		notBefore = max(notBefore, taken.FromUS)
	}
	spare = max(0, spare)
	for i, p := range parts {
		gain := want[i] - p.InForce
		if gain <= 0 {
			continue
		}
		now := min(gain, spare*gain/gains)
		to, terms := want[i], ledger.Gain{NotBeforeUS: notBefore, AtOnce: now}
		if r.rate.Limiter == ledger.LimiterSliding {
			to = p.InForce + now
		}
		if given, err := r.set(ctx, fence, i, to, terms); err != nil || given.Fenced {
			return err
		}
	}
	return nil
}

func (r *Rebalancer) set(
	ctx context.Context, fence int64, partition int, permits int64, gain ledger.Gain,
) (ledger.Part, error) {
	return ledger.SetPart(ctx, r.conn.Cmd, r.space.Partition(partition), fence,
		r.rate.Of(partition, r.space.Partitions()), permits, gain)
}

// Resign lets another process take over at once. It works also after ctx has ended.
func (r *Rebalancer) Resign(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_, _ = ledger.LeadDivision(ctx, r.conn.Cmd, r.space.Partition(0), r.id, 0)
}

// divide says which part of all permits each partition should have. First come those that can use
// theirs, by their active tenants; what these leave goes to whoever can use more. While nobody is
// short, everything stays as it is. A hundredth is kept for partitions without demand, so that a
// tenant that comes need not wait for the next division, where the limit is large enough for that.
// Where there are fewer permits than partitions, these take turns.
func divide(all int64, parts []ledger.Part, turn int) []int64 {
	n := int64(len(parts))
	floor := all / 100 / n
	want, out := make([]int64, n), make([]int64, n)
	short := false
	have := int64(0)
	for i, p := range parts {
		want[i] = min(all, max(p.Demand, floor))
		out[i] = p.InForce
		short = short || want[i] > p.InForce
		have += p.InForce
	}
	if !short && have <= all {
		return out
	}
	// Water-filling: in the order of what each wants for an active tenant, everybody gets that or
	// an equal part of what is left.
	weight := func(i int) int64 { return max(1, parts[i].Active) }
	order := make([]int, n)
	weights := int64(0)
	for i := range order {
		order[i] = i
		weights += weight(i)
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(float64(want[a])/float64(weight(a)), float64(want[b])/float64(weight(b)))
	})
	left := all
	for _, i := range order {
		out[i] = min(want[i], left*weight(i)/weights)
		left -= out[i]
		weights -= weight(i)
	}
	// What nobody wants now is spread.
	for k, i := range order {
		extra := left / (n - int64(k))
		out[i] += extra
		left -= extra
	}
	// Nobody goes without for ever.
	var without, richest []int
	most := max(1, slices.Max(out))
	for i := range out {
		if out[i] == 0 && want[i] > 0 {
			without = append(without, i)
		}
		if out[i] == most {
			richest = append(richest, i)
		}
	}
	if len(without) > 0 && len(richest) > 0 {
		out[without[turn%len(without)]]++
		out[richest[turn%len(richest)]]--
	}
	return out
}
