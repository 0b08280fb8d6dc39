package console

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// fakeRooms is a waiting room in memory with two events. Methods that it does not implement panic.
type fakeRooms struct {
	httpapi.Rooms // nil

	mu    sync.Mutex
	err   error // of every call
	all   map[string]api.RoomEvent
	seats bool // there is a seat service
	calls []string
}

func newFakeRooms() *fakeRooms {
	capacity, stock, minute, rate := int64(100), int64(1234), api.Duration(time.Minute), 2.5
	sale := api.RoomEvent{
		Event: "sale", Rev: 7, Waiting: 4321, Away: 12, Tail: 9876, Over: 3,
		EventSettings: api.EventSettings{
			Capacity: &capacity, Stock: &stock, TokenTTL: &minute, Rate: &rate, Burst: 5, Mode: api.ModeOpen, OnClose: "keep",
			ReturnURL: "https://shop.example/" + hostile,
		},
		Slots:    api.EventSlots{Capacity: 100, Used: 98, Free: 2, Stock: &stock},
		Counters: map[string]int64{"entered": 10000, "promoted": 5000, "admitted": 4990, "no_shows": 7},
	}
	closed := api.RoomEvent{Event: "closed", EventSettings: api.EventSettings{Mode: api.ModeSoldOut}}
	return &fakeRooms{all: map[string]api.RoomEvent{"sale": sale, "closed": closed}}
}

func (f *fakeRooms) call(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf(format, args...))
	return f.err
}

