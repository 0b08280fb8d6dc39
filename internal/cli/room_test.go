package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// fakeRooms is a waiting room in memory behind the real HTTP API. It checks settings by the real
// rules.
type fakeRooms struct {
	*httptest.Server
	httpapi.Rooms // nil: methods that are not defined here are not called

	rules roomadmin.Rules

	mu       sync.Mutex
	events   map[string]*waitingroom.Snapshot
	gets     int
	onGet    func(get int, s *waitingroom.Snapshot) error // called before each Event; get counts from 1
	revs     []int64                                      // of SetEvent
	rejected error                                        // returned by SetEvent and Recalibrate
}

func newFakeRooms(t *testing.T) *fakeRooms {
	f := &fakeRooms{
		rules:  roomadmin.Rules{Defaults: roomadmin.Standard(), ReturnHosts: []string{"shop.example"}, Seats: true},
		events: map[string]*waitingroom.Snapshot{},
	}
	f.Server = httptest.NewServer(httpapi.New(httpapi.Options{Backend: noBackend{}, Rooms: f}))
	t.Cleanup(f.Close)
	return f
}

type noBackend struct{ httpapi.Backend }

func (f *fakeRooms) exec(c console, args ...string) run {
	return f.execWith(context.Background(), c, args...)
}

func (f *fakeRooms) execWith(ctx context.Context, c console, args ...string) run {
	return c.exec(ctx, append([]string{"--api", f.URL, "room"}, args...)...)
}

func (f *fakeRooms) CheckSettings(set api.EventSettings) []api.FieldError { return f.rules.Check(set) }

func (f *fakeRooms) CheckRecalibration(to api.Recalibration) []api.FieldError {
	return f.rules.CheckRecalibration(to)
}

func (f *fakeRooms) SetEvent(_ context.Context, event string, set api.EventSettings, rev int64) (api.RoomEvent, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revs = append(f.revs, rev)
	if f.rejected != nil {
		return api.RoomEvent{}, f.rejected
	}
	s := f.events[event]
	if s == nil {
		s = &waitingroom.Snapshot{Event: event, Rev: 40, Settings: waitingroom.Settings{Mode: "open"}}
		f.events[event] = s
	}
	to := f.rules.Fill(set)
	if to.Mode == "" {
		to.Mode = s.Settings.Mode
	}
	s.Rev, s.Settings, s.Left = s.Rev+1, to, to.Stock
	return roomadmin.View(*s), nil
}

func (f *fakeRooms) Event(_ context.Context, event string) (api.RoomEvent, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gets++
	s := f.events[event]
	if s == nil {
		return api.RoomEvent{}, fmt.Errorf("event %s: %w", event, api.ErrNotFound)
	}
	if f.onGet != nil {
		if err := f.onGet(f.gets, s); err != nil {
			return api.RoomEvent{}, err
		}
	}
	return roomadmin.View(*s), nil
}

func (f *fakeRooms) Events(context.Context, string, int) (l api.RoomEventList, err error) {
	for _, s := range f.events {
		l.Events = append(l.Events, roomadmin.View(*s))
	}
	return l, nil
}

func (f *fakeRooms) SetMode(ctx context.Context, event, mode string) (api.RoomEvent, error) {
	if s := f.events[event]; s != nil {
		if mode == "paused" && s.Settings.Mode == "closed" {
			return api.RoomEvent{}, fmt.Errorf("pause event %s: %w", event, api.ErrConflict)
		}
		s.Settings.Mode = mode
	}
	return f.Event(ctx, event)
}

func (f *fakeRooms) Recalibrate(ctx context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	if f.rejected != nil {
		return api.RoomEvent{}, f.rejected
	}
	if s := f.events[event]; s != nil && to.Capacity != nil {
		s.Settings.Capacity, s.Settings.SeatsPending = *to.Capacity, false
	}
	return f.Event(ctx, event)
}

func (f *fakeRooms) DeleteEvent(_ context.Context, event string) (api.EventRemoval, error) {
	s := f.events[event]
	if s == nil {
		return api.EventRemoval{}, fmt.Errorf("event %s: %w", event, api.ErrNotFound)
	}
	return api.EventRemoval{Event: event, Remaining: s.Used}, nil
}

