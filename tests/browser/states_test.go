//go:build browser

package browser

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func TestPause(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	require.False(t, eval[bool](ben, "document.getElementById('paused').checkVisibility()"))
	_, err := r.api.PauseRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ben.sees("#paused")
	ann.click("#leave")
	ann.at(r.shop + "/")
	cat := r.buyer() // her page has the notice of the pause before its script runs
	cat.seesPlace(2, 2)
	cat.sees("#paused")
	ben.seesPlace(1, 2)
	_, err = r.api.ResumeRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ben.at(r.shop + "/buy")
	cat.seesPlace(1, 1)
	cat.until("!document.getElementById('paused').checkVisibility()")
}

func TestClosed(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	_, err := r.api.CloseRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ben.seesView("closed")
	ben.until("!document.getElementById('leave').checkVisibility()")
	ben.expect("409 (Conflict)")
	ben.visit(r.waitURL())
	ben.seesView("closed")
	require.Equal(t, "Closed · demo", eval[string](ben, "document.title"))
	streams, _ := ben.streamed()
	require.Equal(t, 1, streams)
}

func TestSoldOut(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{Stock: new(int64(1))})
	ann := r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	ann.click("#buy")
	ann.sees("#bought")
	ben.seesView("sold_out")
	ben.expect("410 (Gone)")
	ben.visit(r.shop + "/")
	ben.click("#enter")
	ben.seesView("sold_out")
	require.Equal(t, "Sold out", eval[string](ben, "document.getElementById('headline').textContent"))
}

func TestUnknownEvent(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.visitor()
	ann.expect("404 (Not Found)")
	ann.visit(r.broker + "/events/nothing/wait")
	ann.seesView("unknown_event")
	streams, _ := ann.streamed()
	require.Zero(t, streams)
}

func TestRemovedByAnOperator(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	removal, err := r.api.RemoveUser(t.Context(), event, ben.user())
	require.NoError(t, err)
	require.True(t, removal.Removed)
	ben.seesView("removed")
	cat.seesPlace(1, 1)
	ben.entersAgain()
	ben.click("#again")
	ben.seesPlace(2, 2)
}

// user returns the id that the room knows the visitor by.
func (b *tab) user() string {
	b.t.Helper()
	for _, c := range command(b, network.GetCookies, network.GetCookiesParams{}).Cookies {
		if c.Name == "broker" {
			require.True(b.t, c.HTTPOnly)
			id, _, _ := strings.Cut(c.Value, ".")
			return id
		}
	}
	require.FailNow(b.t, "the visitor has no cookie of the room")
	return ""
}

// TestTheTurnEnds: if the event has no return_url, the waiting page tells an admitted visitor that
// it is their turn, and later that the turn is over.
func TestTheTurnEnds(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ttl, leeway := api.Duration(2*time.Second), api.Duration(0)
	r.set(api.EventSettings{TokenTTL: &ttl, Leeway: &leeway})
	ann := r.visitor()
	ann.visit(r.waitURL())
	ann.seesView("admitted") // by the page itself
	require.Equal(t, "Go back to the shop.", eval[string](ann, "document.getElementById('detail').textContent"))
	require.False(t, eval[bool](ann, "document.getElementById('goon').checkVisibility()"))
	ann.seesView("gone")

	_, err := r.api.PauseRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ann.click("#again")
	ann.seesPlace(1, 1)
	_, err = r.api.ResumeRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ann.seesView("admitted") // by the stream
	require.Equal(t, "Go back to the shop.", eval[string](ann, "document.getElementById('detail').textContent"))
	ann.seesView("gone")
}

func TestKorean(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.visitor()
	command(ben, network.SetExtraHTTPHeaders, network.SetExtraHTTPHeadersParams{
		Headers: network.Headers{"Accept-Language": "ko-KR,ko;q=0.9,en;q=0.8"},
	})
	ben.visit(r.waitURL())
	ben.seesPlace(1, 1)
	require.Equal(t, "ko", eval[string](ben, "document.documentElement.lang"))
	require.Equal(t, "1 · 대기 중입니다 · demo", eval[string](ben, "document.title"))
	require.Contains(t, eval[string](ben, "document.body.innerText"), "전체 대기 인원")

	cat := r.buyer()
	cat.seesPlace(2, 2)
	cat.click("footer a")
	cat.at(r.waitURL() + "?lang=ko")
	cat.seesPlace(2, 2)
	require.Equal(t, "ko", eval[string](cat, "document.documentElement.lang"))
	ann.click("#leave")
	cat.seesPlace(1, 1)
	require.Equal(t, "대기 중입니다", eval[string](cat, "document.getElementById('headline').textContent"))
	cat.click("#leave button")
	cat.at(r.waitURL() + "?lang=ko&left=")
	require.Equal(t, "대기열에서 나왔습니다", eval[string](cat, "document.getElementById('headline').textContent"))
	cat.click("footer a")
	cat.until("document.documentElement.lang === 'en'")
	ben.at(r.shop + "/buy")
}

