package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Duration is a length of time in JSON: it is written as a string such as "1m30s", and read from
// such a string or from a whole number of milliseconds.
type Duration time.Duration

// MarshalJSON implements json.Marshaler.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON implements json.Unmarshaler.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var ms int64
	if err := json.Unmarshal(b, &ms); err == nil {
		if ms < -maxDurationMS || ms > maxDurationMS {
			return fmt.Errorf("duration %d: must be at most %d ms", ms, maxDurationMS)
		}
		*d = Duration(time.Duration(ms) * time.Millisecond)
		return nil
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return errors.New(`must be a duration such as "1m30s", or a number of milliseconds`)
	}
	v, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf(`duration %q: must be like "1m30s", or a number of milliseconds`, text)
	}
	*d = Duration(v)
	return nil
}

const maxDurationMS = int64(time.Duration(1<<63-1) / time.Millisecond)

// Modes of an event.
const (
	ModeOpen    = "open"     // users enter and are promoted
	ModePaused  = "paused"   // users enter, nobody is promoted
	ModeClosed  = "closed"   // nobody enters; the queue is dissolved
	ModeSoldOut = "sold_out" // as closed: the stock is sold
)

// Values of EventSettings.Preset.
const (
	PresetStandard = "standard"
	PresetStrict   = "strict"
)

// EventSettings are the settings of an event of the waiting room: the body of
// PUT /v1/events/{event}. For a missing field without another default below, a variable BROKER_* of
// the API's process has the default.
type EventSettings struct {
	// Capacity is the largest number of slots in use at once, 0 to 10,000,000. Required, unless
	// BROKER_SEATS_URL is set.
	Capacity *int64 `json:"capacity,omitempty"`
	// Stock is the number of seats to sell in all; nil: no stock. No promotion makes more users
	// inside than seats are left. A PUT with the same number changes nothing, also when seats have
	// been sold.
	Stock *int64 `json:"stock,omitempty"`
	// Rate is the number of admissions a second, by a token bucket of Burst admissions (0: those of
	// one second, at least 1). nil: no limit.
	Rate  *float64 `json:"rate,omitempty"`
	Burst int64    `json:"burst,omitempty"`
	// MaxWaiting is the largest number of users in the queue, who are waiting or away.
	MaxWaiting *int64 `json:"max_waiting,omitempty"`
	// TokenTTL is the lifetime of an entry token. The slot is held for Leeway longer.
	TokenTTL *Duration `json:"token_ttl,omitempty"`
	Leeway   *Duration `json:"leeway,omitempty"`
	// MaxSession bounds a session: no renewal makes a token expire later than this time after the
	// user's first token began; 0: no bound.
	MaxSession *Duration `json:"max_session,omitempty"`
	// Ready is the time to fetch the token after the promotion.
	Ready *Duration `json:"ready,omitempty"`
	// Grace is how long an away user keeps the place; 0: the place ends with the user's stream.
	Grace *Duration `json:"grace,omitempty"`
	// OnClose says what happens to the slot when the stream of a user with a token ends: keep or
	// release.
	OnClose string `json:"on_close,omitempty"`
	// NoShow says what happens to a promoted user without a connection: wait or release. With wait,
	// the user keeps the slot for the time Ready. With release, the slot is free at once.
	NoShow string `json:"no_show,omitempty"`
	// Preset gives Grace, OnClose and NoShow other defaults: PresetStrict (whoever disconnects has
	// left: 0, release and release), or PresetStandard, those of the variables BROKER_*. Answers do
	// not have it, but the settings themselves.
	Preset string `json:"preset,omitempty"`
	// Mode is one of the Mode constants; "": the mode stays as it is, and a new event is open. But
	// an event without seats becomes sold out, and a sold-out event that gets seats is open.
	Mode string `json:"mode,omitempty"`
	// ReturnURL is where the waiting page sends an admitted user; "": nowhere.
	ReturnURL string `json:"return_url,omitempty"`
	// Retention is how long a closed or sold-out event is kept.
	Retention *Duration `json:"retention,omitempty"`
}

// EventSlots are the slots of an event.
type EventSlots struct {
	Capacity int64  `json:"capacity"`
	Used     int64  `json:"used"`
	Free     int64  `json:"free"`
	Stock    *int64 `json:"stock,omitempty"` // seats that are left
}

