package roomadmin_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial))
}

// patience is how long the tests wait for an event that must happen; normally it takes a fraction
// of that.
const patience = 30 * time.Second

// event is the id of the event of the tests. conn is the id of a user's stream.
const (
	event = "sale"
	conn  = "0123abcd.1"
)

// world is an Admin with a key space of its own on a real Redis. Through rooms, which calls the
// scripts of the waiting room, a test prepares and reads the data.
type world struct {
	*testing.T
	*roomadmin.Admin
	rooms *waitingroom.Rooms
	keys  *entrytoken.Keys
	conn  *redisx.Conn
	space keyspace.Space
	cfg   roomadmin.Config
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	url, prefix := redistest.Shared(t)
	return worldAt(t, url, prefix)
}

func worldAt(t *testing.T, url, prefix string) *world {
	t.Helper()
	conn, err := redisx.Connect(t.Context(), redisx.Config{
		URL: url, PoolMaxActive: 10, DialTimeout: patience, CommandTimeout: patience,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 4)
	require.NoError(t, err)
	w := &world{T: t, conn: conn, space: space, keys: newKeys(t)}
	w.rooms = waitingroom.New(conn, space, nil)
	w.cfg = roomadmin.Config{
		Rooms: w.rooms, Space: space, Tokens: w.keys, Log: slog.New(slog.DiscardHandler),
		Rules: roomadmin.Rules{Defaults: roomadmin.Standard()},
	}
	w.Admin = roomadmin.New(w.cfg)
	return w
}

func newKeys(t *testing.T) *entrytoken.Keys {
	t.Helper()
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	keys, err := entrytoken.Read(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return keys
}

// withSeats gives the Admin a fake seat service that answers the text that answer holds, or status
// 500 if that is nil. About the event unknown it answers 404.
func (w *world) withSeats(answer *atomic.Pointer[string]) {
	w.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch text := answer.Load(); {
		case strings.HasSuffix(r.URL.Path, "/unknown"):
			rw.WriteHeader(http.StatusNotFound)
		case text == nil:
			rw.WriteHeader(http.StatusInternalServerError)
		default:
			_, _ = fmt.Fprint(rw, *text)
		}
	}))
	w.Cleanup(s.Close)
	client, err := roomadmin.NewSeatService(s.URL+"/seats/{event}", patience)
	require.NoError(w, err)
	w.Cleanup(client.Close)
	w.cfg.Seats = client
	w.Admin = roomadmin.New(w.cfg)
}

func (w *world) declare(set api.EventSettings) api.RoomEvent {
	w.Helper()
	v, err := w.SetEvent(w.Context(), event, set, 0)
	require.NoError(w, err)
	return v
}

func (w *world) enter(user, conn string) waitingroom.Entry {
	w.Helper()
	e, err := w.rooms.Enter(w.Context(), event, waitingroom.EnterNew, time.Second, waitingroom.Visitor{User: user, Conn: conn})
	require.NoError(w, err)
	return e.Entries[0]
}

// admit enters a user while a slot is free, claims the token, and returns it.
func (w *world) admit(user, conn string) string {
	w.Helper()
	require.Equal(w, waitingroom.Ready, w.enter(user, conn).Code)
	c, err := w.rooms.Claim(w.Context(), event, waitingroom.Visitor{User: user, Conn: conn})
	require.NoError(w, err)
	require.Equal(w, waitingroom.Claimed, c[0].Code)
	return w.sign(user, c[0])
}

func (w *world) sign(user string, c waitingroom.Claim) string {
	w.Helper()
	token, err := w.keys.Sign(entrytoken.Claims{
		Issuer: "http://127.0.0.1:8090", Audience: event, User: user, Event: event, Fence: c.Fence,
		IssuedAt: time.Now(), ExpiresAt: c.Expires,
	})
	require.NoError(w, err)
	return token
}

// dispatched returns the dispatch messages for the broker of conn, and deletes them.
func (w *world) dispatched() (all []string) {
	w.Helper()
	stream := w.space.Dispatch(keyspace.InstanceOf(conn))
	entries, err := w.conn.Cmd.XRange(w.Context(), stream, "-", "+").Result()
	require.NoError(w, err)
	for _, e := range entries {
		require.NotEmpty(w, e.Values["id"])
		all = append(all, fmt.Sprint(e.Values["type"], " ", e.Values["data"]))
	}
	if len(all) > 0 {
		require.Positive(w, w.conn.Cmd.PTTL(w.Context(), stream).Val(), "the stream of a dead broker must end")
	}
	require.NoError(w, w.conn.Cmd.Del(w.Context(), stream).Err())
	return all
}

