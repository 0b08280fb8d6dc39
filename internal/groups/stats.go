package groups

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Stats sums up what waits and runs in all partitions, and who works on it.
func (s *Store) Stats(ctx context.Context) (api.Stats, error) {
	st, err := s.stats(ctx)
	return st, apiError(err)
}

func (s *Store) stats(ctx context.Context) (api.Stats, error) {
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
		types, err := ledger.Types(ctx, s.conn, p)
		if err != nil {
			return st, err
		}
		part, err := ledger.Loads(ctx, s.conn, p, types)
		if err != nil {
			return st, err
		}
		for _, l := range part {
			sum := byType[l.Type]
			if sum == nil {
				sum = &api.TypeStats{Type: l.Type}
				byType[l.Type] = sum
			}
			sum.Backlog += l.Backlog
			sum.Waiting += l.Waiting
			sum.NonReady += l.NonReady
			sum.Ready += l.Ready
			sum.InFlight += l.InFlight
			sum.StaleOutcomes += l.StaleOutcomes
			sum.LeasesLost += l.LeasesLost
		}
		if err := s.pausedTypes(ctx, p, byType); err != nil {
			return st, err
		}
		pipe := s.conn.Cmd.Pipeline()
		groups, active := pipe.ZCard(ctx, p.Groups()), pipe.SCard(ctx, p.Active())
		dead, rate := pipe.XLen(ctx, p.DeadLetters()), pipe.HMGet(ctx, p.Rate(), "w", "n")
		if _, err := pipe.Exec(ctx); err != nil {
			return st, fmt.Errorf("read stats of partition %d: %w", p.Index(), err)
		}
		st.Groups += groups.Val()
		st.ActiveTenants += active.Val()
		st.DeadLetters += dead.Val()
		if w := rate.Val(); time.Since(time.UnixMilli(number(w[0]))) < s.cfg.Rate.Window {
			st.RateLimit.Used += number(w[1])
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
			if byType[typ] == nil {
				byType[typ] = &api.TypeStats{Type: typ}
			}
			byType[typ].Workers++
		}
		for _, r := range w.StartedPerSecond {
			st.StartedPerSec += r
		}
	}
	if stages, err := presence.Stages(ctx, s.conn, s.space); err != nil {
		return st, err
	} else if stages != nil {
		st.Stages = stages
	}
	for _, t := range byType {
		st.Types = append(st.Types, *t)
	}
	slices.SortFunc(st.Types, func(a, b api.TypeStats) int { return cmp.Compare(a.Type, b.Type) })
	return st, nil
}

// pauseOfType begins the fields of the hash of pauses that are about types.
const pauseOfType = "y:"

// pausedTypes marks the types that are paused, also those of which there was no job yet.
func (s *Store) pausedTypes(ctx context.Context, p keyspace.Partition, byType map[string]*api.TypeStats) error {
	for cursor := uint64(0); ; { // by and by: there may be as many paused tenants as there are tenants
		page, next, err := s.conn.Cmd.HScan(ctx, p.Pauses(), cursor, pauseOfType+"*", 1000).Result()
		if err != nil {
			return fmt.Errorf("read pauses of partition %d: %w", p.Index(), err)
		}
		for i := 0; i < len(page); i += 2 {
			typ := strings.TrimPrefix(page[i], pauseOfType)
			if byType[typ] == nil {
				byType[typ] = &api.TypeStats{Type: typ}
			}
			byType[typ].Paused = true
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}
