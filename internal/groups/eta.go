package groups

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// etaGroups is how many groups of a tenant are counted that come before one. A group that is
// further behind has at least as long to wait as is said.
const etaGroups = 100

// pauseOfType begins the fields of the hash of pauses that are about types.
const pauseOfType = "y:"

// fairList names a list of a tenant's groups in the order in which they are served.
type fairList struct{ typ, lane, tenant string }

// estimate says when groups of one partition will have ended: the jobs that are left, and those of
// their tenant's groups that come first, at the speed at which the tenant's jobs end right now.
// Where nothing moves it says nothing.
func (s *Store) estimate(ctx context.Context, p keyspace.Partition, views []api.Group) error {
	speeds := map[string]float64{}
	orders := map[fairList]*redis.StringSliceCmd{}
	paused := map[string]*redis.BoolCmd{}
	for i := range views {
		g := &views[i]
		g.ETASeconds = nil
		if moving(g) {
			speeds[g.Tenant] = 0
			orders[fairList{g.Type, g.Priority, g.Tenant}] = nil
			paused[g.Type] = nil
		}
	}
	if len(speeds) == 0 {
		return nil
	}
	if err := s.speeds(ctx, p, speeds); err != nil {
		return err
	}
	_, err := s.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for l := range orders {
			orders[l] = pipe.ZRange(ctx, p.FairTenant(l.typ, l.lane, l.tenant), 0, etaGroups-1)
		}
		for typ := range paused {
			paused[typ] = pipe.HExists(ctx, p.Pauses(), pauseOfType+typ)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("estimate groups: %w", err)
	}
	waiting, err := s.waitingOf(ctx, p, orders)
	if err != nil {
		return err
	}
	for i := range views {
		g := &views[i]
		speed := speeds[g.Tenant]
		if !moving(g) || speed <= 0 || paused[g.Type].Val() {
			continue
		}
		left := g.Counts.Accepted - g.Counts.Ended()
		if order := orders[fairList{g.Type, g.Priority, g.Tenant}].Val(); g.Counts.Waiting > 0 {
			for _, other := range order {
				if other == g.ID {
					break
				}
				left += waiting[other]
			}
		}
		seconds := roundTo(float64(left)/speed, 10)
		g.ETASeconds = &seconds
	}
	return nil
}

// moving says whether a group has jobs left that may run.
func moving(g *api.Group) bool {
	return !g.Status.Ended() && !g.Paused && g.Counts.Accepted > g.Counts.Ended()
}

// speeds fills in how many jobs of each tenant end a second, at most what limits let it; 0 for one
// that is paused.
func (s *Store) speeds(ctx context.Context, p keyspace.Partition, of map[string]float64) error {
	tenants := make([]string, 0, len(of))
	for t := range of {
		tenants = append(tenants, t)
	}
	states := make([]ledger.TenantState, len(tenants))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxConcurrentReads)
	for i, t := range tenants {
		reads.Go(func() (err error) {
			states[i], err = s.tenantState(ctx, p, t)
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		return err
	}
	for i, t := range tenants {
		if !states[i].Paused {
			of[t] = s.notAbove(states[i], states[i].PerSecond)
		}
	}
	return nil
}

// waitingOf reads how many jobs wait of each group in the lists.
func (s *Store) waitingOf(
	ctx context.Context, p keyspace.Partition, orders map[fairList]*redis.StringSliceCmd,
) (map[string]int64, error) {
	counts := map[string]*redis.SliceCmd{}
	_, err := s.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, order := range orders {
			for _, id := range order.Val() {
				if counts[id] == nil {
					counts[id] = pipe.HMGet(ctx, p.Group(id), "waiting")
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("estimate groups: %w", err)
	}
	waiting := make(map[string]int64, len(counts))
	for id, cmd := range counts {
		waiting[id] = max(0, number(cmd.Val()[0]))
	}
	return waiting, nil
}
