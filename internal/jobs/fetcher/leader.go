package fetcher

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// leader divides the limits among partitions by demand: the global rate, the rates of types, and the
// places of types with a bound. Each partition has a part of each limit, by which its scripts decide.
// Each fetcher process has a leader, but only the one with the leader lease acts: it carries out
// changes of the limits, and moves parts to the partitions where jobs wait. It lowers parts before it
// raises others, and raises them only when all partitions have answered, by no more than what no
// other partition holds. So the parts never add up to more than the limit, and while a limit changes
// to no more than the larger one. Both steps are idempotent: the next leader reads what is there.
type leader struct {
	cfg   Config
	conn  *redisx.Conn
	space keyspace.Space
	id    string

	at    ledger.Order
	rev   int64                     // the last revision that this leader has brought to all partitions; -1: none
	above int64                     // the highest fencing number that has refused a call
	peaks map[ledger.Limit][]demand // by limit (without its total) and partition
}

// newLeader returns a leader for the process named id.
func newLeader(cfg Config, conn *redisx.Conn, space keyspace.Space, id string) *leader {
	return &leader{cfg: cfg, conn: conn, space: space, id: id, peaks: map[ledger.Limit][]demand{}}
}

const (
	leaderLease = 3 * time.Second // after this time without a step, another process may replace the leader
	leaderPause = time.Second     // pause without demand, or while another process leads
)

// pause returns the pause between two steps while there is demand.
func (l *leader) pause() time.Duration {
	return min(max(l.cfg.Meter.Window/8, 20*time.Millisecond), 200*time.Millisecond)
}

// step asks for the leadership or renews it; while another process is the leader, it does nothing
// else. The leader carries out a change of the limits, or moves parts if that is worthwhile and all
// earlier increases are effective. step returns the pause until the next step. While a partition does
// not answer, parts are lowered in the others and raised in none.
func (l *leader) step(ctx context.Context) (time.Duration, error) {
	fence, err := ledger.LeadRebalancing(ctx, l.conn.Cmd, l.space.Partition(0), l.id, leaderLease, l.above)
	if err != nil || fence == 0 { // another process is the leader
		return leaderPause, err
	}
	if fence != l.at.Fence {
		l.at, l.rev = ledger.Order{Fence: fence}, -1
	}
	set, err := ledger.ReadLimitSettings(ctx, l.conn.Cmd, l.space)
	if err != nil {
		return 0, err
	}
	c := change{leader: l, limits: set.Limits(l.cfg.Meter, l.cfg.Configured.RPS), now: time.Now()}
	c.terms = ledger.Terms{Rev: set.Rev, Share: l.cfg.Configured.Share, Partitions: l.space.Partitions()}
	if set.Share != nil {
		c.terms.Share = *set.Share
	}
	all, fenced, err := c.carryOut(ctx, set.Rev != l.rev)
	if err != nil || fenced {
		return leaderPause, err
	}
	if l.rev = set.Rev; set.Applied != set.Rev || set.Leader == nil || *set.Leader != l.cfg.Configured {
		if err := ledger.MarkApplied(ctx, l.conn.Cmd, l.space, set.Rev, time.Now(), l.cfg.Configured); err != nil {
			return 0, err
		}
	}
	if idle := !slices.ContainsFunc(all, func(p ledger.Parts) bool {
		return slices.ContainsFunc(p.Of, func(of ledger.Part) bool { return of.Demand > 0 })
	}); idle || len(all) == 1 {
		return leaderPause, nil
	}
	return l.pause(), nil
}

// change is one step of the leader: the limits, what the partitions have of them, and what they are to
// have.
type change struct {
	*leader
	limits []ledger.Limit
	terms  ledger.Terms // for all partitions; To differs
	now    time.Time
	parts  []ledger.Parts // by partition
	want   [][]int64      // by limit and partition
}

// carryOut brings the limits to all partitions. changed says that they may differ from those that the
// partitions know. It returns what the partitions have in the end, and whether another process leads
// by now. The error is of the first partition that has not answered.
func (c *change) carryOut(ctx context.Context, changed bool) (parts []ledger.Parts, fenced bool, failed error) {
	n := c.space.Partitions()
	c.parts = make([]ledger.Parts, n)
	answered := make([]bool, n)
	fenced, failed = c.ask(ctx, func(ctx context.Context, i int, at ledger.Order) (p ledger.Parts, err error) {
		p, err = ledger.ReadParts(ctx, c.conn.Cmd, c.space.Partition(i), at, c.cfg.Meter, c.limits)
		answered[i] = err == nil
		return p, err
	})
	if fenced {
		return nil, true, nil
	}
	for i := range c.parts {
		if len(c.parts[i].Of) == 0 {
			c.parts[i].Of = make([]ledger.Part, len(c.limits))
		}
	}
	lower := make([][]ledger.Increase, n) // nil: nothing changes
	for k := range c.limits {
		changed = changed || c.differs(k, answered)
	}
	moves := false
	for k := range c.limits {
		c.want = append(c.want, c.divide(k))
		moves = c.lower(k, changed, lower) || moves
	}
	if !changed && (!moves || failed != nil) {
		return c.parts, false, failed
	}
	for i := range lower {
		if !answered[i] {
			lower[i] = nil
		}
	}
	fenced, err := c.set(ctx, lower)
	if fenced {
		return nil, true, nil
	}
	failed = cmp.Or(failed, err)
	if failed != nil {
		return nil, false, failed
	}
	c.terms.Wake = changed
	fenced, failed = c.set(ctx, c.raise(changed))
	return c.parts, fenced, failed
}

