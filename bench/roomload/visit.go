package roomload

// Visit is what one user did and received. Times are µs since 1970 by the clock of this host, which
// is that of Redis and of the brokers too.
type Visit struct {
	User  string
	Event string
	// Number of the ticket; 0: unknown. The generator does not see it: the bench fills it in.
	Number int64 `json:",omitempty"`
	// Just before the first connection was opened. The user has no ticket before.
	Sent int64
	// First frame on the first stream that had one; 0: none. The user has a ticket by then.
	Entered int64 `json:",omitempty"`
	// Streams of this user, each from its first frame to its end.
	Streams []Span `json:",omitempty"`
	// Position that was shown last; 0: none.
	Position int64 `json:",omitempty"`
	// Positions that were above the one before.
	Rises int `json:",omitempty"`

	Admitted int64 `json:",omitempty"` // receipt of the token; 0: none
	// Fence of the token. It is the time of the promotion by Redis's clock, or a few µs later if
	// several users were promoted at once.
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

// token returns the time in which a verifier accepts the token of the visit.
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
