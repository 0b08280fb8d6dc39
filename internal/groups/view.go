package groups

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/aggregate"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// Group shows one group.
func (s *Store) Group(ctx context.Context, id string) (api.Group, error) {
	p, _, err := s.locateGroup(ctx, id)
	if err != nil {
		return api.Group{}, err
	}
	views, err := s.Views(ctx, p, []string{id})
	if err != nil {
		return api.Group{}, apiError(err)
	}
	if len(views) == 0 {
		return api.Group{}, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return views[0], nil
}

// Views shows groups of one partition; those that are gone are left out.
func (s *Store) Views(ctx context.Context, p keyspace.Partition, ids []string) ([]api.Group, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	type replies struct{ group, codes, aggregate *redis.MapStringStringCmd }
	cmds := make([]replies, len(ids))
	_, err := s.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, id := range ids {
			cmds[i] = replies{
				group:     pipe.HGetAll(ctx, p.Group(id)),
				codes:     pipe.HGetAll(ctx, p.Codes(id)),
				aggregate: pipe.HGetAll(ctx, p.Aggregate(id)),
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	views := make([]api.Group, 0, len(ids))
	for i := range ids {
		hash := cmds[i].group.Val()
		if hash["status"] == "" {
			continue
		}
		v, err := s.View(hash, cmds[i].codes.Val(), cmds[i].aggregate.Val(), time.Now())
		if err != nil { // this process may lack a reducer: the rest still holds
			s.tel.Log.WarnContext(ctx, "showed a group without its aggregate", "group", v.ID, "error", err)
		}
		views = append(views, v)
	}
	return views, s.estimate(ctx, p, views)
}

// View is a group as its hash, its codes and its partial aggregates tell it. With an error it lacks
// the aggregate only.
func (s *Store) View(hash, codes, aggregate map[string]string, now time.Time) (api.Group, error) {
	n := func(field string) int64 {
		v, _ := strconv.ParseInt(hash[field], 10, 64)
		return v
	}
	g := api.Group{
		ID:       hash["id"],
		Tenant:   hash["tenant"],
		Name:     hash["name"],
		Type:     hash["type"],
		Priority: hash["lane"],
		Status:   api.Status(hash["status"]),
		Sealed:   hash["sealed"] != "",
		Paused:   hash["paused"] != "",
		Round:    int(n("round")),
		Counts: api.Counts{
			Accepted:  n("accepted"),
			Waiting:   n("waiting"),
			NonReady:  n("non_ready"),
			Ready:     n("ready"),
			InFlight:  n("in_flight"),
			Done:      n("done"),
			Failed:    n("failed"),
			Cancelled: n("cancelled"),
		},
		FailuresByCode: map[string]int64{},
		Throttles:      n("throttles"),
		Retries:        n("retries"),
		Timestamps:     map[string]time.Time{},
	}
	if hash["total"] != "" {
		total := n("total")
		g.Total = &total
	}
	for code, count := range codes {
		if c, _ := strconv.ParseInt(count, 10, 64); c > 0 {
			g.FailuresByCode[code] = c
		}
	}
	for field := range hash {
		if state, ok := strings.CutPrefix(field, "at:"); ok {
			g.Timestamps[state] = time.UnixMilli(n(field)).UTC()
		}
	}
	g.ETASeconds = eta(g, n("started"), now)
	state, err := s.Merged(hash["aggregate"], aggregate)
	if err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	if g.Aggregate, err = state.Values(); err != nil {
		return g, fmt.Errorf("group %s: %w", g.ID, err)
	}
	return g, nil
}

// Merged puts the partial aggregates of a group together.
func (s *Store) Merged(asked string, slots map[string]string) (*reducer.State, error) {
	plan, err := aggregate.Plan(s.reducers, asked)
	if err != nil {
		return nil, err
	}
	all := plan.New()
	for field, encoded := range slots {
		if !strings.HasPrefix(field, "slot:") {
			continue
		}
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

// eta guesses how long the group still needs from its speed since it started, for who can't ask how
// fast its tenant is.
func eta(g api.Group, startedMS int64, now time.Time) *float64 {
	ended := g.Counts.Ended()
	elapsed := now.Sub(time.UnixMilli(startedMS)).Seconds()
	if g.Status.Ended() || startedMS == 0 || ended == 0 || elapsed <= 0 {
		return nil
	}
	seconds := math.Round(float64(g.Counts.Accepted-ended)/(float64(ended)/elapsed)*10) / 10
	return &seconds
}

// ListQuery selects groups; zero values select everything.
type ListQuery struct {
	Tenant string
	Status api.Status
	Cursor string
	Limit  int
}

// Groups lists groups, newest first. Its cursor is the place in the order of creation, so that
// groups that come meanwhile neither shift nor repeat a page.
func (s *Store) Groups(ctx context.Context, q ListQuery) (api.GroupList, error) {
	list := api.GroupList{Groups: []api.Group{}}
	parts := s.space.All()
	if q.Tenant != "" {
		parts = []keyspace.Partition{s.space.OfTenant(q.Tenant)}
	}
	before, err := parseCursor(q.Cursor)
	if err != nil {
		return list, err
	}
	for len(list.Groups) < q.Limit {
		page, err := s.newest(ctx, parts, q.Tenant, before, q.Limit)
		if err != nil {
			return list, apiError(err)
		}
		if len(page) == 0 {
			return list, nil
		}
		views, err := s.viewPage(ctx, page)
		if err != nil {
			return list, apiError(err)
		}
		for _, at := range page {
			before = at
			if v, ok := views[at.id]; ok && (q.Status == "" || v.Status == q.Status) {
				list.Groups = append(list.Groups, v)
				if len(list.Groups) == q.Limit {
					list.Cursor = before.String()
					return list, nil
				}
			}
		}
	}
	return list, nil
}

// viewPage shows the groups of a page, by id; those that are gone are left out.
func (s *Store) viewPage(ctx context.Context, page []place) (map[string]api.Group, error) {
	byPartition := map[keyspace.Partition][]string{}
	for _, at := range page {
		byPartition[at.p] = append(byPartition[at.p], at.id)
	}
	all := make(map[string]api.Group, len(page))
	for p, ids := range byPartition {
		views, err := s.Views(ctx, p, ids)
		if err != nil {
			return nil, err
		}
		for _, v := range views {
			all[v.ID] = v
		}
	}
	return all, nil
}
