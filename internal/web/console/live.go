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
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	maxStreams      = 2000            // most open event streams of a process
	maxOwnStreams   = 20              // most of one API key
	maxGroupTopics  = 200             // most groups, lists and other limited topics that a process follows at a time
	stillInterval   = 2 * time.Second // between two checks of a stream's API key in the process's copy of the keys
	sessionInterval = 4 * time.Second // with session.Fresh, a stream outlives its session by 10 s or so
	tryAgain        = 5 * time.Second // what a browser waits if it gets no stream
)

// topic is an entry of the table of topics: a kind of data that open pages follow. The query
// parameter topics of an event stream is NAME:ARGUMENT, with the argument of open.
type topic struct {
	scope auth.Scope
	page  string // the template whose live regions are sent
	group bool   // read up to twice a second, other topics up to once; limited in number
	many  bool   // limited in number, together with groups
	// open checks the argument for the principal of ctx, and returns the function that reads the
	// data.
	open func(ctx context.Context, arg string) (read func(context.Context) (any, error), err error)
	// check, unless nil, refuses a request for a reason other than the scope of its API key.
	check func(r *http.Request) error
}

func (c *Console) topics() map[string]topic {
	groups, tenants, letters := groupPages{c.Backend}, tenantPages{c.Backend}, letterPages{c.Backend}
	guards := guardPages{c.Backend}
	all := map[string]topic{
		"overview": {scope: open, page: "overview", open: c.overview.open},
		"groups":   {scope: auth.Read, page: "groups", many: true, open: groups.openList},
		"group":    {scope: auth.Read, page: "group", group: true, open: groups.openGroup},
		"tenants":  {scope: auth.Read, page: "tenants", many: true, open: listOf(tenants.readList).live(listInterval)},
		"tenant":   {scope: auth.Read, page: "tenant", many: true, open: tenants.openTenant},
		"job":      {scope: auth.Read, page: "job", many: true, open: groups.openJob},
		"dead-letters": {
			scope: auth.Read, page: "deadletters", many: true,
			open: listOf(letters.readDeadLetters).live(listInterval),
		},
		"callbacks": {
			scope: auth.Read, page: "callbacks", many: true,
			open: listOf(callbackPages{c.Backend}.readList).live(listInterval),
		},
		"rejected": {
			scope: auth.ReadSystem, page: "rejected", many: true,
			open: listOf(letters.readRejected).live(listInterval),
		},
		"operations": {
			scope: auth.Read, page: "operations", many: true,
			open: listOf(operationPages{c.Backend}.readList).live(listInterval),
		},
		"operation": {scope: auth.Read, page: "operation", many: true, open: operationPages{c.Backend}.open},
		"guards":    {scope: auth.ReadSystem, page: "guards", many: true, open: listOf(guards.readList).live(guardsInterval)},
		"guard":     {scope: auth.ReadSystem, page: "guard", many: true, open: guards.openGuard},
		"limits":    {scope: auth.ReadSystem, page: "limits", open: limitsPage{c.Backend}.open},
		"workers":   {scope: auth.ReadMetrics, page: "workers", open: workersPage{c.Backend}.open},
		"audit":     {scope: auth.ReadSystem, page: "audit", open: auditPage{c.Backend}.open},
	}
	if c.Rooms != nil {
		all["rooms"] = topic{
			scope: auth.ReadSystem, page: "rooms", many: true, open: c.rooms.openList, check: c.rooms.check,
		}
		all["room"] = topic{
			scope: auth.ReadSystem, page: "room", many: true, open: c.rooms.openRoom, check: c.rooms.check,
		}
	}
	return all
}

// live serves the event streams that send the live regions of open pages. All readers of a topic
// who see the same data share one poller and the same encoded bytes.
type live struct {
	console *Console
	topics  map[string]topic
	streams *web.Streams
	groups  *web.Feed[*regions] // of topics that are read up to twice a second
	others  *web.Feed[*regions]

	mu       sync.Mutex
	own      map[string]int // open streams by API key
	followed map[string]int // open streams by limited topic and class of readers
}

func newLive(c *Console) *live {
	return &live{
		console: c, topics: c.topics(), streams: web.NewStreams(maxStreams),
		groups: web.NewFeed[*regions](500*time.Millisecond, time.Second),
		others: web.NewFeed[*regions](time.Second, time.Second),
		own:    map[string]int{}, followed: map[string]int{},
	}
}

// regions has the live regions that one poll rendered, as events that all streams of the topic
// share.
type regions struct {
	number  int    // sequence number of this change
	frame   []byte // all live regions
	changes []byte // regions that differ from those of number-1; nil: send frame
	last    bool   // the subject of the page is gone: the stream ends
}

