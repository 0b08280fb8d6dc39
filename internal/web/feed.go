package web

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// State is what a poll has found.
type State[T any] struct {
	Value   T    // what viewers get if Changed is set; nobody may change it
	Changed bool // Value differs from that of the poll before, or is the first one
	Last    bool // the topic does not change any more
}

// Poll reads a topic once.
type Poll[T any] func(ctx context.Context) (State[T], error)

// Feed shows changing data, divided into topics, to any number of viewers. Each topic has one poller
// for all its viewers in this process. The poller ends when the topic has no viewers or does not
// change any more, or with an error. All viewers share the result of a poll, so that it is rendered
// only once. A slow viewer skips values that were replaced, and delays nobody.
type Feed[T any] struct {
	shortest, longest time.Duration // between two polls

	mu     sync.Mutex // guards topics, and the changing fields of each topic
	topics map[string]*topic[T]
}

// NewFeed returns a Feed without topics. A poller reads again after shortest if the topic has
// changed. Otherwise it doubles the wait with each poll, up to longest.
func NewFeed[T any](shortest, longest time.Duration) *Feed[T] {
	return &Feed[T]{shortest: shortest, longest: longest, topics: map[string]*topic[T]{}}
}

type topic[T any] struct {
	name    string
	stop    context.CancelFunc
	stopped chan struct{} // closed when the poller has ended

	viewers int
	value   T
	version int           // number of values so far
	changed chan struct{} // closed when there is another value or an error
	err     error         // the poller has ended with this error
}

// Viewer is one viewer of a topic. Only one goroutine may use it.
type Viewer[T any] struct {
	feed  *Feed[T]
	topic *topic[T]
	seen  int // version of the value that it got last
}

// Watch adds a viewer to the topic with this name. If the topic has no poller, Watch starts one
// that calls the Poll that newPoll returns. The caller must call Close.
func (f *Feed[T]) Watch(name string, newPoll func() Poll[T]) *Viewer[T] {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.topics[name]
	if t == nil {
		ctx, stop := context.WithCancel(context.Background())
		t = &topic[T]{name: name, stop: stop, stopped: make(chan struct{}), changed: make(chan struct{})}
		f.topics[name] = t
		go f.run(ctx, t, newPoll())
	}
	t.viewers++
	return &Viewer[T]{feed: f, topic: t}
}

// Close removes the viewer. If it was the topic's last one, Close stops the poller and waits until
// the poller has ended.
func (v *Viewer[T]) Close() {
	v.feed.mu.Lock()
	v.topic.viewers--
	last := v.topic.viewers == 0
	if last {
		v.feed.forget(v.topic)
	}
	v.feed.mu.Unlock()
	if last {
		v.topic.stop()
		<-v.topic.stopped
	}
}

// Next returns the newest value if this viewer has not got it yet; changed is nil then. Otherwise
// it returns a channel that is closed when Next should be called again; after the topic's last
// state it never is. err is the error that ended the poller.
func (v *Viewer[T]) Next() (value T, changed <-chan struct{}, err error) {
	v.feed.mu.Lock()
	defer v.feed.mu.Unlock()
	switch t := v.topic; {
	case t.version > v.seen:
		v.seen = t.version
		return t.value, nil, nil
	default:
		return value, t.changed, t.err
	}
}

// forget makes the next viewer of the topic start another poller. The caller holds mu.
func (f *Feed[T]) forget(t *topic[T]) {
	if f.topics[t.name] == t {
		delete(f.topics, t.name)
	}
}

// run is the poller of a topic. It ends after the topic's last state, after an error, or when ctx
// ends. While the store is unavailable, viewers keep their value and the poller continues; if there
// is no value yet, that is an error.
func (f *Feed[T]) run(ctx context.Context, t *topic[T], poll Poll[T]) {
	defer close(t.stopped)
	for wait := f.shortest; ; {
		state, err := safely(ctx, poll)
		if err == nil && state.Changed {
			wait = f.shortest
		} else {
			wait = min(2*wait, f.longest)
		}
		if f.publish(t, state, err) {
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

// safely polls, and turns a panic into an error.
func safely[T any](ctx context.Context, poll Poll[T]) (state State[T], err error) {
	defer func() {
		if recover() != nil { // the value is not shown: it might hold a payload
			err = fmt.Errorf("poll panicked: %s", debug.Stack())
		}
	}()
	return poll(ctx)
}

// publish gives the result of a poll to the viewers. It reports whether the poller must end.
func (f *Feed[T]) publish(t *topic[T], state State[T], err error) (last bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err == nil && state.Changed:
		t.value = state.Value
		t.version++
	case err != nil && (t.version == 0 || !errors.Is(err, api.ErrUnavailable)):
		t.err = err
	case err != nil || !state.Last:
		return false
	}
	if last = state.Last || t.err != nil; last {
		f.forget(t)
	}
	close(t.changed)
	t.changed = make(chan struct{})
	return last
}
