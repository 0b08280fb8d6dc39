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
	minPollInterval   = 200 * time.Millisecond // between looks at a group that changes
	maxPollInterval   = time.Second            // between looks at one that does not
	keepAliveInterval = 15 * time.Second       // of silence, before a comment keeps proxies awake
)

// lifecycle orders the states of a round; its last three exclude each other.
var lifecycle = []struct {
	status api.Status
	rank   int
}{
	{api.StatusCreated, 1}, {api.StatusDispatched, 2}, {api.StatusRunning, 3}, {api.StatusAggregating, 4},
	{api.StatusCompleted, 5}, {api.StatusFailed, 5}, {api.StatusCancelled, 5},
}

// rank is a state's place in a round, from 1; 0 for what is no state.
func rank(s api.Status) int {
	for _, st := range lifecycle {
		if st.status == s {
			return st.rank
		}
	}
	return 0
}

// position is where a client is in a group's history: the last state that it has seen and how
// many progress events since. As an event id it is written round.rank for a state, round.rank.n
// for progress.
type position struct{ round, rank, progress int }

func (p position) String() string {
	if p.progress == 0 {
		return fmt.Sprintf("%d.%d", p.round, p.rank)
	}
	return fmt.Sprintf("%d.%d.%d", p.round, p.rank, p.progress)
}

// parsePosition reads a Last-Event-ID; one that is not ours means the beginning.
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

// watchGroup streams what happens to a group, until it has ended, by looking at it. States are told
// from their timestamps, so that none is skipped however quickly they follow.
func (s *server) watchGroup(w http.ResponseWriter, r *http.Request) error {
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
		w.WriteHeader(http.StatusNoContent) // tells an EventSource, which comes again after each end, to stop
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

// readGroupAfter reads the group after a while, and bears with a store that is away.
func (s *server) readGroupAfter(ctx context.Context, f *feed, id string, wait time.Duration) (api.Group, error) {
	for {
		select {
		case <-ctx.Done():
			return api.Group{}, ctx.Err()
		case <-s.closing:
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

// feed writes one client's events.
type feed struct {
	w        http.ResponseWriter
	ctl      *http.ResponseController
	at       position
	lastView []byte // the group as it was last told, without what changes by itself
	sentAt   time.Time
	buf      bytes.Buffer
}

// start sends the headers and how soon to come again after a lost connection, so that the client
// knows that it is heard.
func (f *feed) start() error {
	f.buf.WriteString("retry: 1000\n\n")
	return f.flush()
}

// startRound forgets the states of another round.
func (f *feed) startRound(round int) {
	if f.at.round != round {
		f.at = position{round: round}
	}
}

// sendChanges sends the states that are new and, when there is none, what else has changed.
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

// comparableView is what makes one look at a group differ from another.
func comparableView(g api.Group) []byte {
	g.ETASeconds = nil
	return encode(g)
}

func (f *feed) addEvent(name, typ string, at time.Time, g api.Group) {
	id := f.at.String()
	data := encode(api.Event{ID: id, Type: typ, At: at, Group: &g})
	fmt.Fprintf(&f.buf, "id: %s\nevent: %s\ndata: %s\n\n", id, name, data)
}

// sendKeepAlive sends a comment after a long silence.
func (f *feed) sendKeepAlive() error {
	if time.Since(f.sentAt) < keepAliveInterval {
		return nil
	}
	f.buf.WriteString(": still here\n\n")
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
