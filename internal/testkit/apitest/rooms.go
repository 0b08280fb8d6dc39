package apitest

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// Rooms is a waiting room with fixed answers and records the calls. It stores no events, only
// the settings of the last SetEvent, which every event then has. It checks settings by the real
// rules.
type Rooms struct {
	roomadmin.Rules
	Err   error // returned by every call
	Calls []string
	Set   api.EventSettings
}

// NewRooms returns a waiting room for links to shop.example.
func NewRooms() *Rooms {
	return &Rooms{Rules: roomadmin.Rules{Defaults: roomadmin.Standard(), ReturnHosts: []string{"shop.example"}}}
}

func (f *Rooms) CheckSettings(set api.EventSettings) []api.FieldError { return f.Check(set) }

func (f *Rooms) record(format string, args ...any) error {
	f.Calls = append(f.Calls, fmt.Sprintf(format, args...))
	return f.Err
}

func (f *Rooms) view(event string) api.RoomEvent {
	s := f.Fill(f.Set)
	s.Mode = "open"
	used := int64(5)
	return roomadmin.View(waitingroom.Snapshot{Event: event, Rev: 7, Settings: s, Waiting: 2, Used: used, Tail: 9})
}

func (f *Rooms) SetEvent(_ context.Context, event string, set api.EventSettings, rev int64) (api.RoomEvent, error) {
	f.Set = set
	return f.view(event), f.record("set %s %d", event, rev)
}

func (f *Rooms) Event(_ context.Context, event string) (api.RoomEvent, error) {
	return f.view(event), f.record("get %s", event)
}

func (f *Rooms) Events(_ context.Context, cursor string, limit int) (api.RoomEventList, error) {
	var l api.RoomEventList
	if cursor == "" {
		l = api.RoomEventList{Events: []api.RoomEvent{f.view("a"), f.view("b")}, Cursor: "0-2"}
	}
	return l, f.record("list %q %d", cursor, limit)
}

func (f *Rooms) SetMode(_ context.Context, event, mode string) (api.RoomEvent, error) {
	return f.view(event), f.record("mode %s %s", event, mode)
}

func (f *Rooms) Recalibrate(_ context.Context, event string, to api.Recalibration) (api.RoomEvent, error) {
	return f.view(event), f.record("recalibrate %s %v %v %v", event, to.Capacity != nil, to.Stock != nil, to.FromSeats)
}

func (f *Rooms) DeleteEvent(_ context.Context, event string) (api.EventRemoval, error) {
	return api.EventRemoval{Event: event, Remaining: 3}, f.record("delete %s", event)
}

func (f *Rooms) RemoveUser(_ context.Context, event, user string) (bool, error) {
	return user != "nobody", f.record("remove %s of %s", user, event)
}

func (f *Rooms) VerifyToken(_ context.Context, token string) (api.EntryTokenState, error) {
	at := time.Unix(1e9, 0).UTC()
	s := api.EntryTokenState{Valid: true, Event: "e", User: "u", Fence: "4", ExpiresAt: &at}
	if token == "gone" {
		s = api.EntryTokenState{}
	}
	return s, f.record("verify %s", token)
}

func (f *Rooms) RenewToken(_ context.Context, token string) (api.EntryToken, error) {
	return api.EntryToken{Token: token + "2", ExpiresAt: time.Unix(1e9, 0).UTC()}, f.record("renew %s", token)
}

func (f *Rooms) CompleteToken(_ context.Context, token string, sold bool) (bool, error) {
	return token != "gone", f.record("complete %s %v", token, sold)
}
