package console

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	roomsPage = 50
	// brokersInterval is how often open pages read the list of brokers, which is a part of the
	// stats of the whole system.
	brokersInterval = 5 * time.Second
)

// roomPages serves the pages that show the events of the waiting room, and their forms.
type roomPages struct {
	rooms   httpapi.Rooms
	backend httpapi.Backend // it knows the brokers
	brokers *redisx.Cache[string, []api.StageStatus]
	paces   *paces
	local   bool // there are no API keys: only loopback may see events
}

// check returns an error if the caller may not use the waiting room: without API keys, only callers
// on this machine may.
func (p roomPages) check(r *http.Request) error {
	if p.local {
		return httpapi.CheckLoopback(r)
	}
	return nil
}

// roomsData is the data of the list of events.
type roomsData struct {
	Events  []room
	Brokers []api.StageStatus
	Next    string // path of the next page
	First   bool   // this is the first page
}

// room is an event with its pace.
type room struct {
	api.RoomEvent
	Pace *roomPace // nil: unknown
}

// Queue is the number of users who are waiting or away.
func (e room) Queue() int64 { return e.Waiting + e.Away }

// Dissolved reports whether nobody enters the event.
func (e room) Dissolved() bool { return e.Mode == api.ModeClosed || e.Mode == api.ModeSoldOut }

func (p roomPages) list(r *http.Request) (view, error) {
	if err := p.check(r); err != nil {
		return view{}, err
	}
	cursor, err := cursorOf(r.URL.Query())
	if err != nil {
		return view{}, err
	}
	data, err := p.listReader(cursor)(r.Context())
	return view{name: "rooms", title: "Rooms", data: data, topic: "rooms:" + url.QueryEscape(cursor)}, err
}

func (p roomPages) openList(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	cursor, err := url.QueryUnescape(arg)
	if err == nil {
		_, err = cursorOf(url.Values{"cursor": {cursor}})
	}
	if err != nil {
		return nil, invalid("topics", "is malformed")
	}
	return p.listReader(cursor), nil
}

func (p roomPages) listReader(cursor string) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		l, err := p.rooms.Events(ctx, cursor, roomsPage)
		if err != nil {
			return nil, err
		}
		brokers, err := p.brokers.GetOr("", func() ([]api.StageStatus, error) { return p.readBrokers(ctx) })
		if err != nil {
			return nil, err
		}
		d := roomsData{Brokers: brokers, Next: nextPage(root+"/rooms", nil, l.Cursor), First: cursor == ""}
		for _, e := range l.Events {
			d.Events = append(d.Events, room{e, p.paces.add(e, time.Now())})
		}
		return d, nil
	}
}

// readBrokers returns the live brokers.
func (p roomPages) readBrokers(ctx context.Context) (all []api.StageStatus, err error) {
	s, err := p.backend.Stats(ctx)
	if err != nil {
		return nil, err
	}
	for _, process := range s.Stages {
		if process.Role == api.RoleBroker {
			all = append(all, process)
		}
	}
	return all, nil
}

// roomData is the data of the page of an event.
type roomData struct {
	room
	Seats    bool // there is a seat service
	Settings []named
	Counts   []named // how often what has happened to users, from the event's counters
}

func (p roomPages) room(r *http.Request) (view, error) {
	if err := p.check(r); err != nil {
		return view{}, err
	}
	event, err := pathID(r, "event")
	if err != nil {
		return view{}, err
	}
	data, err := p.reader(event)(r.Context())
	return view{name: "room", title: "Event " + event, data: data, topic: "room:" + event}, err
}

func (p roomPages) openRoom(ctx context.Context, event string) (func(context.Context) (any, error), error) {
	if !api.ValidID(event) {
		return nil, api.ErrNotFound
	}
	_, err := p.rooms.Event(ctx, event)
	return p.reader(event), unlessAway(err)
}

func (p roomPages) reader(event string) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		e, err := p.rooms.Event(ctx, event)
		if err != nil {
			return nil, err
		}
		d := roomData{room: room{e, p.paces.add(e, time.Now())}, Settings: settingsOf(e)}
		d.Seats = len(p.rooms.CheckRecalibration(api.Recalibration{FromSeats: true})) == 0
		for _, name := range []string{
			"entered", "promoted", "admitted", "completed", "sold", "left", "expired", "no_shows", "refused",
		} {
			d.Counts = append(d.Counts, named{name, count(e.Counters[name])})
		}
		return d, nil
	}
}

func settingsOf(e api.RoomEvent) (all []named) {
	add := func(name, text string) {
		if text != "" {
			all = append(all, named{name, text})
		}
	}
	whole := func(name string, n *int64) {
		if n != nil {
			add(name, count(*n))
		}
	}
	whole("capacity", e.Capacity)
	whole("stock", e.Stock)
	if e.Rate != nil {
		add("rate", decimal(*e.Rate)+" a second, bursts of "+count(e.Burst))
	}
	whole("max_waiting", e.MaxWaiting)
	for _, s := range []struct {
		name string
		d    *api.Duration
	}{
		{"token_ttl", e.TokenTTL}, {"leeway", e.Leeway}, {"max_session", e.MaxSession}, {"ready", e.Ready},
		{"grace", e.Grace}, {"retention", e.Retention},
	} {
		if s.d != nil {
			add(s.name, duration(time.Duration(*s.d).Seconds()))
		}
	}
	add("on_close", e.OnClose)
	add("no_show", e.NoShow)
	add("return_url", e.ReturnURL)
	return all
}

