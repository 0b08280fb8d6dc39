package groups

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// stats counts what is in the installation.
type stats struct{ *access }

// Stats returns the figures of the installation: jobs by type in all partitions, used permits, and
// the live processes.
func (s *stats) Stats(ctx context.Context) (api.Stats, error) {
	st, err := s.read(ctx)
	return st, apiError(err)
}

// ResizeWorker asks a worker process to have n slots. The process reads the number with its next
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
	if err := s.addPartitions(ctx, &st, byType); err != nil {
		return st, err
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
	brokers, err := presence.Brokers(ctx, s.conn, s.space)
	if err != nil {
		return st, err
	}
	st.Stages = append(append(st.Stages, stages...), brokers...)
	st.Roles = rolesOf(st.Stages, len(workers))
	for _, t := range byType {
		st.Types = append(st.Types, *t)
	}
	slices.SortFunc(st.Types, func(a, b api.TypeStats) int { return cmp.Compare(a.Type, b.Type) })
	return st, nil
}

// rolesOf counts the live processes of each role. The role broker is left out if it has none.
func rolesOf(stages []api.StageStatus, workers int) []api.RoleStatus {
	live := map[string]int{"worker": workers}
	for _, st := range stages {
		live[st.Role]++
	}
	var all []api.RoleStatus
	for _, role := range append(slices.Clone(api.Roles), api.RoleBroker) {
		if n := live[role]; n > 0 || role != api.RoleBroker {
			all = append(all, api.RoleStatus{Role: role, Processes: n})
		}
	}
	return all
}

// addPartitions adds the figures of all partitions to the answer. It reads maxConcurrentReads
// partitions at the same time.
func (s *stats) addPartitions(ctx context.Context, st *api.Stats, byType map[string]*api.TypeStats) error {
	all := s.space.All()
	parts := make([]partitionStats, len(all))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(maxConcurrentReads)
	for i, p := range all {
		reads.Go(func() (err error) {
			parts[i], err = s.readPartition(ctx, p)
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		return err
	}
	for _, part := range parts {
		st.Groups += part.Groups
		st.ActiveTenants += part.ActiveTenants
		st.DeadLetters += part.DeadLetters
		st.RateLimit.Used += part.used
		addTotals(&st.Totals, part.Retired)
		for _, l := range part.loads {
			addStats(statsOf(byType, l.Type), l)
			addTotals(&st.Totals, l.Totals)
		}
		for _, typ := range part.paused {
			statsOf(byType, typ).Paused = true
		}
	}
	return nil
}

// partitionStats are the numbers of one partition.
type partitionStats struct {
	ledger.PartitionStats
	loads  []api.TypeStats
	paused []string // types
	used   int64    // permits of the global limit, as ledger.PermitsUsed counts them
}

func (s *stats) readPartition(ctx context.Context, p keyspace.Partition) (part partitionStats, err error) {
	if part.PartitionStats, err = ledger.ReadPartition(ctx, s.conn.Cmd, p); err != nil {
		return part, err
	}
	if part.loads, err = ledger.Loads(ctx, s.conn.Cmd, p, part.Types); err != nil {
		return part, err
	}
	if part.paused, err = ledger.PausedTypes(ctx, s.conn.Cmd, p, part.Types); err != nil {
		return part, err
	}
	if part.used, err = ledger.PermitsUsed(ctx, s.conn.Cmd, p, s.partitionLimit(p)); err != nil {
		return part, fmt.Errorf("read permits: %w", err)
	}
	return part, nil
}

// addStats adds the figures of a type in one partition to the sums of this type.
func addStats(sum *api.TypeStats, t api.TypeStats) {
	sum.Backlog += t.Backlog
	sum.Waiting += t.Waiting
	sum.NonReady += t.NonReady
	sum.Ready += t.Ready
	sum.InFlight += t.InFlight
	sum.StaleOutcomes += t.StaleOutcomes
	sum.LeasesLost += t.LeasesLost
	addTotals(&sum.Totals, t.Totals)
}

func addTotals(sum *api.JobTotals, t api.JobTotals) {
	sum.Accepted += t.Accepted
	sum.Started += t.Started
	sum.Done += t.Done
	sum.Failed += t.Failed
	sum.Retried += t.Retried
	sum.Throttled += t.Throttled
}

// statsOf returns the entry of a type in the answer; it adds the entry if it is missing.
func statsOf(byType map[string]*api.TypeStats, typ string) *api.TypeStats {
	if byType[typ] == nil {
		byType[typ] = &api.TypeStats{Type: typ}
	}
	return byType[typ]
}
