//go:build browser

package browser

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// buyer returns the tab of a new visitor who has opened the shop's first page and clicked "enter".
func (r *room) buyer() *tab {
	r.t.Helper()
	b := r.visitor()
	b.visit(r.shop + "/")
	b.click("#enter")
	return b
}

// inside returns the tab of a new visitor, when the visitor has a slot and sees the shop's page.
func (r *room) inside() *tab {
	r.t.Helper()
	b := r.buyer()
	b.at(r.shop + "/buy")
	return b
}

// TestTheWayThroughTheRoom: with one slot and the embedded Redis, two visitors wait while the first
// renews the entry and buys. The second leaves, and the third buys. Then no slot is used and nobody
// waits.
func TestTheWayThroughTheRoom(t *testing.T) {
	t.Parallel()
	r := openOn(t, api.EventSettings{}, nil)
	ann := r.inside()
	ann.sees("#buy")
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	ben.seesPlace(1, 2)
	require.Equal(t, "1 · You are in the queue · demo", eval[string](ben, "document.title"))

	before := eval[string](ann, "document.getElementById('until').dateTime")
	_, err := chromedp.RunResponse(ann.ctx, chromedp.Click(chromedp.CSS("#renew")))
	require.NoError(t, err)
	ann.at(r.shop + "/buy")
	require.GreaterOrEqual(t, eval[string](ann, "document.getElementById('until').dateTime"), before)
	ann.click("#buy")
	ann.sees("#bought")

	ben.at(r.shop + "/buy")
	cat.seesPlace(1, 1)
	ben.click("#leave")
	ben.at(r.shop + "/")
	cat.at(r.shop + "/buy")
	cat.click("#buy")
	cat.sees("#bought")

	shown, err := r.api.RoomEvent(t.Context(), event)
	require.NoError(t, err)
	require.Zero(t, shown.Slots.Used)
	require.Zero(t, shown.Waiting+shown.Away)
}

func TestNewerTabReplacesTheOlder(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	older := r.buyer()
	older.seesPlace(1, 1)
	newer := r.newTab(older)
	newer.visit(r.waitURL())
	newer.seesPlace(1, 1)
	older.seesView("replaced")
	older.sees("#again")

	// The tab that was replaced takes the place back when its user asks for it. The newer tab does
	// not take it again by itself.
	older.click("#again")
	older.seesPlace(1, 1)
	newer.seesView("replaced")
	r.buyer().seesPlace(2, 2)
	older.seesPlace(1, 2)
	streams, _ := newer.streamed()
	require.Equal(t, 1, streams, "a tab that was replaced must not connect again")

	ann.click("#leave")
	older.at(r.shop + "/buy")
}

func TestReloadKeepsThePlace(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	for range 3 {
		ben.do(chromedp.Reload())
		ben.seesPlace(1, 2)
	}
	ben.visit("about:blank") // closed
	ben.visit(r.waitURL())
	ben.seesPlace(1, 2)
	cat.seesPlace(2, 2)
}

func TestLeaveAndQueueAgain(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	ben.click("#leave button")
	ben.at(r.waitURL() + "?left=")
	ben.seesView("left")
	cat.seesPlace(1, 1)
	ben.entersAgain()
	ben.click("#again")
	ben.seesPlace(2, 2)
	ann.click("#buy")
	cat.at(r.shop + "/buy")
	ben.seesPlace(1, 1)
}

// TestBackFromTheShop: an admitted visitor opens the waiting page, or goes back to it from the
// shop. The page does not send the visitor to the shop by itself. It shows the view admitted, in
// which the visitor can choose to go on to the shop or to leave.
func TestBackFromTheShop(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	ann.click("#leave")
	ben.at(r.shop + "/buy")
	ben.do(chromedp.NavigateBack())
	ben.at(r.shop + "/")
	ben.visit(r.waitURL())
	ben.seesView("admitted")
	ben.click("#goon")
	ben.at(r.shop + "/buy")
	ben.do(chromedp.NavigateBack())
	ben.seesView("admitted")
	ben.click("#leave button")
	ben.seesView("left")
	ben.visit(r.shop + "/")
	ben.click("#enter")
	ben.at(r.shop + "/buy")
}

func TestWithoutEventSource(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	ann := r.inside()
	ben := r.visitor()
	ben.streamless = true
	ben.beforeEachPage("delete window.EventSource")
	ben.visit(r.shop + "/buy")
	ben.seesPlace(1, 1)
	r.buyer().seesPlace(2, 2)
	ben.seesPlace(1, 2)
	ann.click("#leave")
	ben.at(r.shop + "/buy")
	streams, _ := ben.streamed()
	require.Zero(t, streams)
}

// TestStreamIsTriedAgain: the first event stream of a page fails, as with a proxy that refuses it.
// When the page's clock has jumped ahead by a minute, the page opens a stream and gets positions.
func TestStreamIsTriedAgain(t *testing.T) {
	t.Parallel()
	r := open(t, api.EventSettings{})
	r.inside()
	ben := r.visitor()
	ben.beforeEachPage(`
		const Real = EventSource;
		let refused = false;
		window.EventSource = function (url) {
			if (refused) return new Real(url);
			refused = true;
			const dead = {readyState: Real.CLOSED, addEventListener() {}, close() {}};
			setTimeout(() => dead.onerror());
			return dead;
		};
		window.EventSource.CLOSED = Real.CLOSED;
		const now = Date.now;
		let minute = 0;
		Date.now = () => now() + minute;
		setTimeout(() => { minute = 61000; }, 500);`)
	ben.visit(r.shop + "/buy")
	ben.seesPlace(1, 1)
	streams, _ := ben.streamed()
	require.Positive(t, streams)
}