func requireInvalid(t *testing.T, err error, field string) {
	t.Helper()
	var bad *messages.ValidationError
	require.ErrorAs(t, err, &bad)
	require.Equal(t, field, bad.Fields[0].Field)
}

func TestSetEvent(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := w.Event(ctx, event)
	require.ErrorIs(t, err, api.ErrNotFound)
	first := w.declare(api.EventSettings{Capacity: new(int64(3)), Grace: new(api.Duration(0))})
	require.Equal(t, "open", first.Mode)
	require.EqualValues(t, 3, first.Slots.Free)
	require.Zero(t, *first.Grace)
	require.Equal(t, api.Duration(5*time.Minute), *first.TokenTTL)
	again := w.declare(api.EventSettings{Capacity: new(int64(3)), Grace: new(api.Duration(0))})
	require.Equal(t, first, again, "the same settings change nothing")

	w.admit("u1", conn)
	w.admit("u2", conn)
	v, err := w.SetEvent(ctx, event, api.EventSettings{Capacity: new(int64(1))}, first.Rev)
	require.NoError(t, err)
	require.EqualValues(t, 1, v.Over, "nobody loses a slot")
	require.EqualValues(t, 2, v.Slots.Used)
	require.Equal(t, api.Duration(time.Minute), *v.Grace, "a missing setting gets its default")
	_, err = w.SetEvent(ctx, event, api.EventSettings{Capacity: new(int64(9))}, first.Rev)
	require.ErrorIs(t, err, api.ErrChanged)
	_, err = w.SetEvent(ctx, "new", api.EventSettings{Capacity: new(int64(9))}, first.Rev)
	require.ErrorIs(t, err, api.ErrChanged, "with a rev, no event is created")
	_, err = w.SetEvent(ctx, event, api.EventSettings{}, 0)
	requireInvalid(t, err, "capacity")
	now, err := w.Event(ctx, event)
	require.NoError(t, err)
	require.Equal(t, v, now)
}

// TestReturnURLOfAnotherHost: a return URL with another host than the brokers' gives a warning,
// because browsers send the entry cookie to the brokers' host alone.
func TestReturnURLOfAnotherHost(t *testing.T) {
	w := newWorld(t)
	capacity := int64(1)
	set := api.EventSettings{Capacity: &capacity, ReturnURL: "http://localhost:8081/buy"}
	require.Empty(t, w.declare(set).Warnings, "the brokers' host is not known")
	w.cfg.PublicURL = "http://127.0.0.1:8090"
	w.Admin = roomadmin.New(w.cfg)
	warnings := w.declare(set).Warnings
	require.Len(t, warnings, 1)
	require.Contains(t, warnings[0], "its host is localhost, and visitors reach the brokers at 127.0.0.1")
	set.ReturnURL = "http://127.0.0.1:8081/buy"
	require.Empty(t, w.declare(set).Warnings)
	set.Preset = api.PresetStrict // gives the slot back when the page leaves for the shop
	warnings = w.declare(set).Warnings
	require.Len(t, warnings, 1)
	require.Contains(t, warnings[0], "on_close: with release")
	set.ReturnURL = ""
	require.Empty(t, w.declare(set).Warnings)
}

func TestModes(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := w.SetMode(ctx, event, api.ModePaused)
	require.ErrorIs(t, err, api.ErrNotFound)
	_, err = w.SetMode(ctx, event, api.ModeOpen)
	require.ErrorIs(t, err, api.ErrNotFound)
	first := w.declare(api.EventSettings{Capacity: new(int64(1))})
	for _, mode := range []string{api.ModePaused, api.ModeOpen, api.ModePaused, api.ModeClosed} {
		v, err := w.SetMode(ctx, event, mode)
		require.NoError(t, err)
		require.Equal(t, mode, v.Mode)
		require.Greater(t, v.Rev, first.Rev)
	}
	_, err = w.SetMode(ctx, event, api.ModePaused)
	require.ErrorIs(t, err, api.ErrConflict)
	require.ErrorContains(t, err, "its mode is closed")
	v := w.declare(api.EventSettings{Capacity: new(int64(2))})
	require.Equal(t, api.ModeClosed, v.Mode, "a change of another setting opens no event")
	v, err = w.SetMode(ctx, event, api.ModeOpen)
	require.NoError(t, err)
	require.Equal(t, api.ModeOpen, v.Mode)
}

