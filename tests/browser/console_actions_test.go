//go:build browser

package browser

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// confirm presses a button of the console, requires that the text with which the page asks contains
// question, and answers yes.
func (b *tab) confirm(selector, question string) {
	b.t.Helper()
	b.click(selector)
	b.sees("#confirm[open]")
	require.Contains(b.t, eval[string](b, "document.getElementById('confirm-text').textContent"), question)
	b.click("#confirm-yes")
}

// status waits until the open page of a group shows this status, without being loaded again.
func (b *tab) status(status api.Status) {
	b.t.Helper()
	eval[bool](b, "window.same = true")
	b.sees("#state .badge." + strings.ToLower(string(status)))
	require.True(b.t, eval[bool](b, "window.same === true"), "the page was loaded again")
}

// TestConsoleFirstLook does what a new user does: submit a file of three jobs, watch the group, see
// why one job has failed, and retry it. Then no job is failed.
func TestConsoleFirstLook(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	b := c.reader()
	c.open(b, "/")
	b.click("main a[href='/ui/submit']")
	b.sees("#file")
	file := filepath.Join(t.TempDir(), "jobs.csv")
	require.NoError(t, os.WriteFile(file, []byte("fail,fail_times,sleep_ms\n,0,0\npermanent,1,0\n,0,100\n"), 0o600))
	b.do(chromedp.SendKeys(chromedp.CSS("#type"), "NOOP"))
	b.click("#csv-options summary")
	b.do(chromedp.SendKeys(chromedp.CSS("#column-types"), "fail_times:number,sleep_ms:number"))
	b.do(chromedp.SetUploadFiles(chromedp.CSS("#file"), []string{file}))
	b.click("main form button.primary")
	b.until("/^.ui.groups.[^/]+$/.test(location.pathname)")
	b.status(api.StatusCompleted)
	b.until("document.getElementById('state').textContent.includes('with 1 failed job.')")

	b.click("#failures a[href$='/failures']")
	b.until("document.querySelector('h1').textContent.startsWith('Failures of') && document.body.innerText.includes('NOOP_PERMANENT')")
	b.click("main tbody a[href$='/jobs/1']")
	b.until("document.querySelector('h1').textContent === 'Job 1'")
	require.Contains(t, eval[string](b, "document.querySelector('main').innerText"), "the payload asked for this failure")
	b.click(".crumbs a:nth-child(2)")
	b.confirm("#do-retry", "Run 1 failed job of ")
	b.until("document.getElementById('steps')?.textContent.includes('Round 2')")
	b.status(api.StatusCompleted)
	b.until("!document.getElementById('state').textContent.includes('failed job')")
}

// tabTo presses the Tab key, at most 80 times, until the element has the focus. It requires that
// the focus is visible.
func (b *tab) tabTo(selector string) {
	b.t.Helper()
	for range 80 {
		b.do(chromedp.KeyEvent(kb.Tab))
		if eval[bool](b, fmt.Sprintf("document.activeElement.matches(%q)", selector)) {
			require.NotEqual(b.t, "none", eval[string](b, "getComputedStyle(document.activeElement).outlineStyle"), "2.4.7: the focus is visible")
			return
		}
	}
	require.FailNow(b.t, "the Tab key does not reach "+selector)
}

func TestConsoleByKeyboard(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	c.submit(client.Submission{ID: "slow", Seal: true, JobTimeout: time.Hour, Jobs: jobs(20, sleeps)})
	b := c.reader()
	c.open(b, "/")
	b.tabTo(".skip")
	b.do(chromedp.KeyEvent(kb.Enter))
	require.Equal(t, "main", eval[string](b, "document.activeElement.id"), "2.4.1: the link skips the navigation")
	c.open(b, "/")
	b.do(chromedp.KeyEvent("/"))
	b.until("document.activeElement.id === 'q'")
	b.do(chromedp.KeyEvent("sl"))
	b.sees("#suggested:not([hidden]) a[href='/ui/groups/slow']")
	b.do(chromedp.KeyEvent(kb.ArrowDown))
	require.Equal(t, "/ui/groups/slow", eval[string](b, "document.activeElement.pathname"))
	b.do(chromedp.KeyEvent(kb.Escape))
	require.True(t, eval[bool](b, "document.activeElement.id === 'q' && document.getElementById('suggested').hidden"))
	c.open(b, "/")
	b.tabTo("nav a[href='/ui/groups']")
	b.do(chromedp.KeyEvent(kb.Enter))
	b.until("location.pathname === '/ui/groups' && document.readyState === 'complete'")
	b.tabTo("a[href='/ui/groups/slow']")
	b.do(chromedp.KeyEvent(kb.Enter))
	b.status(api.StatusRunning)

	b.tabTo("#do-cancel")
	b.do(chromedp.KeyEvent(kb.Enter))
	b.sees("#confirm[open]")
	require.Equal(t, "no", eval[string](b, "document.activeElement.value"), "the focus is on the harmless answer")
	b.do(chromedp.KeyEvent(kb.Escape))
	b.until("!document.getElementById('confirm').open && document.activeElement.id === 'do-cancel'")
	b.do(chromedp.KeyEvent(kb.Enter))
	b.sees("#confirm[open]")
	require.Contains(t, eval[string](b, "document.getElementById('confirm-text').textContent"), "Cancel 20 jobs of slow.")
	b.tabTo("#confirm-yes")
	b.do(chromedp.KeyEvent(kb.Enter))
	b.until("location.search.includes('done=') && document.readyState === 'complete'")
	b.status(api.StatusCancelled)
	require.Equal(t, api.StatusCancelled, c.wait("slow").Status)
}