// RoomEvent is an event of the waiting room as operators see it, with all its settings.
type RoomEvent struct {
	Event string `json:"event"`
	Rev   int64  `json:"rev"` // changes with each change of the settings
	EventSettings
	Slots   EventSlots `json:"slots"`
	Waiting int64      `json:"waiting"`
	Away    int64      `json:"away"`
	Tail    int64      `json:"tail"`           // the last number that was given
	Over    int64      `json:"over,omitempty"` // slots in use above the limit
	// Counters count what has happened since the event was created: entered, promoted, admitted,
	// completed, sold, left, expired, no_shows and refused.
	Counters map[string]int64 `json:"counters"`
	// Warnings say what in the settings probably does not work. Only the answer to a change of the
	// settings has them.
	Warnings []string `json:"warnings,omitempty"`
}

// RoomEventList is a page of events.
type RoomEventList struct {
	Events []RoomEvent `json:"events"`
	Cursor string      `json:"cursor,omitempty"` // of the next page; empty on the last page
}

// Recalibration is the body of POST /v1/events/{event}/recalibrate. Stock is the number of seats
// that are left. With FromSeats, the capacity is the number that the seat service answers.
type Recalibration struct {
	Capacity  *int64 `json:"capacity,omitempty"`
	Stock     *int64 `json:"stock,omitempty"`
	FromSeats bool   `json:"from_seats,omitempty"`
}

// EntryToken is the answer to a renewal, and to a visitor who asks for the token.
type EntryToken struct {
	Token     string    `json:"token"`
	ExpiresAt time.Time `json:"expires_at"`
}

// EntryTokenState is the answer to POST /v1/entry-tokens/verify.
type EntryTokenState struct {
	Valid     bool       `json:"valid"`
	Event     string     `json:"event,omitempty"`
	User      string     `json:"user,omitempty"`
	Fence     string     `json:"fence,omitempty"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
}

// Ticket is the place of a user in an event, as the visitor's calls show it.
type Ticket struct {
	State       string   `json:"state"`       // IN_ENTRY, READY or IN_PROGRESS
	Position    *int64   `json:"position"`    // 1 is next; null: unknown or promoted
	Total       *int64   `json:"total"`       // length of the queue; null: unknown or promoted
	ETASeconds  *float64 `json:"eta_seconds"` // null: unknown
	PollAfterMS int64    `json:"poll_after_ms"`
	Stream      string   `json:"stream"`          // address of the stream of events
	Token       string   `json:"token,omitempty"` // only if IN_PROGRESS
}

// States of a ticket.
const (
	TicketInEntry    = "IN_ENTRY"
	TicketReady      = "READY"
	TicketInProgress = "IN_PROGRESS"
)

// EventStatus is what visitors see of an event.
type EventStatus struct {
	Status        string     `json:"status"` // open, queueing, paused, closed or sold_out
	Mode          string     `json:"mode"`
	Waiting       int64      `json:"waiting"`
	Away          int64      `json:"away"`
	Slots         EventSlots `json:"slots"`
	PacePerMinute *float64   `json:"pace_per_minute"` // promotions; null: unknown
	ETASeconds    *float64   `json:"eta_seconds"`     // of a user who enters now; null: unknown
}

// EntryTokenCall is the body of the calls on entry tokens.
type EntryTokenCall struct {
	Token string `json:"token"`
	// Sold says that the user has bought a seat: complete takes it from the event's stock. The
	// other calls do not have it.
	Sold bool `json:"sold,omitempty"`
}

// EntryTokenDone is the answer to POST /v1/entry-tokens/complete. Done is false if the user's entry
// had ended before, also if an earlier attempt of the same call has completed it.
type EntryTokenDone struct {
	Done bool `json:"done"`
}

// EventRemoval is the answer to DELETE /v1/events/{event}. Remaining is the number of users that
// the event still has: those inside keep their slots until their tokens expire, and the brokers
// remove the rest of a long queue. The event is deleted when the last one has gone.
type EventRemoval struct {
	Event     string `json:"event"`
	Remaining int64  `json:"remaining"`
}

// UserRemoval is the answer to DELETE /v1/events/{event}/users/{user}. Removed is false if the
// event does not have the user.
type UserRemoval struct {
	Event   string `json:"event"`
	User    string `json:"user"`
	Removed bool   `json:"removed"`
}
