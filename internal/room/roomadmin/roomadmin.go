// Package roomadmin carries out what operators, and the protected services, ask of the waiting
// room: it changes events, removes users, and checks entry tokens against Redis. The HTTP API uses
// it. It hides the bounds and defaults of settings, in which partition an event is, where a missing
// capacity comes from, and that the broker of a removed user must be told.
package roomadmin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config configures an Admin.
type Config struct {
	Rooms     *waitingroom.Rooms
	Space     keyspace.Space
	Rules     Rules
	PublicURL string           // of the brokers; "": unknown
	Tokens    *entrytoken.Keys // nil: this process has no token keys
	Seats     *SeatService     // nil: there is no seat service
	Log       *slog.Logger
	// Ended is called to count users who completed or were removed: counter is
	// telemetry.RoomCompleted or telemetry.RoomLeft. nil: nothing is counted.
	Ended func(counter, event string, n int)
}

// Admin has a method for each operation on the waiting room. Several goroutines may use it. Its
// errors wrap those of package api where one fits. Fields with bad values are a
// *messages.ValidationError.
type Admin struct{ cfg Config }

// New returns an Admin. Rules.Seats follows from cfg.Seats.
func New(cfg Config) *Admin {
	cfg.Rules.Seats = cfg.Seats != nil
	if cfg.Ended == nil {
		cfg.Ended = func(string, string, int) {}
	}
	return &Admin{cfg}
}

// CheckSettings returns an error for each bad field of an event's settings; nil if all are good.
func (a *Admin) CheckSettings(set api.EventSettings) []api.FieldError { return a.cfg.Rules.Check(set) }

// CheckRecalibration returns an error for each bad field of a recalibration; nil if all are good.
func (a *Admin) CheckRecalibration(to api.Recalibration) []api.FieldError {
	return a.cfg.Rules.CheckRecalibration(to)
}

// SetEvent creates an event, or replaces all its settings; only a missing mode keeps its value. If
// the caller gives a rev and the event has another one, it changes nothing and returns
// api.ErrChanged. Without a capacity it asks the seat service. If that does not know the event, the
// capacity is a bad field. If it does not answer, a new event has no slots and the brokers ask
// again later; an existing event keeps its capacity.
func (a *Admin) SetEvent(
	ctx context.Context, event string, set api.EventSettings, rev int64,
) (v api.RoomEvent, err error) {
	if err := invalid(a.CheckSettings(set)...); err != nil {
		return v, err
	}
	to := a.cfg.Rules.Fill(set)
	if to.SeatsPending {
		if err := a.fillCapacity(ctx, event, &to); err != nil {
			return v, err
		}
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := a.cfg.Rooms.Declare(ctx, event, to, waitingroom.DeclareOptions{Rev: rev})
		return err
	})
	if err != nil {
		return v, apiError("change", event, err)
	}
	if v, err = a.Event(ctx, event); err == nil {
		v.Warnings = a.warnings(v)
	}
	return v, err
}

// warnings returns a warning for each reason why a return_url probably does not work. Browsers send
// the entry cookie only to the brokers' host, so the service at another host would refuse each
// admitted user, and send the user back.
func (a *Admin) warnings(v api.RoomEvent) (all []string) {
	to, err := url.Parse(v.ReturnURL)
	if err != nil || v.ReturnURL == "" {
		return nil
	}
	if v.OnClose == "release" {
		all = append(all, "on_close: with release a user who goes to return_url gives the slot back, because the waiting "+
			"page and its stream end. Use keep, or a page of your own that stays open beside the service.")
	}
	public, err := url.Parse(a.cfg.PublicURL)
	if err != nil || a.cfg.PublicURL == "" || strings.EqualFold(public.Hostname(), to.Hostname()) {
		return all
	}
	return append(all, fmt.Sprintf("return_url: its host is %s, and visitors reach the brokers at %s. Browsers "+
		"send the entry cookie to the second alone, so a service at the first sends admitted users back to the "+
		"waiting page.", to.Hostname(), public.Hostname()))
}

