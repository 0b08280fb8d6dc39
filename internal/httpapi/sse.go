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
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/livefeed"
	"github.com/bulkaction/bulkaction/internal/sse"
)

const (
	maxStreams = 2000 // event streams of a process
	// maxEventAggregate is the largest aggregate that events have, in bytes as Redis holds it. All
	// clients that do not read may together cause no more than a few such events to be kept.
	maxEventAggregate = 64 << 10
	tooManyRetry      = 5 * time.Second
)

// lifecycle lists the states of a round with their order. The last three exclude each other.
var lifecycle = []struct {
	status api.Status
	rank   int
}{
	{api.StatusCreated, 1}, {api.StatusDispatched, 2}, {api.StatusRunning, 3}, {api.StatusAggregating, 4},
	{api.StatusCompleted, 5}, {api.StatusFailed, 5}, {api.StatusCancelled, 5},
}

// rank returns the order of a state in a round, from 1; 0 for an unknown state.
func rank(s api.Status) int {
	for _, st := range lifecycle {
		if st.status == s {
			return st.rank
		}
	}
	return 0
}

// position is the place of a client in a group's history: the last state that it got. It is the
// event id of this state, written "round.rank". The id of a progress event is that of the state
// before it and the event's time, "round.rank.ms".
type position struct{ round, rank int }

func (p position) String() string { return fmt.Sprintf("%d.%d", p.round, p.rank) }

// parsePosition parses a Last-Event-ID. An id that this server did not write means the beginning.
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

// watchGroup streams the states and the progress of a group until it has ended.
func (s *calls) watchGroup(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	w.(*responseWriter).ownDeadlines = true
	stream, err := s.streams.Open(s.closing, w)
	if err != nil {
		return retryLater(api.TooManyStreams, tooManyRetry,
			fmt.Sprintf("this server allows %d event streams, and all are in use: try again later, "+
				"or read the group with GET /v1/groups/%s", maxStreams, id))
	}
	defer stream.Close()
	// Callers of the same tenant share a topic, so that a poll shows no group of another tenant.
	who, _ := auth.From(r.Context())
	viewer := s.groups.Watch(who.Tenant+"\x00"+id, func() livefeed.Poll[*groupEvents] { return s.groupPoll(who, id) })
	defer viewer.Close()
	err = follow(r.Context(), w, stream, viewer, parsePosition(r.Header.Get("Last-Event-ID")))
	if errors.Is(err, sse.ErrClosing) {
		return errShutdown
	}
	return err
}

// follow sends the events behind a position, until the group has ended.
func follow(
	ctx context.Context, w http.ResponseWriter, stream *sse.Stream, viewer *livefeed.Viewer[*groupEvents], at position,
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

// groupPoll returns a function that reads a group for a principal. The group has changed when
// anything else but its ETA has.
func (s *calls) groupPoll(who auth.Principal, id string) livefeed.Poll[*groupEvents] {
	var last []byte
	return func(ctx context.Context) (livefeed.State[*groupEvents], error) {
		g, complete, err := s.backend.GroupSummary(auth.With(ctx, who), id, maxEventAggregate)
		if err != nil {
			return livefeed.State[*groupEvents]{}, err
		}
		g = withEmptyMaps(g)
		view := comparableView(g)
		changed := !bytes.Equal(view, last)
		last = view
		state := livefeed.State[*groupEvents]{Changed: changed, Last: g.Status.Ended()}
		if changed {
			state.Value = newGroupEvents(g, complete)
		}
		return state, nil
	}
}

// comparableView returns the JSON of a group without its ETA. Two equal views mean that nothing
// changed.
func comparableView(g api.Group) []byte {
	g.ETASeconds = nil
	return encode(g)
}

// groupEvents are the events that show a group as it was read once. Each is rendered when the first
// client needs it, and then shared.
type groupEvents struct {
	at       position // the group's state
	ended    bool
	states   []stateEvent // all states of the round
	progress func() []byte
}

type stateEvent struct {
	rank  int
	frame func() []byte
}

// newGroupEvents takes the states from the group's timestamps, so that a client gets each state
// even if several follow between two reads, or while it was slow. The counts of a past state are
// not stored: each event has those of now, and says so.
func newGroupEvents(g api.Group, complete bool) *groupEvents {
	now := time.Now().UTC()
	frame := func(id, event, typ string, at time.Time, g api.Group) func() []byte {
		return sync.OnceValue(func() []byte {
			e := api.Event{ID: id, Type: typ, At: at, Group: &g, ReadAt: &now}
			if !complete {
				e.Omitted = []string{"aggregate"}
			}
			return sse.Frame(id, event, encode(e))
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

// after returns the frames for a client at a position: the states behind it, or else progress.
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
