//go:build browser

package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/audits"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// tab is a tab of a visitor's browser. It records problems, which are what pages must never do, for
// example write errors to the browser's console, violate the content security policy, send requests
// to other hosts, or receive a position that rises.
type tab struct {
	t     *testing.T
	ctx   context.Context //nolint:containedctx // chromedp keeps a tab in a context
	hosts []string        // to which the pages may send requests

	mu         sync.Mutex
	problems   []string
	expected   []string // a problem that contains one of these texts is no failure
	streams    int      // requests for a stream
	frames     int      // position frames
	place      int64    // in the last position frame; 0: none since the last entry
	live       bool     // the present page has received a position by its stream
	streamless bool     // the visitor has no streams
}

// visitor opens a tab in a new profile, without cookies: it is a visitor who has not been here
// before.
func (r *room) visitor() *tab {
	r.t.Helper()
	return r.tab(chromium, chromedp.WithNewBrowserContext())
}

// newTab opens another tab of the same visitor.
func (r *room) newTab(b *tab) *tab {
	r.t.Helper()
	return r.tab(b.ctx)
}

func (r *room) tab(parent context.Context, options ...chromedp.ContextOption) *tab {
	r.t.Helper()
	return openTab(parent, r.t, []string{host(r.broker), host(r.shop)}, options...)
}

// openTab opens a tab. It records a request to another host than these as a problem. When the test
// ends, it requires that the tab has recorded no problems but those that the test expects.
func openTab(parent context.Context, t *testing.T, hosts []string, options ...chromedp.ContextOption) *tab {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(parent, options...)
	b := &tab{t: t, ctx: ctx, hosts: hosts}
	t.Cleanup(func() {
		if t.Failed() {
			b.report()
		}
		closeTab()
		require.Empty(t, b.found(), "what the pages must not do")
	})
	require.NoError(t, chromedp.Listen(ctx, b.record))
	command(b, log.Enable, cdp.Empty{})
	command(b, audits.Enable, cdp.Empty{})
	command(b, network.Enable, network.EnableParams{})
	return b
}

func host(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return err.Error() // no request has it
	}
	return u.Host
}

// command sends a command of Chromium's protocol to the tab.
func command[P, R any](b *tab, c cdp.Command[P, R], params P) R {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	answer, err := chromedp.Run(ctx, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, c, params) })
	require.NoError(b.t, err)
	return answer
}

// record is called for each event of the tab, in their order.
func (b *tab) record(ev any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch ev := ev.(type) {
	case *runtime.EventConsoleAPICalled:
		if ev.Type == runtime.ConsoleAPICalledTypeError || ev.Type == runtime.ConsoleAPICalledTypeWarning || ev.Type == runtime.ConsoleAPICalledTypeAssert {
			b.problem("console: %s %s", ev.Type, text(ev.Args))
		}
	case *runtime.EventExceptionThrown:
		b.problem("exception: %s", text(ev.ExceptionDetails))
	case *log.EventEntryAdded:
		if ev.Entry.Level == log.EntryLevelError || ev.Entry.Level == log.EntryLevelWarning {
			b.problem("log: %s %s %s", ev.Entry.Source, ev.Entry.Text, ev.Entry.URL)
		}
	case *audits.EventIssueAdded:
		b.problem("issue: %s %s", ev.Issue.Code, text(ev.Issue.Details))
	case *network.EventRequestWillBeSent:
		u, err := url.Parse(ev.Request.URL)
		here := err == nil && (u.Scheme == "data" || u.Scheme == "http" && slices.Contains(b.hosts, u.Host))
		if !here { // a URL with data, such as an icon of Chromium's controls, needs no host
			b.problem("request to another host: %s", ev.Request.URL)
		}
		if ev.Type == network.ResourceTypeEventSource {
			b.streams++
		}
	case *page.EventFrameNavigated:
		b.live = false
	case *page.EventJavascriptDialogOpening:
		b.problem("dialog: %s", ev.Message)
	case *network.EventEventSourceMessageReceived:
		b.recordFrame(ev.EventName, ev.Data)
	}
}

