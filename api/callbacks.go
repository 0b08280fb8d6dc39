package api

import (
	"regexp"
	"strings"
	"time"
)

// CallbackSettings are where a tenant gets told of its groups. A group with a callback_url of its own
// uses that URL instead, with the events of [DefaultCallbackEvents].
type CallbackSettings struct {
	// URL is an https address of at most [MaxCallbackURL] bytes.
	URL string `json:"url"`
	// Events are types of events, such as group.completed; nil: those of DefaultCallbackEvents.
	Events []string `json:"events,omitempty"`
}

// MaxCallbackURL is the most bytes of a callback's URL.
const MaxCallbackURL = 2048

// DefaultCallbackEvents are the events of which one is told who asks for none.
var DefaultCallbackEvents = []string{EventOf(StatusCompleted), EventOf(StatusFailed), EventOf(StatusCancelled)}

// EventOf returns the type of the event that says that a group has entered a status.
func EventOf(s Status) string { return "group." + strings.ToLower(string(s)) }

var eventID = regexp.MustCompile(`^(.+)\.[1-9][0-9]{0,9}\.[a-z]{1,20}$`)

// GroupOfEvent returns the group of an event's id, such as my-group.1.completed, which is also the id
// of its callback. It returns "" for what is no such id.
func GroupOfEvent(id string) string {
	m := eventID.FindStringSubmatch(id)
	if m == nil || !ValidID(m[1]) {
		return ""
	}
	return m[1]
}

// TenantCallback is the callback endpoint of a tenant.
type TenantCallback struct {
	Tenant        string     `json:"tenant"`
	URL           string     `json:"url"`
	Events        []string   `json:"events"`
	SecretVersion int        `json:"secret_version"` // from 1; a rotation raises it
	FailingSince  *time.Time `json:"failing_since,omitempty"`
	// DisabledAt is when nothing more was sent, for the reason DisabledBecause: until the settings are
	// stored again.
	DisabledAt      *time.Time `json:"disabled_at,omitempty"`
	DisabledBecause string     `json:"disabled_because,omitempty"`
	Pending         int64      `json:"pending"` // callbacks that wait for their delivery
}

// CallbackRemoval says that a tenant has no callback endpoint any more.
type CallbackRemoval struct {
	Tenant  string `json:"tenant"`
	Deleted bool   `json:"deleted"`
}

// CallbackSecret is the secret by which a tenant's callbacks are signed. After a rotation they also
// have a signature of the previous secret, until PreviousUntil.
type CallbackSecret struct {
	Tenant        string     `json:"tenant"`
	Secret        string     `json:"secret"` // whsec_ and base64
	Version       int        `json:"version"`
	Previous      string     `json:"previous,omitempty"`
	PreviousUntil *time.Time `json:"previous_until,omitempty"`
}

// States of a callback. One that was delivered is forgotten.
const (
	CallbackPending = "pending"
	CallbackDead    = "dead" // it will not be tried again by itself
)

// CallbackStates are the states of a callback.
var CallbackStates = []string{CallbackPending, CallbackDead}

// Callback is one event that a URL is told of.
type Callback struct {
	ID     string    `json:"id"` // of the event, and the header webhook-id
	Tenant string    `json:"tenant"`
	Group  string    `json:"group"`
	Type   string    `json:"type"` // of the event
	At     time.Time `json:"at"`   // when the group entered the status
	URL    string    `json:"url"`
	State  string    `json:"state"`
	Tries  int       `json:"tries"` // that have failed
	// NextAt is when a pending callback is tried next, DiedAt when a dead one died.
	NextAt *time.Time `json:"next_at,omitempty"`
	DiedAt *time.Time `json:"died_at,omitempty"`
	// Error says why the last try has failed, or why the callback is dead; Answer is the beginning of
	// the body with which it was answered, at most 1 KB.
	Error  string            `json:"error,omitempty"`
	Answer string            `json:"answer,omitempty"`
	Links  map[string]string `json:"links,omitempty"`
}

// CallbackList is a page of callbacks. Those of a tenant come in this order: dead ones with the newest
// first, pending ones by endpoint, within each by the time of their next try.
type CallbackList struct {
	Callbacks []Callback `json:"callbacks"`
	Cursor    string     `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}

// CallbackQuery selects callbacks.
type CallbackQuery struct {
	State  string // CallbackDead or CallbackPending
	Tenant string // "": any
	Cursor string
	Limit  int
}

// Redelivered says how many dead callbacks became pending again. Full means that an endpoint has as
// many pending callbacks as may be: the rest can be sent again later. More means that some dead ones
// were not looked at yet: repeat the call.
type Redelivered struct {
	Redelivered int64 `json:"redelivered"`
	Full        bool  `json:"full"`
	// Refused is how many were left out, because their endpoint is disabled or deleted.
	Refused int64 `json:"refused"`
	More    bool  `json:"more"`
}

// WebhookEvent is the body of a callback.
type WebhookEvent struct {
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	Data      Group     `json:"data"`
	Truncated bool      `json:"truncated,omitempty"` // Data has no aggregate, because the body would be too large
}
