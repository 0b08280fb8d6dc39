package why

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// Values of api.WhyLimit.Scope.
const (
	scopeTenant = "tenant" // the tenant's own limit
	scopeShare  = "share"  // the tenant's share of the global limit
	scopeGlobal = "global"
)

// rateLimited sets the reason WhyRate for a job that is not ready, if its tenant or the partition
// has no permit left.
func (j *job) rateLimited(ctx context.Context, w *api.Why) error {
	if j.State == ledger.Ready { // it has spent its permit
		return nil
	}
	if err := j.readTenant(ctx); err != nil {
		return err
	}
	w.Until = apivalue.TimeIfAfter(apivalue.Latest(j.nextPermit(), j.tenantState.GlobalPermit), j.now())
	if w.Until == nil {
		return nil
	}
	w.Reason, w.Limit = api.WhyRate, j.usedUpLimit()
	w.Detail = j.describeLimit(w.Limit) + ": the next permit comes at " + formatTime(*w.Until) +
		j.describePlace(w) + "."
	if least := apivalue.Round(w.Until.Sub(j.Now).Seconds(), 10); w.EstimateSeconds != nil {
		*w.EstimateSeconds = max(*w.EstimateSeconds, least)
	}
	return nil
}

// now returns the time, by Redis, of the later of the two reads: of the job and of its tenant.
func (j *job) now() time.Time { return apivalue.Latest(j.Now, j.tenantState.Now) }

// nextPermit returns when the tenant may get a permit for the job, by its own limit or share; not
// before the time until which the tenant is rate-limited. A tenant whose share is used up may
// borrow, but the rest of the limit can be reserved for others: so its next own permit counts.
func (j *job) nextPermit() time.Time {
	st := j.tenantState
	next := apivalue.Latest(j.e.rate.OwnPermit(*st), j.RateLimitedUntil)
	if st.Settings.RPS == nil && st.Limit > 0 && st.Used >= st.Limit {
		next = apivalue.Latest(next, st.NextPermit)
	}
	return next
}

// usedUpLimit returns the limit that the tenant waits for: its own limit or its share; the global
// limit if only that is used up, or if the tenant is the only active one and so has all of it.
func (j *job) usedUpLimit() *api.WhyLimit {
	st, now := j.tenantState, j.now()
	l := &api.WhyLimit{
		Scope:        scopeShare,
		RPS:          j.e.rate.PerSecond(st.Limit),
		PerWindow:    st.Limit,
		Used:         st.Used,
		WindowMS:     j.e.rate.Window.Milliseconds(),
		NextPermitAt: apivalue.TimeIfAfter(j.nextPermit(), now),
	}
	usedUp := st.Limit > 0 && st.Used >= st.Limit
	switch {
	case st.GlobalPermit.After(now) && (!usedUp || st.Settings.RPS == nil && st.ActiveTenants <= 1):
		l.Scope, l.PerWindow, l.Used = scopeGlobal, st.GlobalLimit, st.GlobalUsed
		l.NextPermitAt = apivalue.TimeIfAfter(st.GlobalPermit, now)
		l.RPS = j.e.rate.PerSecond(j.e.rate.PerWindow())
	case st.Settings.RPS != nil:
		l.Scope, l.RPS = scopeTenant, *st.Settings.RPS
	}
	return l
}

// describeLimit returns the beginning of a sentence that says which limit is used up. With several
// partitions, a tenant shares the partition's quota with the tenants of its partition.
func (j *job) describeLimit(l *api.WhyLimit) string {
	all, partitioned := j.e.rate.PerWindow(), j.e.space.Partitions() > 1
	rps := strconv.FormatFloat(l.RPS, 'f', -1, 64)
	switch {
	case l.Used < l.PerWindow: // there were none when the job became non-ready
		return "Its tenant " + j.Tenant + " had no permit left"
	case l.Scope == scopeGlobal && partitioned:
		return fmt.Sprintf("The limit is %s a second for all tenants; its partition has %d of a window's %d, all used",
			rps, l.PerWindow, all)
	case l.Scope == scopeGlobal:
		return "All tenants together have used up the limit of " + rps + " a second"
	case l.Scope == scopeTenant:
		return "Its tenant " + j.Tenant + " has used up its own limit of " + rps + " a second"
	}
	detail := fmt.Sprintf("Its tenant %s has used up its share of %s a second among %s",
		j.Tenant, rps, plural(j.tenantState.ActiveTenants, "active tenant"))
	if partitioned {
		detail += fmt.Sprintf(" of its partition, which has %d of a window's %d", j.tenantState.GlobalLimit, all)
	}
	return detail
}
