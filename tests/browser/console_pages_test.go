//go:build browser

package browser

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// consolePages and filledPages are paths of the console, below /ui. The second list needs the data
// that fill creates.
var (
	consolePages = []string{
		"/", "/groups", "/groups?status=FAILED&tenant=nobody", "/tenants", "/dead-letters", "/rejected", "/submit", "/groups/none",
		"/?minutes=1440", "/tenants?sort=backlog", "/dead-letters?code=NOOP_PERMANENT", "/guards", "/rooms", "/rooms/demo",
		"/limits", "/limits?type=NOOP", "/workers", "/audit", "/activity", "/keys", "/operations",
		"/callbacks", "/callbacks?state=pending&tenant=acme",
	}
	filledPages = []string{
		"/groups/newsletter", "/groups/newsletter/failures", "/groups/newsletter/jobs/7", "/groups/newsletter/jobs/5", "/groups/refused",
		"/groups/refused/failures", "/groups/refused/jobs", "/groups/refused/jobs/0", "/groups/welcome", "/groups/reminder", "/groups/reminder/jobs/3",
		"/groups/empty", "/tenants/initech", "/tenants/acme?rps=20&weight=2&preview=1", "/guards/mail",
		"/tenants/globex",
	}
)

// violations is a JavaScript expression that runs axe-core, which the page must have loaded. Its
// value is a promise of the violations of WCAG 2.2 A and AA that axe-core finds.
const violations = `axe.run({
	runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa"], resultTypes: ["violations"],
}).then((r) => r.violations.flatMap((v) => v.nodes.map((n) => v.id + ": " + v.help + ": " + n.html.slice(0, 300) + " " +
	n.any.concat(n.all).map((c) => c.message).join("; "))))`

func axeScript(t *testing.T) string {
	t.Helper()
	script, err := os.ReadFile(*axeFile)
	require.NoError(t, err, "run `make browser`, which fetches axe-core")
	return string(script)
}

// isSound requires that axe-core finds nothing in light and dark colours, that the content fits
// windows of 360, 768 and 1280 px, that no script of the text hostile has run and main has no
// element of it, and that the page has fewer than 2000 DOM elements. axe is the source of axe-core.
func (b *tab) isSound(axe string) {
	b.t.Helper()
	where := eval[string](b, "location.pathname + location.search")
	eval[bool](b, axe+"; true")
	for _, scheme := range []string{"light", "dark"} {
		command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{
				{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
			},
		})
		require.Empty(b.t, b.violations(), "%s, %s", where, scheme)
	}
	for _, width := range []int64{360, 768, 1280} {
		b.do(chromedp.EmulateViewport(width, 900))
		require.Empty(b.t, eval[[]string](b, cut), "%s, at %d px", where, width)
	}
	require.False(b.t, eval[bool](b, "'hacked' in window"), where)
	require.Empty(b.t, eval[[]string](b, `[...document.querySelectorAll("main :is(script, img, iframe, style), main [style], main [onerror]")]
		.map((e) => e.outerHTML)`), where)
	require.Less(b.t, eval[int](b, "document.querySelectorAll('*').length"), 2000, where)
}

// violations runs axe-core in the page, and returns the violations that it finds. The page must
// have run the source of axe-core, and JavaScript must be on.
func (b *tab) violations() []string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	found, err := chromedp.Run(ctx, chromedp.Evaluate[[]string](violations, chromedp.EvalAwaitPromise))
	require.NoError(b.t, err)
	return found
}

// cut is a JavaScript expression. Its value is a list of strings: one that says that the page is
// wider than the window, and one for each element whose content its box cuts off.
const cut = `(() => {
	const found = [];
	const { scrollWidth, clientWidth } = document.documentElement;
	if (scrollWidth > clientWidth) {
		found.push("the page is " + scrollWidth + " px wide: " + [...document.body.querySelectorAll("*")]
			.filter((e) => e.getBoundingClientRect().right > clientWidth + 1 && !e.closest(".scroll, pre")).slice(0, 3)
			.map((e) => e.outerHTML.slice(0, 120)).join(" | "));
	}
	for (const e of document.querySelectorAll("main *, header *, footer *")) {
		const style = getComputedStyle(e);
		if (e.checkVisibility() && e.clientWidth > 1 && style.overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1) {
			found.push("cut: " + e.outerHTML.slice(0, 200));
		}
	}
	return found;
})()`

