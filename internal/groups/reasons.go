package groups

import (
	"context"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
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
	that := "that is"
	if len(named) > 1 {
		that = "all of them are"
	}
	w.Detail = "Paused: " + strings.Join(named, " and ") + ". It goes on when " + that + " resumed."
	return nil
}

// scheduled is a start that was asked for, of the group or of the job alone.
func (c *whyCase) scheduled(_ context.Context, w *api.Why) error {
	start := c.HeldUntil
	if c.State == ledger.NonReady && c.reason == ledger.ReasonScheduled {
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
	w.Detail = "No live worker serves the type " + c.Type + ": start one. "
	if c.Type == "NOOP" { // none serves it unasked
		w.Detail = "No live worker serves the type NOOP: start one with NOOP in BULKACTION_WORKER_TYPES. "
	}
	w.Detail += "When none has come after the watcher's BULKACTION_NO_PROCESSOR_TIMEOUT, it fails with NO_PROCESSOR."
	if c.State == ledger.NonReady {
		w.Until = timeIfAfter(c.due, c.Now)
	}
	return nil
}

// parked is a job that comes back after a failure, or a tenant's marker that waits for its
// reserved permit.
func (c *whyCase) parked(ctx context.Context, w *api.Why) error {
	if c.State != ledger.NonReady || c.reason == ledger.ReasonScheduled || c.reason == ledger.ReasonPaused {
		return nil
	}
	st, err := c.s.tenantState(ctx, c.p, c.Tenant)
	if err != nil {
		return err
	}
	when, start := "its next attempt is at "+clock(c.due), "its reserved start is at "+clock(c.due)
	if c.due.After(c.Now) {
		c.at(w, c.due)
	} else {
		if when, err = c.overdue(ctx, w, st); err != nil {
			return err
		}
		start = when
	}
	switch c.reason {
	case ledger.ReasonRate:
		w.Reason, w.Limit = api.WhyRate, c.limitOf(st)
		w.Detail = c.spent(w.Limit, st) + ": " + start + "."
	case ledger.ReasonThrottled:
		w.Reason = api.WhyCongestion
		w.Detail = "A partner asked for patience" + c.failed() + ": " + when + "."
	default:
		w.Reason = api.WhyRetry
		w.Detail = "Its last attempt did not succeed" + c.failed() + ": " + when + "."
	}
	return nil
}

// overdue is a job whose time has come and that is held up: who was due earlier comes first.
func (c *whyCase) overdue(ctx context.Context, w *api.Why, st ledger.TenantState) (string, error) {
	ahead, err := ledger.DueBefore(ctx, c.s.conn.Cmd, c.p, c.Tenant, c.due)
	if err != nil {
		return "", err
	}
	w.Position = &ahead
	c.estimate(w, st.PerSecond, st)
	said := "it is due and waits for a permit and for room among what is handed out"
	if ahead > 0 {
		said += ", behind " + count(ahead, "due job") + " of its tenant"
	}
	return said, nil
}

// estimate says how long the jobs before it take at a speed, if one is known.
func (c *whyCase) estimate(w *api.Why, speed float64, st ledger.TenantState) {
	if speed = c.s.cfg.Rate.Bound(st, speed); speed > 0 {
		seconds := roundTo(float64(*w.Position+1)/speed, 10)
		w.EstimateSeconds = &seconds
	}
}

// failed tells the code of the last attempt.
func (c *whyCase) failed() string {
	if c.last == nil || c.last.Code == "" {
		return ""
	}
	return " (" + c.last.Code + ")"
}

// at tells of a start at a known time.
func (c *whyCase) at(w *api.Why, start time.Time) {
	w.Until = timeIfAfter(start, time.Time{})
	seconds := roundTo(max(0, start.Sub(c.Now).Seconds()), 10)
	w.EstimateSeconds = &seconds
}

// inLine is the last reason: nothing is in its way but others.
func (c *whyCase) inLine(ctx context.Context, w *api.Why) error {
	w.Reason = api.WhyFairness
	switch c.State {
	case ledger.Ready:
		place := c.place
		w.Position = &place
		w.Detail = "It is handed out and waits for a free worker."
		if place > 0 {
			w.Detail = "It is handed out and waits for a free worker, behind " + count(place, "other") + "."
		}
	case ledger.NonReady:
		w.Detail = "Its time has come: it is handed out with the next permits."
		if c.reason == ledger.ReasonPaused {
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

// line gives the place of a waiting job in the order in which jobs are chosen, and how long those
// before it take.
func (c *whyCase) line(w *api.Why, st ledger.TenantState) string {
	if c.State != ledger.Waiting {
		return ""
	}
	place := max(0, c.Place) + c.JobsBefore
	w.Position = &place
	said, verb := "; "+count(place, "job"), "come"
	if place == 1 {
		verb = "comes"
	}
	if c.ByPriority {
		said += " of a higher priority " + verb + " before it"
	} else {
		said += " of its tenant " + verb + " before it"
	}
	if c.GroupsBefore > 0 {
		said += ", of " + count(c.GroupsBefore, "group") + " beside its own"
	}
	speed := st.PerSecond
	if running := c.Now.Sub(c.Started).Seconds(); speed <= 0 && !c.Started.IsZero() && running > 0 {
		speed = float64(c.Ended) / running
	}
	c.estimate(w, speed, st)
	return said
}
