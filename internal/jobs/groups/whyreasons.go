package groups

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
)

// This file has the checks that explain makes one after the other: each checks whether a reason
// applies, and if so sets w.Reason and the details.

// paused sets the reason WhyPaused for a job whose group, tenant or type is paused. This reason is
// checked first: until the pause ends, no other one matters.
func (j *waitingJob) paused(_ context.Context, w *api.Why) error {
	var named []string
	for _, what := range []struct {
		paused   bool
		kind, id string
	}{
		{j.GroupPaused, "group", j.group},
		{j.TenantPaused, "tenant", j.Tenant},
		{j.TypePaused, "type", j.Type},
	} {
		if what.paused {
			w.PausedBy = append(w.PausedBy, what.kind)
			named = append(named, what.kind+" "+what.id)
		}
	}
	if len(named) == 0 {
		return nil
	}
	w.Reason = api.WhyPaused
	that := "that is"
	if len(named) > 1 {
		that = "all of them are"
	}
	w.Detail = "Paused: " + strings.Join(named, " and ") + ". It goes on when " + that + " resumed."
	return nil
}

// scheduled sets the reason WhyScheduled before the start time that was requested for the group or
// for the job alone.
func (j *waitingJob) scheduled(_ context.Context, w *api.Why) error {
	start := j.HeldUntil
	if j.State == ledger.NonReady && j.reason == ledger.ReasonScheduled {
		start = j.due
	}
	if !start.After(j.Now) {
		return nil
	}
	w.Reason = api.WhyScheduled
	setStart(w, j.Now, start)
	w.Detail = "It was submitted to start at " + formatTime(start) + "."
	return nil
}

// unserved sets the reason WhyNoProcessor when no live worker process serves the job's type;
// otherwise it calls unpermitted.
func (j *waitingJob) unserved(ctx context.Context, w *api.Why) error {
	if j.Type == "" {
		return nil
	}
	workers, err := presence.Workers(ctx, j.s.conn, j.s.space)
	if err != nil {
		return err
	}
	upper := strings.ToUpper(j.Type)
	similar := slices.ContainsFunc(workers, func(r presence.WorkerReport) bool {
		return slices.Contains(r.Types, upper)
	})
	j.workers = slices.DeleteFunc(workers, func(r presence.WorkerReport) bool {
		return !slices.Contains(r.Types, j.Type)
	})
	if len(j.workers) > 0 {
		unpermitted(j, w)
		return nil
	}
	w.Reason = api.WhyNoProcessor
	w.Detail = "No live worker serves the type " + j.Type + ": start one. "
	if j.Type == "NOOP" { // workers serve it only if their settings name it
		w.Detail = "No live worker serves the type NOOP: start one with NOOP in BULKACTION_WORKER_TYPES. "
	}
	if similar {
		w.Detail += "Did you mean " + upper + "? "
	}
	w.Detail += "When none has come after the watcher's BULKACTION_NO_PROCESSOR_TIMEOUT, it fails with NO_PROCESSOR."
	if j.State == ledger.NonReady {
		w.Until = timeIfAfter(j.due, j.Now)
	}
	return nil
}

// unpermitted sets the reason WhyResource if j is a ready job of a gated type and no worker process
// can get a permission now. It sets w.Until to the time at which the first process may get one.
func unpermitted(j *waitingJob, w *api.Why) {
	if j.State != ledger.Ready || len(j.workers) == 0 {
		return
	}
	first := time.Time{}
	for _, r := range j.workers {
		until := r.NoPermissionUntil[j.Type]
		if !until.After(j.Now) {
			return
		}
		if first.IsZero() || until.Before(first) {
			first = until
		}
	}
	w.Reason = api.WhyResource
	setStart(w, j.Now, first)
	w.Detail = "It is ready, but what its type needs is busy until " + formatTime(first) + ", such as all accounts."
}

// nonReady sets the reason of a non-ready job: WhyCongestion if it was throttled, WhyResource if it
// was deferred, WhyRate if it is a tenant's marker, and WhyRetry if it was retried, released or
// reclaimed. It sets none for a scheduled job, or one that was paused.
func (j *waitingJob) nonReady(ctx context.Context, w *api.Why) error {
	if j.State != ledger.NonReady || j.reason == ledger.ReasonScheduled || j.reason == ledger.ReasonPaused {
		return nil
	}
	if err := j.readTenant(ctx); err != nil {
		return err
	}
	if j.lastErr == nil && j.reason != ledger.ReasonRate { // it is a group's next job
		status, err := ledger.ReadJob(ctx, j.s.conn.Cmd, j.p, j.group, j.Ordinal)
		if err != nil {
			return err
		}
		j.lastErr = status.LastError()
	}
	when, start := "its next attempt is at "+formatTime(j.due), "its reserved start is at "+formatTime(j.due)
	if j.due.After(j.Now) {
		setStart(w, j.Now, j.due)
	} else {
		late, err := j.overdue(ctx, w)
		if err != nil {
			return err
		}
		when, start = late, late
	}
	switch j.reason {
	case ledger.ReasonRate:
		w.Reason, w.Limit = api.WhyRate, j.usedUpLimit()
		w.Detail = j.describeLimit(w.Limit) + ": " + start + "."
	case ledger.ReasonThrottled:
		w.Reason = api.WhyCongestion
		w.Detail = "A downstream API asked to wait" + codeOf(j.lastErr) + ": " + when + "."
	case ledger.ReasonResource:
		w.Reason = api.WhyResource
		w.Detail = "Something that it needs is busy" + textOf(ctx, j.lastErr) + ": " + when + "."
	default:
		w.Reason = api.WhyRetry
		w.Detail = "Its last attempt did not succeed" + codeOf(j.lastErr) + ": " + when + "."
	}
	return nil
}

