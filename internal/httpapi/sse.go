package httpapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

const (
	minPollInterval   = 200 * time.Millisecond // between two reads of a group that changes
	maxPollInterval   = time.Second            // between two reads of a group that does not change
	keepAliveInterval = 15 * time.Second       // then a comment is sent, so that proxies keep the connection
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

// position is the place of a client in a group's history: the last state that it got, and the
// number of progress events since. As an event id it is written "round.rank" for a state and
// "round.rank.progress" for progress.
type position struct{ round, rank, progress int }

func (p position) String() string {
	if p.progress == 0 {
		return fmt.Sprintf("%d.%d", p.round, p.rank)
	}
	return fmt.Sprintf("%d.%d.%d", p.round, p.rank, p.progress)
}

// parsePosition parses a Last-Event-ID. An id that this server did not write means the beginning.
func parsePosition(id string) position {
	parts := strings.Split(id, ".")
	if len(parts) != 2 && len(parts) != 3 {
		return position{}
	}
	var n [3]int
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 10, 31)
		if err != nil {
			return position{}
		}
		n[i] = int(v)
	}
	return position{round: n[0], rank: n[1], progress: n[2]}
}

// watchGroup streams the states and the progress of a group until it has ended. It polls the group.
// It takes the states from the group's timestamps, so that it sends each state even if several
// follow between two polls.
func (s *calls) watchGroup(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	g, err := s.backend.Group(r.Context(), id)
	if err != nil {
		return err
	}
	f := &feed{w: w, ctl: http.NewResponseController(w), at: parsePosition(r.Header.Get("Last-Event-ID"))}
	f.startRound(g.Round)
	if g.Status.Ended() && f.at.rank == rank(g.Status) {
		w.WriteHeader(http.StatusNoContent) // makes an EventSource stop reconnecting
		return nil
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	if err := f.start(); err != nil {
		return err
	}
	for wait := minPollInterval; ; {
		sent, err := f.sendChanges(withEmptyMaps(g))
		if err != nil || g.Status.Ended() {
			return err
		}
		if wait = min(2*wait, maxPollInterval); sent {
			wait = minPollInterval
		}
		if g, err = s.readGroupAfter(r.Context(), f, id, wait); err != nil {
			return err
		}
	}
}

// readGroupAfter waits and reads the group. While the store is unavailable it sends keep-alives and
// tries again, without end. It returns errShutdown when the server shuts down.
func (s *calls) readGroupAfter(ctx context.Context, f *feed, id string, wait time.Duration) (api.Group, error) {
	for {
		select {
		case <-ctx.Done():
			return api.Group{}, ctx.Err()
		case <-s.closing.Done():
			return api.Group{}, errShutdown
		case <-time.After(wait):
		}
		g, err := s.backend.Group(ctx, id)
		if err == nil || !errors.Is(err, api.ErrUnavailable) {
			return g, err
		}
		wait = maxPollInterval
		if err := f.sendKeepAlive(); err != nil {
			return api.Group{}, err
		}
	}
}

// feed writes the events of one client.
type feed struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
	at  position
	// lastView is the group as it was last sent, without fields that change by themselves.
	lastView []byte
	sentAt   time.Time
	buf      bytes.Buffer
}

// start sends the headers, and how long the client should wait before it reconnects. So the client
// knows at once that it is connected.
func (f *feed) start() error {
	f.buf.WriteString("retry: 1000\n\n")
	return f.flush()
}

// startRound resets the position when another round has begun.
func (f *feed) startRound(round int) {
	if f.at.round != round {
		f.at = position{round: round}
	}
}

// sendChanges sends the states that are new, and moves the position. If there are none, it sends
// progress when anything else but the ETA has changed, or else a keep-alive if one is due.
func (f *feed) sendChanges(g api.Group) (sent bool, err error) {
	f.startRound(g.Round)
	view := comparableView(g)
	changed := !bytes.Equal(view, f.lastView)
	f.lastView = view
	for _, st := range lifecycle {
		at, reached := g.Timestamps[strings.ToLower(string(st.status))]
		if st.rank <= f.at.rank || !reached && st.status != g.Status {
			continue
		}
		if !reached {
			at = time.Now().UTC()
		}
		f.at.rank, f.at.progress = st.rank, 0
		then := g
		then.Status = st.status
		f.addEvent("state", "group."+strings.ToLower(string(st.status)), at, then)
		sent = true
	}
	if changed && !sent {
		f.at.progress++
		f.addEvent("progress", "group.progress", time.Now().UTC(), g)
		sent = true
	}
	if !sent {
		return false, f.sendKeepAlive()
	}
	return true, f.flush()
}

// comparableView returns the JSON of a group without its ETA. Two equal views mean that nothing
// changed.
func comparableView(g api.Group) []byte {
	g.ETASeconds = nil
	return encode(g)
}

func (f *feed) addEvent(name, typ string, at time.Time, g api.Group) {
	id := f.at.String()
	data := encode(api.Event{ID: id, Type: typ, At: at, Group: &g})
	fmt.Fprintf(&f.buf, "id: %s\nevent: %s\ndata: %s\n\n", id, name, data)
}

// sendKeepAlive sends a comment if nothing was sent for keepAliveInterval.
func (f *feed) sendKeepAlive() error {
	if time.Since(f.sentAt) < keepAliveInterval {
		return nil
	}
	f.buf.WriteString(": keep-alive\n\n")
	return f.flush()
}

func (f *feed) flush() error {
	defer f.buf.Reset()
	f.sentAt = time.Now()
	if _, err := f.w.Write(f.buf.Bytes()); err != nil {
		return err
	}
	return f.ctl.Flush()
}