// faults is a JavaScript expression. Its value is the list of the page's faults that hinder users
// with a keyboard, a screen reader, a small screen or weak eyes. It checks some rules of WCAG 2.2,
// and that no id is used twice.
const faults = `(() => {
  const found = [];
  const check = (holds, fault) => { if (!holds) found.push(fault); };
  const all = (selector) => [...document.querySelectorAll(selector)];
  const visible = (e) => e.checkVisibility({ visibilityProperty: true });
  check(/^(en|ko)$/.test(document.documentElement.lang), "3.1.1: the language is " + document.documentElement.lang);
  check(document.title.trim(), "2.4.2: no title");
  check(all("h1").filter(visible).length === 1, "1.3.1: not one h1");
  check(all("main").length === 1, "1.3.1: not one main");
  const ids = all("[id]").map((e) => e.id);
  check(new Set(ids).size === ids.length, "an id is used twice");
  for (const e of all("a, button").filter(visible)) {
    check(e.innerText.trim(), "4.1.2: no name: " + e.outerHTML);
    const { width, height } = e.getBoundingClientRect();
    check(width >= 24 && height >= 24 || getComputedStyle(e).display === "inline", "2.5.8: small: " + e.outerHTML);
    check(e.tabIndex === 0, "2.1.1: no keyboard: " + e.outerHTML);
    check(e.tagName === "BUTTON" || e.getAttribute("href"), "2.1.1: a link to nowhere: " + e.outerHTML);
  }
  const zoom = document.querySelector("meta[name=viewport]")?.content ?? "";
  check(zoom && !/user-scalable|maximum-scale/.test(zoom), "1.4.4: viewport: " + zoom);
  const { scrollWidth, clientWidth } = document.documentElement;
  check(scrollWidth <= clientWidth, "1.4.10: the page is wider than the window");

  // 1.4.3: contrast of each text with the nearest opaque ground.
  const rgba = (c) => { const [r, g, b, a = 1] = c.match(/[\d.]+/g).map(Number); return { r, g, b, a }; };
  const luminance = ({ r, g, b }) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const groundOf = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c.a === 1) return c;
    }
    return dark ? { r: 18, g: 18, b: 18 } : { r: 255, g: 255, b: 255 }; // the browser's canvas
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !visible(e)) continue;
    const style = getComputedStyle(e);
    const [light, low] = [luminance(rgba(style.color)), luminance(groundOf(e))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
    const ratio = (light + 0.05) / (low + 0.05);
    check(ratio >= (large ? 3 : 4.5), "1.4.3: contrast " + ratio.toFixed(2) + ": " + walker.currentNode.data.trim());
  }
  return found;
})()`

// isAccessible is a helper of tests. It requires that the script faults finds nothing in light
// colours, in dark colours, and in dark colours in a window of 320 px by 640 px.
func (b *tab) isAccessible() {
	b.t.Helper()
	where := eval[string](b, "location.pathname + ' ' + document.querySelector('h1')?.innerText")
	for _, scheme := range []string{"light", "dark"} {
		command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		require.Empty(b.t, eval[[]string](b, faults), "%s, %s", where, scheme)
	}
	b.do(chromedp.EmulateViewport(320, 640))
	require.Empty(b.t, eval[[]string](b, faults), "%s, in a narrow window", where)
	b.do(chromedp.ResetViewport())
}

func TestAccessibility(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.visitor()
	ann.visit(r.shop + "/")
	ann.isAccessible()
	ann.click("#enter")
	ann.at(r.shop + "/buy")
	ann.isAccessible()
	ann.visit(r.waitURL())
	ann.seesView("admitted")
	ann.isAccessible()
	ann.visit(r.waitURL() + "?lang=ko")
	ann.isAccessible()

	ben := r.buyer()
	ben.seesPlace(1, 1)
	ben.isAccessible()
	require.Equal(t, "polite", eval[string](ben, "document.querySelector('[role=status]').ariaLive ?? 'polite'"))

	// By keyboard alone.
	for range 10 {
		ben.do(chromedp.KeyEvent(kb.Tab))
		if eval[bool](ben, "document.activeElement.matches('#leave button')") {
			break
		}
	}
	require.Equal(t, "solid", eval[string](ben, "getComputedStyle(document.activeElement).outlineStyle"), "2.4.7: the focus is visible")
	ben.do(chromedp.KeyEvent(kb.Enter))
	ben.seesView("left")
	ben.isAccessible()

	ann.visit(r.shop + "/buy")
	ann.click("#buy")
	ann.sees("#bought")
	ann.isAccessible()
	_, err := r.api.CloseRoomEvent(t.Context(), event)
	require.NoError(t, err)
	ben.expect("409 (Conflict)")
	ben.visit(r.waitURL())
	ben.seesView("closed")
	ben.isAccessible()
}

