//go:build browser

package browser

import (
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
