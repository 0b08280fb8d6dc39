package groups

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/lua"
)

// Reasons of parked jobs, as their blobs have them.
const (
	parkedRate      = 'R'
	parkedThrottled = 'A'
	parkedScheduled = 'S'
	parkedPaused    = 'P' // it was handed out when it was paused
)

// paused is the first reason: whatever else holds, nothing starts.
func (c *whyCase) paused(_ context.Context, w *api.Why) error {
	if c.GroupPaused {
		w.PausedBy = append(w.PausedBy, "group")
	}
	if c.TenantPaused {
		w.PausedBy = append(w.PausedBy, "tenant")
	}
	if c.TypePaused {
		w.PausedBy = append(w.PausedBy, "type")
	}
	if len(w.PausedBy) == 0 {
		return nil
	}
	var named []string
	for _, what := range w.PausedBy {
		named = append(named, what+" "+map[string]string{"group": c.group, "tenant": c.Tenant, "type": c.Type}[what])
	}
	w.Reason = api.WhyPaused
	w.Detail = "Paused: " + strings.Join(named, " and ") + ". It goes on when that is resumed."
	return nil
}

// scheduled is a start that was asked for, of the group or of the job alone.
func (c *whyCase) scheduled(_ context.Context, w *api.Why) error {
	start := c.HeldUntil
	if c.State == lua.NonReady && c.reason == parkedScheduled {
		start = c.due
	}
	if !start.After(c.Now) {
		return nil
	}
	w.Reason = api.WhyScheduled
	c.at(w, start)
	w.Detail = "It was submitted to start at " + clock(start) + "."
	return nil
}

// unserved is a type without workers.
func (c *whyCase) unserved(ctx context.Context, w *api.Why) error {
	if c.Type == "" {
		return nil
	}
	ok, err := c.s.served(ctx, c.Type)
	if ok || err != nil {
		return err
	}
	w.Reason = api.WhyNoProcessor
	w.Detail = "No live worker serves the type " + c.Type + ": start one."
	if c.State == lua.NonReady {
		w.Until = later(c.due, c.Now)
	}
	return nil
}

// parked is a job that comes back after a failure, or a tenant's marker that waits for its reserved permit.
func (c *whyCase) parked(ctx context.Context, w *api.Why) error {
	if c.State != lua.NonReady || c.reason == parkedScheduled || c.reason == parkedPaused {
		return nil
	}
	c.at(w, c.due)
	when := "its next attempt is at " + clock(c.due)
	if !c.due.After(c.Now) {
		when = "it is due, and starts as soon as it gets a permit and there is room among what is handed out"
	}
	switch c.reason {
	case parkedRate:
		w.Reason = api.WhyRate
		w.Detail = "Its tenant " + c.Tenant + " has used up its limit: " + strings.Replace(when, "next attempt", "reserved start", 1) + "."
		st, err := c.s.tenantState(ctx, c.p, c.Tenant)
		w.Limit = c.limitOf(st)
		return err
	case parkedThrottled:
		w.Reason = api.WhyCongestion
		w.Detail = "A partner asked for patience" + c.failed() + ": " + when + "."
	default:
		w.Reason = api.WhyRetry
		w.Detail = "Its last attempt did not succeed" + c.failed() + ": " + when + "."
	}
	return nil
}

// failed tells the code of the last attempt.
func (c *whyCase) failed() string {
	if c.last.Code == "" {
		return ""
	}
	return " (" + c.last.Code + ")"
}

// at tells of a start at a known time.
func (c *whyCase) at(w *api.Why, start time.Time) {
	w.Until = later(start, time.Time{})
	seconds := round(max(0, start.Sub(c.Now).Seconds()), 10)
	w.EstimateSeconds = &seconds
}

