package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/livefeed"
	"github.com/bulkaction/bulkaction/internal/sse"
)

const (
	maxStreams      = 2000 // event streams of a process
	maxOwnStreams   = 20   // those of one API key
	maxGroupTopics  = 200  // groups that a process follows at a time
	stillInterval   = 2 * time.Second
	sessionInterval = 4 * time.Second // and a session may be remembered for session.Fresh: 10 s in all
	tryAgain        = 5 * time.Second // what a browser waits if it gets no stream
)

// topic is a kind of things that pages follow. Its name is the part before the colon of the
// parameter topics, and what is behind it is the argument of open.
type topic struct {
	scope auth.Scope
	page  string // the template whose live regions are sent
	group bool   // read twice a second, and limited in number
	// open checks the argument for the principal of ctx, and returns what reads the data.
	open func(ctx context.Context, arg string) (read func(context.Context) (any, error), err error)
}

// topics is the table of topics.
func (c *Console) topics() map[string]topic {
	groups := groupPages{c.Backend}
	return map[string]topic{
		"overview": {scope: open, page: "overview", open: overviewPage{c.Backend}.open},
		"groups":   {scope: auth.Read, page: "groups", open: groups.openList},
		"group":    {scope: auth.Read, page: "group", group: true, open: groups.openGroup},
		"workers":  {scope: auth.ReadMetrics, page: "workers", open: workersPage{c.Backend}.open},
		"audit":    {scope: auth.ReadSystem, page: "audit", open: auditPage{c.Backend}.open},
	}
}

// live serves event streams with the live regions of pages. All readers of a topic who see the same
// data share one poller and the same bytes.
type live struct {
	console *Console
	topics  map[string]topic
	streams sse.Streams
	groups  *livefeed.Feed[*regions] // of topics that are read twice a second
	others  *livefeed.Feed[*regions]

	mu       sync.Mutex
	own      map[string]int // open streams by API key
	followed map[string]int // open streams by topic of groups
}

func newLive(c *Console) *live {
	return &live{
		console: c, topics: c.topics(), streams: sse.Streams{Max: maxStreams},
		groups: livefeed.NewPaced[*regions](500*time.Millisecond, time.Second),
		others: livefeed.NewPaced[*regions](time.Second, time.Second),
		own:    map[string]int{}, followed: map[string]int{},
	}
}

// regions is what a poll has found: a frame of the stream, for all its readers.
type regions struct {
	frame []byte
	last  bool // the stream ends: there is no such thing any more
}

// serve streams the live regions of a page. The topic is one, because a page has one.
func (l *live) serve(w http.ResponseWriter, r *http.Request) {
	ctx, err := l.console.principal(r, false)
	if err != nil {
		plainError(w, http.StatusUnauthorized, "log in first", err)
		return
	}
	who, _ := auth.From(ctx)
	name := r.URL.Query().Get("topics")
	kind, arg, _ := strings.Cut(name, ":")
	t, known := l.topics[kind]
	if !known || len(name) > maxForm {
		plainError(w, http.StatusNotFound, "no such topic", nil)
		return
	}
	if t.scope != open && !who.May(t.scope) {
		plainError(w, http.StatusForbidden, "not for your key", nil)
		return
	}
	read, err := t.open(ctx, arg)
	if err != nil {
		plainError(w, http.StatusNotFound, "no such topic", err)
		return
	}
	if t.group {
		kind = name
	} else {
		kind = ""
	}
	leave, err := l.enter(who.KeyID, kind)
	if err != nil {
		w.Header().Set("Retry-After", seconds(tryAgain))
		plainError(w, http.StatusTooManyRequests, err.Error(), nil)
		return
	}
	defer leave()
	if answer, ok := w.(interface{ OwnDeadlines() }); ok {
		answer.OwnDeadlines()
	}
	stream, err := l.streams.Open(l.console.Closing, w)
	if err != nil {
		w.Header().Set("Retry-After", seconds(tryAgain))
		plainError(w, http.StatusTooManyRequests, fmt.Sprintf("all %d event streams are in use", maxStreams), nil)
		return
	}
	defer stream.Close()
	ctx, end := l.whileValid(ctx, w, r)
	defer end()
	feed := l.others
	if t.group {
		feed = l.groups
	}
	viewer := feed.Watch(classOf(who)+"\x00"+name, func() livefeed.Poll[*regions] { return l.poll(t, who, read) })
	defer viewer.Close()
	if err := follow(ctx, stream, viewer); err != nil && !errors.Is(err, context.Canceled) &&
		!errors.Is(err, sse.ErrClosing) {
		l.console.Log.DebugContext(ctx, "an event stream of the console ended", "topic", name, "error", err)
	}
}