// subscription is the topic that a request follows.
type subscription struct {
	topic
	name    string // with its argument
	who     auth.Principal
	read    func(context.Context) (any, error)
	address string // of the API, in command lines
	class   string // of streams that share what is read
}

// serve answers with the event stream of one page, or refuses it in plain text.
func (l *live) serve(w http.ResponseWriter, r *http.Request) {
	ctx, s, err := l.subscribe(r)
	if err != nil {
		refuseStream(w, err)
		return
	}
	leave, err := l.enter(s)
	if err != nil {
		refuseStream(w, err)
		return
	}
	defer leave()
	stream, err := l.streams.Open(l.console.Closing, w)
	if err != nil {
		refuseStream(w, tooMany("all %d event streams are in use", maxStreams))
		return
	}
	defer stream.Close()
	ctx, end := l.whileValid(ctx, w, r)
	defer end()
	feed := l.others
	if s.group {
		feed = l.groups
	}
	viewer := feed.Watch(s.class, func() web.Poll[*regions] { return l.poll(s) })
	defer viewer.Close()
	if err := follow(ctx, &stream, viewer); err != nil && !errors.Is(err, context.Canceled) &&
		!errors.Is(err, web.ErrClosing) {
		l.console.Log.DebugContext(ctx, "an event stream of the console ended", "topic", s.name, "error", err)
	}
}

// subscribe returns what a request follows, and its context with the principal. A request has
// exactly one topic, because a page has only one. The error is a *web.Problem.
func (l *live) subscribe(r *http.Request) (context.Context, subscription, error) {
	c := l.console
	if r.Method != http.MethodGet {
		return nil, subscription{}, refusedStream(http.StatusMethodNotAllowed, "use GET", nil)
	}
	ctx, err := c.principal(r, false)
	if err != nil {
		return nil, subscription{}, refusedStream(http.StatusUnauthorized, "log in first", err)
	}
	who, _ := auth.From(ctx)
	if err := c.CountRequest(r, who); err != nil {
		return nil, subscription{}, err
	}
	name := r.URL.Query().Get("topics")
	kind, arg, _ := strings.Cut(name, ":")
	t, known := l.topics[kind]
	if !known || len(name) > maxForm {
		return nil, subscription{}, errNoTopic
	}
	if t.scope != open && !who.May(t.scope) {
		return nil, subscription{}, refusedStream(http.StatusForbidden, "not for your key", nil)
	}
	if t.check != nil {
		if err := t.check(r); err != nil {
			return nil, subscription{}, refusedStream(http.StatusForbidden, err.Error(), nil)
		}
	}
	read, err := t.open(ctx, arg)
	var input *inputError
	switch {
	case errors.Is(err, api.ErrNotFound), errors.As(err, &input):
		return nil, subscription{}, errNoTopic
	case err != nil:
		c.Log.WarnContext(ctx, "a topic of the console can't be read", "topic", kind, "error", err)
		return nil, subscription{}, refusedStream(http.StatusInternalServerError, "the topic can't be read", err)
	}
	address := c.apiOption(r)
	class := strings.Join([]string{classOf(who), address, name}, "\x00")
	return ctx, subscription{t, name, who, read, address, class}, nil
}

// unlessAway returns the error of the first read of a topic. While Redis is away the stream opens:
// its reader is told so, and sees the data when Redis is back.
func unlessAway(err error) error {
	if errors.Is(err, api.ErrUnavailable) {
		return nil
	}
	return err
}

var errNoTopic = refusedStream(http.StatusNotFound, "no such topic", nil)

// refusedStream returns the answer to a request for a stream that is refused because of cause.
func refusedStream(status int, text string, cause error) *web.Problem {
	if errors.Is(cause, api.ErrUnavailable) {
		status, text = http.StatusServiceUnavailable, "Redis is away"
	}
	return &web.Problem{Problem: api.Problem{Status: status, Detail: text}}
}

func tooMany(format string, limit int) *web.Problem {
	p := refusedStream(http.StatusTooManyRequests, fmt.Sprintf(format, limit), nil)
	p.RetryAfter = tryAgain
	return p
}

func refuseStream(w http.ResponseWriter, err error) {
	problem, after, _ := httpapi.ProblemOf(err)
	web.SetRetryAfter(w.Header(), after)
	if problem.Status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", http.MethodGet)
	}
	http.Error(w, problem.Detail, problem.Status)
}