// TestConsolePages: isSound holds for consolePages without data and with the data of fill, and for
// filledPages; also for a dead callback, which is sent again, and the page with a tenant's secret.
// consolePages has each page that the navigation of the console links to.
func TestConsolePages(t *testing.T) {
	t.Parallel()
	axe := axeScript(t)
	c := openConsole(t, map[string]string{
		"BULKACTION_CALLBACK_MASTER_KEY_FILE": callbackKey(t), "BULKACTION_CALLBACK_ALLOW_HTTP": "true", "BULKACTION_CALLBACK_ALLOW_PRIVATE": "true",
	})
	b := c.reader()
	b.expect("404 (Not Found)")
	look := func(paths []string) {
		t.Helper()
		for _, path := range paths {
			c.open(b, path)
			missing := eval[bool](b, "document.querySelector('h1').textContent === 'Nothing here'")
			require.Equal(t, strings.HasSuffix(path, "/none"), missing, path)
			b.isSound(axe)
		}
	}
	look(consolePages)
	c.fill()
	look(consolePages)
	look(filledPages)
	c.deadCallback()
	look([]string{"/callbacks", "/tenants/globex", "/groups/told"})
	c.enableEndpoint()
	c.presses(b, "/callbacks", "#rows button[name=id]")
	c.open(b, "/tenants/globex")
	b.click("#do-secret")
	b.until("document.querySelector('#secret')?.textContent.startsWith('whsec_')")
	b.isSound(axe)
	look([]string{"/operations/" + c.dryRun(), "/operations"})

	c.open(b, "/tenants/initech")
	b.click("#terms summary")
	b.sees("#terms[open]")
	b.isSound(axe)
	c.open(b, "/groups")
	require.Contains(t, eval[string](b, "document.querySelector('main').innerText"), hostile)
	b.do(chromedp.EmulateViewport(360, 900))
	require.Positive(t, eval[int](b, "document.querySelectorAll('#rows td > .badge:first-child').length"))
	require.Empty(t, eval[[]string](b, `[...document.querySelectorAll("#rows td > .badge:first-child")]
		.filter((e) => e.getBoundingClientRect().right > e.closest(".scroll").getBoundingClientRect().right)
		.map((e) => e.textContent)`), "the status is seen on a phone without scrolling")
	c.open(b, "/groups/refused/jobs/0")
	require.Contains(t, eval[string](b, "document.querySelector('main').textContent"), "<script>hacked=1")

	c.open(b, "/")
	for _, path := range eval[[]string](b, "[...document.querySelectorAll('header nav a:not([href=\"/openapi.yaml\"])')].map((a) => a.pathname)") {
		require.Contains(t, consolePages, strings.TrimPrefix(path, "/ui"), "a page of the navigation is not tested")
	}
}

// TestConsoleMistakesAreFound puts three mistakes into a page. axe-core finds the image without a
// text and the pale text, and the expression cut finds the text that is 3000 px wide.
func TestConsoleMistakesAreFound(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	b := c.reader()
	c.open(b, "/")
	eval[bool](b, `document.querySelector("main").insertAdjacentHTML("beforeend", "<img id=bad><p id=pale>pale</p><p id=wide>wide</p>"); true`)
	eval[bool](b, `pale.style.color = "#ccc"; wide.style.width = "3000px"; true`)
	eval[bool](b, axeScript(t)+"; true")
	found := b.violations()
	require.Len(t, found, 2, "%q", found)
	require.Contains(t, strings.Join(found, "\n"), "image-alt: ")
	require.Contains(t, strings.Join(found, "\n"), "color-contrast: ")
	require.Contains(t, strings.Join(eval[[]string](b, cut), "\n"), "px wide: ")
}

