package groups

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// Whose limit it is.
const (
	scopeTenant = "tenant" // its own
	scopeShare  = "share"  // its part of the one of all
	scopeGlobal = "global"
)

// limited is a job whose tenant, or everybody, has no permit left.
func (c *whyCase) limited(ctx context.Context, w *api.Why) error {
	if c.State == ledger.Ready { // it has its permit
		return nil
	}
	st, err := c.s.tenantState(ctx, c.p, c.Tenant)
	if err != nil {
		return err
	}
	w.Until = timeIfAfter(latest(latest(c.ownPermit(st), c.sharePermit(st)), st.GlobalPermit), latest(c.Now, st.Now))
	if w.Until == nil {
		return nil
	}
	w.Reason, w.Limit = api.WhyRate, c.limitOf(st)
	w.Detail = c.spent(w.Limit, st) + ": the next permit comes at " + clock(*w.Until) + c.line(w, st) + "."
	if least := roundTo(w.Until.Sub(c.Now).Seconds(), 10); w.EstimateSeconds != nil {
		*w.EstimateSeconds = max(*w.EstimateSeconds, least)
	}
	return nil
}

// ownPermit is when the tenant may have one as far as that is up to itself; it may be
// parked until then.
func (c *whyCase) ownPermit(st ledger.TenantState) time.Time {
	return latest(c.s.cfg.Rate.OwnPermit(st), c.RateLimitedUntil)
}

// sharePermit is when a tenant has permits of its share again that it has used up; zero: it has
// some, or no share. Meanwhile it may borrow, but what is left can be reserved for others.
func (c *whyCase) sharePermit(st ledger.TenantState) time.Time {
	if st.Settings.RPS != nil || st.Limit <= 0 || st.Used < st.Limit {
		return time.Time{}
	}
	return st.NextPermit
}

// limitOf is the limit that a tenant waits for: its own or its share, unless only the one of all is
// used up. Who is alone has all for its share.
func (c *whyCase) limitOf(st ledger.TenantState) *api.WhyLimit {
	now := latest(c.Now, st.Now)
	own := latest(c.ownPermit(st), c.sharePermit(st))
	l := &api.WhyLimit{
		Scope:        scopeTenant,
		PerWindow:    st.Limit,
		Used:         st.Used,
		WindowMS:     c.s.cfg.Rate.Window.Milliseconds(),
		NextPermitAt: timeIfAfter(own, now),
	}
	l.RPS = c.s.cfg.Rate.PerSecond(l.PerWindow)
	usedUp := st.Limit > 0 && st.Used >= st.Limit
	switch {
	case st.GlobalPermit.After(now) && (!usedUp || st.Settings.RPS == nil && st.ActiveTenants <= 1):
		l.Scope, l.PerWindow, l.Used = scopeGlobal, st.GlobalLimit, st.GlobalUsed
		l.NextPermitAt = timeIfAfter(st.GlobalPermit, now)
		l.RPS = c.s.cfg.Rate.PerSecond(c.s.cfg.Rate.PerWindow())
	case st.Settings.RPS != nil:
		l.RPS = *st.Settings.RPS
	default:
		l.Scope = scopeShare
	}
	return l
}

// spent says as the beginning of a sentence which limit is used up. With several partitions a
// tenant shares with those of its own what this has of the whole.
func (c *whyCase) spent(l *api.WhyLimit, st ledger.TenantState) string {
	whole, parted := c.s.cfg.Rate.PerWindow(), c.s.space.Partitions() > 1
	rps := strconv.FormatFloat(l.RPS, 'f', -1, 64)
	switch {
	case l.Used < l.PerWindow: // they were when it was parked
		return "Its tenant " + c.Tenant + " had no permit left"
	case l.Scope == scopeGlobal && parted:
		return fmt.Sprintf("The limit is %s a second for all tenants; its partition has %d of a window's %d, all used",
			rps, l.PerWindow, whole)
	case l.Scope == scopeGlobal:
		return "All tenants together have used up the limit of " + rps + " a second"
	case l.Scope == scopeTenant:
		return "Its tenant " + c.Tenant + " has used up its own limit of " + rps + " a second"
	}
	said := fmt.Sprintf("Its tenant %s has used up its share of %s a second among %s",
		c.Tenant, rps, count(st.ActiveTenants, "active tenant"))
	if parted {
		said += fmt.Sprintf(" of its partition, which has %d of a window's %d", st.GlobalLimit, whole)
	}
	return said
}

// count writes 1 job, 2 jobs.
func count(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatInt(n, 10) + " " + what + "s"
}
