package httpapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

const (
	maxStreams = 2000 // event streams of a process
	// maxEventAggregate is the largest aggregate that an event shows, in bytes as stored in Redis.
	// It bounds the memory of events that wait for clients that do not read.
	maxEventAggregate = 64 << 10
	tooManyRetry      = 5 * time.Second
)

// lifecycle lists the states of a group in a round with their order. A round ends in only one of
// the last three.
var lifecycle = []struct {
	status api.Status
	rank   int
}{
	{api.StatusCreated, 1}, {api.StatusDispatched, 2}, {api.StatusRunning, 3}, {api.StatusAggregating, 4},
	{api.StatusCompleted, 5}, {api.StatusFailed, 5}, {api.StatusCancelled, 5},
}

// rank returns the place of a state in the order of a round, counted from 1; 0 for an unknown
// state.
func rank(s api.Status) int {
	for _, st := range lifecycle {
		if st.status == s {
			return st.rank
		}
	}
	return 0
}

// position is a client's place in a group's event stream: the last state that the client got.
// Written as "round.rank", it is the event id of this state. The id of a progress event has the
// time in addition, "round.rank.ms".
type position struct{ round, rank int }

func (p position) String() string { return fmt.Sprintf("%d.%d", p.round, p.rank) }

// parsePosition parses a Last-Event-ID. An id of another form than this server writes means the
// beginning of the stream.
func parsePosition(id string) position {
	parts := strings.Split(id, ".")
	if len(parts) != 2 && len(parts) != 3 {
		return position{}
	}
	var n [3]int
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 10, 63)
		if err != nil {
			return position{}
		}
		n[i] = int(v)
	}
	return position{round: n[0], rank: n[1]}
}

// watchGroup answers with an event stream of the states and the progress of a group, until the
// group has ended.
func (s *server) watchGroup(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	stream, err := s.streams.Open(s.Closing, w)
	if err != nil {
		return web.RetryLater(api.TooManyStreams, tooManyRetry,
			fmt.Sprintf("this server allows %d event streams, and all are in use: try again later, "+
				"or read the group with GET /v1/groups/%s", maxStreams, id))
	}
	defer stream.Close()
	// The topic includes the caller's tenant, because callers of a topic share its polls, and a
	// poll has the rights of one tenant.
	who, _ := auth.From(r.Context())
	viewer := s.groups.Watch(who.Tenant+"\x00"+id, func() web.Poll[*groupEvents] { return s.groupPoll(who, id) })
	defer viewer.Close()
	err = follow(r.Context(), w, &stream, viewer, parsePosition(r.Header.Get("Last-Event-ID")))
	if errors.Is(err, web.ErrClosing) {
		return errShutdown
	}
	return err
}

// follow sends the events that come after the position `at`, until the group has ended. If it had
// ended before and the client has all its states, follow answers with status 204.
func follow(
	ctx context.Context, w http.ResponseWriter, stream *web.Stream, viewer *web.Viewer[*groupEvents], at position,
) error {
	for first := true; ; {
		events, changed, err := viewer.Next()
		switch {
		case err != nil:
			return err
		case changed != nil:
			if err := stream.Wait(ctx, changed); err != nil {
				return err
			}
			continue
		case first && events.ended && at == events.at:
			w.WriteHeader(http.StatusNoContent) // makes an EventSource stop reconnecting
			return nil
		}
		first = false
		if err := stream.Send(events.after(at)...); err != nil || events.ended {
			return err
		}
		at = events.at
	}
}

// groupPoll returns the function by which the shared poller reads a group with the rights of who. A
// group counts as changed if anything but its ETA has changed.
func (s *server) groupPoll(who auth.Principal, id string) web.Poll[*groupEvents] {
	var last []byte
	return func(ctx context.Context) (web.State[*groupEvents], error) {
		g, complete, err := s.Backend.GroupSummary(auth.With(ctx, who), id, maxEventAggregate)
		if err != nil {
			return web.State[*groupEvents]{}, err
		}
		g = withEmptyMaps(g)
		view := comparableView(g)
		changed := !bytes.Equal(view, last)
		last = view
		state := web.State[*groupEvents]{Changed: changed, Last: g.Status.Ended()}
		if changed {
			state.Value = newGroupEvents(g, complete)
		}
		return state, nil
	}
}

// comparableView returns the JSON of a group without its ETA. If two views are equal, there is
// nothing to send.
func comparableView(g api.Group) []byte {
	g.ETASeconds = nil
	return web.Encode(g)
}

// groupEvents has the events that follow from one reading of a group: one for each state that the
// round has reached, and one of the progress. Each event is rendered when the first client needs
// it, and shared by all clients.
type groupEvents struct {
	at       position // the group's state
	ended    bool
	states   []stateEvent // the states of the round that the group has reached
	progress func() []byte
}

type stateEvent struct {
	rank  int
	frame func() []byte
}

// newGroupEvents makes an event for each state that the group has reached in this round, by its
// timestamps, and one of the progress; after chooses those that a client has not got. So a client
// gets each state even if the group passed several between two reads. The counts of a past state
// are not stored: its event has the present counts, and says so in read_at.
func newGroupEvents(g api.Group, complete bool) *groupEvents {
	now := time.Now().UTC()
	frame := func(id, event, typ string, at time.Time, g api.Group) func() []byte {
		return sync.OnceValue(func() []byte {
			e := api.Event{ID: id, Type: typ, At: at, Group: &g, ReadAt: &now}
			if !complete {
				e.Omitted = []string{"aggregate"}
			}
			return web.Frame(id, event, web.Encode(e))
		})
	}
	events := &groupEvents{at: position{round: g.Round}, ended: g.Status.Ended()}
	for _, st := range lifecycle {
		name := strings.ToLower(string(st.status))
		at, reached := g.Timestamps[name]
		if !reached && st.status != g.Status {
			continue
		}
		if !reached {
			at = now
		}
		events.at.rank = st.rank
		then := g
		then.Status = st.status
		events.states = append(events.states,
			stateEvent{st.rank, frame(events.at.String(), "state", "group."+name, at, then)})
	}
	id := fmt.Sprintf("%s.%d", events.at, now.UnixMilli())
	events.progress = frame(id, "progress", "group.progress", now, g)
	return events
}

// after returns the frames to send to a client at a position: the states that it has not got, or,
// if it has got all, a progress event.
func (e *groupEvents) after(at position) (frames [][]byte) {
	if at.round != e.at.round {
		at.rank = 0
	}
	for _, st := range e.states {
		if st.rank > at.rank {
			frames = append(frames, st.frame())
		}
	}
	if len(frames) == 0 {
		frames = append(frames, e.progress())
	}
	return frames
}
