//go:build browser

package browser

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// task is what a person does with the console, from the overview on. It counts clicks and keys, but
// not what is typed into a field.
type task struct {
	*tab
	steps int
}

func (k *task) click(selector string) {
	k.t.Helper()
	k.steps++
	k.tab.click(selector)
}

func (k *task) press(key string) {
	k.t.Helper()
	k.steps++
	k.do(chromedp.KeyEvent(key))
}

// find types a text into the search field, and enters it.
func (k *task) find(text, then string) {
	k.t.Helper()
	k.press("/")
	k.until("document.activeElement.id === 'q'")
	k.do(chromedp.KeyEvent(text))
	k.press(kb.Enter)
	k.until("document.readyState === 'complete' && " + then)
}

const (
	mostSteps   = 6
	taskGroups  = 1000
	taskTenants = 20
)

// TestConsoleTasks: five tasks of operators, on a system with 1,000 groups of 20 tenants, take at
// most six clicks or keys each.
func TestConsoleTasks(t *testing.T) {
	t.Parallel()
	c := openConsole(t, map[string]string{"BULKACTION_WORKER_COUNT": "4", "BULKACTION_BACKPRESSURE_GLOBAL_RPS": "1000"})
	var submits errgroup.Group
	submits.SetLimit(8)
	for i := range taskGroups {
		submits.Go(func() error {
			_, err := c.api.Submit(t.Context(), client.Submission{
				ID: fmt.Sprintf("g-%04d", i), Seal: true, Tenant: fmt.Sprintf("tenant-%02d", i%taskTenants), Type: "NOOP",
				Name: fmt.Sprintf("Mailing %d", i), Jobs: jobs(2, func(int) string { return `{}` }),
			})
			return err
		})
	}
	require.NoError(t, submits.Wait())
	c.submit(client.Submission{
		ID: "spring", Seal: true, Tenant: "acme", Name: "Spring mailing", UniqueKeys: true,
		Jobs: jobs(50, func(i int) string {
			if i%10 == 7 {
				return `{"fail": "permanent", "fail_times": 1}`
			}
			return `{}`
		}),
	})
	c.wait("spring")

	do := func(name string, steps func(t *testing.T, k *task)) {
		t.Run(name, func(t *testing.T) {
			k := &task{tab: c.reader()}
			k.t = t
			c.open(k.tab, "/")
			steps(t, k)
			require.LessOrEqual(t, k.steps, mostSteps)
		})
	}
	do("why a recipient's job has failed, and run it again", func(t *testing.T, k *task) {
		k.find("Spring mailing", "location.pathname === '/ui/groups/spring'")
		k.find("user-17", "location.pathname === '/ui/groups/spring/jobs/17'")
		require.Contains(t, eval[string](k.tab, "document.querySelector('main').innerText"), "NOOP_PERMANENT")
		k.click("#do-retry")
		k.click("#confirm-yes")
		k.until("document.querySelector('#state .badge.done')")
		require.Equal(t, api.Counts{Accepted: 50, Done: 46, Failed: 4}, c.wait("spring").Counts)
	})
	do("whether all is well", func(t *testing.T, k *task) {
		k.until("document.querySelector('#missing .strip')")
		t.Log(eval[string](k.tab, "document.querySelector('#missing').innerText"))
	})
	do("download the failed jobs of a group", func(t *testing.T, k *task) {
		k.find("Spring mailing", "location.pathname === '/ui/groups/spring'")
		k.steps++ // the click on this link
		file := eval[string](k.tab, "document.querySelector('a[href$=\"failures.csv\"]').href")
		k.do(chromedp.Evaluate[chromedp.Void](fmt.Sprintf("fetch(%q).then((r) => r.text()).then((text) => { window.file = text; })", file)))
		k.until("window.file")
		text := eval[string](k.tab, "window.file")
		require.Contains(t, text, "user-27")
		require.NotContains(t, text, "user-17", "it is done now")
	})
	c.submit(client.Submission{ID: "noise", Seal: true, Tenant: "noisy", JobTimeout: time.Hour, Jobs: jobs(2000, func(int) string { return `{"sleep_ms": 600000}` })})
	c.submit(client.Submission{ID: "summer", Seal: true, Tenant: "acme", Jobs: jobs(20, func(int) string { return `{}` })})
	do("why acme is slow", func(t *testing.T, k *task) {
		k.find("acme", "location.pathname === '/ui/tenants/acme'")
		k.until("/busy/.test(document.querySelector('main').innerText)")
	})
	require.Eventually(t, func() bool { // watchers look for the busiest tenants each 20 s
		l, err := c.api.BusiestTenants(t.Context())
		return err == nil && slices.ContainsFunc(l.Tenants, func(x api.Tenant) bool { return x.ID == "noisy" })
	}, 2*patience, 100*time.Millisecond)
	do("stop the noisy tenant", func(t *testing.T, k *task) {
		k.reload("[...document.querySelectorAll('#busiest a')].some((a) => a.textContent === 'noisy')")
		k.click("#busiest a[href='/ui/tenants/noisy']")
		k.until("location.pathname === '/ui/tenants/noisy' && document.readyState === 'complete'")
		k.click("#do-pause")
		k.click("#confirm-yes")
		k.until("document.querySelector('#state .badge.paused')")
		tenant, err := c.api.Tenant(t.Context(), "noisy")
		require.NoError(t, err)
		require.True(t, tenant.Paused)
	})
}