func plainError(w http.ResponseWriter, status int, text string, err error) {
	if errors.Is(err, api.ErrUnavailable) {
		status, text = http.StatusServiceUnavailable, "Redis is away"
	}
	http.Error(w, text, status)
}

// follow sends what viewer gets until ctx ends.
func follow(ctx context.Context, stream *sse.Stream, viewer *livefeed.Viewer[*regions]) error {
	for {
		found, changed, err := viewer.Next()
		switch {
		case changed != nil && err == nil:
			err = stream.Wait(ctx, changed)
		case err == nil:
			if err = stream.Send(found.frame); err == nil && found.last {
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
}

// enter counts a stream of an API key and of a topic of groups until leave is called. An empty name
// is not counted.
func (l *live) enter(key, group string) (leave func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if key != "" && l.own[key] >= maxOwnStreams {
		return nil, fmt.Errorf("your API key has %d event streams already", maxOwnStreams)
	}
	if group != "" && l.followed[group] == 0 && len(l.followed) >= maxGroupTopics {
		return nil, fmt.Errorf("this server follows %d groups already", maxGroupTopics)
	}
	change := func(counts map[string]int, name string, by int) {
		if name == "" {
			return
		}
		if counts[name] += by; counts[name] == 0 {
			delete(counts, name)
		}
	}
	change(l.own, key, 1)
	change(l.followed, group, 1)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		change(l.own, key, -1)
		change(l.followed, group, -1)
	}, nil
}

// whileValid returns a context that ends when the request's session or its API key is not valid any
// more. A write to a client that does not read ends then, too. The caller must call end.
func (l *live) whileValid(
	ctx context.Context, w http.ResponseWriter, r *http.Request,
) (_ context.Context, end func()) {
	if l.console.Keys == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	who, _ := auth.From(ctx)
	var checks sync.WaitGroup
	checks.Go(func() {
		tick := time.NewTicker(stillInterval)
		defer tick.Stop()
		for checked := time.Now(); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			valid := l.console.Keys.Still(who)
			if now := time.Now(); valid && now.Sub(checked) >= sessionInterval {
				checked = now
				_, err := l.console.principal(r, false)
				valid = !errors.Is(err, errNoSession)
			}
			if !valid {
				cancel()
				_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0)) // test servers have no deadlines
				return
			}
		}
	})
	return ctx, func() {
		cancel()
		checks.Wait()
	}
}

// poll returns a function that reads a topic for a principal, and renders the live regions. They
// have changed if their text has.
func (l *live) poll(t topic, who auth.Principal, read func(context.Context) (any, error)) livefeed.Poll[*regions] {
	who.KeyID = "" // the regions are for all readers who see the same
	var last []byte
	return func(ctx context.Context) (livefeed.State[*regions], error) {
		ctx, cancel := context.WithTimeout(auth.With(ctx, who), readTimeout)
		defer cancel()
		found := &regions{}
		event := "regions"
		var text []byte
		data, err := read(ctx)
		switch {
		case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
			event, text = "away", []byte("{}")
		case errors.Is(err, api.ErrNotFound):
			event, text, found.last = "gone", []byte("{}"), true
		case err != nil:
			return livefeed.State[*regions]{}, err
		default:
			if text, err = l.console.renderRegions(t.page, who, data); err != nil {
				l.console.Log.ErrorContext(ctx, "live regions of the console can't be rendered",
					"page", t.page, "error", err)
				return livefeed.State[*regions]{}, err
			}
		}
		frame := fmt.Appendf(nil, "event: %s\ndata: %s\n\n", event, text)
		changed := !bytes.Equal(frame, last)
		last, found.frame = frame, frame
		return livefeed.State[*regions]{Value: found, Changed: changed, Last: found.last}, nil
	}
}

// renderRegions returns the live regions of a page as a JSON object of their ids.
func (c *Console) renderRegions(page string, who auth.Principal, data any) ([]byte, error) {
	html := map[string]string{}
	for _, id := range c.views.live[page] {
		var out bytes.Buffer
		f := frame{Data: data, principal: who, login: c.Keys != nil}
		if err := c.views.pages[page].ExecuteTemplate(&out, livePrefix+id, f); err != nil {
			return nil, fmt.Errorf("render region %s: %w", id, err)
		}
		html[id] = out.String()
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false) // it would make the frames larger, and only scripts read them
	if err := e.Encode(html); err != nil {
		return nil, fmt.Errorf("encode live regions: %w", err)
	}
	return bytes.TrimSpace(out.Bytes()), nil
}
