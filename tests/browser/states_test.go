//go:build browser

package browser

import (
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
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
