package broker

import (
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// connection is a stream of a user at this broker.
type connection struct {
	event, user, conn string
	stream            *roomapi.Stream
	followed          *position.Event
	span              trace.SpanContext // of the call of enter

	mu sync.Mutex
	connState
}

// connState is what a connection knows of its user. Its lock guards it.
type connState struct {
	entered bool      // the script enter has given the user a place
	number  int64     // the user's number
	change  int64     // the view must include this change before a position is shown
	token   bool      // the frame admitted was sent
	expires time.Time // of the token, by Redis's clock
	leftAt  time.Time // when the number was first seen to have left the queue
	// unknownAt is when the view was first seen without a position for the waiting user; zero while
	// it has one.
	unknownAt  time.Time
	over       bool // the broker has ended the stream, or the client has left it
	handedOver bool // so that the client connects to another broker
}

func (c *connection) visitor() waitingroom.Visitor {
	return waitingroom.Visitor{User: c.user, Conn: c.conn}
}

// visitorsOf returns the user and conn of each connection, in the order of conns.
func visitorsOf(conns []*connection) []waitingroom.Visitor {
	visitors := make([]waitingroom.Visitor, len(conns))
	for i, c := range conns {
		visitors[i] = c.visitor()
	}
	return visitors
}

// markOver marks the connection as ended, by the broker or by the client. It returns false if it
// was marked before, so that a stream gets only one last frame.
func (c *connection) markOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.over
	c.over = true
	return !was
}

// showState sends the state frame to a user who has no token yet. If the user has a token already,
// because the answer of enter came late, showState does nothing.
func (c *connection) showState(state, mode string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.token {
		c.stream.State(state, mode)
	}
}

// setPlace stores the number of a user who has a place, and forgets when the number was seen to
// have left the queue. change is the event's change number in the answer of enter: positions from a
// view that is older than change are not shown.
func (c *connection) setPlace(number, change int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entered, c.number, c.change = true, number, change
	c.leftAt, c.unknownAt = time.Time{}, time.Time{}
}

// noteView compares the stored state of a waiting user with the user's place in the view, and
// records since when the number has left the queue or the position is unknown. deleted says that
// the event was deleted. It returns whether the user still waits, as far as known, and for how long
// the view has had no position for the user (0: it has one, or is seen without one for the first
// time).
func (c *connection) noteView(place position.Place, deleted bool) (waits bool, unknown time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.entered || c.token || c.over {
		return false, 0
	}
	switch {
	case place.Known && !place.Left:
		c.leftAt = time.Time{} // a view that was loaded anew knows better
	case c.leftAt.IsZero() && (deleted || place.Left):
		c.leftAt = time.Now()
	}
	switch {
	case place.Known || !c.leftAt.IsZero():
		c.unknownAt = time.Time{}
	case c.unknownAt.IsZero():
		c.unknownAt = time.Now()
	default:
		unknown = time.Since(c.unknownAt)
	}
	return c.leftAt.IsZero(), unknown
}

// setLeft records the present time as the time at which the user's number left the queue, unless a
// time is recorded. The delivery check claims for the user a second later.
func (c *connection) setLeft() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leftAt.IsZero() {
		c.leftAt = time.Now()
	}
}

// now returns the present state.
func (c *connection) now() connState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.connState
}

// furthest is the bound for showPosition that lets every position through.
const furthest = math.MaxInt64

// showPosition sends the position frame, to a user who has a number and no token yet, if the
// position is known and at most `to`. It returns what the view knows of the user's place.
func (c *connection) showPosition(to int64) position.Place {
	s := c.now()
	place := c.followed.Place(s.number, s.change)
	if s.entered && !s.token && !s.over && place.Known && !place.Left && place.Position <= to {
		eta := -1.0
		if seconds, ok := place.ETA(); ok {
			eta = float64(seconds)
		}
		c.stream.Position(roomapi.Position{
			Position: place.Position, Total: place.Total, ETASeconds: eta, At: place.At,
		})
	}
	return place
}

// connections are the open streams of a broker.
type connections struct {
	mu     sync.Mutex
	events map[string]map[string]*connection // by event and conn
}

func (cs *connections) add(c *connection) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.events[c.event] == nil {
		cs.events[c.event] = map[string]*connection{}
	}
	cs.events[c.event][c.conn] = c
}

func (cs *connections) remove(c *connection) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.events[c.event], c.conn)
	if len(cs.events[c.event]) == 0 {
		delete(cs.events, c.event)
	}
}

// find returns the connection of this user with this conn, whose stream may just have ended; nil if
// this broker has none.
func (cs *connections) find(event, user, conn string) *connection {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.events[event][conn]; c != nil && c.user == user {
		return c
	}
	return nil
}

func (cs *connections) byEvent() map[string][]*connection {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	all := make(map[string][]*connection, len(cs.events))
	for event, conns := range cs.events {
		all[event] = slices.AppendSeq(make([]*connection, 0, len(conns)), maps.Values(conns))
	}
	return all
}

func (cs *connections) all() []*connection {
	return slices.Concat(slices.Collect(maps.Values(cs.byEvent()))...)
}

func (cs *connections) len() (n int) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, conns := range cs.events {
		n += len(conns)
	}
	return n
}
