package telemetry

import (
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Reasons for which a permit was denied.
const (
	DeniedGlobal   = "global"    // the global limit is reached, or the partition's quota of it
	DeniedPerGroup = "per_group" // the tenant's share or own limit is reached
)

// MaxLabels bounds the series of a metric with a label whose values users choose: so many values
// have a series each, all other values share the series Other.
const (
	MaxLabels = 64
	Other     = "other"
)

// keepSeries is the shortest time for which a tenant keeps its series after its last given or
// denied permit.
const keepSeries = 10 * time.Minute

// rateLimits counts permits per tenant, with a bounded number of series: the first MaxLabels
// tenants have a series each, all other tenants share Other. When all series are taken and another
// tenant comes, a sweep runs, at most once in keepSeries. It takes the series away from each tenant
// that was given or denied no permit since the last sweep. If such a tenant returns, its series
// starts at 0, like that of a restarted process. The counts are not in SDK counters, because the
// SDK never removes a series.
type rateLimits struct {
	now func() time.Time

	mu       sync.RWMutex
	byTenant map[string]*tenantPermits
	sweepAt  time.Time
	other    *tenantPermits
}

type tenantPermits struct {
	allowed, global, perGroup                   atomic.Int64
	allowedSeries, globalSeries, perGroupSeries metric.ObserveOption

	seen int64 // the sum of the three counters at the last sweep
}

func newRateLimits(i instruments, now func() time.Time) *rateLimits {
	r := &rateLimits{
		now:      now,
		byTenant: make(map[string]*tenantPermits),
		sweepAt:  now().Add(keepSeries),
		other:    newTenantPermits(Other),
	}
	allowed := i.observableCounter("rate_limit_allowed_total", "Permits given to jobs.")
	denied := i.observableCounter("rate_limit_denied_total", "Permits denied, by the limit that was reached.")
	i.observe(func(o metric.Observer) { r.observe(o, allowed, denied) }, allowed, denied)
	return r
}

func newTenantPermits(tenant string) *tenantPermits {
	label := attribute.String("tenant", tenant)
	series := func(attrs ...attribute.KeyValue) metric.ObserveOption {
		return metric.WithAttributeSet(attribute.NewSet(attrs...))
	}
	return &tenantPermits{
		allowedSeries:  series(label),
		globalSeries:   series(label, attribute.String("reason", DeniedGlobal)),
		perGroupSeries: series(label, attribute.String("reason", DeniedPerGroup)),
	}
}

// Allowed counts n jobs of a tenant that became ready; with a rate limit each was given a permit.
func (r *rateLimits) Allowed(tenant string, n int) { r.of(tenant).allowed.Add(int64(max(n, 0))) }

// Denied counts one denied permit. reason is [DeniedGlobal] or [DeniedPerGroup].
func (r *rateLimits) Denied(tenant, reason string) {
	if reason == DeniedGlobal {
		r.of(tenant).global.Add(1)
		return
	}
	r.of(tenant).perGroup.Add(1)
}

func (r *rateLimits) of(tenant string) *tenantPermits {
	r.mu.RLock()
	p, full := r.byTenant[tenant], len(r.byTenant) >= MaxLabels
	if p == nil && (tenant == Other || full && r.now().Before(r.sweepAt)) {
		p = r.other
	}
	r.mu.RUnlock()
	if p != nil {
		return p
	}
	return r.admit(tenant)
}

func (r *rateLimits) admit(tenant string) *tenantPermits {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.byTenant[tenant]; p != nil {
		return p
	}
	if len(r.byTenant) >= MaxLabels && !r.now().Before(r.sweepAt) {
		r.sweep()
	}
	if len(r.byTenant) >= MaxLabels {
		return r.other
	}
	p := newTenantPermits(tenant)
	r.byTenant[tenant] = p
	return p
}

// sweep removes the tenants whose counters have not changed since the last sweep. The caller holds
// the lock.
func (r *rateLimits) sweep() {
	r.sweepAt = r.now().Add(keepSeries)
	for tenant, p := range r.byTenant {
		sum := p.sum()
		if sum == p.seen {
			delete(r.byTenant, tenant)
		}
		p.seen = sum
	}
}

func (p *tenantPermits) sum() int64 { return p.allowed.Load() + p.global.Load() + p.perGroup.Load() }

func (r *rateLimits) observe(o metric.Observer, allowed, denied metric.Int64Observable) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	r.other.observe(o, allowed, denied)
	for _, p := range r.byTenant {
		p.observe(o, allowed, denied)
	}
}

func (p *tenantPermits) observe(o metric.Observer, allowed, denied metric.Int64Observable) {
	report := func(what metric.Int64Observable, n int64, series metric.ObserveOption) {
		if n > 0 {
			o.ObserveInt64(what, n, series)
		}
	}
	report(allowed, p.allowed.Load(), p.allowedSeries)
	report(denied, p.global.Load(), p.globalSeries)
	report(denied, p.perGroup.Load(), p.perGroupSeries)
}
