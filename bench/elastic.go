package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/process/journal"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Elastic shows how much of the global limit one busy tenant borrows while nine others are nearly
// idle. It also shows how soon each of the others gets its share again when it returns with a
// backlog.
type Elastic struct {
	Partitions int `json:"partitions"`
	// BusyShareOfLimit is the permits of the busy tenant / the permits of the global limit, while
	// the other tenants were nearly idle.
	BusyShareOfLimit float64 `json:"busy_share_of_limit"`
	BusyWindows      int     `json:"busy_windows"` // whole windows in this time
	// ReturnWindows is the number of windows that the slowest returning tenant waited until it had
	// its full share; 0: it had it in the window in which it returned.
	ReturnWindows    int               `json:"return_windows"`
	WindowsOverLimit int               `json:"windows_over_limit"`
	LimitUsedRatio   float64           `json:"limit_used_ratio"`
	PerWindow        []ElasticWindow   `json:"per_window"`
	Overrides        map[string]string `json:"overrides"`
}

// ElasticWindow has the permits that were spent in one window: by the busy tenant, by all others
// together, and by the other tenant that spent fewest.
type ElasticWindow struct {
	Busy       int64 `json:"busy"`
	Others     int64 `json:"others"`
	LeastOther int64 `json:"least_other"`
}

const (
	elasticTenants       = 10
	elasticAloneTime     = 10 * time.Second // how long the busy tenant is nearly alone
	trickleInterval      = 250 * time.Millisecond
	returnBacklogWindows = 5 // a returning tenant's backlog, in windows of its share
)

func idleTenant(i int) string { return fmt.Sprintf("idle-%d", i) }

func runElastic(ctx context.Context, o LimitsOptions, partitions int) (Elastic, error) {
	out := Elastic{Partitions: partitions}
	o.Partitions = partitions
	var limit limitRule
	var busyFrom, busyTo int64
	var returning []group
	part := fmt.Sprintf("elastic, %d partitions", partitions)
	x, err := o.experiment(ctx, part, func(x *run) (err error) {
		if limit, err = x.limitRule(o.RPS); err != nil {
			return err
		}
		windows := elasticAloneTime.Seconds()/limit.window.Seconds() + returnBacklogWindows
		busy := group{id: x.name + "-busy", tenant: "busy", jobs: int(float64(limit.perWindow) * windows)}
		if err := x.submit(ctx, busy); err != nil {
			return err
		}
		if busyFrom, err = x.awaitAccepted(ctx, busy); err != nil {
			return err
		}
		for began, n := time.Now(), 0; time.Since(began) < elasticAloneTime; n++ {
			id, tenant := fmt.Sprintf("%s-trickle-%d", x.name, n), idleTenant(n%(elasticTenants-1))
			if err := x.submit(ctx, group{id: id, tenant: tenant, jobs: 1}); err != nil {
				return err
			}
			o.progress(part, int(time.Since(began)), int(2*elasticAloneTime))
			if err := redisx.Sleep(ctx, trickleInterval); err != nil {
				return err
			}
		}
		now, err := x.now(ctx)
		if err != nil {
			return err
		}
		busyTo = now.UnixMicro()
		for i := range elasticTenants - 1 {
			returning = append(returning, group{
				id:     fmt.Sprintf("%s-return-%d", x.name, i),
				tenant: idleTenant(i),
				jobs:   int(limit.perWindow/elasticTenants) * returnBacklogWindows,
			})
		}
		return x.submit(ctx, returning...)
	}, globalLimit(o.RPS))
	if err != nil {
		return out, err
	}
	if len(x.log.Permits) == 0 {
		return out, errNoPermits
	}
	returned := map[string]int64{}
	for _, g := range x.ended[len(x.ended)-len(returning):] {
		returned[g.tenant] = g.Created.UnixMicro()
	}
	out.Overrides = x.overrides
	out.count(limit, x.log, busyFrom, busyTo, returned, limit.perWindow/elasticTenants)
	return out, nil
}

// count computes the figures from the journals, which must contain a permit. The busy tenant was
// nearly alone from busyFrom to busyTo (µs). returned has, for each other tenant, the time (µs) at
// which it submitted its backlog. share is a tenant's permits a window.
func (e *Elastic) count(
	limit limitRule, log journal.Log, busyFrom, busyTo int64, returned map[string]int64, share int64,
) {
	permits := permitEvents(log, nil)
	busy := permitEvents(log, func(p journal.PermitEvent) bool { return p.Tenant == "busy" })
	used, windows := limit.usedRatio(busy, busyFrom, busyTo)
	e.BusyShareOfLimit, e.BusyWindows = measure.Round4(used), windows
	e.WindowsOverLimit, _ = limit.windowsOver(permits)
	used, _ = limit.usedRatio(permits, busyFrom, permits[len(permits)-1].at)
	e.LimitUsedRatio = measure.Round4(used)

	width := limit.window.Microseconds()
	first, last := permits[0].at/width, permits[len(permits)-1].at/width
	tenants := map[string][]event{}
	for name := range returned {
		tenants[name] = permitEvents(log, func(p journal.PermitEvent) bool { return p.Tenant == name })
	}
	for w := first; w <= last; w++ {
		row := ElasticWindow{Busy: sumBetween(busy, w*width, (w+1)*width)}
		row.Others = sumBetween(permits, w*width, (w+1)*width) - row.Busy
		least := int64(-1)
		for _, events := range tenants {
			if n := sumBetween(events, w*width, (w+1)*width); least < 0 || n < least {
				least = n
			}
		}
		row.LeastOther = max(0, least)
		e.PerWindow = append(e.PerWindow, row)
	}
	for name, at := range returned {
		n := int64(0)
		// If a tenant never gets its full share, n becomes the number of windows from its return to
		// the end of the run.
		for at/width+n <= last && sumBetween(tenants[name], (at/width+n)*width, (at/width+n+1)*width) < share {
			n++
		}
		e.ReturnWindows = max(e.ReturnWindows, int(n))
	}
}
