package groups

import (
	"context"
	"maps"
	"slices"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// etaGroups is the most groups of a tenant that an estimate counts before a group. If there are
// more, the estimate is too low.
const etaGroups = 100

// estimate replaces the ETAs of groups of one partition. An ETA is the time that the unfinished
// jobs of the group, and the waiting jobs of groups that are before it in its tenant's queue, take
// at the speed at which the tenant's jobs end now. A group of which no job can end gets no ETA.
func (s *views) estimate(ctx context.Context, p keyspace.Partition, views []api.Group) error {
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
		seconds := apivalue.Round(float64(left)/speed, 10)
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
func (s *views) speeds(ctx context.Context, p keyspace.Partition, of map[string]float64) error {
	tenants := make([]ledger.TenantRef, 0, len(of))
	for t := range of {
		tenants = append(tenants, ledger.TenantRef{Partition: p, ID: t})
	}
	states, err := s.tenants.states(ctx, tenants)
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
