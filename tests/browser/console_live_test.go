//go:build browser

package browser

import (
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
	b.do(chromedp.Focus(chromedp.CSS("#rows a[href='/ui/groups/one']")))
	eval[bool](b, "window.row = document.querySelector('#rows tr'), true")
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