// askTimeout is how long the leader waits for a partition. Its lease must last for three such waits.
const askTimeout = 800 * time.Millisecond

// ask makes one call to each partition, all at the same time, because the node of one may hang. It
// stores what the partitions answer in c.parts, and returns whether another process leads by now, and
// the first error. What do returns with an empty list is not stored.
func (c *change) ask(
	ctx context.Context, do func(ctx context.Context, partition int, at ledger.Order) (ledger.Parts, error),
) (fenced bool, failed error) {
	at := c.next()
	answers, errs := make([]ledger.Parts, len(c.parts)), make([]error, len(c.parts))
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var asking sync.WaitGroup
	for i := range c.parts {
		asking.Go(func() { answers[i], errs[i] = do(ctx, i, at) })
	}
	asking.Wait()
	for i, p := range answers {
		fenced = c.fenced(p) || fenced
		if errs[i] == nil && len(p.Of) > 0 {
			c.parts[i] = p
		}
		failed = cmp.Or(failed, errs[i])
	}
	return fenced, failed
}

// next returns the order of the next call.
func (c *change) next() ledger.Order {
	c.at.Step++
	return c.at
}

// fenced says whether a partition has refused a call. If this process still has the leader lease then,
// the key with the fencing number was lost: the next number is to be higher.
func (c *change) fenced(p ledger.Parts) bool {
	if p.Fenced {
		c.above = p.Fence
	}
	return p.Fenced
}

// set changes the parts of the partitions that have terms in to.
func (c *change) set(ctx context.Context, to [][]ledger.Increase) (fenced bool, failed error) {
	return c.ask(ctx, func(ctx context.Context, i int, at ledger.Order) (ledger.Parts, error) {
		if to[i] == nil {
			return ledger.Parts{}, nil
		}
		terms := c.terms
		terms.To = to[i]
		return ledger.SetParts(ctx, c.conn.Cmd, c.space.Partition(i), at, c.cfg.Meter, c.limits, terms)
	})
}

// differs says whether a partition knows another limit, or the partitions have more of it than there
// is: Redis has lost a decrease.
func (c *change) differs(k int, answered []bool) bool {
	sum := int64(0)
	for i, p := range c.parts {
		if sum += p.Of[k].Quota; answered[i] && p.Of[k].Total != c.limits[k].Total {
			return true
		}
	}
	return sum > c.limits[k].Total && c.limits[k].Total > 0
}

// divide returns what each partition is to have of a limit.
func (c *change) divide(k int) []int64 {
	limit := c.limits[k]
	if limit.Total == 0 {
		return make([]int64, len(c.parts))
	}
	span := min(c.cfg.Meter.Window, time.Second)
	turn := int(c.now.UnixNano() / int64(c.cfg.Meter.Window))
	if limit.Places {
		span, turn = time.Second, int(c.now.Unix()) // slowly: a place moves only when its job ends
	}
	key := limit
	key.Total = 0
	if c.peaks[key] == nil {
		c.peaks[key] = make([]demand, len(c.parts))
	}
	quotas := make([]share, len(c.parts))
	for i, p := range c.parts {
		// A partition that has just admitted all its jobs is likely to need its part again: its demand is
		// the largest of about the last window, or the last second if that is shorter.
		peak := &c.peaks[key][i]
		if p.Of[k].Demand >= peak.n || c.now.Sub(peak.at) > span {
			*peak = demand{p.Of[k].Demand, c.now}
		}
		quotas[i] = share{Held: p.Of[k].Held, Demand: peak.n, Active: p.Active}
	}
	return divide(limit.Total, quotas, turn)
}

// demand is the largest recent demand of a partition.
type demand struct {
	n  int64 // permits that its jobs could use
	at time.Time
}

