//go:build browser

package browser

import (
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

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