// fillCapacity sets the capacity to the number of seats. If the seat service does not answer, it
// sets the capacity that the event has; a new event stays without one (SeatsPending). A service
// that does not know the event makes the missing capacity a bad field.
func (a *Admin) fillCapacity(ctx context.Context, event string, to *waitingroom.Settings) error {
	n, err := a.cfg.Seats.Seats(ctx, event)
	switch {
	case err == nil:
		to.Capacity, to.SeatsPending = n, false
		return nil
	case errors.Is(err, waitingroom.ErrUnknown):
		return invalid(api.FieldError{Field: "capacity", Problem: "is required: the seat service does not know this event"})
	}
	a.cfg.Log.Warn("the seat service gave no capacity", "event", event, "error", err)
	switch now, err := a.snapshot(ctx, event); {
	case err == nil:
		to.Capacity, to.SeatsPending = now.Settings.Capacity, now.Settings.SeatsPending
	case !errors.Is(err, api.ErrNotFound):
		return err
	}
	return nil
}

// Event returns an event.
func (a *Admin) Event(ctx context.Context, event string) (api.RoomEvent, error) {
	s, err := a.snapshot(ctx, event)
	if err != nil {
		return api.RoomEvent{}, err
	}
	return View(s), nil
}

func (a *Admin) snapshot(ctx context.Context, event string) (waitingroom.Snapshot, error) {
	all, err := a.snapshots(ctx, a.cfg.Space.OfEvent(event), []string{event})
	switch {
	case err != nil:
		return waitingroom.Snapshot{}, apiError("read", event, err)
	case len(all) == 0:
		return waitingroom.Snapshot{}, apiError("read", event, waitingroom.ErrUnknown)
	}
	return all[0], nil
}

func (a *Admin) snapshots(
	ctx context.Context, p keyspace.Partition, events []string,
) (found []waitingroom.Snapshot, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		s, err := a.cfg.Rooms.Snapshot(ctx, p, events...)
		found = s.Events
		return err
	})
	return found, err
}

// Events returns a page of events. An event that changes meanwhile may be listed twice or not at
// all.
func (a *Admin) Events(ctx context.Context, cursor string, limit int) (l api.RoomEventList, err error) {
	var names []string
	err = retry(ctx, func(ctx context.Context) (err error) {
		names, l.Cursor, err = a.cfg.Rooms.Events(ctx, cursor, limit)
		return err
	})
	if err != nil {
		return l, apiError("list", "", err)
	}
	// Consecutive names of one partition are read by one call, as of one instant.
	for len(names) > 0 {
		p := a.cfg.Space.OfEvent(names[0])
		n := 1
		for n < len(names) && n < waitingroom.MostUsers && a.cfg.Space.OfEvent(names[n]).Index() == p.Index() {
			n++
		}
		found, err := a.snapshots(ctx, p, names[:n])
		if err != nil {
			return l, apiError("list", "", err)
		}
		for _, s := range found {
			l.Events = append(l.Events, View(s))
		}
		names = names[n:]
	}
	return l, nil
}

// SetMode opens, pauses or closes an event. A closed or sold-out event can't be paused, because
// users may enter a paused event. An event without seats left can't be opened: it is sold out then.
func (a *Admin) SetMode(ctx context.Context, event, mode string) (v api.RoomEvent, err error) {
	if mode == api.ModePaused {
		now, err := a.snapshot(ctx, event)
		if err != nil {
			return v, err
		}
		if m := now.Settings.Mode; m == api.ModeClosed || m == api.ModeSoldOut {
			return v, fmt.Errorf("pause event %s: %w: its mode is %s, so nobody enters it", event, api.ErrConflict, m)
		}
	}
	return a.change(ctx, event, waitingroom.Changes{Mode: mode})
}

// Recalibrate sets the capacity, the seats that are left, or both, while users wait. No user loses
// a slot. With FromSeats, the capacity is what the seat service answers. If it does not answer,
// nothing changes and the error is api.ErrUpstream; if it does not know the event, from_seats is a
// bad field.
func (a *Admin) Recalibrate(
	ctx context.Context, event string, to api.Recalibration,
) (v api.RoomEvent, err error) {
	if err := invalid(a.CheckRecalibration(to)...); err != nil {
		return v, err
	}
	if _, err := a.snapshot(ctx, event); err != nil {
		return v, err // before the seat service is asked about anything
	}
	if to.FromSeats {
		n, err := a.cfg.Seats.Seats(ctx, event)
		switch {
		case errors.Is(err, waitingroom.ErrUnknown):
			return v, invalid(api.FieldError{
				Field: "from_seats", Problem: "gives no capacity: the seat service does not know this event",
			})
		case err != nil:
			return v, fmt.Errorf("%w: %w", api.ErrUpstream, err)
		}
		to.Capacity = &n
	}
	return a.change(ctx, event, waitingroom.Changes{
		Capacity: to.Capacity, Left: to.Stock, SeatsKnown: to.Capacity != nil,
	})
}

