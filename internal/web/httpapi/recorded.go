package httpapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/activity"
)

// Activity is the activity log. Package activity implements it.
type Activity interface {
	// Do stores the entry e, and then calls do, which makes the change. If the entry can't be
	// stored, do is not called.
	Do(ctx context.Context, e api.Activity, do func(context.Context) error) error
	// Read returns a page of the log.
	Read(ctx context.Context, q activity.Query) (api.ActivityList, error)
}

// recorded is a Backend that writes each change to the activity log before it carries it out,
// except submissions and appends, which are the daily traffic. Before a command on a group it reads
// the group, so that commands on groups that don't exist for the caller are not recorded. If the
// store is unavailable to this read, it goes on.
type recorded struct {
	Backend
	log Activity
}

// pauseState is what the log shows of a pause.
type pauseState struct {
	Paused bool `json:"paused"`
}

func entry(action, object string, before, after any) api.Activity {
	return api.Activity{Action: action, Object: object, Before: activity.JSON(before), After: activity.JSON(after)}
}

// recordedCall stores an entry, and then calls do.
func recordedCall[T any](
	ctx context.Context, log Activity, e api.Activity, do func(context.Context) (T, error),
) (v T, err error) {
	err = log.Do(ctx, e, func(ctx context.Context) (err error) {
		v, err = do(ctx)
		return err
	})
	return v, err
}

// recordedGroup records and carries out a command on a group. state returns the part of the group
// that the log shows as the state before; after is what the log shows as the state after: the new
// state or the command's arguments, nil for none.
func recordedGroup(
	ctx context.Context, b recorded, action, id string, state func(api.Group) any, after any,
	do func(context.Context) (api.Accepted, error),
) (a api.Accepted, err error) {
	g, _, err := b.GroupSummary(ctx, id, 0)
	if err != nil && !errors.Is(err, api.ErrUnavailable) { // the log and the command wait for Redis
		return a, err
	}
	return recordedCall(ctx, b.log, entry("group."+action, id, state(g), after), do)
}

func statusOf(g api.Group) any { return map[string]api.Status{"status": g.Status} }

func pausedOf(g api.Group) any { return pauseState{g.Paused} }

func (b recorded) Seal(ctx context.Context, id string, total *int64) (api.Accepted, error) {
	sealed := func(g api.Group) any { return map[string]bool{"sealed": g.Sealed} }
	return recordedGroup(ctx, b, "seal", id, sealed, map[string]any{"sealed": true, "total": total},
		func(ctx context.Context) (api.Accepted, error) { return b.Backend.Seal(ctx, id, total) })
}

func (b recorded) Cancel(ctx context.Context, id string) (api.Accepted, error) {
	return recordedGroup(ctx, b, "cancel", id, statusOf, nil,
		func(ctx context.Context) (api.Accepted, error) { return b.Backend.Cancel(ctx, id) })
}

func (b recorded) Delete(ctx context.Context, id string) (api.Deletion, error) {
	g, _, err := b.GroupSummary(ctx, id, 0)
	if errors.Is(err, api.ErrNotFound) { // what a deletion has left that did not come to its end
		return b.Backend.Delete(ctx, id)
	} else if err != nil && !errors.Is(err, api.ErrUnavailable) {
		return api.Deletion{}, err
	}
	return recordedCall(ctx, b.log, entry("group.delete", id, statusOf(g), nil),
		func(ctx context.Context) (api.Deletion, error) { return b.Backend.Delete(ctx, id) })
}

// Erase records no key: it may be what is to be erased.
func (b recorded) Erase(ctx context.Context, tenant, key, cursor string) (api.Erasure, error) {
	return recordedCall(ctx, b.log, entry("tenant.erase", tenant, nil, nil),
		func(ctx context.Context) (api.Erasure, error) { return b.Backend.Erase(ctx, tenant, key, cursor) })
}

func (b recorded) CancelJob(ctx context.Context, id string, ordinal int64) (api.Job, error) {
	if _, _, err := b.GroupSummary(ctx, id, 0); err != nil && !errors.Is(err, api.ErrUnavailable) {
		return api.Job{}, err
	}
	return recordedCall(ctx, b.log, entry("job.cancel", id+"."+strconv.FormatInt(ordinal, 10), nil, nil),
		func(ctx context.Context) (api.Job, error) { return b.Backend.CancelJob(ctx, id, ordinal) })
}

