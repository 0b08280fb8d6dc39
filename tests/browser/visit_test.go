//go:build browser

package browser

import (
	"context"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
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
			setTimeout(() => {
				dead.onerror();
				setTimeout(() => { minute = 61000; }, 500);
			});
			return dead;
		};
		window.EventSource.CLOSED = Real.CLOSED;
		const now = Date.now;
		let minute = 0;
		Date.now = () => now() + minute;`)
	ben.visit(r.shop + "/buy")
	ben.seesPlace(1, 1)
	streams, _ := ben.streamed()
	require.Positive(t, streams)
}

const (
	// event is the id of the event that `dev --rooms` creates.
	event = "demo"
	// patience is the longest time to wait for what must happen.
	patience = 30 * time.Second
)

// room is a waiting room, and the shop behind it.
type room struct {
	t            *testing.T
	broker, shop string // addresses, without a slash at their ends
	api          *client.API
	process      *proctest.Process
}

// open starts a process with a waiting room, and the shop, on free ports. The event gets these
// settings, and the shop's address as return_url.
func open(t *testing.T, s api.EventSettings) *room {
	t.Helper()
	url, prefix := shared(t)
	return openOn(t, s, map[string]string{"BULKACTION_KEY_PREFIX": prefix}, "--redis-url", url)
}

// openOn starts `bulkaction dev --rooms` with these environment variables and flags, and the shop.
// Without the flag --redis-url the Redis is the embedded one.
func openOn(t *testing.T, s api.EventSettings, env map[string]string, flags ...string) *room {
	t.Helper()
	r := &room{t: t, process: startDev(t, env, flags...)}
	r.broker, r.api = "http://"+r.process.BrokerAddr(), client.NewAPI("http://"+r.process.APIAddr())
	r.openShop(s)
	t.Cleanup(func() {
		if t.Failed() {
			shown, err := r.api.RoomEvent(context.WithoutCancel(t.Context()), event)
			t.Logf("the event: %s %v", text(shown), err)
		}
	})
	return r
}

// shared returns the URL of a Redis that all tests share, with a Redis user that may do what all
// roles need, and a key prefix that only this test uses.
func shared(t *testing.T) (url, prefix string) {
	t.Helper()
	url, prefix = redistest.Shared(t)
	return proctest.AddUser(t, url, acl.All, prefix, nil), prefix
}

func startDev(t *testing.T, env map[string]string, flags ...string) *proctest.Process {
	all := map[string]string{
		"BULKACTION_BROKER_ADDR": "127.0.0.1:0", "BULKACTION_BROKER_ENTER_RATE_PER_IP": "1000",
		"BULKACTION_BROKER_TOKEN_KEYS_FILE": tokenKeys(t),
	}
	maps.Copy(all, env)
	p := proctest.Start(t, "bulkaction", all, append([]string{"dev", "--rooms"}, flags...)...)
	p.WaitReady()
	return p
}

func tokenKeys(t *testing.T) (path string) {
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path = filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

var shopAddress = regexp.MustCompile(`the shop is at (http://127\.0\.0\.1:\d+)/`)

// openShop starts the shop. The event gets these settings, and the shop's address as return_url.
func (r *room) openShop(s api.EventSettings) {
	r.t.Helper()
	shop := proctest.Start(r.t, "protected-shop", nil,
		"-addr", "127.0.0.1:0", "-broker", r.broker, "-api", "http://"+r.process.APIAddr(), "-event", event)
	require.Eventually(r.t, func() bool {
		found := shopAddress.FindStringSubmatch(shop.Stdout())
		if found != nil {
			r.shop = found[1]
		}
		return found != nil
	}, patience, 5*time.Millisecond)
	s.ReturnURL = r.shop + "/buy"
	r.set(s)
}

// set replaces the settings of the event. A capacity that is not set becomes 1.
func (r *room) set(s api.EventSettings) {
	r.t.Helper()
	if s.Capacity == nil {
		s.Capacity = new(int64(1))
	}
	_, err := r.api.SetRoomEvent(r.t.Context(), event, s, 0)
	require.NoError(r.t, err)
}

// waitURL is the address of the waiting page.
func (r *room) waitURL() string { return r.broker + "/events/" + event + "/wait" }

// crowd lets n new visitors enter the queue, each by one request. They neither poll nor open a
// stream.
func (r *room) crowd(n int) {
	r.t.Helper()
	for range n {
		q, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.broker+"/events/"+event+"/ticket", nil)
		require.NoError(r.t, err)
		a, err := http.DefaultClient.Do(q)
		require.NoError(r.t, err)
		require.NoError(r.t, a.Body.Close())
		require.Equal(r.t, http.StatusCreated, a.StatusCode)
	}
}