// lower adds the decreases of a limit to `lower`, which has a list for each partition. While a limit
// changes, each partition gets all of them, because it has to learn the new limit. It returns whether
// parts of the limit are to move: a partition would gain at least a fiftieth of it, or has none and is
// to get some, and all earlier increases are effective.
func (c *change) lower(k int, changed bool, lower [][]ledger.Increase) bool {
	worthwhile, settled := false, true
	for i, p := range c.parts {
		gain := c.want[k][i] - p.Of[k].Held
		worthwhile = worthwhile || gain >= max(1, c.limits[k].Total/50) || p.Of[k].Held == 0 && gain > 0
		settled = settled && p.Of[k].FromUS == 0
	}
	moves := worthwhile && settled
	if !moves && !changed {
		c.want[k] = nil // nothing of this limit is raised
		return false
	}
	unlimited := !slices.ContainsFunc(c.parts, func(p ledger.Parts) bool { return p.Of[k].Total != 0 })
	for i, p := range c.parts {
		to, of := ledger.Keep, p.Of[k]
		switch {
		case changed && unlimited: // nobody counted
			to = c.want[k][i]
		case changed || c.want[k][i] < of.Quota:
			to = min(c.want[k][i], of.Quota)
		}
		if to != ledger.Keep {
			lower[i] = c.orKept(lower[i])
			lower[i][k].To = to
		}
	}
	return moves
}

// orKept returns the terms, or terms that change nothing if they are nil.
func (c *change) orKept(terms []ledger.Increase) []ledger.Increase {
	if terms == nil {
		terms = slices.Repeat([]ledger.Increase{{To: ledger.Keep}}, len(c.limits))
	}
	return terms
}

// raise returns the increases of each partition, or nil if it gets none; if wake is true, each gets
// terms. With the limiter fixed, the permits that a partition has spent become free when the window
// ends: an increase may become effective then. With sliding, and of places, what is used becomes free
// by and by: a step may give less than is wanted. With token, an increase is effective at once.
func (c *change) raise(wake bool) [][]ledger.Increase {
	raised := make([][]ledger.Increase, len(c.parts))
	for i := range raised {
		if wake {
			raised[i] = c.orKept(nil)
		}
	}
	for k, limit := range c.limits {
		if c.want[k] == nil {
			continue
		}
		spare, increases, notBefore := limit.Total, int64(0), int64(0)
		for i, p := range c.parts {
			spare -= p.Of[k].Held
			increases += max(0, c.want[k][i]-p.Of[k].Held)
			notBefore = max(notBefore, p.Of[k].FromUS)
		}
		spare = max(0, spare)
		for i, p := range c.parts {
			of := p.Of[k]
			increase := c.want[k][i] - of.Held
			if increase <= 0 {
				continue
			}
			now := min(increase, spare*increase/increases)
			terms := ledger.Increase{To: c.want[k][i], NotBeforeUS: notBefore, AtOnce: of.Held - of.Quota + now}
			if limit.Places || c.cfg.Meter.Limiter == ledger.LimiterSliding {
				terms = ledger.Increase{To: of.Held + now}
			}
			if terms.To <= of.Quota {
				continue
			}
			raised[i] = c.orKept(raised[i])
			raised[i][k] = terms
		}
	}
	return raised
}

// resign gives up the leadership, so that another process can lead at once. After an error, the
// leader lease ends by itself.
func (l *leader) resign(ctx context.Context) {
	_, _ = ledger.LeadRebalancing(ctx, l.conn.Cmd, l.space.Partition(0), l.id, 0, 0)
}

// share is what a partition has of a limit, and what it could use.
type share struct{ Held, Demand, Active int64 }

// divide returns the quota, in permits, that each partition should have of the limit. It divides by
// max-min fairness (water-filling): partitions with demand come first, weighted by their active
// tenants; permits that one does not need go to those that can use more. While every quota covers
// its demand and all of the limit is assigned, all quotas stay as they are. If the limit is large
// enough, a hundredth of it, divided evenly, is the least demand of the partitions, so that a new
// tenant in one without demand need not wait for the next step. If there are fewer permits than
// partitions, the partitions take turns: turn is the number of the turn.
func divide(limit int64, quotas []share, turn int) []int64 {
	n := int64(len(quotas))
	reserved := limit / 100 / n
	want, out := make([]int64, n), make([]int64, n)
	shortage := false
	assigned := int64(0)
	for i, p := range quotas {
		want[i] = min(limit, max(p.Demand, reserved))
		out[i] = p.Held
		shortage = shortage || want[i] > p.Held
		assigned += p.Held
	}
	if !shortage && assigned == limit {
		return out
	}
	// If more partitions have a demand than there are permits, they take turns.
	var wanting []int
	for i := range want {
		if want[i] > 0 {
			wanting = append(wanting, i)
		}
	}
	if int64(len(wanting)) > limit {
		clear(out)
		for k := range int(limit) {
			out[wanting[(turn*int(limit)+k)%len(wanting)]] = 1
		}
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
