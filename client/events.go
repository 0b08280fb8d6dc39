package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// Events ranges over the group's progress and state changes until the round has ended, an error
// comes, or ctx ends.
//
// With after, the id of an event, it goes on behind that one (Last-Event-ID); without, it begins
// with the states that the round has been through. A connection that breaks, or is silent for a
// minute, is resumed; after a minute without success its error comes out. An event may come more
// than once, with the same id.
func (a *API) Events(ctx context.Context, group, after string) iter.Seq2[api.Event, error] {
	return func(yield func(api.Event, error) bool) {
		f := follower{api: a, group: group, lastEventID: after, lastReadAt: time.Now()}
		for failed := 0; ; failed++ {
			err := f.read(ctx, func(e api.Event) bool { return yield(e, nil) })
			if errors.Is(err, errEndOfEvents) {
				return
			}
			if ctx.Err() != nil {
				yield(api.Event{}, fmt.Errorf("follow group %s: %w", group, context.Cause(ctx)))
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
				yield(api.Event{}, fmt.Errorf("follow group %s: %w", group, err))
				return
			}
		}
	}
}

// Wait returns the group once it has ended.
func (a *API) Wait(ctx context.Context, group string) (api.Group, error) {
	for e, err := range a.Events(ctx, group, "") {
		if err != nil {
			return api.Group{}, err
		}
		if ended(e) {
			return *e.Group, nil
		}
	}
	return a.Group(ctx, group)
}

func ended(e api.Event) bool { return e.Group != nil && e.Group.Status.Ended() }

var (
	errEndOfEvents = errors.New("nothing more to follow") // the round has ended, or the consumer has left
	errSilent      = errors.New("no sign of life")
	errFormat      = errors.New("not in the format of events")
)

// follower is one consumer's place in the events of a group, over any number of connections.
type follower struct {
	api         *API
	group       string
	lastEventID string        // id of the last event
	lastReadAt  time.Time     // when something last came
	retry       time.Duration // as the server asks
	connected   bool          // connected before
	received    bool          // something came on the latest connection
}

// resumable says whether a connection that ended with err, nil for an orderly end, is
// worth another.
func (f *follower) resumable(err error) bool {
	if err == nil {
		return true
	}
	// do has repeated the first connection already.
	return f.connected && retryAlways(err) && !errors.Is(err, errFormat) && time.Since(f.lastReadAt) < f.api.outageTimeout
}

// read hands out the events of one connection. It returns errFollowed, nil when the server
// closed, or an error.
func (f *follower) read(ctx context.Context, yield func(api.Event) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f.received = false

	path, err := groupPath(f.group, "/events")
	if err != nil {
		return err
	}
	c := apiCall{action: "follow group " + f.group, path: path, stream: true, retry: retryAlways, header: http.Header{}}
	c.header.Set("Accept", "text/event-stream")
	if f.lastEventID != "" {
		c.header.Set("Last-Event-ID", f.lastEventID)
	}
	resp, err := f.api.do(ctx, c)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	f.connected, f.lastReadAt = true, time.Now()
	watchdog := time.AfterFunc(f.api.silenceTimeout, func() { cancel(errSilent) })
	defer watchdog.Stop()

	if resp.StatusCode == http.StatusNoContent {
		return errEndOfEvents // the event after which we asked was the end
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
			return fmt.Errorf("follow group %s: %w", f.group, err)
		}
		if err := f.deliver(m, yield); err != nil {
			return err
		}
	}
}

// deliver decodes an event and hands it out, unless it is the one after which the
// connection was resumed.
func (f *follower) deliver(m sseMessage, yield func(api.Event) bool) error {
	var e api.Event
	if err := json.Unmarshal(m.data, &e); err != nil {
		return fmt.Errorf("follow group %s: event %q: %w: %w", f.group, m.id, errFormat, err)
	}
	if m.id != "" {
		e.ID = m.id // the one to resume after
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

// activityReader tells of every read that brought something, comments too.
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