func (b recorded) Retry(ctx context.Context, id string, choice api.RetryChoice) (api.Accepted, error) {
	return recordedGroup(ctx, b, "retry", id, statusOf, choice,
		func(ctx context.Context) (api.Accepted, error) { return b.Backend.Retry(ctx, id, choice) })
}

func (b recorded) Pause(ctx context.Context, id string) (api.Accepted, error) {
	return recordedGroup(ctx, b, "pause", id, pausedOf, pauseState{true},
		func(ctx context.Context) (api.Accepted, error) { return b.Backend.Pause(ctx, id) })
}

func (b recorded) Resume(ctx context.Context, id string) (api.Accepted, error) {
	return recordedGroup(ctx, b, "resume", id, pausedOf, pauseState{false},
		func(ctx context.Context) (api.Accepted, error) { return b.Backend.Resume(ctx, id) })
}

// pause records and carries out a pause or a resumption of a tenant or a type.
func (b recorded) pause(
	ctx context.Context, action, id string, paused bool, do func(context.Context, string) error,
) error {
	return b.log.Do(ctx, entry(action, id, nil, pauseState{paused}),
		func(ctx context.Context) error { return do(ctx, id) })
}

func (b recorded) PauseTenant(ctx context.Context, tenant string) error {
	return b.pause(ctx, "tenant.pause", tenant, true, b.Backend.PauseTenant)
}

func (b recorded) ResumeTenant(ctx context.Context, tenant string) error {
	return b.pause(ctx, "tenant.resume", tenant, false, b.Backend.ResumeTenant)
}

func (b recorded) PauseType(ctx context.Context, typ string) error {
	return b.pause(ctx, "type.pause", typ, true, b.Backend.PauseType)
}

func (b recorded) ResumeType(ctx context.Context, typ string) error {
	return b.pause(ctx, "type.resume", typ, false, b.Backend.ResumeType)
}

// changeSettings records and carries out a change of a tenant's settings.
func (b recorded) changeSettings(
	ctx context.Context, tenant string, after any, do func(context.Context) (api.Tenant, error),
) (api.Tenant, error) {
	var before any
	if t, err := b.Tenant(ctx, tenant); err == nil { // a new tenant has no settings
		before = api.TenantSettings{RPS: t.RPS, Weight: &t.Weight, BasePriority: t.BasePriority, InFlight: t.InFlight}
	}
	return recordedCall(ctx, b.log, entry("tenant.set", tenant, before, after), do)
}

func (b recorded) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	return b.changeSettings(ctx, tenant, set, func(ctx context.Context) (api.Tenant, error) {
		return b.Backend.SetTenant(ctx, tenant, set)
	})
}

func (b recorded) PatchTenant(ctx context.Context, tenant string, p api.TenantPatch) (api.Tenant, error) {
	return b.changeSettings(ctx, tenant, p, func(ctx context.Context) (api.Tenant, error) {
		return b.Backend.PatchTenant(ctx, tenant, p)
	})
}

// changeLimits records and carries out a change of limits. shown returns the part of the limits that
// the log shows as the state before.
func (b recorded) changeLimits(
	ctx context.Context, action, object string, shown func(api.Limits) any, after any,
	do func(context.Context) (api.Limits, error),
) (api.Limits, error) {
	var before any
	if l, err := b.Limits(ctx); err == nil {
		before = shown(l)
	}
	return recordedCall(ctx, b.log, entry(action, object, before, after), do)
}

func (b recorded) PatchLimits(ctx context.Context, p api.LimitsPatch) (api.Limits, error) {
	effective := func(l api.Limits) any {
		g := l.Global
		return api.ConfiguredLimits{
			RPS: g.RPS.Effective, Share: g.Share.Effective, DefaultBackoff: g.DefaultBackoff.Effective,
			MaxBackoff: g.MaxBackoff.Effective,
		}
	}
	return b.changeLimits(ctx, "limits.set", "global", effective, p.Global, func(ctx context.Context) (api.Limits, error) {
		return b.Backend.PatchLimits(ctx, p)
	})
}

