package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
)

// RoomEvents iterates over the events of the waiting room, in no order. An event that changes
// meanwhile may come twice or not at all. An error ends the iteration. A server without API keys
// answers calls on the waiting room on loopback only.
func (a *API) RoomEvents(ctx context.Context) iter.Seq2[api.RoomEvent, error] {
	return pages(ctx, a, "events", url.Values{"limit": {"200"}},
		func(l api.RoomEventList) ([]api.RoomEvent, string) { return l.Events, l.Cursor })
}

// RoomEvent returns an event: its settings, its queue and its slots.
func (a *API) RoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("get", http.MethodGet, "event", event, ""))
}

// SetRoomEvent creates an event, or replaces its settings: a missing one gets its default, only a
// missing mode stays as it is. With a rev, the call fails with status 412 if the event has another
// rev; 0 means any.
func (a *API) SetRoomEvent(
	ctx context.Context, event string, set api.EventSettings, rev int64,
) (api.RoomEvent, error) {
	c := putOn("set", "event", event, set)
	if rev != 0 {
		c.header = http.Header{"If-Match": {`"` + strconv.FormatInt(rev, 10) + `"`}}
	}
	return doJSON[api.RoomEvent](ctx, a, c)
}

// PauseRoomEvent stops promotions; users still enter the queue. It fails with status 409 if the
// event is closed or sold out.
func (a *API) PauseRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("pause", http.MethodPost, "event", event, "/pause"))
}

// ResumeRoomEvent undoes PauseRoomEvent and CloseRoomEvent. Users whose queue was dissolved have to
// enter again.
func (a *API) ResumeRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("resume", http.MethodPost, "event", event, "/resume"))
}

// CloseRoomEvent ends an event: nobody enters any more, and the queue is dissolved. Users inside
// keep their slots. The event is deleted after its retention.
func (a *API) CloseRoomEvent(ctx context.Context, event string) (api.RoomEvent, error) {
	return doJSON[api.RoomEvent](ctx, a, callOn("close", http.MethodPost, "event", event, "/close"))
}

// Recalibrate sets the capacity of an event, the seats that are left, or both, while users wait.
// Nobody loses a slot.
func (a *API) Recalibrate(ctx context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	c := callOn("recalibrate", http.MethodPost, "event", event, "/recalibrate")
	return doJSON[api.RoomEvent](ctx, a, c.withBody(to))
}

// DeleteRoomEvent closes an event and deletes it without its retention. Users inside keep their
// slots; the event is deleted when the last one has gone.
func (a *API) DeleteRoomEvent(ctx context.Context, event string) (api.EventRemoval, error) {
	return doJSON[api.EventRemoval](ctx, a, callOn("delete", http.MethodDelete, "event", event, ""))
}

// RemoveUser removes a user from an event, in any state, and ends the user's stream. Removed is
// false in the answer if the event does not have the user, also because an attempt whose answer was
// lost has removed the user.
func (a *API) RemoveUser(ctx context.Context, event, user string) (api.UserRemoval, error) {
	c := callOn("remove a user of", http.MethodDelete, "event", event, "/users/"+user)
	if !api.ValidID(user) && c.invalid == nil {
		c.invalid = fmt.Errorf("user id %q: must "+api.IDRule, user)
	}
	return doJSON[api.UserRemoval](ctx, a, c)
}

// VerifyEntryToken says whether the bearer of an entry token may be inside now. It knows what an
// offline check does not: whether the user has left, completed or was removed. A token that the
// brokers have not signed is an *Error with status 422.
func (a *API) VerifyEntryToken(ctx context.Context, token string) (api.EntryTokenState, error) {
	return doJSON[api.EntryTokenState](ctx, a, onToken("verify", api.EntryTokenCall{Token: token}))
}

// RenewEntryToken returns a token of the same session with a later expiry. It fails with status 409
// if the user is gone, or the session has reached the event's max_session.
func (a *API) RenewEntryToken(ctx context.Context, token string) (api.EntryToken, error) {
	return doJSON[api.EntryToken](ctx, a, onToken("renew", api.EntryTokenCall{Token: token}))
}

// CompleteEntryToken ends the entry of a token's user and gives the slot back. With sold, it also
// takes a seat from the stock. Done is false in the answer if the entry had ended before. The
// client repeats the call only if the server has certainly not carried it out, because a second
// attempt would answer false. So after an error the entry may have ended.
func (a *API) CompleteEntryToken(ctx context.Context, token string, sold bool) (api.EntryTokenDone, error) {
	c := onToken("complete", api.EntryTokenCall{Token: token, Sold: sold})
	c.onlyIfRefused = true
	return doJSON[api.EntryTokenDone](ctx, a, c)
}

// onToken returns a call on an entry token. The token is not part of its error messages.
func onToken(verb string, body api.EntryTokenCall) apiCall {
	c := apiCall{action: verb + " entry token", method: http.MethodPost, path: "/v1/entry-tokens/" + verb}
	return c.withBody(body)
}