func (f *fakeRooms) RemoveUser(_ context.Context, _, user string) (bool, error) {
	return user == "u1", nil
}

// words joins the words of a text by single spaces.
func words(text string) string { return strings.Join(strings.Fields(text), " ") }

func TestRoomSetAndShow(t *testing.T) {
	f := newFakeRooms(t)
	got := f.exec(console{}, "set", "sale", "--capacity", "3", "--stock", "100", "--rate", "2.5", "--burst", "9", "--grace", "0s",
		"--return-url", "https://shop.example/buy", "--mode", "paused")
	require.Equal(t, exitOK, got.code, got.err)
	f.events["sale"].Used = 5
	got = f.exec(console{}, "set", "sale", "--token-ttl", "90s", "--no-stock", "--rate", "7")
	got.ends(t, exitOK, "2 more slots are in use than the limit allows")
	for _, line := range []string{
		"Event sale", "Mode paused", "Slots 5 of 3 in use, 0 free, 2 above the limit", "capacity 3", "rate 7 a second, bursts of 7",
		"token-ttl 1m30s", "grace 0s", "max-waiting 1,000,000", "return-url https://shop.example/buy",
	} {
		require.Contains(t, words(got.out), line, "settings without a flag stay")
	}
	require.NotContains(t, got.out, "stock")
	require.Equal(t, words(got.out), words(f.exec(console{}, "show", "sale").out))

	got = f.exec(console{}, "set", "sale", "--capacity", "9", "--clear", "--json")
	var v api.RoomEvent
	require.NoError(t, json.Unmarshal([]byte(got.out), &v), got.err)
	require.Equal(t, api.Duration(5*time.Minute), *v.TokenTTL)
	require.Empty(t, v.ReturnURL)
	require.Equal(t, "paused", v.Mode, "--clear opens no event")
	require.Contains(t, got.err, "The event has no return URL")
	require.NotContains(t, f.exec(console{}, "set", "sale", "--return-url", "http://127.0.0.1:8081/buy").err, "return_url")
	got = f.exec(console{}, "set", "sale", "--clear", "--json")
	require.NoError(t, json.Unmarshal([]byte(got.out), &v), got.err)
	require.Equal(t, int64(9), *v.Capacity, "--clear keeps it")
	require.Equal(t, []int64{0, 41, 42, 43, 44}, f.revs, "a change between the look and the command is refused")

	got = f.exec(console{}, "set", "sale", "--grace", "5s", "--no-show", "wait")
	require.Contains(t, words(got.out), "grace 5s retention 24h0m0s on-close keep no-show wait")
	got = f.exec(console{}, "set", "sale", "--preset", "strict")
	require.Contains(t, words(got.out), "grace 0s retention 24h0m0s on-close release no-show release", "one flag for three settings")
	got = f.exec(console{}, "set", "sale", "--preset", "strict", "--grace", "10s")
	require.Contains(t, words(got.out), "grace 10s retention 24h0m0s on-close release no-show release", "and the others as given")
	got = f.exec(console{}, "set", "sale", "--preset", "standard")
	require.Contains(t, words(got.out), "grace 1m0s retention 24h0m0s on-close keep no-show wait")
	f.exec(console{}, "set", "sale", "--preset", "lax").ends(t, exitUsage, "--preset lax: must be standard or strict")

	got = f.exec(console{}, "set", "seats", "--ready", "5s")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, words(got.out), "0 of unknown in use")

	f.rejected = fmt.Errorf("set: %w", api.ErrChanged)
	f.exec(console{}, "set", "sale", "--capacity", "9").ends(t, exitError, "run the command again")
	got = f.exec(console{}, "set", "sale", "--capacity", "-1", "--on-close", "drop")
	got.ends(t, exitUsage, "--capacity -1: must be a whole number from 0 to 10,000,000", "--on-close drop: must be keep or release")
	for args, problem := range map[string]string{
		"set":                           "set needs the id of one event",
		"set a/b --capacity 1":          "event id",
		"set sale":                      "nothing to set",
		"set sale --json":               "nothing to set",
		"set sale --capacity x":         "must be a whole number",
		"set sale --grace 5":            "must be a duration with its unit, such as 30s, from 0s (until",
		"set sale --stock 1 --no-stock": "exclude each other",
		"set sale --no-rate --burst 3":  "--no-rate excludes",
		"recalibrate sale":              "nothing to change",
		"recalibrate sale --capacity 1 --from-seats": "leave out --capacity",
		"kick sale":                 "needs an event and a user",
		"kick sale a/b":             "user id",
		"watch sale --interval 1ms": "must be at least 10ms",
		"ls sale":                   `ls takes no argument "sale"`,
		"":                          "room needs a subcommand: ls, show, set",
	} {
		f.exec(console{}, strings.Fields(args)...).ends(t, exitUsage, problem)
	}
}