func (b *tab) recordFrame(name, data string) {
	if name != "position" {
		return
	}
	var f struct{ Position, Total int64 }
	if err := json.Unmarshal([]byte(data), &f); err != nil || f.Position < 1 || f.Total < f.Position {
		b.problem("position: %s", data)
	}
	if b.place > 0 && f.Position > b.place {
		b.problem("position rose from %d to %d", b.place, f.Position)
	}
	b.place, b.live = f.Position, true
	b.frames++
}

func (b *tab) problem(format string, args ...any) {
	b.problems = append(b.problems, fmt.Sprintf(format, args...))
}

func text(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// expect says that a recorded problem that contains this text is no failure in this test.
func (b *tab) expect(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expected = append(b.expected, text)
}

// found returns the problems that the test does not expect.
func (b *tab) found() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(b.problems), func(problem string) bool {
		return slices.ContainsFunc(b.expected, func(part string) bool { return strings.Contains(problem, part) })
	})
}

// streamed returns how many event streams the tab has opened, and how many positions it has
// received on them.
func (b *tab) streamed() (streams, frames int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.streams, b.frames
}

// entersAgain says that the visitor will get a new place: the next position may be higher than the
// last one.
func (b *tab) entersAgain() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.place = 0
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	require.NoError(b.t, chromedp.Do(ctx, steps...))
}

func (b *tab) visit(address string) {
	b.t.Helper()
	b.do(chromedp.Navigate(address))
}

// click clicks an element. If the live page replaces the element at the same time, it tries again.
func (b *tab) click(selector string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	err := chromedp.Do(ctx, chromedp.Click(chromedp.CSS(selector)))
	for err != nil && strings.Contains(err.Error(), "Could not find node") {
		err = chromedp.Do(ctx, chromedp.Click(chromedp.CSS(selector)))
	}
	require.NoError(b.t, err)
}

func eval[T any](b *tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	require.NoError(b.t, err, expression)
	return value
}

// beforeEachPage makes the browser run a script in each page that it loads from now on, before the
// page's own scripts.
func (b *tab) beforeEachPage(script string) {
	b.t.Helper()
	command(b, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: script})
}

// until waits until a JavaScript expression is true in the page; while a page is being loaded, it
// is not.
func (b *tab) until(expression string) {
	b.t.Helper()
	b.await(expression, func() bool {
		ctx, cancel := context.WithTimeout(b.ctx, patience)
		defer cancel()
		holds, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+expression+")"))
		return err == nil && holds // an error: the page is changing
	})
}

func (b *tab) await(what string, holds func() bool) {
	b.t.Helper()
	expired := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-expired:
			require.FailNow(b.t, "it does not happen within "+patience.String(), what)
		}
	}
}

// report logs what the tab shows, for a test that has failed.
func (b *tab) report() {
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	page, err := chromedp.Run(ctx, chromedp.Evaluate[string](`location.href + "\n" + document.documentElement.innerText`))
	streams, frames := b.streamed()
	b.t.Logf("a tab shows: %s %v\n%d streams, %d positions, problems: %q", page, err, streams, frames, b.found())
}

// at waits until the tab shows the page at an address.
func (b *tab) at(address string) {
	b.t.Helper()
	b.until(fmt.Sprintf("location.href === %q && document.readyState === 'complete'", address))
}

// sees waits until an element is visible.
func (b *tab) sees(selector string) {
	b.t.Helper()
	b.until(fmt.Sprintf("document.querySelector(%q)?.checkVisibility()", selector))
}

// seesView waits until the waiting page shows this one of its views, such as "waiting" or
// "admitted".
func (b *tab) seesView(view string) {
	b.t.Helper()
	b.until(fmt.Sprintf("document.getElementById('room')?.dataset.view === %q", view))
}

// seesPlace waits until the waiting page shows this position and this length of the queue. Unless
// the visitor has no streams, it also waits until the page has received a position by its stream.
func (b *tab) seesPlace(position, total int) {
	b.t.Helper()
	b.seesView("waiting")
	b.await("a position by the stream", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.live || b.streamless
	})
	b.until(fmt.Sprintf("document.getElementById('position').textContent === '%d' && "+
		"document.getElementById('total').textContent === '%d' && document.getElementById('place').checkVisibility()",
		position, total))
}
