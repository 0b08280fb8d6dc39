package groups

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// Group returns one group.
func (s *Store) Group(ctx context.Context, id string) (api.Group, error) {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return api.Group{}, err
	}
	views, err := s.ReadViews(ctx, p, []string{id})
	if err != nil {
		return api.Group{}, apiError(err)
	}
	if len(views) == 0 {
		return api.Group{}, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return views[0], nil
}

// GroupSummary returns one group. An aggregate that takes more than maxAggregate bytes in Redis is
// left out; then complete is false.
func (s *Store) GroupSummary(
	ctx context.Context, id string, maxAggregate int64,
) (g api.Group, complete bool, err error) {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return g, false, err
	}
	from, complete, err := ledger.ReadGroupSummary(ctx, s.conn.Cmd, p, id, maxAggregate)
	if err != nil {
		return g, false, apiError(err)
	}
	if from.Status == "" {
		return g, false, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	if !complete {
		from.Aggregates = ""
	}
	views, err := s.showGroups(ctx, p, []ledger.Group{from})
	if err != nil {
		return g, false, apiError(err)
	}
	return views[0], complete, nil
}

// ReadViews returns the views of groups of one partition. If an aggregate can't be computed, it
// logs that, and the view lacks the aggregate. It leaves out groups that do not exist.
func (s *Store) ReadViews(ctx context.Context, p keyspace.Partition, ids []string) ([]api.Group, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	groups, err := ledger.ReadGroups(ctx, s.conn.Cmd, p, ids)
	if err != nil {
		return nil, err
	}
	return s.showGroups(ctx, p, groups)
}

// showGroups returns the views of groups of one partition.
func (s *Store) showGroups(ctx context.Context, p keyspace.Partition, groups []ledger.Group) ([]api.Group, error) {
	views := make([]api.Group, 0, len(groups))
	for i := range groups {
		v, err := s.View(&groups[i], time.Now())
		if err != nil { // this process may lack a reducer; the rest of the view is right
			s.tel.Log.WarnContext(ctx, "showed a group without its aggregate", "group", v.ID, "error", err)
		}
		views = append(views, v)
	}
	return views, s.estimate(ctx, p, views)
}

// View converts a group that was read at the time at to the API's form. It estimates the ETA from
// the group's own speed. If it returns an error, the view is complete except for the aggregate.
func (s *Store) View(from *ledger.Group, at time.Time) (api.Group, error) {
	g := api.Group{
		ID:             from.ID,
		Tenant:         from.Tenant,
		Name:           from.Name,
		Type:           from.Type,
		Priority:       from.Lane,
		Status:         from.Status,
		Sealed:         from.Sealed,
		Paused:         from.Paused,
		Round:          from.Round,
		Total:          from.Total,
		Counts:         from.Counts,
		FailuresByCode: from.FailuresByCode,
		Throttles:      from.Throttles,
		Retries:        from.Retries,
		Timestamps:     from.Entered,
	}
	g.ETASeconds = eta(&g, from.Started, at)
	state, err := s.Merged(from.Aggregates, from.Partials)
	if err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	if g.Aggregate, err = state.Values(); err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	return g, nil
}

// Merged returns the aggregate of a group, merged from its partial aggregates. asked is what the
// group asked for, encoded as in the group's hash.
func (s *Store) Merged(asked string, partials []string) (*reducer.State, error) {
	plan, err := ledger.AggregatePlan(s.reducers, asked)
	if err != nil {
		return nil, err
	}
	all := plan.New()
	for _, encoded := range partials {
		part, err := plan.Decode([]byte(encoded))
		if err != nil {
			return nil, err
		}
		if err := all.Merge(part); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// eta estimates how many seconds the group still needs, from its speed since it started; nil if it
// has ended or the speed is unknown. It serves callers that can't read the tenant's speed.
func eta(g *api.Group, started, now time.Time) *float64 {
	ended := g.Counts.Ended()
	elapsed := now.Sub(started).Seconds()
	if g.Status.Ended() || started.IsZero() || ended == 0 || elapsed <= 0 {
		return nil
	}
	seconds := round(float64(g.Counts.Accepted-ended)/(float64(ended)/elapsed), 10)
	return &seconds
}

// etaGroups is the most groups of a tenant that an estimate counts before a group. If there are
// more, the estimate is too low.
const etaGroups = 100

// estimate replaces the ETAs of groups of one partition. An ETA is the time that the unfinished
// jobs of the group, and the waiting jobs of groups that are before it in its tenant's queue, take
// at the speed at which the tenant's jobs end now. A group of which no job can end gets no ETA.
func (s *Store) estimate(ctx context.Context, p keyspace.Partition, views []api.Group) error {
	speeds := map[string]float64{}
	known := map[ledger.TenantQueue]bool{}
	for i := range views {
		g := &views[i]
		g.ETASeconds = nil
		if moving(g) {
			speeds[g.Tenant] = 0
			known[queueOf(g)] = true
		}
	}
	if len(speeds) == 0 {
		return nil
	}
	if err := s.speeds(ctx, p, speeds); err != nil {
		return err
	}
	queues, err := ledger.ReadQueues(ctx, s.conn.Cmd, p, slices.Collect(maps.Keys(known)), etaGroups)
	if err != nil {
		return err
	}
	for i := range views {
		g := &views[i]
		speed, queue := speeds[g.Tenant], queues[queueOf(g)]
		if !moving(g) || speed <= 0 || queue.TypePaused {
			continue
		}
		left := g.Counts.Accepted - g.Counts.Ended()
		if g.Counts.Waiting > 0 {
			for _, other := range queue.Groups {
				if other.ID == g.ID {
					break
				}
				left += other.Waiting
			}
		}
		seconds := round(float64(left)/speed, 10)
		g.ETASeconds = &seconds
	}
	return nil
}

// queueOf returns the queue that has the waiting jobs of the group's own type.
func queueOf(g *api.Group) ledger.TenantQueue {
	return ledger.TenantQueue{Type: g.Type, Lane: g.Priority, Tenant: g.Tenant}
}

// moving reports whether a group has jobs left that may run.
func moving(g *api.Group) bool {
	return !g.Status.Ended() && !g.Paused && g.Counts.Accepted > g.Counts.Ended()
}

// speeds sets how many jobs of each tenant end per second, at most what its limits allow. It leaves
// 0 for a paused tenant.
func (s *Store) speeds(ctx context.Context, p keyspace.Partition, of map[string]float64) error {
	tenants := make([]ledger.TenantRef, 0, len(of))
	for t := range of {
		tenants = append(tenants, ledger.TenantRef{Partition: p, ID: t})
	}
	states, err := s.tenantStates(ctx, tenants)
	if err != nil {
		return err
	}
	for i, t := range tenants {
		if !states[i].Paused {
			of[t.ID] = s.cfg.Rate.Bound(states[i], states[i].PerSecond)
		}
	}
	return nil
}

// latestOf returns the latest of the times.
func latestOf(first time.Time, more ...time.Time) time.Time {
	for _, at := range more {
		if at.After(first) {
			first = at
		}
	}
	return first
}

// timeIfAfter returns at in UTC and whole milliseconds if it is after now, otherwise nil.
func timeIfAfter(at, now time.Time) *time.Time {
	if !at.After(now) {
		return nil
	}
	at = at.Truncate(time.Millisecond).UTC()
	return &at
}

// round rounds v to a multiple of 1/parts.
func round(v, parts float64) float64 { return math.Round(v*parts) / parts }