func TestRoomCommands(t *testing.T) {
	f := newFakeRooms(t)
	f.exec(console{}, "set", "sale", "--capacity", "3", "--stock", "100")
	s := f.events["sale"]
	s.Used, s.Free, s.Waiting, s.Away, s.Counters = 2, 1, 1234, 5, map[string]int64{"completed": 7}
	got := f.exec(console{outIsTerm: true}, "ls")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, words(got.out), "EVENT MODE CAPACITY USED FREE SEATS WAITING AWAY COMPLETED sale open 3 2 1 100 1,234 5 7")
	require.True(t, strings.HasPrefix(f.exec(console{}, "ls", "--json").out, `{"event":"sale","rev":41,"capacity":3,`))

	for _, c := range []struct{ verb, mode string }{{"pause", "paused"}, {"resume", "open"}, {"close", "closed"}} {
		got := f.exec(console{}, c.verb, "sale")
		require.Equal(t, "sale   "+c.mode+"\n", got.out, got.err)
	}
	f.exec(console{}, "pause", "sale").ends(t, exitError, "`bulkaction room show sale` shows its mode")
	got = f.exec(console{}, "recalibrate", "sale", "--capacity", "1")
	require.Equal(t, "sale 2 of 1 in use, 1 free, 1 above the limit", words(got.out))
	require.Contains(t, got.err, "1 more slots are in use")
	f.rejected = fmt.Errorf("%w: status 500", api.ErrUpstream)
	f.exec(console{}, "recalibrate", "sale", "--from-seats").ends(t, exitError, "Give the number yourself")
	require.Equal(t, "sale   u1   removed\n", f.exec(console{}, "kick", "sale", "u1").out)
	got = f.exec(console{}, "kick", "sale", "u2")
	require.Equal(t, "sale   u2   not in the event\n", got.out)
	require.NotContains(t, got.err, "dot")
	require.Contains(t, f.exec(console{}, "kick", "sale", "u2.mac").err, "give only the part before the dot: u2\n")
	require.Equal(t, "sale   closed, deleted when 2 users have gone\n", f.exec(console{}, "delete", "sale").out)
	s.Used = 0
	require.Equal(t, "sale   deleted\n", f.exec(console{}, "delete", "sale").out)
	for _, verb := range []string{"show", "pause", "delete", "watch"} {
		got := f.exec(console{}, verb, "none")
		require.Equal(t, exitError, got.code, verb)
		require.Contains(t, got.err, "`bulkaction room ls` lists the events")
		require.Equal(t, verb != "delete", strings.Contains(got.err, "creates this one"), verb)
	}
	broker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		problem(w, http.StatusNotFound, "no such path: see /openapi.yaml")
	}))
	t.Cleanup(broker.Close)
	for _, args := range []string{"ls", "show sale", "delete sale", "set sale --capacity 1"} {
		got := console{}.exec(t.Context(), append([]string{"--api", broker.URL, "room"}, strings.Fields(args)...)...)
		require.Contains(t, got.err, "This may be a broker; the API is ingest", args)
		require.NotContains(t, got.err, "room ls` lists", args)
	}
}