// follow sends events to the client of viewer. It returns an error when ctx ends or when a read or
// a write fails, and nil when the subject of the page is gone. A client that is new or has missed a
// change gets all live regions, any other client only those that have changed.
func follow(ctx context.Context, stream *web.Stream, viewer *web.Viewer[*regions]) error {
	for sent := 0; ; {
		found, changed, err := viewer.Next()
		switch {
		case changed != nil && err == nil:
			err = stream.Wait(ctx, changed)
		case err == nil:
			text := found.frame
			if found.changes != nil && sent == found.number-1 {
				text = found.changes
			}
			sent = found.number
			if err = stream.Send(text); err == nil && found.last {
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
}

// enter counts an open event stream for its API key and, if the topic is limited in number, for its
// class, until leave is called. It returns a problem if there are too many. Readers who see
// different data of a topic count as readers of different topics, because their data is read
// separately.
func (l *live) enter(s subscription) (leave func(), err error) {
	key, limited := s.who.KeyID, ""
	if s.group || s.many {
		limited = s.class
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if key != "" && l.own[key] >= maxOwnStreams {
		return nil, tooMany("your API key has %d event streams already", maxOwnStreams)
	}
	if limited != "" && l.followed[limited] == 0 && len(l.followed) >= maxGroupTopics {
		return nil, tooMany("this server follows %d groups and other things already", maxGroupTopics)
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
	change(l.followed, limited, 1)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		change(l.own, key, -1)
		change(l.followed, limited, -1)
	}, nil
}

// whileValid returns a context that ends when the request's session or its API key is not valid any
// more (see web.WhileValid). The caller must call end.
func (l *live) whileValid(
	ctx context.Context, w http.ResponseWriter, r *http.Request,
) (_ context.Context, end func()) {
	if l.console.Keys == nil {
		return ctx, func() {}
	}
	who, _ := auth.From(ctx)
	checked := time.Now()
	return web.WhileValid(ctx, w, stillInterval, errNoSession, func() bool {
		if !l.console.Keys.Still(who) {
			return false
		}
		if now := time.Now(); now.Sub(checked) >= sessionInterval {
			checked = now
			_, err := l.console.principal(r, false)
			return !errors.Is(err, errNoSession)
		}
		return true
	})
}

// poll returns a function that reads a topic with the rights of its first reader and renders the
// live regions. A region has changed if its HTML has.
func (l *live) poll(s subscription) web.Poll[*regions] {
	who := s.who
	who.KeyID = "" // the regions are for all readers who see the same
	number, event := 0, ""
	var last map[string]string
	return func(ctx context.Context) (web.State[*regions], error) {
		ctx, cancel := context.WithTimeout(auth.With(ctx, who), readTimeout)
		defer cancel()
		found, before := "regions", event
		var html map[string]string
		data, err := s.read(ctx)
		switch {
		case errors.Is(err, api.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
			found = "away"
		case errors.Is(err, api.ErrNotFound):
			found = "gone"
		case err != nil:
			return web.State[*regions]{}, err
		default:
			if html, err = l.console.renderRegions(s.page, who, s.address, data); err != nil {
				l.console.Log.ErrorContext(ctx, "live regions of the console can't be rendered",
					"page", s.page, "error", err)
				return web.State[*regions]{}, err
			}
		}
		changes := map[string]string{}
		for id, text := range html {
			if text != last[id] {
				changes[id] = text
			}
		}
		last, event = html, found
		if found == before && len(changes) == 0 {
			return web.State[*regions]{}, nil
		}
		number++
		value := &regions{number: number, frame: eventOf(found, html), last: found == "gone"}
		if found == before && len(changes) < len(html) {
			value.changes = eventOf(found, changes)
		}
		return web.State[*regions]{Value: value, Changed: true, Last: value.last}, nil
	}
}

// renderRegions returns the HTML of a page's live regions, by their element ids.
func (c *Console) renderRegions(
	page string, who auth.Principal, address string, data any,
) (map[string]string, error) {
	html := map[string]string{}
	for _, id := range c.views().live[page] {
		var out bytes.Buffer
		f := frame{Data: data, principal: who, login: c.Keys != nil, api: address}
		if err := c.views().pages[page].ExecuteTemplate(&out, livePrefix+id, f); err != nil {
			return nil, fmt.Errorf("render region %s: %w", id, err)
		}
		html[id] = string(c.withPrefix(out.Bytes()))
	}
	return html, nil
}

// eventOf encodes a server-sent event: its name, and as JSON the HTML of live regions by their ids.
func eventOf(name string, html map[string]string) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "event: %s\ndata: ", name)
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false) // it would make the frames larger, and only scripts read them
	if html == nil {
		html = map[string]string{}
	}
	_ = e.Encode(html) // it ends with a line break. Strings can be encoded
	return append(out.Bytes(), '\n')
}