func (a *Admin) change(ctx context.Context, event string, c waitingroom.Changes) (v api.RoomEvent, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		_, err := a.cfg.Rooms.Change(ctx, event, c)
		return err
	})
	if err != nil {
		return v, apiError("change", event, err)
	}
	return a.Event(ctx, event)
}

// removalTime is the most time for which one call of DeleteEvent removes users from the queue. The
// brokers remove the rest.
const removalTime = 10 * time.Second

// DeleteEvent closes an event and ends its retention. It removes the users in the queue; after
// removalTime the brokers remove the rest. Users inside keep their slots, and the event is deleted
// when the last of them is gone.
func (a *Admin) DeleteEvent(ctx context.Context, event string) (r api.EventRemoval, err error) {
	now := time.Duration(0)
	err = retry(ctx, func(ctx context.Context) error {
		_, err := a.cfg.Rooms.Change(ctx, event, waitingroom.Changes{Mode: api.ModeClosed, Retention: &now})
		return err
	})
	if err != nil {
		return r, apiError("delete", event, err)
	}
	r.Event = event
	for end := time.Now().Add(removalTime); ; {
		var wait time.Duration
		err := retry(ctx, func(ctx context.Context) (err error) {
			r.Remaining, wait, err = a.cfg.Rooms.Forget(ctx, event)
			return err
		})
		if err != nil {
			return r, apiError("delete", event, err)
		}
		if wait != 0 || time.Now().After(end) {
			return r, nil
		}
	}
}

// RemoveUser removes a user in any state, and tells the broker that has the user's stream. It
// returns false if the event has no record of the user, and api.ErrNotFound for an unknown event.
func (a *Admin) RemoveUser(ctx context.Context, event, user string) (bool, error) {
	if _, err := a.snapshot(ctx, event); err != nil {
		return false, err
	}
	var conn string
	removed := false
	err := retry(ctx, func(ctx context.Context) error {
		c, found, err := a.cfg.Rooms.Leave(ctx, event, user)
		if found {
			conn, removed = c, true
		}
		return err
	})
	if err != nil {
		return false, apiError("remove a user of", event, err)
	}
	if removed {
		a.cfg.Ended(telemetry.RoomLeft, event, 1)
	}
	m := waitingroom.StreamEnd{Event: event, User: user, Conn: conn, Reason: "removed"}
	if err := a.cfg.Rooms.SendEnd(ctx, m); err != nil {
		// Only log this error: the user is removed, and the broker learns it a second later from
		// the stream moves, or when the token expires.
		a.cfg.Log.Warn("a broker was not told of a removed user", "event", event, "error", err)
	}
	return removed, nil
}

func invalid(bad ...api.FieldError) error {
	if len(bad) == 0 {
		return nil
	}
	var e messages.ValidationError
	for _, f := range bad {
		e.Fields = append(e.Fields, messages.FieldError(f))
	}
	return &e
}

// retryTime is how long a call to Redis is repeated while Redis does not answer.
const retryTime = 5 * time.Second

// retry repeats step for retryTime while Redis does not answer. It is for scripts that may be
// repeated.
func retry(ctx context.Context, step func(context.Context) error) error {
	return redisx.RetryWhile(ctx, retryTime, call.IsUnavailable, step)
}

// apiError converts an error of package waitingroom or of Redis to one of package api.
func apiError(action, event string, err error) error {
	what := action + " events"
	if event != "" {
		what = action + " event " + event
	}
	switch {
	case errors.Is(err, waitingroom.ErrUnknown):
		return fmt.Errorf("event %s: %w", event, api.ErrNotFound)
	case errors.Is(err, waitingroom.ErrRev):
		return fmt.Errorf("%s: %w: it has another rev than If-Match", what, api.ErrChanged)
	case errors.Is(err, waitingroom.ErrCursor):
		return fmt.Errorf("%s: cursor: %w: it is of another list", what, api.ErrInvalid)
	case call.IsOOM(err):
		return &api.BackpressureError{RetryAfter: 5 * time.Second, Reason: "Redis is out of memory"}
	case call.IsUnavailable(err), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w: %w", what, api.ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
