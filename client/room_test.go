package client_test

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/room/settings"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// roomBackend is a fake waiting room behind the real handlers of package httpapi. It checks
// settings by the real rules. Each event has the last settings that were set; the other answers are
// fixed. It records the calls that list or change something, except renewals of tokens.
type roomBackend struct {
	httpapi.Rooms // nil: methods that are not defined here are not called

	rules settings.Rules
	set   api.EventSettings
	calls []string
}

func (b *roomBackend) record(format string, args ...any) {
	b.calls = append(b.calls, fmt.Sprintf(format, args...))
}

func (b *roomBackend) view(event string) api.RoomEvent {
	return settings.View(waitingroom.Snapshot{Event: event, Rev: 8, Settings: b.rules.Fill(b.set), Used: 4})
}

func (b *roomBackend) CheckSettings(set api.EventSettings) []api.FieldError {
	return b.rules.Check(set)
}

func (b *roomBackend) CheckRecalibration(to api.Recalibration) []api.FieldError {
	return b.rules.CheckRecalibration(to)
}

func (b *roomBackend) SetEvent(_ context.Context, event string, set api.EventSettings, rev int64) (api.RoomEvent, error) {
	b.record("set %s %d", event, rev)
	if rev == 7 {
		return api.RoomEvent{}, fmt.Errorf("set event %s: %w", event, api.ErrChanged)
	}
	b.set = set
	return b.view(event), nil
}

func (b *roomBackend) Event(_ context.Context, event string) (api.RoomEvent, error) {
	if event == "none" {
		return api.RoomEvent{}, fmt.Errorf("event none: %w", api.ErrNotFound)
	}
	return b.view(event), nil
}

func (b *roomBackend) Events(_ context.Context, cursor string, limit int) (api.RoomEventList, error) {
	b.record("list %q %d", cursor, limit)
	if cursor == "" {
		return api.RoomEventList{Cursor: "0-1"}, nil // a page may be empty
	}
	return api.RoomEventList{Events: []api.RoomEvent{b.view("a"), b.view("b")}}, nil
}

func (b *roomBackend) SetMode(_ context.Context, event, mode string) (api.RoomEvent, error) {
	b.record("mode %s %s", event, mode)
	return b.view(event), nil
}

func (b *roomBackend) Recalibrate(_ context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	b.record("recalibrate %s", event)
	b.set.Capacity = to.Capacity
	return b.view(event), nil
}

func (b *roomBackend) DeleteEvent(_ context.Context, event string) (api.EventRemoval, error) {
	b.record("delete %s", event)
	return api.EventRemoval{Event: event, Remaining: 4}, nil
}

func (b *roomBackend) RemoveUser(_ context.Context, event, user string) (bool, error) {
	b.record("remove %s of %s", user, event)
	return true, nil
}

func (b *roomBackend) VerifyToken(_ context.Context, token string) (api.EntryTokenState, error) {
	return api.EntryTokenState{Valid: token == "good"}, nil
}

func (b *roomBackend) RenewToken(_ context.Context, token string) (api.EntryToken, error) {
	if token != "good" {
		return api.EntryToken{}, fmt.Errorf("renew: %w", api.ErrConflict)
	}
	return api.EntryToken{Token: "better", ExpiresAt: time.Unix(1e9, 0).UTC()}, nil
}

func (b *roomBackend) CompleteToken(_ context.Context, token string, sold bool) (bool, error) {
	b.record("complete %s %v", token, sold)
	return token == "good", nil
}

