package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// Events iterates over the group's progress and state changes. The iteration ends when the round
// has ended, or after it has yielded an error, also when ctx ends.
//
// With after, the id of an event, the iteration continues after that event (Last-Event-ID). With
// an empty after, it begins with the states that the round has been through. If the connection
// breaks or is silent for a minute, Events connects again and continues. After a minute without
// success, if the server refuses the call, or if the first connection fails, it yields the error.
// An event may come more than once, with the same id. A large aggregate is missing, see
// api.Event.Omitted.
func (a *API) Events(ctx context.Context, group, after string) iter.Seq2[api.Event, error] {
	return func(yield func(api.Event, error) bool) {
		c := callOn("follow", http.MethodGet, "group", group, "/events")
		c.stream = true
		f := follower{api: a, call: c, lastEventID: after, lastReadAt: time.Now()}
		for failed := 0; ; failed++ {
			err := f.read(ctx, func(e api.Event) bool { return yield(e, nil) })
			if errors.Is(err, errEndOfEvents) {
				return
			}
			if ctx.Err() != nil {
				yield(api.Event{}, fmt.Errorf("%s: %w", c.action, context.Cause(ctx)))
				return
			}
			if f.received {
				failed = 0
			}
			if !f.resumable(err) {
				yield(api.Event{}, err)
				return
			}
			if err := a.sleep(ctx, min(max(f.retry, backoff(err, failed+1)), a.maxWait)); err != nil {
				yield(api.Event{}, fmt.Errorf("%s: %w", c.action, err))
				return
			}
		}
	}
}

// Wait waits until the group has ended, and returns it. With an error it returns the last state of
// the group that it saw, if any. A group that nobody has sealed can't end: the error then says so,
// but Wait waits all the same.
func (a *API) Wait(ctx context.Context, group string) (api.Group, error) {
	var last api.Group
	for e, err := range a.Events(ctx, group, "") {
		if e.Group != nil {
			last = *e.Group
		}
		switch {
		case err != nil && last.ID != "" && !last.Sealed:
			return last, fmt.Errorf("%w; group %s is not sealed, so it does not end: call Seal", err, group)
		case err != nil:
			return last, err
		case ended(e) && len(e.Omitted) == 0:
			return last, nil
		}
	}
	return a.Group(ctx, group)
}

func ended(e api.Event) bool { return e.Group != nil && e.Group.Status.Ended() }

var (
	// errEndOfEvents says that no more events are to be yielded: the round has ended, or the caller
	// has stopped the iteration.
	errEndOfEvents = errors.New("nothing more to follow")
	errSilent      = errors.New("the server sent nothing for too long")
	errFormat      = errors.New("not in the format of events")
)

// follower reads the events of a group for one caller, over any number of connections.
type follower struct {
	api         *API
	call        apiCall       // makes a connection; its header is set for each
	lastEventID string        // id of the last event that the caller got
	lastReadAt  time.Time     // when a connection last succeeded or brought a byte
	retry       time.Duration // wait before the next connection, as the server asks
	connected   bool          // at least one connection succeeded
	received    bool          // the latest connection brought at least one byte
}

// resumable reports whether Events should connect again after a connection that ended with err. err
// is nil when the server closed the connection in order or was silent for too long.
func (f *follower) resumable(err error) bool {
	if err == nil {
		return true
	}
	// API.do has retried the first connection already.
	return f.connected && f.call.mayRepeat(err) && !errors.Is(err, errFormat) &&
		time.Since(f.lastReadAt) < f.api.outageTimeout
}

// read yields the events of one connection. It returns errEndOfEvents after the last event of the
// round or when the caller stops, nil when the server closed the connection or was silent for too
// long, and an error otherwise.
func (f *follower) read(ctx context.Context, yield func(api.Event) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f.received = false

	f.call.header = http.Header{"Accept": {"text/event-stream"}}
	if f.lastEventID != "" {
		f.call.header.Set("Last-Event-ID", f.lastEventID)
	}
	resp, err := f.api.do(ctx, f.call)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	f.connected, f.lastReadAt = true, time.Now()
	watchdog := time.AfterFunc(f.api.silenceTimeout, func() { cancel(errSilent) })
	defer watchdog.Stop()

	if resp.StatusCode == http.StatusNoContent {
		return errEndOfEvents // the round ended with the event after which we asked to continue
	}
	messages := newMessageReader(activityReader{resp.Body, func() {
		watchdog.Reset(f.api.silenceTimeout)
		f.received, f.lastReadAt = true, time.Now()
	}})
	for {
		m, err := messages.next()
		f.retry = messages.retry
		if errors.Is(err, io.EOF) || errors.Is(context.Cause(ctx), errSilent) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.call.action, err)
		}
		if err := f.deliver(m, yield); err != nil {
			return err
		}
	}
}

// deliver decodes an event and yields it. It leaves out an event with the id of the last one,
// because the server may repeat that event on a new connection.
func (f *follower) deliver(m sseMessage, yield func(api.Event) bool) error {
	var e api.Event
	if err := json.Unmarshal(m.data, &e); err != nil {
		return fmt.Errorf("%s: event %q: %w: %w", f.call.action, m.id, errFormat, err)
	}
	if m.id != "" {
		e.ID = m.id // the id with which the stream can be resumed
	}
	if e.Type == "" {
		e.Type = m.event
	}
	if m.id != "" && m.id == f.lastEventID {
		return nil
	}
	if m.id != "" {
		f.lastEventID = m.id
	}
	if !yield(e) || ended(e) {
		return errEndOfEvents
	}
	return nil
}

// activityReader calls onRead after each Read that brought at least one byte. Comments of the event
// stream count, too, because they show that the server is alive.
type activityReader struct {
	io.Reader
	onRead func()
}

func (p activityReader) Read(b []byte) (int, error) {
	n, err := p.Reader.Read(b)
	if n > 0 {
		p.onRead()
	}
	return n, err
}

// sseMessage is one message of a text/event-stream. id is empty when the message has none.
type sseMessage struct {
	id, event string
	data      []byte
}

const maxEventBytes = 16 << 20 // bytes of one line

// messageReader reads the messages of a text/event-stream (HTML standard, section 9.2.6).
type messageReader struct {
	s     *bufio.Scanner
	retry time.Duration // wait before the next connection, as the server asks; 0 when it does not say
}

func newMessageReader(r io.Reader) *messageReader {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 4<<10), maxEventBytes)
	return &messageReader{s: s}
}

// next returns the next message that has data, or io.EOF. It drops a message that the end of the
// stream cuts off.
func (m *messageReader) next() (sseMessage, error) {
	var msg sseMessage
	var data [][]byte
	for m.s.Scan() {
		line := m.s.Bytes()
		if len(line) == 0 {
			if data == nil {
				msg = sseMessage{}
				continue
			}
			msg.data = bytes.Join(data, []byte("\n"))
			return msg, nil
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "id":
			if !strings.ContainsRune(string(value), 0) {
				msg.id = string(value)
			}
		case "event":
			msg.event = string(value)
		case "data":
			data = append(data, bytes.Clone(value))
		case "retry":
			if ms, err := strconv.ParseInt(string(value), 10, 32); err == nil && ms >= 0 {
				m.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
	switch err := m.s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return sseMessage{}, fmt.Errorf("%w: a line of more than %d bytes", errFormat, maxEventBytes)
	case err != nil:
		return sseMessage{}, err
	}
	return sseMessage{}, io.EOF
}