// actions returns the handlers of an event's forms, by the last segment of the path to which each
// form is sent.
func (p roomPages) actions() map[string]func(context.Context, *http.Request) (string, error) {
	return map[string]func(context.Context, *http.Request) (string, error){
		"pause":       p.setMode(api.ModePaused),
		"resume":      p.setMode(api.ModeOpen),
		"close":       p.setMode(api.ModeClosed),
		"recalibrate": p.eventAction(p.recalibrate),
		"users":       p.eventAction(p.removeUser),
		"delete":      p.delete,
	}
}

// eventAction wraps do as an action on the event in the path. do returns the key of the notice that
// the page then shows.
func (p roomPages) eventAction(
	do func(ctx context.Context, event string, form url.Values) (done string, err error),
) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		if err := p.check(r); err != nil {
			return "", err
		}
		event, err := pathID(r, "event")
		if err != nil {
			return "", err
		}
		done, err := do(ctx, event, r.PostForm)
		return root + "/rooms/" + event + "?done=" + done, err
	}
}

// setMode returns an action that sets the mode of an event.
func (p roomPages) setMode(mode string) func(context.Context, *http.Request) (string, error) {
	return p.eventAction(func(ctx context.Context, event string, _ url.Values) (string, error) {
		_, err := p.rooms.SetMode(ctx, event, mode)
		return "room-" + mode, err
	})
}

// recalibrate sets the capacity of an event, and the seats that are left (field stock), to the
// numbers in the form. An empty field changes nothing. With the field from_seats, the capacity is
// what the seat service answers.
func (p roomPages) recalibrate(ctx context.Context, event string, form url.Values) (string, error) {
	to := api.Recalibration{FromSeats: form.Get("from_seats") != ""}
	for name, n := range map[string]**int64{"capacity": &to.Capacity, "stock": &to.Stock} {
		text := strings.TrimSpace(form.Get(name))
		if text == "" {
			continue
		}
		whole, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return "", invalid(name, "must be a whole number from 0 to 10,000,000")
		}
		*n = &whole
	}
	if bad := p.rooms.CheckRecalibration(to); len(bad) > 0 { // before it is in the activity log
		var e messages.ValidationError
		for _, f := range bad {
			e.Fields = append(e.Fields, messages.FieldError(f))
		}
		return "", &e
	}
	_, err := p.rooms.Recalibrate(ctx, event, to)
	return "room-recalibrated", err
}

func (p roomPages) removeUser(ctx context.Context, event string, form url.Values) (string, error) {
	user := strings.TrimSpace(form.Get("user"))
	if !api.ValidID(user) {
		return "", invalid("user", "must %s", api.IDRule)
	}
	removed, err := p.rooms.RemoveUser(ctx, event, user)
	if err == nil && !removed {
		return "user-unknown", nil
	}
	return "user-removed", err
}

// delete closes an event. The store deletes the event when its last user has gone.
func (p roomPages) delete(ctx context.Context, r *http.Request) (string, error) {
	_, err := p.eventAction(func(ctx context.Context, event string, _ url.Values) (string, error) {
		_, err := p.rooms.DeleteEvent(ctx, event)
		return "", err
	})(ctx, r)
	return root + "/rooms?done=room-deleted", err
}

// roomPace has how many users per minute were promoted and admitted lately.
type roomPace struct{ Promoted, Admitted float64 }

// paces computes the pace of events from the counters that pages have read at different times.
type paces struct {
	mu  sync.Mutex
	all map[string][]reading // by event, oldest first
}

// reading is what the counters of an event were at a time.
type reading struct {
	at                 time.Time
	promoted, admitted int64
}

const (
	paceWindow = time.Minute     // that a pace is of
	minWindow  = 3 * time.Second // in a shorter time, one batch of promotions would look like a high pace
	paceStep   = time.Second     // least time between two stored readings
	maxPaces   = 1000            // events whose pace is known
)

// add records the counters of an event, and returns its pace since the oldest reading of the last
// minute. It returns nil if that is less than minWindow ago, or if too many other events are read.
func (p *paces) add(e api.RoomEvent, now time.Time) *roomPace {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := reading{now, e.Counters["promoted"], e.Counters["admitted"]}
	old := func(r reading) bool { return now.Sub(r.at) > paceWindow }
	all := slices.DeleteFunc(p.all[e.Event], old)
	if n := len(all); n > 0 && (next.promoted < all[n-1].promoted || next.admitted < all[n-1].admitted) {
		all = nil // another event of this name, or a loss of data
	}
	if n := len(all); n == 0 || now.Sub(all[n-1].at) >= paceStep {
		all = append(all, next)
	}
	if _, there := p.all[e.Event]; !there && len(p.all) >= maxPaces {
		for name, readings := range p.all {
			if old(readings[len(readings)-1]) {
				delete(p.all, name)
			}
		}
		if len(p.all) >= maxPaces {
			return nil
		}
	}
	p.all[e.Event] = all
	since := now.Sub(all[0].at)
	if since < minWindow {
		return nil
	}
	perMinute := func(n int64) float64 { return float64(n) / since.Minutes() }
	return &roomPace{perMinute(next.promoted - all[0].promoted), perMinute(next.admitted - all[0].admitted)}
}