// TestConsoleLiveRegionsKeepWhatReadersDo: a group that a reader has ticked in a live region is
// still ticked after new HTML has replaced the region, and a link that had the focus still has it.
// While a reader has selected text in the region, the region is not replaced.
func TestConsoleLiveRegionsKeepWhatReadersDo(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	group := client.Submission{ID: "one", Jobs: jobs(2, sleeps), JobTimeout: time.Hour}
	c.submit(group)
	b := c.reader()
	c.open(b, "/groups")
	b.click("#tick-one")
	eval[bool](b, "document.querySelector('#rows a[href=\"/ui/groups/one\"]').focus(), window.row = document.querySelector('#rows tr'), true")
	group.ID = "two"
	c.submit(group)
	b.sees("#tick-two")
	require.True(t, eval[bool](b, "!row.isConnected"), "the region was replaced")
	require.True(t, eval[bool](b, "document.getElementById('tick-one').checked"))
	require.False(t, eval[bool](b, "document.getElementById('tick-two').checked"))
	require.Equal(t, "/ui/groups/one", eval[string](b, "document.activeElement.getAttribute('href')"))
	require.Equal(t, "Ticked groups: 1", eval[string](b, "document.getElementById('ticked').textContent"))

	// A region with selected text is not replaced until nothing in it is selected.
	eval[bool](b, "getSelection().selectAllChildren(document.querySelector('#rows th[scope=row]')), true")
	_, err := c.api.Pause(t.Context(), "one")
	require.NoError(t, err)
	group.ID = "three"
	c.submit(group)
	other := c.reader()
	c.open(other, "/groups")
	other.sees("#tick-three")
	require.True(t, eval[bool](b, "document.getElementById('tick-three') === null"))
	require.NotEmpty(t, eval[string](b, "getSelection().toString()"))
	eval[bool](b, "getSelection().removeAllRanges(), true")
	b.sees("#tick-three")

	// HTML that waits for the end of a selection is dropped when the server sends what the region
	// already shows: otherwise the outdated HTML would stay.
	require.True(t, eval[bool](b, `(() => {
		stopFollowing();
		getSelection().selectAllChildren(document.querySelector("#rows th[scope=row]"));
		replace("rows", "out of date");
		const waits = pending.has("rows");
		replace("rows", shown.get("rows"));
		return waits && !pending.has("rows");
	})()`))
}

// TestConsoleRecoversFromAnOutage: while Redis is away, the page still shows its data, and says so.
// When Redis is back, the page is live again without being loaded again.
func TestConsoleRecoversFromAnOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.AOF)
	c := openConsoleOn(t, server.URL(), server.URL(), "t:", nil) // Redis users would not survive the restart
	c.submit(client.Submission{ID: "one", Jobs: jobs(2, sleeps), JobTimeout: time.Hour})
	b := c.reader()
	c.open(b, "/groups/one")
	b.sees("#do-pause")
	eval[bool](b, "window.same = true")

	server.Kill()
	b.sees("#away")
	require.Equal(t, "one", eval[string](b, "document.querySelector('h1 bdi').textContent"))
	require.Contains(t, eval[string](b, "document.getElementById('as-of').textContent"), "What you see is of ")
	b.isSound(axeScript(t))
	b.expect("503 (Service Unavailable)")
	other := c.reader() // a new page shows what a page has shown last
	other.expect("503 (Service Unavailable)")
	other.expect("404 (Not Found)")
	c.open(other, "/groups/one")
	other.sees("#away")
	require.Equal(t, "one", eval[string](other, "document.querySelector('h1 bdi').textContent"))
	c.open(other, "/groups/nothing-known")
	other.until("document.querySelector('[data-again]')")

	server.Restart()
	b.until("!document.getElementById('away').checkVisibility()")
	require.Eventually(t, func() bool {
		_, err := c.api.Pause(t.Context(), "one")
		return err == nil
	}, patience, 20*time.Millisecond)
	b.sees("#do-resume")
	require.True(t, eval[bool](b, "window.same === true"), "the page was loaded again")
	other.until("document.querySelector('h1').textContent.includes('Nothing here')") // by itself
}

// TestConsoleHiddenPagesHaveNoStream: the overview opens one event stream. When document.hidden
// becomes true, it has no stream and does not poll; when that becomes false, it opens another
// stream.
func TestConsoleHiddenPagesHaveNoStream(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	b := c.reader()
	c.open(b, "/")
	b.until("document.querySelector('#tiles dl')")
	b.await("a stream", func() bool { streams, _ := b.streamed(); return streams == 1 })
	hide := func(hidden bool) {
		eval[bool](b, `Object.defineProperty(document, "hidden", { value: `+map[bool]string{true: "true", false: "false"}[hidden]+`, configurable: true }),
			document.dispatchEvent(new Event("visibilitychange"))`)
	}
	hide(true)
	require.True(t, eval[bool](b, "stream === null && poll === null"))
	hide(false)
	b.await("a new stream", func() bool { streams, _ := b.streamed(); return streams == 2 })
}

