package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

// Rooms is the store behind the calls on the waiting room. Its errors wrap those of package api, or
// are a *messages.ValidationError.
type Rooms interface {
	// CheckSettings and CheckRecalibration return all bad fields of a body; none if it is valid.
	CheckSettings(set api.EventSettings) []api.FieldError
	CheckRecalibration(to api.Recalibration) []api.FieldError
	// SetEvent creates an event or replaces its settings. With a rev other than 0, it only
	// replaces, and only if the event has this rev.
	SetEvent(ctx context.Context, event string, set api.EventSettings, rev int64) (api.RoomEvent, error)
	// Event returns one event.
	Event(ctx context.Context, event string) (api.RoomEvent, error)
	// Events returns a page of events.
	Events(ctx context.Context, cursor string, limit int) (api.RoomEventList, error)
	// SetMode changes the mode of an event to one of the constants api.Mode….
	SetMode(ctx context.Context, event, mode string) (api.RoomEvent, error)
	// Recalibrate sets the capacity, the seats that are left, or both. With FromSeats it asks the
	// seat service for the capacity.
	Recalibrate(ctx context.Context, event string, to api.Recalibration) (api.RoomEvent, error)
	// DeleteEvent closes an event. The event is deleted when no user is inside any more.
	DeleteEvent(ctx context.Context, event string) (api.EventRemoval, error)
	// RemoveUser removes a user, in whatever state, from an event. It returns false if there was
	// none.
	RemoveUser(ctx context.Context, event, user string) (bool, error)
	// VerifyToken returns whether the bearer of an entry token may be inside the event now.
	VerifyToken(ctx context.Context, token string) (api.EntryTokenState, error)
	// RenewToken returns a token with a later expiry.
	RenewToken(ctx context.Context, token string) (api.EntryToken, error)
	// CompleteToken ends the entry of a token's user and gives the slot back. With sold, it also
	// takes a seat from the stock. It returns false if the entry had ended before.
	CompleteToken(ctx context.Context, token string, sold bool) (bool, error)
}

type roomCalls struct{ *server }

// routes returns the routes of the waiting room. If the API has no keys, only callers on this
// machine may use them, because they decide who enters an event.
func (s roomCalls) routes() []route {
	const get, post, put, del = http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete
	const event, tokens = "/v1/events/{event}", "/v1/entry-tokens/"
	const read, change, token = auth.ReadSystem, auth.System, auth.EntryTokens
	all := []route{
		{method: get, path: "/v1/events", scope: read, serve: showPage(s.listEvents),
			query: []string{"cursor", "limit"}},
		{method: get, path: event, scope: read, serve: s.onEvent(s.getEvent)},
		{method: put, path: event, scope: change, serve: s.onEvent(s.putEvent)},
		{method: del, path: event, scope: change, serve: s.onEvent(s.deleteEvent)},
		{method: post, path: event + "/pause", scope: change, serve: s.onEvent(s.setMode(api.ModePaused))},
		{method: post, path: event + "/resume", scope: change, serve: s.onEvent(s.setMode(api.ModeOpen))},
		{method: post, path: event + "/close", scope: change, serve: s.onEvent(s.setMode(api.ModeClosed))},
		{method: post, path: event + "/recalibrate", scope: change, serve: s.onEvent(s.recalibrate)},
		{method: del, path: event + "/users/{user}", scope: change, serve: s.onEvent(s.removeUser)},
		{method: post, path: tokens + "verify", scope: token, serve: s.onToken(s.verifyToken)},
		{method: post, path: tokens + "renew", scope: token, serve: s.onToken(s.renewToken)},
		{method: post, path: tokens + "complete", scope: token, serve: s.onToken(s.completeToken, "sold")},
	}
	for i := range all {
		all[i].object = noTenant
		if s.Keys == nil {
			all[i].serve = onlyLoopback(all[i].serve)
		}
	}
	return all
}

// onlyLoopback refuses requests that CheckLoopback refuses.
func onlyLoopback(serve web.Handler) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := CheckLoopback(r); err != nil {
			return err
		}
		return serve(w, r)
	}
}

// CheckLoopback returns an error for a request that another host sent, or whose Host header is not
// a loopback name, so that no web page can make the call by DNS rebinding. Without API keys, all
// calls on the waiting room need this check, even if API_ALLOW_UNAUTHENTICATED opens the rest of
// the API. A handler of Options.UI that shows the waiting room needs it, too.
func CheckLoopback(r *http.Request) error {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	switch {
	case err != nil, !peer.Addr().Unmap().IsLoopback():
		return web.NewProblem(api.Forbidden,
			"without API keys (AUTH=keys), calls on the waiting room are served on loopback only: "+
				"call this server from its own host")
	case !loopbackHostHeader(r.Host):
		return web.NewProblem(api.WrongHost,
			"calls on the waiting room are served only for the hosts localhost and loopback addresses")
	}
	return nil
}

// onEvent returns the handler of a call on the event in the path. do checks the request, and
// returns the function that carries out the call.
func (s roomCalls) onEvent(
	do func(r *http.Request, event string) (func(context.Context) (any, error), error),
) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		event, err := pathValue(r, "event")
		if err != nil {
			return err
		}
		run, err := do(r, event)
		if err != nil {
			return err
		}
		return s.answer(w, r, run)
	}
}