func TestRecalibrate(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := w.Recalibrate(ctx, event, api.Recalibration{Capacity: new(int64(1))})
	require.ErrorIs(t, err, api.ErrNotFound)
	w.declare(api.EventSettings{Capacity: new(int64(2)), Stock: new(int64(10)), Ready: new(api.Duration(time.Minute))})
	w.admit("u1", conn)
	w.admit("u2", conn)
	require.Equal(t, waitingroom.Entered, w.enter("u3", "").Code)

	v, err := w.Recalibrate(ctx, event, api.Recalibration{Capacity: new(int64(0))})
	require.NoError(t, err)
	require.EqualValues(t, 2, v.Over)
	require.EqualValues(t, 1, v.Waiting, "the queue stays")
	require.Equal(t, api.Duration(time.Minute), *v.Ready, "other settings stay")
	v, err = w.Recalibrate(ctx, event, api.Recalibration{Capacity: new(int64(5)), Stock: new(int64(3))})
	require.NoError(t, err)
	require.Equal(t, api.EventSlots{Capacity: 5, Used: 2, Free: 1, Stock: new(int64(3))}, v.Slots)
	require.Zero(t, v.Over)
	_, err = w.Recalibrate(ctx, event, api.Recalibration{FromSeats: true})
	requireInvalid(t, err, "from_seats")
	_, err = w.Recalibrate(ctx, event, api.Recalibration{Capacity: new(int64(-1))})
	requireInvalid(t, err, "capacity")
}

func TestSeatService(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	var answer atomic.Pointer[string]
	w.withSeats(&answer)

	v := w.declare(api.EventSettings{})
	require.Nil(t, v.Capacity, "the service has not answered: the brokers ask again")
	require.Zero(t, v.Slots.Capacity)
	_, err := w.Recalibrate(ctx, event, api.Recalibration{FromSeats: true})
	require.ErrorIs(t, err, api.ErrUpstream)
	require.ErrorContains(t, err, "status 500")

	answer.Store(new(`{"seats": 40}`))
	v = w.declare(api.EventSettings{})
	require.EqualValues(t, 40, *v.Capacity)
	answer.Store(new(`{"seats": 50}`))
	v, err = w.Recalibrate(ctx, event, api.Recalibration{FromSeats: true})
	require.NoError(t, err)
	require.EqualValues(t, 50, *v.Capacity)
	answer.Store(nil)
	v = w.declare(api.EventSettings{Grace: new(api.Duration(0))})
	require.EqualValues(t, 50, *v.Capacity, "an event keeps its capacity while the service does not answer")

	_, err = w.SetEvent(ctx, "unknown", api.EventSettings{}, 0)
	requireInvalid(t, err, "capacity")
	_, err = w.Event(ctx, "unknown")
	require.ErrorIs(t, err, api.ErrNotFound)
	_, err = w.Recalibrate(ctx, "unknown", api.Recalibration{FromSeats: true})
	require.ErrorIs(t, err, api.ErrNotFound)
	_, err = w.SetEvent(ctx, "unknown", api.EventSettings{Capacity: new(int64(1))}, 0)
	require.NoError(t, err)
	_, err = w.Recalibrate(ctx, "unknown", api.Recalibration{FromSeats: true})
	requireInvalid(t, err, "from_seats")
}

func TestEventsArePaged(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	l, err := w.Events(ctx, "", 10)
	require.NoError(t, err)
	require.Empty(t, l)
	want := map[string]bool{}
	for i := range 25 {
		name := fmt.Sprintf("event-%d", i)
		_, err := w.SetEvent(ctx, name, api.EventSettings{Capacity: new(int64(i))}, 0)
		require.NoError(t, err)
		want[name] = true
	}
	for _, limit := range []int{1, 7, 1000} {
		got, cursor := map[string]bool{}, ""
		for {
			l, err := w.Events(ctx, cursor, limit)
			require.NoError(t, err)
			require.LessOrEqual(t, len(l.Events), limit)
			for _, v := range l.Events {
				got[v.Event] = true
				require.Equal(t, fmt.Sprintf("event-%d", *v.Capacity), v.Event)
			}
			if cursor = l.Cursor; cursor == "" {
				break
			}
		}
		require.Equal(t, want, got)
	}
	for _, cursor := range []string{"x", "9-0", "-1-0", "0-x"} {
		_, err := w.Events(ctx, cursor, 10)
		require.ErrorIs(t, err, api.ErrInvalid, cursor)
	}
}