// errGone is the error of a read of an event that was deleted while the command watches it.
var errGone = fmt.Errorf("event sale: %w", api.ErrNotFound)

func TestRoomWatch(t *testing.T) {
	f := newFakeRooms(t)
	f.exec(console{}, "set", "sale", "--capacity", "3")
	watch := func(c console, flags ...string) run {
		f.gets = 0
		f.events["sale"].Counters = map[string]int64{}
		return f.exec(c, append([]string{"watch", "sale", "--interval", "10ms"}, flags...)...)
	}
	f.onGet = func(get int, s *waitingroom.Snapshot) error {
		s.Waiting, s.Counters["promoted"] = int64(min(get, 2)), int64(get)
		if get == 5 {
			return errGone
		}
		return nil
	}
	got := watch(console{}, "--json")
	require.Equal(t, exitOK, got.code, got.err)
	require.Equal(t, 4, strings.Count(got.out, `{"event":"sale"`), "each look is a line")
	require.Contains(t, got.err, "Event sale is deleted.")

	f.onGet = func(get int, s *waitingroom.Snapshot) error {
		s.Waiting = int64(get / 3)
		if get == 6 {
			return errGone
		}
		return nil
	}
	got = watch(console{})
	require.Equal(t, 2, strings.Count(got.out, "\n"), "only changes are lines: %s", got.out)
	require.Contains(t, got.out, "open     0 of 3 in use, 0 free; 1 waiting, 0 away")

	f.onGet = func(get int, s *waitingroom.Snapshot) error {
		s.Counters["promoted"] = int64(1000 * get)
		if get == 3 {
			return errGone
		}
		return nil
	}
	got = watch(console{outIsTerm: true})
	first, second, _ := strings.Cut(got.out, "\x1b[")
	require.Contains(t, words(first), "USERS TOTAL A SECOND entered 0 - promoted 1,000 -")
	require.True(t, strings.HasPrefix(second, fmt.Sprintf("%dA\x1b[J", strings.Count(first, "\n"))), "the lines are replaced: %q", second)
	require.Contains(t, words(second), "promoted 2,000 ")
	require.NotContains(t, words(second), "promoted 2,000 -")
}

func TestRoomWatchSurvivesAnOutage(t *testing.T) {
	f := newFakeRooms(t)
	f.exec(console{}, "set", "sale", "--capacity", "3")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	broken := 0
	f.gets = 0
	f.onGet = func(get int, s *waitingroom.Snapshot) error {
		switch {
		case get == 1:
		case broken < 6: // more often than the client repeats a call
			broken++
			return fmt.Errorf("WRONGTYPE")
		default:
			cancel()
		}
		return nil
	}
	got := f.execWith(ctx, console{}, "watch", "sale", "--interval", "10ms")
	require.Equal(t, exitOK, got.code, got.err)
	require.Equal(t, 1, strings.Count(got.err, "trying again"), "an outage is told once: %s", got.err)
	require.Equal(t, 6, broken)

	refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		problem(w, http.StatusForbidden, "calls on the waiting room are served on loopback only")
	}))
	t.Cleanup(refusing.Close)
	refused := console{}.exec(t.Context(), "--api", refusing.URL, "room", "watch", "sale")
	require.Equal(t, exitError, refused.code)
	require.Contains(t, refused.err, "served on loopback only")
}

func TestRoomNewKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.pem")
	newKey := func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"room", "new-key"}, args...)...)
	}
	got := newKey(file)
	require.Equal(t, exitOK, got.code, got.err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "BEGIN PRIVATE KEY")

	require.Equal(t, exitOK, newKey(file).code, "it may be run before each start")
	again, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, text, again)

	require.NoError(t, os.WriteFile(file, []byte("no key"), 0o600))
	newKey(file).ends(t, exitError, "there is no PEM block")
	require.Equal(t, exitError, newKey(filepath.Join(file, "below")).code)
	folder := filepath.Join(t.TempDir(), "none")
	require.Contains(t, newKey(filepath.Join(folder, "keys.pem")).err, "the directory "+folder+" does not exist: create it first")
	require.Equal(t, exitUsage, newKey().code)
}
