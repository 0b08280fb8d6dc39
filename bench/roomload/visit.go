package roomload

// Visit is what one simulated user did and received. Times are µs since 1970 by the clock of this
// host, on which Redis and the brokers run too.
type Visit struct {
	User  string
	Event string
	// Number is the number of the user's ticket; 0: unknown. Users do not see it: package bench
	// reads it from Redis and stores it here.
	Number int64 `json:",omitempty"`
	// Sent is the time just before the user opened the first connection. The user has no ticket
	// before it.
	Sent int64
	// Entered is the time of the first frame that the user received; 0: none. The user has a ticket
	// by then.
	Entered int64 `json:",omitempty"`
	// Streams of this user, each from its first frame to its end.
	Streams []Span `json:",omitempty"`
	// Position that was shown last; 0: none.
	Position int64 `json:",omitempty"`
	// Positions that were above the one before.
	Rises int `json:",omitempty"`

	Admitted int64 `json:",omitempty"` // receipt of the token; 0: none
	// Fence is the fence of the user's token. It is the time of the promotion by Redis's clock
	// (µs), or a few µs later if several users were promoted at once.
	Fence   int64 `json:",omitempty"`
	Expires int64 `json:",omitempty"` // of the token
	Freed   int64 `json:",omitempty"` // just before the slot was given back; 0: it was not

	Open   bool   `json:",omitempty"` // at the end the user has a stream and no token
	Closed bool   `json:",omitempty"` // the user has closed the tab for good
	Ended  string `json:",omitempty"` // reason of the frame ended
}

// Span is the time in which a stream was open.
type Span struct {
	From, To int64
	Own      bool  `json:",omitempty"` // the user ended it
	Shown    int64 `json:",omitempty"` // when the first position or the token was shown; 0: never
	Before   int64 `json:",omitempty"` // position that was shown last before it
	First    int64 `json:",omitempty"` // first position that was shown on it
}

// Leeway is the time (µs) after its expiry for which a verifier may still accept a token.
const Leeway = 5_000_000

// token returns the span in which a verifier accepts the user's token: from its receipt until its
// expiry and Leeway, or until the slot was given back.
func (v *Visit) token() Span {
	to := v.Expires + Leeway
	if v.Freed > 0 {
		to = min(to, v.Freed)
	}
	return Span{From: v.Admitted, To: to}
}

// ByEvent returns the visits of each event.
func ByEvent(visits []Visit) map[string][]Visit {
	out := map[string][]Visit{}
	for _, v := range visits {
		out[v.Event] = append(out[v.Event], v)
	}
	return out
}
