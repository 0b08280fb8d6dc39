package roomapi

import (
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// Stream passes frames from a broker to the goroutine that writes them to one client. Its methods
// never wait for the client. Several goroutines may call them, also after the client has gone.
//
// It stores at most one unwritten frame of each kind: a newer frame replaces an older one, because
// each is a complete state. So a client that reads slowly misses older frames but never has a queue
// of them. Admitted, Ended and Reconnect drop an unwritten position; otherwise frames replace only
// frames of their own kind. All frames after the first Ended or Reconnect are ignored. Frames are
// written in the order state, position, admitted, ended or reconnect.
type Stream struct {
	wake chan struct{} // has an element while frames are pending

	mu       sync.Mutex
	pending  kinds
	begun    bool // a state was given: positions may follow
	admitted bool // no position follows
	over     bool // ended or reconnect was given: nothing follows
	state    stateFrame
	position Position
	entry    entryFrame
	reason   string // of ended or reconnect
}

type kinds uint8

const (
	kindState kinds = 1 << iota
	kindPosition
	kindAdmitted
	kindEnded
	kindReconnect
)

// Position is a place in the queue as one frame shows it.
type Position struct {
	Position   int64 // 1 is next
	Total      int64
	ETASeconds float64   // negative: unknown
	At         time.Time // the time, by Redis's clock, as of which the position is exact
}

// Reasons in the frame ended. After this frame the client does not connect again.
const (
	EndedLeft     = "left"
	EndedReplaced = "replaced" // a newer stream of the same user
	EndedClosed   = "closed"
	EndedSoldOut  = "sold_out"
	EndedRemoved  = "removed" // by an operator
	// EndedGone: the place or the token has expired, the event was deleted, or Redis has lost the
	// user.
	EndedGone = "gone"
)

// Reasons of the frame reconnect.
const (
	ReconnectDraining  = draining
	ReconnectBusy      = busy
	ReconnectRedisAway = redisAway
)

type stateFrame struct{ state, mode string }

type entryFrame struct {
	api.EntryToken
	ReturnURL string `json:"return_url"`
}

// NewStream returns an empty stream.
func NewStream() *Stream { return &Stream{wake: make(chan struct{}, 1)} }

// State sends the user's state and the event's mode to the client, unless both are as in the last
// call of State.
func (s *Stream) State(state, mode string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := stateFrame{state, mode}
	if s.begun && s.state == f {
		return
	}
	s.begun, s.state = true, f
	s.add(kindState)
}

// Position sends the user's place to the client. It sends nothing if only At differs from the last
// place, or after Admitted. A place that is given before the first State is sent after it.
func (s *Stream) Position(p Position) {
	p.ETASeconds = roundETA(p.ETASeconds)
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.position
	if s.admitted || last.Position == p.Position && last.Total == p.Total && last.ETASeconds == p.ETASeconds {
		return
	}
	s.position = p
	s.add(kindPosition)
}

// Admitted sends the frame admitted: the token, and the address to go to with it. No position
// follows.
func (s *Stream) Admitted(t api.EntryToken, returnURL string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admitted = true
	s.pending &^= kindPosition
	t.ExpiresAt = t.ExpiresAt.UTC()
	s.entry = entryFrame{t, returnURL}
	s.add(kindAdmitted)
}

// Ended sends the frame ended with one of the Ended reasons: the stream ends and the client does
// not connect again.
func (s *Stream) Ended(reason string) { s.end(kindEnded, reason) }

// Reconnect sends the frame reconnect: the stream ends, and the client connects again after 3 to 10
// s.
func (s *Stream) Reconnect(reason string) { s.end(kindReconnect, reason) }

func (s *Stream) end(kind kinds, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	s.reason = reason
	s.pending &^= kindPosition
	s.add(kind)
	s.over = true
}

// add makes a frame pending. Its caller holds mu.
func (s *Stream) add(kind kinds) {
	if s.over {
		return
	}
	s.pending |= kind
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// append appends the unwritten frames of the stream to b. end is true if one of the frames ends the
// stream.
func (s *Stream) append(b []byte) (out []byte, end bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == 0 || s.pending == kindPosition && !s.begun {
		return b, false
	}
	if s.pending&kindState != 0 {
		b = appendState(b, s.state)
	}
	if s.pending&kindPosition != 0 && s.begun {
		b = appendPosition(b, s.position)
	}
	if s.pending&kindAdmitted != 0 {
		b = appendAdmitted(b, s.entry)
		s.entry = entryFrame{}
	}
	if s.pending&kindEnded != 0 {
		b = appendEnded(b, s.reason)
	}
	if s.pending&kindReconnect != 0 {
		b = appendReconnect(b, s.reason)
	}
	s.pending = 0
	return b, s.over
}

func appendState(b []byte, f stateFrame) []byte {
	b = append(b, "event: state\ndata: {\"state\":\""...)
	b = append(b, f.state...)
	b = append(b, `","mode":"`...)
	b = append(b, f.mode...)
	return append(b, "\"}\n\n"...)
}

func appendPosition(b []byte, p Position) []byte {
	b = append(b, "event: position\ndata: {\"position\":"...)
	b = strconv.AppendInt(b, p.Position, 10)
	b = append(b, `,"total":`...)
	b = strconv.AppendInt(b, p.Total, 10)
	b = append(b, `,"eta_seconds":`...)
	if p.ETASeconds < 0 {
		b = append(b, "null"...)
	} else {
		b = strconv.AppendFloat(b, p.ETASeconds, 'f', -1, 64)
	}
	b = append(b, `,"at":"`...)
	b = p.At.UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z07:00")
	return append(b, "\"}\n\n"...)
}

// roundETA rounds seconds to tenths. It returns -1 for a negative, infinite or undefined number: no
// ETA is known.
func roundETA(seconds float64) float64 {
	if !(seconds >= 0) || math.IsInf(seconds, 0) { // NaN, too
		return -1
	}
	return math.Round(seconds*10) / 10
}

func appendAdmitted(b []byte, f entryFrame) []byte {
	b = append(b, "event: admitted\ndata: "...)
	b = append(b, web.Encode(f)...)
	return append(b, "\n\n"...)
}

func appendEnded(b []byte, reason string) []byte {
	b = append(b, "id: ended\nevent: ended\ndata: {\"reason\":\""...)
	b = append(b, reason...)
	return append(b, "\"}\n\n"...)
}

func appendReconnect(b []byte, reason string) []byte {
	b = web.AppendRetry(b, shortestReconnect, longestReconnect)
	b = append(b, "event: reconnect\ndata: {\"reason\":\""...)
	b = append(b, reason...)
	return append(b, "\"}\n\n"...)
}