func TestRemoveUser(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := w.RemoveUser(ctx, event, "u")
	require.ErrorIs(t, err, api.ErrNotFound)
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	token := w.admit("inside", conn)
	require.Equal(t, waitingroom.Entered, w.enter("waits", conn).Code)
	require.Equal(t, waitingroom.Entered, w.enter("polls", "").Code)
	for _, user := range []string{"inside", "waits"} {
		removed, err := w.RemoveUser(ctx, event, user)
		require.NoError(t, err)
		require.True(t, removed)
		require.Equal(t, []string{fmt.Sprintf(`entry.removed {"event":"sale","user":%q,"conn":%q,"reason":"removed"}`, user, conn)}, w.dispatched())
	}
	for user, known := range map[string]bool{"polls": true, "waits": false, "nobody": false} {
		removed, err := w.RemoveUser(ctx, event, user)
		require.NoError(t, err)
		require.Equal(t, known, removed, user)
	}
	require.Empty(t, w.dispatched())
	s, err := w.VerifyToken(ctx, token)
	require.NoError(t, err)
	require.Equal(t, api.EntryTokenState{}, s)
	v, err := w.Event(ctx, event)
	require.NoError(t, err)
	require.Zero(t, v.Slots.Used+v.Waiting+v.Away)
}

func TestDeleteEvent(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	_, err := w.DeleteEvent(ctx, event)
	require.ErrorIs(t, err, api.ErrNotFound)
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	token := w.admit("inside", conn)
	for i := range 500 { // more than one call of the script removes
		require.Equal(t, waitingroom.Entered, w.enter(fmt.Sprintf("u%d", i), conn).Code)
	}
	r, err := w.DeleteEvent(ctx, event)
	require.NoError(t, err)
	require.Equal(t, api.EventRemoval{Event: event, Remaining: 1}, r)
	v, err := w.Event(ctx, event)
	require.NoError(t, err)
	require.Equal(t, api.ModeClosed, v.Mode)
	require.EqualValues(t, 1, v.Slots.Used, "users inside keep their slots")
	done, err := w.CompleteToken(ctx, token, false)
	require.NoError(t, err)
	require.True(t, done)
	r, err = w.DeleteEvent(ctx, event)
	require.NoError(t, err)
	require.Zero(t, r.Remaining)
	_, err = w.Event(ctx, event)
	require.ErrorIs(t, err, api.ErrNotFound)
	keys, err := w.conn.Cmd.Keys(ctx, w.space.Prefix()+"*room:sale*").Result()
	require.NoError(t, err)
	require.Empty(t, keys)
}

func TestTokens(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	w.declare(api.EventSettings{Capacity: new(int64(2)), Stock: new(int64(5))})
	token := w.admit("u1", conn)
	s, err := w.VerifyToken(ctx, token)
	require.NoError(t, err)
	require.True(t, s.Valid)
	require.Equal(t, []string{event, "u1"}, []string{s.Event, s.User})
	require.NotEmpty(t, s.Fence)
	require.WithinDuration(t, time.Now().Add(5*time.Minute), *s.ExpiresAt, patience)

	renewed, err := w.RenewToken(ctx, token)
	require.NoError(t, err)
	claims, err := w.keys.Verify(renewed.Token)
	require.NoError(t, err)
	require.Equal(t, s.Fence, claims.Fence, "it is the same session")
	require.True(t, claims.ExpiresAt.Equal(renewed.ExpiresAt))
	require.False(t, renewed.ExpiresAt.Before(*s.ExpiresAt))
	for _, token := range []string{token, renewed.Token} {
		s, err := w.VerifyToken(ctx, token)
		require.NoError(t, err)
		require.True(t, s.Valid, "the old token is valid until its own expiry")
	}

	done, err := w.CompleteToken(ctx, token, true)
	require.NoError(t, err)
	require.True(t, done)
	done, err = w.CompleteToken(ctx, renewed.Token, true)
	require.NoError(t, err)
	require.False(t, done, "a second call sells no second seat")
	v, err := w.Event(ctx, event)
	require.NoError(t, err)
	require.EqualValues(t, 4, *v.Slots.Stock)
	for _, token := range []string{token, renewed.Token} {
		s, err := w.VerifyToken(ctx, token)
		require.NoError(t, err)
		require.Equal(t, api.EntryTokenState{}, s)
		_, err = w.RenewToken(ctx, token)
		require.ErrorIs(t, err, api.ErrConflict)
	}
}