// overdue returns the text about a non-ready job whose due time has passed, and sets w.Position and
// w.EstimateSeconds. The tenant's jobs that were due earlier come before it.
func (j *waitingJob) overdue(ctx context.Context, w *api.Why) (string, error) {
	before, err := ledger.DueBefore(ctx, j.s.conn.Cmd, j.p, j.Tenant, j.due)
	if err != nil {
		return "", err
	}
	w.Position = &before
	j.setEstimate(w, j.tenantState.PerSecond)
	detail := "it is due and waits for a permit and for free capacity in the ready stream"
	if before > 0 {
		detail += ", behind " + plural(before, "due job") + " of its tenant"
	}
	return detail, nil
}

// behindOthers sets the reason WhyFairness when no other reason applies: the job waits for its
// turn, or no worker owns the entry of the ready job.
func (j *waitingJob) behindOthers(ctx context.Context, w *api.Why) error {
	w.Reason = api.WhyFairness
	switch j.State {
	case ledger.Ready:
		if unowned, err := isUnowned(ctx, j); err != nil || unowned {
			w.Detail = unownedDetail
			return err
		}
		w.Position = &j.before
		w.Detail = "It is ready and waits for a free worker"
		if j.before > 0 {
			w.Detail += ", behind " + plural(j.before, "other")
		}
		w.Detail += "."
	case ledger.NonReady:
		w.Detail = "Its time has come: it becomes ready with the next permits."
		if j.reason == ledger.ReasonPaused {
			w.Detail = "It was paused and has been resumed: it becomes ready with the next permits."
		}
	default:
		if err := j.readTenant(ctx); err != nil {
			return err
		}
		w.Detail = "It waits for its turn among the tenants" + j.describePlace(w) + "."
	}
	return nil
}

// describePlace returns the text about the jobs that are dequeued before a waiting job, of its
// tenant or with ByPriority of all tenants, and sets w.Position and w.EstimateSeconds. For a job
// that is not waiting it returns "".
func (j *waitingJob) describePlace(w *api.Why) string {
	if j.State != ledger.Waiting {
		return ""
	}
	place := max(0, j.Place) + j.JobsBefore
	w.Position = &place
	detail, verb := "; "+plural(place, "job"), "come"
	if place == 1 {
		verb = "comes"
	}
	if j.ByPriority {
		detail += " of a higher priority " + verb + " before it"
	} else {
		detail += " of its tenant " + verb + " before it"
	}
	if j.GroupsBefore > 0 {
		detail += ", of " + plural(j.GroupsBefore, "group") + " beside its own"
	}
	speed := j.tenantState.PerSecond
	if running := j.Now.Sub(j.Started).Seconds(); speed <= 0 && !j.Started.IsZero() && running > 0 {
		speed = float64(j.Ended) / running
	}
	j.setEstimate(w, speed)
	return detail
}

// setStart sets Until and EstimateSeconds for a start at a known time.
func setStart(w *api.Why, now, start time.Time) {
	w.Until = timeIfAfter(start, time.Time{})
	seconds := round(max(0, start.Sub(now).Seconds()), 10)
	w.EstimateSeconds = &seconds
}

// setEstimate sets w.EstimateSeconds, the time until the job has ended: the time that it and the
// w.Position jobs before it take at a speed in jobs per second, which the rate limits bound. It
// sets nothing if the speed is unknown.
func (j *waitingJob) setEstimate(w *api.Why, speed float64) {
	if speed = j.s.cfg.Rate.Bound(*j.tenantState, speed); speed > 0 {
		seconds := round(float64(*w.Position+1)/speed, 10)
		w.EstimateSeconds = &seconds
	}
}

// codeOf returns a failed attempt's error code in parentheses; "" if there was no such attempt or
// its error has no code.
func codeOf(e *ledger.JobError) string {
	if e == nil || e.Code == "" {
		return ""
	}
	return " (" + e.Code + ")"
}

// textOf returns the text of a job's last error in parentheses; "" if the principal of ctx may not
// see error texts.
func textOf(ctx context.Context, e *ledger.JobError) string {
	if e == nil || e.Error == "" || !auth.SeesPayloads(ctx) {
		return ""
	}
	return " (" + e.Error + ")"
}

// formatTime writes a time for a person, in UTC and without fractions of a second.
func formatTime(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }

// plural writes "1 job" or "2 jobs".
func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatInt(n, 10) + " " + what + "s"
}
