//go:build browser

package browser

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// consolePages and filledPages are paths of the console, below /ui. The second list needs the data
// that fill creates.
var (
	consolePages = []string{
		"/", "/groups", "/groups?status=FAILED&tenant=nobody", "/tenants", "/dead-letters", "/rejected", "/submit", "/groups/none",
		"/?minutes=1440", "/tenants?sort=backlog", "/dead-letters?code=NOOP_PERMANENT", "/guards", "/rooms", "/rooms/demo",
		"/workers", "/audit", "/activity", "/keys",
	}
	filledPages = []string{
		"/groups/newsletter", "/groups/newsletter/failures", "/groups/newsletter/jobs/7", "/groups/newsletter/jobs/5", "/groups/refused",
		"/groups/refused/failures", "/groups/refused/jobs/0", "/groups/welcome", "/groups/reminder", "/groups/reminder/jobs/3",
		"/groups/empty", "/tenants/initech", "/tenants/acme?rps=20&weight=2&preview=1", "/guards/mail",
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
// filledPages. consolePages has each page that the navigation of the console links to.
func TestConsolePages(t *testing.T) {
	t.Parallel()
	axe := axeScript(t)
	c := openConsole(t, nil)
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
