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
	for _, w := range workers {
		if slices.ContainsFunc(w.Types, func(typ string) bool { return slices.Contains(types, typ) }) {
			sc.SlotsNow += int64(w.Workers)
		}
		for typ, n := range w.PermissionsPerSecond {
			permissions[typ] = max(permissions[typ], n)
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
	var eligible, may, variance, work float64 // jobs without and with limits; seconds of a slot
	var inFlight int64
	for i, typ := range types {
		d := demands[i]
		ready := float64(d.Ready)
		jobs, spread := d.waiting.Sum(true, func(t ledger.WaitingTenant) float64 {
			return t.Within(seconds, static, d.meanRun.Seconds())
		})
		all, _ := d.waiting.Sum(true, func(t ledger.WaitingTenant) float64 { return t.Jobs })
		bound := math.Inf(1)
		if n, gated := permissions[typ]; gated {
			bound = n * seconds
		}
		if n := set.Types[typ].RPS; n != nil {
			bound = min(bound, float64(*n)*seconds)
		}
		if n := set.Types[typ].InFlight; n != nil && d.meanRun > 0 {
			bound = min(bound, float64(*n)*seconds/d.meanRun.Seconds())
		}
		eligible += ready + all
		may += min(ready+jobs, bound)
		variance += spread
		work += min(ready+jobs, bound) * d.meanRun.Seconds()
		inFlight += d.InFlight
		sc.Backlog += d.Backlog
		sc.Runnable += d.Runnable
		tenants, looked := d.waiting.Size()
		if looked < tenants && sc.Sample == nil {
			sc.Sample = new(api.ScaleSample)
		}
		if sc.Sample != nil {
			sc.Sample.Tenants, sc.Sample.LookedAt = sc.Sample.Tenants+tenants, sc.Sample.LookedAt+looked
		}
	}
	if may > 0 {
		sc.MeanRunMS = math.Round(work/may*1e6) / 1e3
	}
	if sc.Sample != nil && may > 0 {
		sc.Sample.Error = math.Round(1.96*math.Sqrt(variance)/may*1e3) / 1e3
	}
	if most := global * seconds; global > 0 && may > most {
		may, work = most, work*most/may
	}
	sc.RateBound = may < eligible-0.5
	sc.SlotsWanted = max(int64(math.Ceil(work/seconds-1e-9)), min(inFlight, sc.SlotsNow))
	if may > 0 {
		sc.SlotsWanted = max(1, sc.SlotsWanted)
	}
	return sc, nil
}

// demand is what is known of a type's jobs in all partitions. What is paused is in Backlog only.
type demand struct {
	api.TypeStats
	meanRun time.Duration // 0: not known
	waiting ledger.WaitingJobs
}

// readDemands also returns the number of active tenants.
func (s *Store) readDemands(ctx context.Context, types []string) ([]demand, int64, error) {
	demands, weights := make([]demand, len(types)), make([]float64, len(types))
	var active int64
	var mu sync.Mutex
	all := s.space.All()
	err := concurrently(ctx, len(all), func(ctx context.Context, i int) error {
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
		waiting, err := ledger.SetRunnable(ctx, s.conn.Cmd, p, loads, paused, true)
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