// TestConsoleBulkActions ticks two of three groups and cancels the ticked ones with one button.
// These two are CANCELLED, and the third has not ended.
func TestConsoleBulkActions(t *testing.T) {
	t.Parallel()
	c := openConsole(t, nil)
	for _, id := range []string{"one", "two", "three"} {
		c.submit(client.Submission{ID: id, JobTimeout: time.Hour, Jobs: jobs(2, sleeps)})
	}
	b := c.reader()
	c.open(b, "/groups")
	b.click("#tick-one")
	b.click("#tick-three")
	b.until("document.getElementById('ticked').textContent === 'Ticked groups: 2'")
	b.confirm("#bulk button[value=cancel]", "Cancel all unfinished jobs of 2 groups.")
	b.until("document.querySelector('main .strip.good')")
	require.Equal(t, api.StatusCancelled, c.wait("one").Status)
	require.Equal(t, api.StatusCancelled, c.wait("three").Status)
	g, err := c.api.Group(t.Context(), "two")
	require.NoError(t, err)
	require.False(t, g.Status.Ended())
}

// locked starts a console that asks for API keys, and returns the token of a key with the role
// admin.
func locked(t *testing.T) (c *console, secret string) {
	t.Helper()
	c = openConsole(t, map[string]string{"BULKACTION_AUTH": "keys"})
	p := proctest.Start(t, "bulkaction", map[string]string{"BULKACTION_KEY_PREFIX": c.prefix},
		"key", "create", "--role", "admin", "--name", "test", "--json", "--redis-url", "redis://"+c.rdb.Options().Addr)
	require.Zero(t, p.Wait(patience), p.Output())
	var key api.NewKey
	require.NoError(t, json.Unmarshal([]byte(p.Stdout()), &key))
	c.api = client.NewAPI(c.url, client.WithAPIKey(key.Secret))
	c.knows(key.Secret)
	return c, key.Secret
}

// knows waits until the process accepts a new API key, which takes up to a second.
func (c *console) knows(secret string) {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		_, err := client.NewAPI(c.url, client.WithAPIKey(secret)).Stats(c.t.Context())
		return err == nil
	}, patience, 20*time.Millisecond)
}

func (c *console) logIn(b *tab, secret string) {
	c.t.Helper()
	b.do(chromedp.SendKeys(chromedp.CSS("#key"), secret))
	b.click("main form button")
}

func TestConsoleLogin(t *testing.T) {
	t.Parallel()
	c, secret := locked(t)
	axe := axeScript(t)
	b := c.reader()
	c.open(b, "/groups?status=FAILED")
	b.sees("#key")
	b.isSound(axe)
	b.expect("401 (Unauthorized)")
	c.logIn(b, "not a key")
	b.sees("#login-problem")
	b.isSound(axe)
	c.logIn(b, secret)
	b.until("location.pathname + location.search === '/ui/groups?status=FAILED'")

	c.open(b, "/submit")
	b.do(chromedp.SendKeys(chromedp.CSS("#type"), "NOOP"), chromedp.SetValue(chromedp.CSS("#jobs"), "hello"))
	b.expect("422 (Unprocessable Entity)")
	b.click("main form button.primary")
	b.sees("#refused")
	b.isSound(axe)
	c.open(b, "/groups?status=FAILED")
	b.expect("DocumentCookie") // Chromium warns of the next line
	require.NotContains(t, eval[string](b, "document.cookie"), "bulkaction", "scripts can't read the session")
	b.click(".who button")
	b.sees("#key")
	c.open(b, "/")
	b.sees("#key")

	// A revoked key ends the session of an open page.
	reader, err := c.api.CreateKey(t.Context(), api.KeyRequest{Role: "reader"})
	require.NoError(t, err)
	c.knows(reader.Secret)
	c.logIn(b, reader.Secret)
	b.until("document.querySelector('h1').textContent === 'Overview'")
	c.open(b, "/submit")
	b.expect("403 (Forbidden)")
	b.until("document.querySelector('h1').textContent !== 'Submit' && !document.querySelector('form[action=\"/ui/submit\"]')")
	b.isSound(axe)
	c.open(b, "/groups")
	b.expect("ERR_INCOMPLETE_CHUNKED_ENCODING") // the stream is cut off, so that no client can hold it
	_, err = c.api.RevokeKey(t.Context(), reader.ID)
	require.NoError(t, err)
	b.sees("#key")
}

// noScripts opens a tab that runs no JavaScript, and logs in.
func (c *console) noScripts(secret string) *tab {
	c.t.Helper()
	b := c.reader()
	b.runsNoScripts()
	c.open(b, "/")
	c.logIn(b, secret)
	b.until("document.querySelector('h1')?.textContent === 'Overview'")
	return b
}