// answer carries out a call and writes its result as JSON. If the result is an event, its rev is
// the ETag. A disconnecting client interrupts only a GET or HEAD, never another call.
func (s roomCalls) answer(w http.ResponseWriter, r *http.Request, run func(context.Context) (any, error)) error {
	var answer any
	carryOut := func(ctx context.Context) (err error) {
		answer, err = run(ctx)
		return err
	}
	var err error
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		err = carryOut(r.Context())
	} else {
		err = s.write(r.Context(), carryOut)
	}
	if err != nil {
		return err
	}
	if v, ok := answer.(api.RoomEvent); ok {
		v.Counters = orEmptyMap(v.Counters)
		w.Header().Set("ETag", `"`+strconv.FormatInt(v.Rev, 10)+`"`)
		answer = v
	}
	web.WriteJSON(w, http.StatusOK, "application/json", answer)
	return nil
}

func (s roomCalls) listEvents(ctx context.Context, cursor string, limit int) (api.RoomEventList, error) {
	l, err := s.Rooms.Events(ctx, cursor, limit)
	l.Events = orEmpty(l.Events)
	for i := range l.Events {
		l.Events[i].Counters = orEmptyMap(l.Events[i].Counters)
	}
	return l, err
}

func (s roomCalls) getEvent(_ *http.Request, event string) (func(context.Context) (any, error), error) {
	return func(ctx context.Context) (any, error) { return s.Rooms.Event(ctx, event) }, nil
}

func (s roomCalls) putEvent(r *http.Request, event string) (func(context.Context) (any, error), error) {
	rev, err := ifMatch(r)
	if err != nil {
		return nil, err
	}
	f, err := readFields(s.server, r)
	if err != nil {
		return nil, err
	}
	set := f.eventSettings()
	f.check(s.Rooms.CheckSettings(set))
	if err := f.err(); err != nil {
		return nil, err
	}
	return func(ctx context.Context) (any, error) { return s.Rooms.SetEvent(ctx, event, set, rev) }, nil
}

func (s roomCalls) deleteEvent(r *http.Request, event string) (func(context.Context) (any, error), error) {
	if err := noFields(s.server, r); err != nil {
		return nil, err
	}
	return func(ctx context.Context) (any, error) { return s.Rooms.DeleteEvent(ctx, event) }, nil
}

func (s roomCalls) setMode(
	mode string,
) func(*http.Request, string) (func(context.Context) (any, error), error) {
	return func(r *http.Request, event string) (func(context.Context) (any, error), error) {
		if err := noFields(s.server, r); err != nil {
			return nil, err
		}
		return func(ctx context.Context) (any, error) { return s.Rooms.SetMode(ctx, event, mode) }, nil
	}
}

func (s roomCalls) recalibrate(r *http.Request, event string) (func(context.Context) (any, error), error) {
	f, err := readFields(s.server, r)
	if err != nil {
		return nil, err
	}
	to := api.Recalibration{Capacity: f.count("capacity"), Stock: f.count("stock"), FromSeats: f.boolean("from_seats")}
	f.check(s.Rooms.CheckRecalibration(to))
	if err := f.err(); err != nil {
		return nil, err
	}
	return func(ctx context.Context) (any, error) { return s.Rooms.Recalibrate(ctx, event, to) }, nil
}

func (s roomCalls) removeUser(r *http.Request, event string) (func(context.Context) (any, error), error) {
	user, err := pathValue(r, "user")
	if err == nil {
		err = noFields(s.server, r)
	}
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (any, error) {
		removed, err := s.Rooms.RemoveUser(ctx, event, user)
		return api.UserRemoval{Event: event, User: user, Removed: removed}, err
	}, nil
}

// maxToken is the largest size of an entry token, in bytes, that the server decodes.
const maxToken = 4096

// onToken returns the handler of a call on an entry token. The body has the field token, and may
// have the boolean field sold if further names it.
func (s roomCalls) onToken(do func(context.Context, api.EntryTokenCall) (any, error), further ...string) web.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		f, err := readFields(s.server, r)
		if err != nil {
			return err
		}
		var c api.EntryTokenCall
		c.Token = f.text("token")
		for _, name := range further {
			c.Sold = f.boolean(name)
		}
		switch {
		case c.Token == "":
			f.problem("token", "is required: an entry token")
		case len(c.Token) > maxToken:
			f.problem("token", fmt.Sprintf("has %d bytes; at most %d are accepted", len(c.Token), maxToken))
		}
		if err := f.err(); err != nil {
			return err
		}
		return s.answer(w, r, func(ctx context.Context) (any, error) { return do(ctx, c) })
	}
}

func (s roomCalls) verifyToken(ctx context.Context, c api.EntryTokenCall) (any, error) {
	return s.Rooms.VerifyToken(ctx, c.Token)
}

func (s roomCalls) renewToken(ctx context.Context, c api.EntryTokenCall) (any, error) {
	return s.Rooms.RenewToken(ctx, c.Token)
}

func (s roomCalls) completeToken(ctx context.Context, c api.EntryTokenCall) (any, error) {
	done, err := s.Rooms.CompleteToken(ctx, c.Token, c.Sold)
	return api.EntryTokenDone{Done: done}, err
}

// ifMatch returns the rev in the header If-Match, with or without quotes; 0 if the header is
// absent.
func ifMatch(r *http.Request) (int64, error) {
	values := r.Header.Values("If-Match")
	if len(values) == 0 {
		return 0, nil
	}
	text := values[0]
	if n := len(text); n >= 2 && text[0] == '"' && text[n-1] == '"' {
		text = text[1 : n-1]
	}
	rev, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if len(values) > 1 || err != nil || rev <= 0 {
		return 0, web.NewProblem(api.BadParameter, "the header If-Match is not a rev",
			api.FieldError{Field: "If-Match", Problem: `must be the ETag or the rev of the event, such as "7", once`})
	}
	return rev, nil
}
