package groups

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// stats counts what is in the installation.
type stats struct{ *access }

// Stats returns the numbers of the installation: jobs by type in all partitions, used permits, and
// the live processes.
func (s *stats) Stats(ctx context.Context) (api.Stats, error) {
	st, err := s.read(ctx)
	return st, apiError(err)
}

// ResizeWorker asks a worker process to have n slots. The process takes the number with its next
// heartbeat.
func (s *stats) ResizeWorker(ctx context.Context, id string, n int) error {
	return apiError(presence.SetPoolSize(ctx, s.conn, s.space, id, n))
}

func (s *stats) read(ctx context.Context) (api.Stats, error) {
	st := api.Stats{
		Partitions: s.space.Partitions(),
		Types:      []api.TypeStats{},
		Workers:    []api.WorkerStatus{},
		Stages:     []api.StageStatus{},
		RateLimit: api.RateLimit{
			Limiter:  s.cfg.Limiter,
			Share:    s.cfg.LimiterMode,
			RPS:      s.cfg.Rate.RPS,
			WindowMS: s.cfg.Rate.Window.Milliseconds(),
		},
	}
	byType := map[string]*api.TypeStats{}
	for _, p := range s.space.All() {
		if err := s.addPartition(ctx, p, &st, byType); err != nil {
			return st, err
		}
	}
	rejected, err := s.conn.Cmd.XLen(ctx, s.space.Rejected()).Result()
	if err != nil {
		return st, fmt.Errorf("read stats: %w", err)
	}
	st.Rejected = rejected
	workers, err := presence.Workers(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	for _, w := range workers {
		st.Workers = append(st.Workers, w.WorkerStatus)
		for _, typ := range w.Types {
			statsOf(byType, typ).Workers++
		}
		for _, r := range w.StartedPerSecond {
			st.StartedPerSec += r
		}
	}
	stages, err := presence.Stages(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	if stages != nil {
		st.Stages = stages
	}
	for _, t := range byType {
		st.Types = append(st.Types, *t)
	}
	slices.SortFunc(st.Types, func(a, b api.TypeStats) int { return cmp.Compare(a.Type, b.Type) })
	return st, nil
}

// addPartition adds the numbers of one partition.
func (s *stats) addPartition(
	ctx context.Context, p keyspace.Partition, st *api.Stats, byType map[string]*api.TypeStats,
) error {
	part, err := ledger.ReadPartition(ctx, s.conn.Cmd, p)
	if err != nil {
		return err
	}
	st.Groups += part.Groups
	st.ActiveTenants += part.ActiveTenants
	st.DeadLetters += part.DeadLetters

	loads, err := ledger.Loads(ctx, s.conn.Cmd, p, part.Types)
	if err != nil {
		return err
	}
	for _, l := range loads {
		addStats(statsOf(byType, l.Type), l)
	}
	paused, err := ledger.PausedTypes(ctx, s.conn.Cmd, p)
	if err != nil {
		return err
	}
	for _, typ := range paused {
		statsOf(byType, typ).Paused = true
	}
	used, err := ledger.PermitsUsed(ctx, s.conn.Cmd, p, s.partitionLimit(p))
	if err != nil {
		return fmt.Errorf("read permits: %w", err)
	}
	st.RateLimit.Used += used
	return nil
}

// addStats adds the numbers of jobs of a type in one partition.
func addStats(sum *api.TypeStats, t api.TypeStats) {
	sum.Backlog += t.Backlog
	sum.Waiting += t.Waiting
	sum.NonReady += t.NonReady
	sum.Ready += t.Ready
	sum.InFlight += t.InFlight
	sum.StaleOutcomes += t.StaleOutcomes
	sum.LeasesLost += t.LeasesLost
}

// statsOf returns the entry of a type and adds it if it is missing.
func statsOf(byType map[string]*api.TypeStats, typ string) *api.TypeStats {
	if byType[typ] == nil {
		byType[typ] = &api.TypeStats{Type: typ}
	}
	return byType[typ]
}
