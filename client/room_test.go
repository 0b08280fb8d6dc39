package client_test

import (
	"context"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestRoomCallsOnTheRealServer(t *testing.T) {
	b := apitest.NewRooms()
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: apitest.NewBackend(), Rooms: b}))
	ctx := t.Context()
	set := api.EventSettings{Capacity: new(int64(3)), Rate: new(0.5), Grace: new(api.Duration(0)), TokenTTL: new(api.Duration(time.Minute))}
	v, err := a.SetRoomEvent(ctx, "sale", set, 0)
	require.NoError(t, err)
	require.Equal(t, set, b.Set)
	require.EqualValues(t, 2, v.Over)
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
	_, err = a.Recalibrate(ctx, "sale", api.Recalibration{Capacity: new(int64(4))})
	require.NoError(t, err)
	gone, err := a.DeleteRoomEvent(ctx, "sale")
	require.NoError(t, err)
	require.Equal(t, api.EventRemoval{Event: "sale", Remaining: 3}, gone)
	removed, err := a.RemoveUser(ctx, "sale", "u")
	require.NoError(t, err)
	require.Equal(t, api.UserRemoval{Event: "sale", User: "u", Removed: true}, removed)

	state, err := a.VerifyEntryToken(ctx, "good")
	require.NoError(t, err)
	require.True(t, state.Valid)
	token, err := a.RenewEntryToken(ctx, "good")
	require.NoError(t, err)
	require.Equal(t, "good2", token.Token)
	done, err := a.CompleteEntryToken(ctx, "good", true)
	require.NoError(t, err)
	require.True(t, done.Done)
	require.Equal(t, []string{
		"set sale 0", "get sale", "set sale 7", `list "" 200`, `list "0-2" 200`, "mode sale paused", "mode sale open", "mode sale closed",
		"recalibrate sale true false false", "delete sale", "remove u of sale", "verify good", "renew good", "complete good true",
	}, b.Calls)

	for is, do := range map[error]func() error{
		api.ErrNotFound: func() error { _, err := a.RoomEvent(ctx, "none"); return err },
		api.ErrChanged:  func() error { _, err := a.SetRoomEvent(ctx, "sale", set, 7); return err },
		api.ErrConflict: func() error { _, err := a.RenewEntryToken(ctx, "secret-token"); return err },
		api.ErrInvalid: func() error {
			_, err := a.SetRoomEvent(ctx, "sale", api.EventSettings{Capacity: new(int64(-1)), Mode: "x"}, 0)
			require.ErrorContains(t, err, "capacity: must be a whole number from 0 to 10,000,000; mode: must be open")
			return err
		},
	} {
		b.Err = is
		err := do()
		var refused *client.Error
		require.ErrorAs(t, err, &refused)
		require.Equal(t, map[error]int{api.ErrNotFound: 404, api.ErrChanged: 412, api.ErrConflict: 409, api.ErrInvalid: 422}[is], refused.Status)
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

func TestGuardCallsOnTheRealServer(t *testing.T) {
	b := apitest.NewBackend()
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: b}))
	ctx := t.Context()
	var names []string
	for g, err := range a.Guards(ctx, "pool") {
		require.NoError(t, err)
		names = append(names, g.Name)
	}
	require.Equal(t, []string{"pool/smtp", "lock/report"}, names)
	for _, name := range []string{"p", "key/hosts/example.org"} {
		v, err := a.Guard(ctx, name)
		require.NoError(t, err)
		require.Equal(t, "sliding", v.Spec.Limiter)
	}
	done, err := a.ControlGuard(ctx, "lock/l", "1", "take-back")
	require.NoError(t, err)
	require.Equal(t, api.GuardAction{Guard: "lock/l", Member: "1", Action: "take-back"}, done)
	_, err = a.ControlGuard(ctx, "p", "nobody", "disable")
	var refused *client.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, 404, refused.Status)
	require.ErrorContains(t, err, "disable member nobody of guard p")
	want := []string{
		"guards pool  1000", "guards pool 0.5. 1000", "take-back 1 of lock/l", "disable nobody of pool/p",
	}
	require.Equal(t, want, b.Calls)

	_, err = a.Guard(ctx, "pools/p")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a/b", "open")
	require.ErrorContains(t, err, "member id")
	_, err = a.ControlGuard(ctx, "p/../q", "a", "open")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a", "..")
	require.ErrorContains(t, err, "action")
	require.Equal(t, want, b.Calls, "no invalid argument reaches the backend")
}

func TestRejected(t *testing.T) {
	t.Parallel()
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.String())
		_, _ = w.Write([]byte(`{"rejected":[{"id":"2-0","reason":"no such type","bytes":2}],"cursor":"2-0"}`))
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	page, err := a.Rejected(t.Context(), client.RejectedQuery{})
	require.NoError(t, err)
	require.Equal(t, "2-0", page.Cursor)
	require.Equal(t, "no such type", page.Rejected[0].Reason)
	_, err = a.Rejected(t.Context(), client.RejectedQuery{Cursor: page.Cursor, Limit: 7, Data: true})
	require.NoError(t, err)
	require.Equal(t, []string{"GET /v1/rejected", "GET /v1/rejected?cursor=2-0&data=true&limit=7"}, asked)
}