// limited is a job whose tenant, or everybody, has no permit left.
func (c *whyCase) limited(ctx context.Context, w *api.Why) error {
	if c.State == lua.Ready { // it has its permit
		return nil
	}
	st, err := c.s.tenantState(ctx, c.p, c.Tenant)
	if err != nil {
		return err
	}
	w.Until = later(latest(latest(c.ParkedUntil, c.s.ownPermit(st)), st.GlobalPermit), latest(c.Now, st.Now))
	if w.Until == nil {
		return nil
	}
	w.Reason, w.Limit = api.WhyRate, c.limitOf(st)
	whose := "Its tenant " + c.Tenant + " has"
	if w.Limit.Scope == scopeGlobal {
		whose = "All tenants together have"
	}
	w.Detail = whose + " used up the limit: the next permit comes at " + clock(*w.Until) + c.line(w, st) + "."
	if least := round(w.Until.Sub(c.Now).Seconds(), 10); w.EstimateSeconds != nil {
		*w.EstimateSeconds = max(*w.EstimateSeconds, least)
	}
	return nil
}

// Whose limit it is.
const (
	scopeTenant = "tenant"
	scopeGlobal = "global"
)

// limitOf is the limit that a tenant waits for: its own, unless only the one of all is used up.
func (c *whyCase) limitOf(st lua.TenantState) *api.WhyLimit {
	own, now := latest(c.s.ownPermit(st), c.ParkedUntil), latest(c.Now, st.Now)
	l := &api.WhyLimit{
		Scope: scopeTenant, PerWindow: st.Limit, Used: st.Used, WindowMS: c.s.cfg.Rate.Window.Milliseconds(), NextPermitAt: later(own, now),
	}
	if st.GlobalPermit.After(now) && !own.After(now) {
		l.Scope, l.PerWindow, l.Used, l.NextPermitAt = scopeGlobal, st.GlobalLimit, st.GlobalUsed, later(st.GlobalPermit, now)
	}
	if l.WindowMS > 0 {
		l.RPS = round(float64(l.PerWindow)*1000/float64(l.WindowMS), 1000)
	}
	if l.Scope == scopeTenant && st.Settings.RPS != nil {
		l.RPS = *st.Settings.RPS
	}
	return l
}

// inLine is the last reason: nothing is in its way but others.
func (c *whyCase) inLine(ctx context.Context, w *api.Why) error {
	w.Reason = api.WhyFairness
	switch c.State {
	case lua.Ready:
		place := c.place
		w.Position = &place
		w.Detail = fmt.Sprintf("It is handed out and waits for a free worker, behind %d others.", place)
	case lua.NonReady:
		w.Detail = "Its time has come: it is handed out with the next permits."
		if c.reason == parkedPaused {
			w.Detail = "It was paused and has been resumed: it is handed out with the next permits."
		}
	default:
		st, err := c.s.tenantState(ctx, c.p, c.Tenant)
		if err != nil {
			return err
		}
		w.Detail = "It waits for its turn among the tenants" + c.line(w, st) + "."
	}
	return nil
}

// line gives the place of a waiting job in the order in which jobs are chosen, and how long those before it take.
func (c *whyCase) line(w *api.Why, st lua.TenantState) string {
	if c.State != lua.Waiting {
		return ""
	}
	place := max(0, c.Place) + c.JobsBefore
	w.Position = &place
	if c.ByPriority {
		return fmt.Sprintf("; %d jobs of a higher priority come before it, of %d groups beside its own", place, c.GroupsBefore)
	}
	said := fmt.Sprintf("; %d jobs of its tenant come before it", place)
	if c.GroupsBefore > 0 {
		said += fmt.Sprintf(", of %d groups beside its own", c.GroupsBefore)
	}
	speed := st.PerSecond
	if running := c.Now.Sub(c.Started).Seconds(); speed <= 0 && !c.Started.IsZero() && running > 0 {
		speed = float64(c.Ended) / running
	}
	if speed > 0 {
		seconds := round(float64(place+1)/speed, 10)
		w.EstimateSeconds = &seconds
	}
	return said
}