func (f *fakeRooms) Events(_ context.Context, cursor string, limit int) (l api.RoomEventList, err error) {
	err = f.call("events %s %d", cursor, limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range []string{"sale", "closed"} {
		if e, ok := f.all[name]; ok && cursor == "" {
			l.Events, l.Cursor = append(l.Events, e), "0-2"
		}
	}
	return l, err
}

func (f *fakeRooms) Event(_ context.Context, event string) (api.RoomEvent, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e, ok := f.all[event]
	if f.err == nil && !ok {
		return e, fmt.Errorf("event %s: %w", event, api.ErrNotFound)
	}
	return e, f.err
}

func (f *fakeRooms) SetMode(_ context.Context, event, mode string) (api.RoomEvent, error) {
	return f.all[event], f.call("mode %s %s", event, mode)
}

func (f *fakeRooms) CheckRecalibration(to api.Recalibration) []api.FieldError {
	switch {
	case to.FromSeats && !f.seats:
		return []api.FieldError{{Field: "from_seats", Problem: "needs a seat service"}}
	case to.Capacity != nil && *to.Capacity < 0:
		return []api.FieldError{{Field: "capacity", Problem: "is below 0"}}
	case to.Capacity == nil && to.Stock == nil && !to.FromSeats:
		return []api.FieldError{{Field: "capacity", Problem: "is required: there is nothing to change"}}
	}
	return nil
}

func (f *fakeRooms) Recalibrate(_ context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	text := fmt.Sprint("recalibrate ", event, " seats ", to.FromSeats)
	if to.Capacity != nil {
		text += fmt.Sprint(" capacity ", *to.Capacity)
	}
	if to.Stock != nil {
		text += fmt.Sprint(" stock ", *to.Stock)
	}
	return f.all[event], f.call("%s", text)
}

func (f *fakeRooms) DeleteEvent(_ context.Context, event string) (api.EventRemoval, error) {
	return api.EventRemoval{Event: event, Remaining: 3}, f.call("delete %s", event)
}

func (f *fakeRooms) RemoveUser(_ context.Context, event, user string) (bool, error) {
	return user != "nobody", f.call("remove %s of %s", user, event)
}

func (w *testConsole) withBroker() {
	w.backend.stages = []api.StageStatus{{
		ID: "00c0ffee", Role: "broker", Running: true, SeenAt: created, Counts: map[string]int64{"streams": 2345, "position_age_ms": 1500},
	}}
}

func TestRooms(t *testing.T) {
	w := parallelAs(t, reader)
	d := w.page("/ui/rooms")
	require.Contains(t, d.text, "sale open 4,321 12 98 of 100 2 1,234 – –")
	require.Contains(t, d.text, "closed sold out 0 0 0 of 0 0 – – –")
	require.Contains(t, d.text, "No live process has the role broker")
	require.Equal(t, "rooms:", attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/rooms?cursor=0-2", nextOf(d))
	next := w.page(nextOf(d))
	require.Contains(t, next.text, "There are no further events.")
	require.Equal(t, "rooms:0-2", attribute(next.all("body")[0], "data-topic"))
	require.Equal(t, []string{"events  50", "events 0-2 50"}, w.rooms.calls)
	w = as(t, reader)
	w.withBroker()
	d = w.page("/ui/rooms")
	require.Contains(t, d.text, "00c0ffee running 2,345 1.5 s 2026-01-02 03:04:05 UTC")
	require.NotContains(t, d.text, "No live process")
	w.rooms.all = nil
	require.Contains(t, w.page("/ui/rooms").text, "bulkaction room set sale --capacity 100")
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/rooms?cursor="+strings.Repeat("x", 600)).Code)
	w.rooms.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/rooms").Body.String(), "Redis does not answer")
	for _, who := range []auth.Principal{acme, metrics, service} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/rooms").Code, who.Role)
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/rooms/sale").Code, who.Role)
	}
	without := New(httpapi.Share(httpapi.Options{Backend: w.backend}), Options{})
	require.False(t, slices.ContainsFunc(without.pages, func(p page) bool { return strings.HasPrefix(p.path, "/rooms") }))
	require.NotContains(t, without.topics(), "rooms")
}

func TestRoom(t *testing.T) {
	w := parallelAs(t, reader)
	d := w.page("/ui/rooms/sale")
	for _, want := range []string{
		"open Users enter", "3 slots above the limit", "98 of 100", "Waiting 4,321", "Away 12", "Slots used 98", "Slots free 2", "Seats left 1,234",
		"Last number 9,876", "entered 10,000", "no shows 7", "token_ttl 1 min", "rate 2.5 a second, bursts of 5", "https://shop.example/" + hostile,
	} {
		require.Contains(t, d.text, want)
	}
	require.Empty(t, formsTo(d, "/ui/rooms"), "a reader controls nothing")
	require.Equal(t, "room:sale", attribute(d.all("body")[0], "data-topic"))
	require.Contains(t, w.page("/ui/rooms/closed").text, "The capacity is unknown")
	require.Equal(t, http.StatusNotFound, w.get("/ui/rooms/none").Code)
	require.Equal(t, http.StatusNotFound, w.get("/ui/rooms/a%20b").Code)
	w.rooms.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/rooms/sale").Body.String(), "Redis does not answer")

	w = as(t, admin)
	d = w.page("/ui/rooms/sale")
	require.ElementsMatch(t, []string{
		"/ui/rooms/sale/pause", "/ui/rooms/sale/close", "/ui/rooms/sale/delete", "/ui/rooms/sale/recalibrate", "/ui/rooms/sale/users",
	}, formsTo(d, "/ui/rooms"))
	asks := buttons(d)
	require.Equal(t, "Close sale: 4,333 users in the queue lose their places, and nobody enters. 98 slots in use stay to their end.", asks["do-close"])
	require.Contains(t, asks["do-delete"], "4,333 users")
	require.NotEmpty(t, asks["do-remove"])
	require.NotContains(t, d.text, "seat service")
	w.rooms.seats = true
	require.Contains(t, w.page("/ui/rooms/sale").text, "Ask the seat service for the capacity")
	forms := formsTo(w.page("/ui/rooms/closed"), "/ui/rooms")
	require.Contains(t, forms, "/ui/rooms/closed/resume")
	require.NotContains(t, forms, "/ui/rooms/closed/close")
}

// TestRoomActions: each action of an admin makes one call of the waiting room and one entry in the
// activity log. Malformed ones make none; an operator, a reader and a producer get 403.
func TestRoomActions(t *testing.T) {
	w := parallelAs(t, admin)
	w.rooms.seats = true
	type action struct{ path, call, logged string }
	all := map[*action]url.Values{
		{"pause", "mode sale paused", "event.mode sale"}:                                     nil,
		{"resume", "mode sale open", "event.mode sale"}:                                      nil,
		{"close", "mode sale closed", "event.mode sale"}:                                     nil,
		{"delete", "delete sale", "event.delete sale"}:                                       nil,
		{"users", "remove u-1 of sale", "user.remove u-1@sale"}:                              {"user": {" u-1 "}},
		{"users", "remove nobody of sale", "user.remove nobody@sale"}:                        {"user": {"nobody"}},
		{"recalibrate", "recalibrate sale seats false capacity 5", "event.recalibrate sale"}: {"capacity": {"5"}, "stock": {""}},
		{"recalibrate", "recalibrate sale seats true stock 9", "event.recalibrate sale"}:     {"stock": {" 9 "}, "from_seats": {"true"}},
	}
	for a, form := range all {
		w.rooms.calls, w.log.entries = nil, nil
		answer := w.post("/ui/rooms/sale/"+a.path, form)
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
		require.Equal(t, []string{a.call}, w.rooms.calls)
		require.Len(t, w.log.entries, 1)
		require.Equal(t, a.logged, w.log.entries[0].Action+" "+w.log.entries[0].Object)
		to, err := url.Parse(answer.Header().Get("Location"))
		require.NoError(t, err)
		require.NotEmpty(t, noticeOf(to.Query()))
		require.Contains(t, w.page(to.String()).text, noticeOf(to.Query()))
	}
	w.rooms.calls, w.log.entries = nil, nil
	for path, form := range map[string]url.Values{
		"/ui/rooms/sale/recalibrate": {}, "/ui/rooms/closed/recalibrate": {"capacity": {"-1"}},
		"/ui/rooms/a/recalibrate": {"stock": {"many"}}, "/ui/rooms/sale/users": {"user": {"a b"}}, "/ui/rooms/b/users": {},
	} {
		require.Equal(t, http.StatusUnprocessableEntity, w.post(path, form).Code, path)
	}
	require.Equal(t, http.StatusNotFound, w.post("/ui/rooms/a%20b/pause", nil).Code)
	require.Empty(t, w.rooms.calls)
	require.Empty(t, w.log.entries, "what can't be is not recorded")
	for _, who := range []auth.Principal{operator, reader, acme} {
		w := as(t, who)
		for name := range w.console.rooms.actions() {
			require.Equal(t, http.StatusForbidden, w.post("/ui/rooms/sale/"+name, nil).Code, name)
		}
		require.Empty(t, w.rooms.calls)
	}
}

// TestRoomsAreForLoopback: without API keys, a caller from another host, or with another host's
// name in the request, neither sees nor changes events. With keys, the page does not speak of
// loopback.
func TestRoomsAreForLoopback(t *testing.T) {
	w := parallel(t)
	ask := func(c *Console, method, path, peer, host string) int {
		r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		r.RemoteAddr, r.Host = peer, host
		answer := httptest.NewRecorder()
		c.ServeHTTP(answer, r)
		return answer.Code
	}
	paths := []string{"/ui/rooms", "/ui/rooms/sale", "/ui/events?topics=rooms:", "/ui/events?topics=room:sale"}
	for _, from := range [][2]string{{"192.0.2.1:1", "127.0.0.1:8080"}, {"127.0.0.1:1", "example.com"}, {"odd", "localhost"}} {
		for _, path := range paths {
			code := ask(w.console, http.MethodGet, path, from[0], from[1])
			require.True(t, code == http.StatusForbidden || code == http.StatusMisdirectedRequest, "%s %v: %d", path, from, code)
		}
		for name := range w.console.rooms.actions() {
			require.NotEqual(t, http.StatusSeeOther, ask(w.console, http.MethodPost, "/ui/rooms/sale/"+name, from[0], from[1]))
		}
	}
	require.Empty(t, w.rooms.calls)
	require.Equal(t, http.StatusOK, ask(w.console, http.MethodGet, "/ui/rooms", "[::1]:1", "localhost:8080"))
	require.NotContains(t, as(t, admin).get("/ui/rooms").Body.String(), "loopback")
}

func TestRoomTopics(t *testing.T) {
	w := parallel(t)
	w.withBroker()
	server := w.server()
	for topic, want := range map[string]int{
		"rooms:": 200, "rooms": 200, "rooms:0-2": 200, "room:sale": 200, "room:": 404, "room:none": 404, "room:a%20b": 404, "rooms:%25zz": 404,
	} {
		s := w.follow(server, topic, "")
		require.Equal(t, want, s.status, topic)
		if want == 200 {
			event, data, _ := s.next()
			require.Equal(t, "regions", event, topic)
			require.NotEmpty(t, data)
		}
		s.close()
	}
	s := w.follow(server, "room:sale", "")
	_, data, _ := s.next()
	require.Contains(t, data["actions"], "/ui/rooms/sale/pause")
	change := func(f func(e *api.RoomEvent)) {
		w.rooms.mu.Lock()
		defer w.rooms.mu.Unlock()
		e := w.rooms.all["sale"]
		f(&e)
		w.rooms.all["sale"] = e
	}
	change(func(e *api.RoomEvent) { e.Mode = api.ModePaused })
	s.until(func(_ string, data map[string]string) bool {
		return strings.Contains(data["state"], "nobody is promoted")
	})
	w.rooms.mu.Lock()
	delete(w.rooms.all, "sale")
	w.rooms.mu.Unlock()
	s.until(func(event string, _ map[string]string) bool { return event == "gone" })
}

// TestPaces: the pace is that of the last minute. It is unknown at first, after a loss of data, and
// for events beyond maxPaces.
func TestPaces(t *testing.T) {
	t.Parallel()
	p := &paces{all: map[string][]reading{}}
	at := created
	add := func(event string, promoted, admitted int64) *roomPace {
		return p.add(api.RoomEvent{Event: event, Counters: map[string]int64{"promoted": promoted, "admitted": admitted}}, at)
	}
	after := func(d time.Duration) { at = at.Add(d) }
	require.Nil(t, add("a", 100, 90))
	after(500 * time.Millisecond)
	require.Nil(t, add("a", 101, 90))
	require.Len(t, p.all["a"], 1, "readings that follow each other fast are not kept")
	after(9500 * time.Millisecond)
	require.Equal(t, &roomPace{Promoted: 60, Admitted: 30}, add("a", 110, 95))
	after(55 * time.Second)
	require.Equal(t, &roomPace{Promoted: 0, Admitted: 60}, add("a", 110, 150), "the first reading is too old")
	require.Nil(t, add("a", 3, 2), "the counters are those of a new event")
	for i := range maxPaces {
		add(fmt.Sprint("e", i), 1, 1)
	}
	require.Len(t, p.all, maxPaces)
	after(10 * time.Second)
	require.Nil(t, add(fmt.Sprint("e", maxPaces), 1, 1))
	require.Len(t, p.all, maxPaces)
	after(2 * time.Minute)
	require.Nil(t, add("b", 1, 1))
	require.Len(t, p.all, 1, "events that nobody looks at are forgotten")
	after(2 * time.Minute)
	require.Nil(t, add("b", 1, 1), "the reading before is too old")
}
