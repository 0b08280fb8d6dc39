package groups

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/aggregate"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/why"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// views returns groups and their jobs as the API shows them.
type views struct {
	*access
	tenants   *tenants
	explainer *why.Explainer
}

// Group returns one group.
func (s *views) Group(ctx context.Context, id string) (api.Group, error) {
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
func (s *views) GroupSummary(
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
	views, err := s.show(ctx, p, []ledger.Group{from})
	if err != nil {
		return g, false, apiError(err)
	}
	return views[0], complete, nil
}

// ReadViews returns the views of groups of one partition. If an aggregate can't be computed, it
// logs that, and the view lacks the aggregate. It leaves out groups that do not exist.
func (s *views) ReadViews(ctx context.Context, p keyspace.Partition, ids []string) ([]api.Group, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	groups, err := ledger.ReadGroups(ctx, s.conn.Cmd, p, ids)
	if err != nil {
		return nil, err
	}
	return s.show(ctx, p, groups)
}

// show returns the views of groups of one partition.
func (s *views) show(ctx context.Context, p keyspace.Partition, groups []ledger.Group) ([]api.Group, error) {
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
func (s *views) View(from *ledger.Group, at time.Time) (api.Group, error) {
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
func (s *views) Merged(asked string, partials []string) (*reducer.State, error) {
	plan, err := aggregate.Plan(s.reducers, asked)
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
	seconds := apivalue.Round(float64(g.Counts.Accepted-ended)/(float64(ended)/elapsed), 10)
	return &seconds
}
