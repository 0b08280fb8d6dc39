package groups

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// Scale says how many slots the jobs of these types could use, so that those which wait end within
// the time drain. A type without jobs needs none. api.Scale has the formula.
func (s *Store) Scale(ctx context.Context, types []string, drain time.Duration) (api.Scale, error) {
	sc, err := s.scale(ctx, types, drain)
	return sc, apiError(err)
}

func (s *Store) scale(ctx context.Context, types []string, drain time.Duration) (api.Scale, error) {
	sc := api.Scale{Type: strings.Join(types, ",")}
	set, err := ledger.ReadLimitSettings(ctx, s.conn.Cmd, s.space)
	if err != nil {
		return sc, err
	}
	workers, err := presence.Workers(ctx, s.conn, s.space)
	if err != nil {
		return sc, err
	}
	permissions := map[string]float64{} // a second, of types whose jobs need accounts or hosts
	batch := map[string]int{}           // most jobs of one call, which takes one slot
	for _, w := range workers {
		if slices.ContainsFunc(w.Types, func(typ string) bool { return slices.Contains(types, typ) }) {
			sc.SlotsNow += int64(w.Workers)
		}
		for typ, n := range w.PermissionsPerSecond {
			permissions[typ] = max(permissions[typ], n)
		}
		for typ, n := range w.BatchSizes {
			batch[typ] = max(batch[typ], n)
		}
	}
	demands, active, err := s.readDemands(ctx, types)
	if err != nil {
		return sc, err
	}
	seconds := drain.Seconds()
	limits := s.globalLimits(set)
	global, static := float64(limits.RPS.Effective), 0.0
	if limits.Share.Effective == ledger.ShareStatic {
		static = global / float64(max(1, active))
	}
	// Jobs without and with limits, and those that may start but were not seen; seconds of a slot; slots.
	var eligible, may, variance, unseen, work, inUse, inUseLater float64
	spent := map[string]float64{} // permits, by tenant
	for i, typ := range types {
		d, mean := demands[i], demands[i].meanRun.Seconds()
		// starting returns how many jobs may start with and without limits.
		starting := func(w ledger.WaitingJobs, most int64) (jobs, all float64) {
			now := map[string]float64{}
			jobs, spread := w.Sum(true, func(t ledger.WaitingTenant) float64 {
				now[t.ID] = t.Within(seconds, static, spent[t.ID], mean)
				return now[t.ID]
			})
			for tenant, n := range now {
				spent[tenant] += n
			}
			all, _ = w.Sum(true, func(t ledger.WaitingTenant) float64 { return t.Jobs })
			variance += spread
			if tenants, looked := w.Size(); looked < tenants && sc.Sample == nil {
				sc.Sample = new(api.ScaleSample)
			}
			return min(jobs, float64(most)), min(all, float64(most))
		}
		jobs, all := starting(d.waiting, d.Waiting)
		gap := 0.0 // that the tenants looked at don't explain: jobs of others, or scheduled and paused ones
		if tenants, looked := d.waiting.Size(); looked < tenants {
			gap = max(0, float64(d.Waiting)-all)
		}
		due, allDue := starting(d.due, d.NonReady)
		bound := math.Inf(1)
		if n, gated := permissions[typ]; gated {
			bound = n * seconds
		}
		if n := set.Types[typ].RPS; n != nil {
			bound = min(bound, float64(*n)*seconds)
		}
		if n := set.Types[typ].InFlight; n != nil && mean > 0 {
			bound = min(bound, float64(*n)*seconds/mean)
		}
		jobs += float64(d.Ready) + due
		eligible += float64(d.Ready) + all + allDue
		may += min(jobs, bound)
		unseen += min(jobs+gap, bound) - min(jobs, bound)
		work += min(jobs, bound) * mean
		slots := math.Ceil(float64(d.InFlight) / float64(max(1, batch[typ])))
		inUse, inUseLater = inUse+slots, inUseLater+slots*min(1, mean/seconds)
		sc.Backlog += d.Backlog
		sc.Runnable += d.Runnable
	}
	if may > 0 {
		sc.MeanRunMS = math.Round(work/may*1e6) / 1e3
	}
	if sc.Sample != nil {
		for _, d := range demands {
			for _, w := range []ledger.WaitingJobs{d.waiting, d.due} {
				tenants, looked := w.Size()
				sc.Sample.Tenants, sc.Sample.LookedAt = sc.Sample.Tenants+tenants, sc.Sample.LookedAt+looked
			}
		}
		sc.Sample.Error = math.Round(max(1.96*math.Sqrt(variance), unseen)/max(1, may)*1e3) / 1e3
	}
	if most := global * seconds; global > 0 && may > most {
		may, work = most, work*most/may
	}
	if sc.RateBound = may < eligible-0.5; sc.RateBound {
		inUse = inUseLater // a burst of short jobs needs its slots only now
	}
	sc.SlotsWanted = int64(math.Ceil(max(work/seconds-1e-9, min(inUse, float64(sc.SlotsNow)))))
	if eligible > 0 {
		sc.SlotsWanted = max(1, sc.SlotsWanted)
	}
	return sc, nil
}

// demand is what is known of a type's jobs in all partitions. What is paused is in Backlog only.
type demand struct {
	api.TypeStats
	meanRun time.Duration // 0: not known
	waiting ledger.WaitingJobs
	due     ledger.WaitingJobs
}

// readDemands also returns the number of active tenants.
func (s *Store) readDemands(ctx context.Context, types []string) ([]demand, int64, error) {
	demands, weights := make([]demand, len(types)), make([]float64, len(types))
	var active int64
	var mu sync.Mutex
	found, err := s.readBusiest(ctx)
	if err != nil {
		return nil, 0, err
	}
	top := map[int][]string{} // the busiest tenants, by partition
	for _, f := range found {
		for _, t := range f.Tenants {
			at := s.space.OfTenant(t.ID).Index()
			top[at] = append(top[at], t.ID)
		}
	}
	all := s.space.All()
	err = concurrently(ctx, len(all), func(ctx context.Context, i int) error {
		p := all[i]
		loads, err := ledger.Loads(ctx, s.conn.Cmd, p, types)
		if err != nil {
			return err
		}
		paused, err := ledger.PausedTypes(ctx, s.conn.Cmd, p, types)
		if err != nil {
			return err
		}
		means, err := ledger.MeanRuns(ctx, s.conn.Cmd, p, types)
		if err != nil {
			return err
		}
		waiting, err := ledger.SetRunnable(ctx, s.conn.Cmd, p, loads, paused, top[p.Index()], true)
		if err != nil {
			return err
		}
		due, err := ledger.DueJobs(ctx, s.conn.Cmd, p, loads, paused, top[p.Index()])
		if err != nil {
			return err
		}
		n, err := s.conn.Cmd.SCard(ctx, p.Active()).Result()
		mu.Lock()
		defer mu.Unlock()
		active += n
		for j := range types {
			d := &demands[j]
			if slices.Contains(paused, types[j]) {
				loads[j].Ready = 0
			}
			addStats(&d.TypeStats, loads[j])
			d.waiting.Sets = append(d.waiting.Sets, waiting[j].Sets...)
			d.due.Sets = append(d.due.Sets, due[j].Sets...)
			if means[j] > 0 {
				weight := 1 + float64(loads[j].Backlog+loads[j].InFlight)
				weights[j] += weight
				d.meanRun += time.Duration(float64(means[j]-d.meanRun) * weight / weights[j])
			}
		}
		return err
	})
	return demands, active, err
}