func TestRoomCallsOnTheRealServer(t *testing.T) {
	b := &roomBackend{rules: settings.Rules{Defaults: settings.Standard()}}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: &guardBackend{}, Rooms: b}))
	ctx := t.Context()
	set := api.EventSettings{Capacity: new(int64(3)), Rate: new(0.5), Grace: new(api.Duration(0)), TokenTTL: new(api.Duration(time.Minute))}
	v, err := a.SetRoomEvent(ctx, "sale", set, 0)
	require.NoError(t, err)
	require.Equal(t, set, b.set)
	require.EqualValues(t, 1, v.Over)
	shown, err := a.RoomEvent(ctx, "sale")
	require.NoError(t, err)
	require.Equal(t, v, shown)
	_, err = a.SetRoomEvent(ctx, "sale", shown.EventSettings, shown.Rev)
	require.NoError(t, err, "what is shown can be sent back")
	var names []string
	for e, err := range a.RoomEvents(ctx) {
		require.NoError(t, err)
		names = append(names, e.Event)
	}
	require.Equal(t, []string{"a", "b"}, names)
	for _, do := range []func(context.Context, string) (api.RoomEvent, error){a.PauseRoomEvent, a.ResumeRoomEvent, a.CloseRoomEvent} {
		v, err := do(ctx, "sale")
		require.NoError(t, err)
		require.Equal(t, "sale", v.Event)
	}
	v, err = a.Recalibrate(ctx, "sale", api.Recalibration{Capacity: new(int64(4))})
	require.NoError(t, err)
	require.EqualValues(t, 4, *v.Capacity)
	gone, err := a.DeleteRoomEvent(ctx, "sale")
	require.NoError(t, err)
	require.Equal(t, api.EventRemoval{Event: "sale", Remaining: 4}, gone)
	removed, err := a.RemoveUser(ctx, "sale", "u")
	require.NoError(t, err)
	require.Equal(t, api.UserRemoval{Event: "sale", User: "u", Removed: true}, removed)

	state, err := a.VerifyEntryToken(ctx, "good")
	require.NoError(t, err)
	require.True(t, state.Valid)
	token, err := a.RenewEntryToken(ctx, "good")
	require.NoError(t, err)
	require.Equal(t, "better", token.Token)
	done, err := a.CompleteEntryToken(ctx, "good", true)
	require.NoError(t, err)
	require.True(t, done.Done)
	require.Equal(t, []string{
		"set sale 0", "set sale 8", `list "" 200`, `list "0-1" 200`, "mode sale paused", "mode sale open", "mode sale closed",
		"recalibrate sale", "delete sale", "remove u of sale", "complete good true",
	}, b.calls)

	for status, do := range map[int]func() error{
		404: func() error { _, err := a.RoomEvent(ctx, "none"); return err },
		412: func() error { _, err := a.SetRoomEvent(ctx, "sale", set, 7); return err },
		409: func() error { _, err := a.RenewEntryToken(ctx, "secret-token"); return err },
		422: func() error {
			_, err := a.SetRoomEvent(ctx, "sale", api.EventSettings{Capacity: new(int64(-1)), Mode: "x"}, 0)
			require.ErrorContains(t, err, "capacity: must be a whole number from 0 to 10,000,000; mode: must be open")
			return err
		},
	} {
		err := do()
		var refused *client.Error
		require.ErrorAs(t, err, &refused)
		require.Equal(t, status, refused.Status)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestRoomCallsAreRepeatedOnlyWithoutHarm(t *testing.T) {
	var calls []string
	a, _ := serve(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		calls = append(calls, r.Method+" "+r.URL.RequestURI()+" "+r.Header.Get("If-Match")+" "+string(body))
		if len(calls)%2 == 1 {
			refuse(rw, http.StatusServiceUnavailable, api.Problem{})
			return
		}
		answer(rw, http.StatusOK, map[string]any{})
	}))
	ctx := t.Context()
	for _, c := range []struct {
		want string
		do   func() error
	}{
		{`PUT /v1/events/e "7" {"capacity":0}`, func() error {
			_, err := a.SetRoomEvent(ctx, "e", api.EventSettings{Capacity: new(int64(0))}, 7)
			return err
		}},
		{`POST /v1/events/e/recalibrate  {"stock":0,"from_seats":true}`, func() error {
			_, err := a.Recalibrate(ctx, "e", api.Recalibration{Stock: new(int64(0)), FromSeats: true})
			return err
		}},
		{"DELETE /v1/events/e/users/u  ", func() error { _, err := a.RemoveUser(ctx, "e", "u"); return err }},
		{`POST /v1/entry-tokens/renew  {"token":"t"}`, func() error { _, err := a.RenewEntryToken(ctx, "t"); return err }},
	} {
		calls = nil
		require.NoError(t, c.do())
		require.Equal(t, []string{c.want, c.want}, calls)
	}
	calls = nil
	_, err := a.CompleteEntryToken(ctx, "t", true)
	require.ErrorContains(t, err, "503")
	require.Equal(t, []string{`POST /v1/entry-tokens/complete  {"token":"t","sold":true}`}, calls)

	calls = nil
	for _, id := range []string{"", "..", "a/b", "a b"} {
		_, err := a.RoomEvent(ctx, id)
		require.ErrorContains(t, err, "event id")
		_, err = a.Recalibrate(ctx, id, api.Recalibration{})
		require.ErrorContains(t, err, "event id")
		_, err = a.RemoveUser(ctx, "e", id)
		require.ErrorContains(t, err, "user id")
	}
	_, err = a.SetRoomEvent(ctx, "e", api.EventSettings{Rate: new(math.Inf(1))}, 0)
	require.ErrorContains(t, err, "set event e")
	require.Empty(t, calls, "no request is sent for an invalid argument")
}