// withoutScripts returns a tab of a new visitor whose browser does not run JavaScript.
func (r *room) withoutScripts() *tab {
	r.t.Helper()
	b := r.visitor()
	b.runsNoScripts()
	return b
}

// runsNoScripts switches JavaScript off for the pages in the tab.
func (b *tab) runsNoScripts() {
	b.t.Helper()
	b.streamless = true
	command(b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
}

func TestWithoutJavaScript(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.withoutScripts()
	ben.visit(r.shop + "/")
	ben.click("#enter")
	ben.seesPlace(1, 1)
	cat := r.withoutScripts()
	cat.visit(r.shop + "/buy")
	cat.seesPlace(2, 2)
	ben.seesPlace(1, 2)
	ann.click("#buy")
	ann.sees("#bought")
	ben.at(r.shop + "/buy")
	cat.seesPlace(1, 1)
	cat.click("#leave button")
	cat.seesView("left")
	cat.click("#again")
	cat.seesPlace(1, 1)
	ben.click("#buy")
	ben.sees("#bought")
	cat.at(r.shop + "/buy")
	for _, b := range []*tab{ben, cat} {
		streams, _ := b.streamed()
		require.Zero(t, streams)
	}
}

// TestOtherSite: a link on another site leads to the waiting page, with and without JavaScript. A
// form of the other site can't leave the queue for its visitor: the visitor keeps the place.
func TestOtherSite(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	r.inside()
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!doctype html><title>Other</title><link rel="icon" href="data:,"><a id="enter" href=%q>Tickets</a>
			<form method="post" action=%q><button id="evil">Win</button></form>`,
			r.waitURL(), r.broker+"/events/"+event+"/ticket/leave?page")
	}))
	t.Cleanup(site.Close)
	other := strings.Replace(site.URL, "127.0.0.1", "localhost", 1) // another site for the browser
	for i, b := range []*tab{r.visitor(), r.withoutScripts()} {
		b.hosts = append(b.hosts, host(other))
		b.visit(other)
		b.click("#enter")
		b.seesPlace(i+1, i+1)
		b.visit(other)
		b.expect("403 (Forbidden)")
		b.expect("/favicon.ico") // of the page with the problem document
		b.click("#evil")
		b.until("location.href.includes('/ticket/leave')")
		b.visit(r.waitURL())
		b.seesPlace(i+1, i+1)
	}
}

// TestAnotherBroker: two visitors wait while their broker is killed, and later while the next one
// is stopped. Another broker behind the same address serves them, and they keep their places.
func TestAnotherBroker(t *testing.T) {
	t.Parallel()
	var broker atomic.Pointer[url.URL]
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite: func(q *httputil.ProxyRequest) {
			q.SetURL(broker.Load())
			q.Out.Host = q.In.Host
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	})
	t.Cleanup(proxy.Close)
	redisURL, prefix := shared(t)
	env := map[string]string{
		"BULKACTION_KEY_PREFIX": prefix, "BULKACTION_BROKER_PUBLIC_URL": proxy.URL, "BULKACTION_BROKER_DRAIN": "500ms",
		"BULKACTION_BROKER_TOKEN_KEYS_FILE": tokenKeys(t),
	}
	r := &room{t: t, broker: proxy.URL, process: startDev(t, env, "--redis-url", redisURL)}
	use := func() {
		broker.Store(&url.URL{Scheme: "http", Host: r.process.BrokerAddr()})
		r.api = client.NewAPI("http://" + r.process.APIAddr())
	}
	use()
	r.openShop(api.EventSettings{})
	second := startDev(t, env, "--redis-url", redisURL)

	r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	ben.seesPlace(1, 2)
	back := func(change func()) {
		t.Helper()
		type seen struct{ streams, frames int }
		before := map[*tab]seen{}
		for _, b := range []*tab{ben, cat} {
			b.expect("net::ERR_")
			streams, frames := b.streamed()
			before[b] = seen{streams, frames}
		}
		change()
		for b, was := range before {
			b.await("a position by a new stream", func() bool {
				streams, frames := b.streamed()
				return streams > was.streams && frames > was.frames
			})
		}
		ben.seesPlace(1, 2)
		cat.seesPlace(2, 2)
	}
	back(func() {
		first := r.process
		r.process = second
		use()
		first.Kill()
	})
	third := startDev(t, env, "--redis-url", redisURL)
	back(func() {
		r.process = third
		use()
		second.Signal(syscall.SIGTERM)
	})
	require.Zero(t, second.Wait(patience))

	_, err := r.api.Recalibrate(t.Context(), event, api.Recalibration{Capacity: new(int64(3))})
	require.NoError(t, err)
	ben.at(r.shop + "/buy")
	cat.at(r.shop + "/buy")
}