func (b recorded) PatchType(ctx context.Context, typ string, p api.TypePatch) (api.Limits, error) {
	limits := func(l api.Limits) any {
		return map[string]*int64{"rps": l.Types[typ].RPS, "in_flight": l.Types[typ].InFlight}
	}
	return b.changeLimits(ctx, "type.set", typ, limits, p, func(ctx context.Context) (api.Limits, error) {
		return b.Backend.PatchType(ctx, typ, p)
	})
}

func (b recorded) ResizeWorker(ctx context.Context, id string, n int) error {
	return b.log.Do(ctx, entry("worker.resize", id, nil, map[string]int{"workers": n}),
		func(ctx context.Context) error { return b.Backend.ResizeWorker(ctx, id, n) })
}

func (b recorded) ControlGuard(ctx context.Context, name, member string, do guard.Action) error {
	return b.log.Do(ctx, entry("guard."+string(do), member+"@"+name, nil, nil),
		func(ctx context.Context) error { return b.Backend.ControlGuard(ctx, name, member, do) })
}

// recordedRooms is a Rooms that writes each change by operators to the activity log before it
// carries it out.
type recordedRooms struct {
	Rooms
	log Activity
}

// recordedEvent records and carries out a change of an event of the waiting room. shown returns the
// part of the event that the log shows as the state before; nil: none.
func recordedEvent[T any](
	ctx context.Context, r recordedRooms, action, event string, shown func(api.RoomEvent) any, after any,
	do func(context.Context) (T, error),
) (T, error) {
	var before any
	if shown != nil {
		if e, err := r.Event(ctx, event); err == nil { // an event may be new
			before = shown(e)
		}
	}
	return recordedCall(ctx, r.log, entry("event."+action, event, before, after), do)
}

func settingsOf(e api.RoomEvent) any { return e.EventSettings }

func modeOf(e api.RoomEvent) any { return map[string]string{"mode": e.Mode} }

func (r recordedRooms) SetEvent(
	ctx context.Context, event string, set api.EventSettings, rev int64,
) (api.RoomEvent, error) {
	return recordedEvent(ctx, r, "set", event, settingsOf, set, func(ctx context.Context) (api.RoomEvent, error) {
		return r.Rooms.SetEvent(ctx, event, set, rev)
	})
}

func (r recordedRooms) SetMode(ctx context.Context, event, mode string) (api.RoomEvent, error) {
	after := map[string]string{"mode": mode}
	return recordedEvent(ctx, r, "mode", event, modeOf, after, func(ctx context.Context) (api.RoomEvent, error) {
		return r.Rooms.SetMode(ctx, event, mode)
	})
}

func (r recordedRooms) Recalibrate(
	ctx context.Context, event string, to api.Recalibration,
) (api.RoomEvent, error) {
	return recordedEvent(ctx, r, "recalibrate", event, settingsOf, to,
		func(ctx context.Context) (api.RoomEvent, error) { return r.Rooms.Recalibrate(ctx, event, to) })
}

func (r recordedRooms) DeleteEvent(ctx context.Context, event string) (api.EventRemoval, error) {
	return recordedEvent(ctx, r, "delete", event, modeOf, nil, func(ctx context.Context) (api.EventRemoval, error) {
		return r.Rooms.DeleteEvent(ctx, event)
	})
}

func (r recordedRooms) RemoveUser(ctx context.Context, event, user string) (removed bool, err error) {
	return recordedCall(ctx, r.log, entry("user.remove", user+"@"+event, nil, nil),
		func(ctx context.Context) (bool, error) { return r.Rooms.RemoveUser(ctx, event, user) })
}

func listActivity(log Activity) func(*http.Request) (api.ActivityList, error) {
	return func(r *http.Request) (l api.ActivityList, err error) {
		q := r.URL.Query()
		query := activity.Query{Actor: q.Get("actor"), Tenant: q.Get("tenant")}
		if query.Cursor, query.Limit, err = pageParams(r); err != nil {
			return l, err
		}
		if query.Cursor != "" && !activity.ValidCursor(query.Cursor) {
			return l, invalidField("cursor", "must be the cursor of an earlier page")
		}
		if query.Tenant != "" && !api.ValidID(query.Tenant) {
			return l, invalidField("tenant", idProblem)
		}
		if query.Since, err = sinceParam(q); err != nil {
			return l, err
		}
		l, err = log.Read(r.Context(), query)
		l.Activity = orEmpty(l.Activity)
		return l, err
	}
}