// TestExpiredTokenOfARenewedSession: a token that was renewed is refused after its own expiry,
// although the user's newer token is still valid.
func TestExpiredTokenOfARenewedSession(t *testing.T) {
	w := newWorld(t)
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	w.admit("u1", conn)
	c, err := w.rooms.Claim(t.Context(), event, waitingroom.Visitor{User: "u1"})
	require.NoError(t, err)
	expired := c[0]
	expired.Expires = time.Now().Add(-time.Minute)
	s, err := w.VerifyToken(t.Context(), w.sign("u1", expired))
	require.NoError(t, err)
	require.Equal(t, api.EntryTokenState{}, s)
}

func TestSessionIsOver(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	w.declare(api.EventSettings{
		Capacity: new(int64(1)), TokenTTL: new(api.Duration(time.Hour)), MaxSession: new(api.Duration(time.Millisecond)),
	})
	token := w.admit("u1", conn)
	require.Eventually(t, func() bool {
		_, err := w.RenewToken(ctx, token)
		return err != nil && strings.Contains(err.Error(), "max_session")
	}, patience, time.Millisecond)
	_, err := w.RenewToken(ctx, token)
	require.ErrorIs(t, err, api.ErrConflict)
}

func TestBadTokens(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	token := w.admit("u1", conn)
	head, rest, _ := strings.Cut(token, ".")
	body, signature, _ := strings.Cut(rest, ".")
	foreign, err := newKeys(t).Sign(entrytoken.Claims{
		Issuer: "i", Audience: "a", User: "u1", Event: event, Fence: "1", IssuedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour),
	})
	require.NoError(t, err)
	hostile, err := w.keys.Sign(entrytoken.Claims{
		Issuer: "i", Audience: "a", User: "u1", Event: "a}b", Fence: "1", IssuedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour),
	})
	require.NoError(t, err)
	for name, bad := range map[string]string{
		"empty": "", "text": "secret-token", "foreign key": foreign, "no signature": head + "." + body + ".",
		"alg none":        "eyJhbGciOiJub25lIn0." + body + ".",
		"other signature": head + "." + body + "." + strings.ToLower(signature), "event id": hostile,
	} {
		_, err := w.VerifyToken(ctx, bad)
		requireInvalid(t, err, "token")
		require.NotContains(t, err.Error(), "secret", name)
		_, err = w.RenewToken(ctx, bad)
		requireInvalid(t, err, "token")
		_, err = w.CompleteToken(ctx, bad, true)
		requireInvalid(t, err, "token")
	}
	w.cfg.Tokens = nil
	_, err = roomadmin.New(w.cfg).VerifyToken(ctx, token)
	require.ErrorIs(t, err, api.ErrNotConfigured)
	require.ErrorContains(t, err, "BULKACTION_BROKER_TOKEN_KEYS_FILE")
}

func TestRedisAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	w := worldAt(t, server.URL(), "p:")
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	token := w.admit("u1", conn)
	server.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for name, call := range map[string]func() error{
		"event":  func() error { _, err := w.Event(ctx, event); return err },
		"events": func() error { _, err := w.Events(ctx, "", 10); return err },
		"set": func() error {
			_, err := w.SetEvent(ctx, event, api.EventSettings{Capacity: new(int64(1))}, 0)
			return err
		},
		"mode":     func() error { _, err := w.SetMode(ctx, event, api.ModeClosed); return err },
		"delete":   func() error { _, err := w.DeleteEvent(ctx, event); return err },
		"remove":   func() error { _, err := w.RemoveUser(ctx, event, "u1"); return err },
		"verify":   func() error { _, err := w.VerifyToken(ctx, token); return err },
		"renew":    func() error { _, err := w.RenewToken(ctx, token); return err },
		"complete": func() error { _, err := w.CompleteToken(ctx, token, true); return err },
	} {
		require.ErrorIs(t, call(), api.ErrUnavailable, name)
	}
}

func TestRedisIsFull(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	w := worldAt(t, server.URL(), "p:")
	w.declare(api.EventSettings{Capacity: new(int64(1))})
	token := w.admit("u1", conn)
	require.NoError(t, w.conn.Cmd.ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, err := w.SetEvent(t.Context(), event, api.EventSettings{Capacity: new(int64(2))}, 0)
	require.ErrorIs(t, err, api.ErrBackpressure)
	removed, err := w.RemoveUser(t.Context(), event, "u1")
	require.NoError(t, err, "what takes users away goes through, also if no broker can be told")
	require.True(t, removed)
	s, err := w.VerifyToken(t.Context(), token)
	require.NoError(t, err)
	require.False(t, s.Valid)
}
