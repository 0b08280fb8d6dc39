//go:build browser

package browser

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

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
