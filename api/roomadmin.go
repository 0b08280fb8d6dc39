package api

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