// TestConsolePollsWithoutAStream: the page of a group, whose event stream always fails, fetches its
// HTML again from time to time. It shows that the group is paused, and then that it is cancelled.
func TestConsolePollsWithoutAStream(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	c.submit(client.Submission{ID: "one", Jobs: jobs(2, sleeps), JobTimeout: time.Hour})
	b := c.reader()
	b.expect("net::ERR_FAILED")
	b.beforeEachPage(`window.EventSource = class extends EventTarget {
		static CLOSED = 2;
		readyState = 2;
		constructor() { super(); setTimeout(() => this.dispatchEvent(new Event("error"))); }
		close() {}
	}`)
	c.open(b, "/groups/one")
	b.sees("#do-pause")
	_, err := c.api.Pause(t.Context(), "one")
	require.NoError(t, err)
	b.sees("#do-resume")
	_, err = c.api.Cancel(t.Context(), "one")
	require.NoError(t, err)
	b.status(api.StatusCancelled)
}

// presses opens a page of the console, presses a button, and waits for the page that says that the
// action was done.
func (c *console) presses(b *tab, path, button string) {
	c.t.Helper()
	c.open(b, path)
	b.click(button)
	b.until("document.readyState === 'complete' && document.querySelector('main .strip.good')")
}

// TestConsoleControlsTheSystem: without JavaScript, forms disable and enable an account of a pool,
// pause and resume an event of the waiting room, and create and revoke an API key.
func TestConsoleControlsTheSystem(t *testing.T) {
	t.Parallel()
	ctx, axe := t.Context(), axeScript(t)
	c, secret := locked(t)
	c.guards()
	b := c.noScripts(secret)

	state := func(member string) string {
		g, err := c.api.Guard(ctx, "pool/mail")
		require.NoError(t, err)
		for _, m := range g.Members {
			if m.ID == member {
				return m.State
			}
		}
		return "missing"
	}
	c.presses(b, "/guards/mail", "#disable-first")
	require.Equal(t, "off", state("first"))
	c.presses(b, "/guards/mail", "#enable-first")
	require.NotEqual(t, "off", state("first"))

	mode := func() string {
		e, err := c.api.RoomEvent(ctx, event)
		require.NoError(t, err)
		return e.Mode
	}
	c.presses(b, "/rooms/"+event, "#do-pause")
	require.Equal(t, "paused", mode())
	c.presses(b, "/rooms/"+event, "#do-resume")
	require.Equal(t, "open", mode())

	// The page after the form shows the secret of the new key. The pages /keys and /activity,
	// opened later, do not.
	c.open(b, "/keys")
	b.click("#new-key summary")
	b.do(chromedp.SetValue(chromedp.CSS("#role"), "reader"), chromedp.SetValue(chromedp.CSS("#name"), hostile[:40]))
	b.click("#new-key button")
	b.until("document.querySelector('main code')?.textContent.startsWith('bkr_')")
	created := eval[string](b, "document.querySelector('main code').textContent")
	c.knows(created)
	keys := func() (all []api.Key) {
		for key, err := range c.api.Keys(ctx) {
			require.NoError(t, err)
			all = append(all, key)
		}
		return all
	}
	require.Len(t, keys(), 2)
	require.Equal(t, hostile[:40], keys()[1].Name)
	c.open(b, "/keys")
	require.NotContains(t, eval[string](b, "document.documentElement.outerHTML"), created)
	c.presses(b, "/keys", "#revoke-"+keys()[1].ID)
	require.Len(t, keys(), 1)
	require.Eventually(t, func() bool {
		_, err := client.NewAPI(c.url, client.WithAPIKey(created)).Stats(ctx)
		return err != nil
	}, patience, 100*time.Millisecond)

	c.open(b, "/activity")
	log := eval[string](b, "document.querySelector('main').innerText")
	for _, want := range []string{"guard", "key", event} {
		require.Contains(t, log, want)
	}
	require.NotContains(t, log, created)

	looks := c.reader() // with JavaScript, which axe-core needs
	c.open(looks, "/keys")
	c.logIn(looks, secret)
	looks.sees("#new-key")
	looks.click("#new-key summary")
	looks.isSound(axe)
	c.open(looks, "/activity")
	looks.isSound(axe)
}
