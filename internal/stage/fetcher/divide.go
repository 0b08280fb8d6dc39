package fetcher

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// divider moves parts of the global limit between partitions, to where the demand is. One fetcher
// does so at a time. It takes before it gives, and gives only when it has heard from every
// partition, so that the parts never add up to more than the limit.
type divider struct {
	rate  ledger.Rate
	conn  *redisx.Conn
	space keyspace.Space
	id    string

	peaks []peak // of each partition's demand
}

// How long a divider that is silent keeps its office, and how long it rests while there
// is no demand.
const (
	divideLease = 3 * time.Second
	divideRest  = time.Second
)

// interval is the pause between two looks while there is demand.
func (d *divider) interval() time.Duration {
	return min(max(d.rate.Window/8, 20*time.Millisecond), 200*time.Millisecond)
}

// step looks at all partitions and moves what is to be moved. What is on its way is waited for.
func (d *divider) step(ctx context.Context) (time.Duration, error) {
	fence, err := ledger.LeadDivision(ctx, d.conn.Cmd, d.space.Partition(0), d.id, divideLease)
	if err != nil || fence == 0 { // another one does it
		return divideRest, err
	}
	parts := make([]ledger.Part, d.space.Partitions())
	settled, idle := true, true
	for i := range parts {
		limit := d.rate.Of(i, len(parts))
		parts[i], err = ledger.LookAtPart(ctx, d.conn.Cmd, d.space.Partition(i), fence, limit)
		if err != nil || parts[i].Fenced {
			return divideRest, err
		}
		settled = settled && parts[i].FromUS == 0
		idle = idle && parts[i].Demand == 0
	}
	d.smooth(parts)
	if settled {
		window := int(time.Now().UnixNano() / int64(d.rate.Window))
		if err := d.move(ctx, fence, parts, divide(d.rate.PerWindow(), parts, window)); err != nil {
			return 0, err
		}
	}
	if idle {
		return divideRest, nil
	}
	return d.interval(), nil
}

// smooth lets the most that a partition has wanted within a window, or a second, count: one that
// has just admitted all that it had is not without demand.
func (d *divider) smooth(parts []ledger.Part) {
	if d.peaks == nil {
		d.peaks = make([]peak, len(parts))
	}
	now := time.Now()
	for i := range parts {
		if k := &d.peaks[i]; parts[i].Demand >= k.demand || now.Sub(k.at) > min(d.rate.Window, time.Second) {
			*k = peak{parts[i].Demand, now}
		}
		parts[i].Demand = d.peaks[i].demand
	}
}

type peak struct {
	demand int64
	at     time.Time
}

// move takes, then gives. What a partition has spent in a window can't be given away before it is
// over (fixed), or only as it falls out of the span (sliding): then others get more with each look.
func (d *divider) move(ctx context.Context, fence int64, parts []ledger.Part, want []int64) error {
	all, least := d.rate.PerWindow(), max(1, d.rate.PerWindow()/50)
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
		r, err := d.set(ctx, fence, i, want[i], ledger.Gain{})
		if err != nil || r.Fenced {
			return err
		}
		spare += r.Freed
		notBefore = max(notBefore, r.FromUS)
	}
	spare = max(0, spare)
	for i, p := range parts {
		gain := want[i] - p.InForce
		if gain <= 0 {
			continue
		}
		now := min(gain, spare*gain/gains)
		to, terms := want[i], ledger.Gain{NotBeforeUS: notBefore, AtOnce: now}
		if d.rate.Limiter == ledger.LimiterSliding {
			to = p.InForce + now
		}
		if r, err := d.set(ctx, fence, i, to, terms); err != nil || r.Fenced {
			return err
		}
	}
	return nil
}

func (d *divider) set(
	ctx context.Context, fence int64, partition int, permits int64, gain ledger.Gain,
) (ledger.Part, error) {
	return ledger.SetPart(ctx, d.conn.Cmd, d.space.Partition(partition), fence,
		d.rate.Of(partition, d.space.Partitions()), permits, gain)
}

func (d *divider) resign(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_, _ = ledger.LeadDivision(ctx, d.conn.Cmd, d.space.Partition(0), d.id, 0)
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