// reload loads the current page again and again until a JavaScript expression is true in it.
func (b *tab) reload(expression string) {
	b.t.Helper()
	b.await(expression, func() bool {
		b.do(chromedp.Reload())
		return eval[bool](b, "!!("+expression+")")
	})
}

// TestConsoleWithoutJavaScript: without JavaScript, forms submit, retry, pause, resume, seal and
// cancel a group, pause, resume and change a tenant, pause and resume a type, choose the dark theme
// and log out. The dead letters show a payload.
func TestConsoleWithoutJavaScript(t *testing.T) {
	t.Parallel()
	c, secret := locked(t)
	b := c.noScripts(secret)
	c.open(b, "/submit")
	b.do(chromedp.SendKeys(chromedp.CSS("#type"), "NOOP"), chromedp.SendKeys(chromedp.CSS("#tenant"), "acme"))
	b.do(chromedp.SetValue(chromedp.CSS("#jobs"), "hello"))
	b.expect("422 (Unprocessable Entity)")
	b.click("main form button.primary")
	b.until("document.readyState === 'complete' && document.querySelector('#refused')") // with what was typed
	require.Equal(t, "NOOP acme hello", eval[string](b, "['type', 'tenant', 'jobs'].map((id) => document.getElementById(id).value).join(' ')"))
	b.do(chromedp.SetValue(chromedp.CSS("#jobs"), `{"payload": {"fail": "permanent"}}`+"\n"+`{"payload": {"fail": "permanent", "fail_times": 1}}`))
	b.click("main form button.primary")
	b.until("/^.ui.groups.[^/]+$/.test(location.pathname)")
	b.reload("document.querySelector('#state .badge.failed')")
	id := eval[string](b, "location.pathname.split('/').pop()")
	c.open(b, "/groups/"+id) // without the notice of the submission
	b.click("#do-retry")
	b.until("document.querySelector('main .strip.good')")
	b.reload("document.querySelector('#state .badge.completed')")
	require.Equal(t, api.Counts{Accepted: 2, Done: 1, Failed: 1}, c.wait(id).Counts)

	c.submit(client.Submission{ID: "slow", Tenant: "acme", JobTimeout: time.Hour, Jobs: jobs(3, sleeps)})
	done := func(path, button string, holds func() bool) {
		t.Helper()
		c.open(b, path)
		b.click(button)
		b.until("document.readyState === 'complete' && document.querySelector('main > .strip.good')")
		require.Eventually(t, holds, patience, 20*time.Millisecond, "%s %s", path, button)
	}
	group := func(holds func(g api.Group) bool) func() bool {
		return func() bool {
			g, err := c.api.Group(t.Context(), "slow")
			return err == nil && holds(g)
		}
	}
	done("/groups/slow", "#do-pause", group(func(g api.Group) bool { return g.Paused }))
	done("/groups/slow", "#do-resume", group(func(g api.Group) bool { return !g.Paused }))
	done("/groups/slow", "#do-seal", group(func(g api.Group) bool { return g.Sealed }))
	tenant := func(holds func(x api.Tenant) bool) func() bool {
		return func() bool {
			x, err := c.api.Tenant(t.Context(), "acme")
			return err == nil && holds(x)
		}
	}
	done("/tenants/acme", "#do-pause", tenant(func(x api.Tenant) bool { return x.Paused }))
	done("/tenants/acme", "#do-resume", tenant(func(x api.Tenant) bool { return !x.Paused }))
	c.open(b, "/tenants/acme")
	b.do(chromedp.SetValue(chromedp.CSS("#rps"), "25"), chromedp.SetValue(chromedp.CSS("#weight"), "3"))
	b.click("#do-change")
	b.until("document.querySelector('main .strip.good')")
	require.True(t, tenant(func(x api.Tenant) bool { return x.RPS != nil && *x.RPS == 25 && x.Weight == 3 })())
	paused := func(want bool) func() bool {
		return func() bool {
			s, err := c.api.Stats(t.Context())
			require.NoError(t, err)
			for _, x := range s.Types {
				if x.Type == "NOOP" {
					return x.Paused == want
				}
			}
			return false
		}
	}
	done("/", "#type-NOOP", paused(true))
	done("/", "#type-NOOP", paused(false))
	c.open(b, "/groups?prefix=slow")
	b.click("#tick-slow")
	b.click("#bulk button[value=cancel]")
	b.until("document.querySelector('main .strip.good')")
	require.Equal(t, api.StatusCancelled, c.wait("slow").Status)

	require.Equal(t, "system", eval[string](b, "document.documentElement.dataset.theme"))
	b.click(".themes button[value=dark]")
	b.until("document.documentElement.dataset.theme === 'dark' && location.pathname === '/ui/groups'")
	c.open(b, "/dead-letters")
	b.sees("main table")
	b.click("main details[id^=payload] summary")
	b.until("document.querySelector('main details[open] pre').innerText.includes('permanent')")
	b.click(".who button")
	b.sees("#key")
}
