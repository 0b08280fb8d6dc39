//go:build browser

package browser

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// hostile is a text with HTML and scripts, which tests use as a name, a key, a payload and an
// error. Pages must show it as text.
const hostile = "\"><script>hacked=1</script><img src=x onerror=hacked=1>{{.}} javascript:hacked=1 \u202e'`"

// console is a running process with all roles, the waiting room and the web console, which the
// tests open in a browser.
type console struct {
	t       *testing.T
	url     string // without a slash at its end
	process *proctest.Process
	api     *client.API
	rdb     *redis.Client // with all rights
	prefix  string        // of the keys in Redis
	env     map[string]string
}

// openConsole starts a console process with these environment variables, on the Redis that tests
// share.
func openConsole(t *testing.T, env map[string]string) *console {
	t.Helper()
	url, prefix := redistest.Shared(t)
	return openConsoleOn(t, url, proctest.AddUser(t, url, acl.All, prefix, nil), prefix, env)
}

// openConsoleOn starts a console process on a Redis. The test itself connects with url, the process
// with processURL.
func openConsoleOn(t *testing.T, url, processURL, prefix string, env map[string]string) *console {
	t.Helper()
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := &console{t: t, rdb: redis.NewClient(o), prefix: prefix, env: map[string]string{
		"BULKACTION_KEY_PREFIX": prefix, "BULKACTION_WORKER_TYPES": "NOOP,HTTP", "BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE": "true",
	}}
	t.Cleanup(func() { require.NoError(t, c.rdb.Close()) })
	for name, value := range env {
		c.env[name] = value
	}
	c.process = startDev(t, c.env, "--redis-url", processURL)
	c.url = "http://" + c.process.APIAddr()
	c.api = client.NewAPI(c.url)
	return c
}

// reader opens a tab in a new profile.
func (c *console) reader() *tab {
	c.t.Helper()
	return openTab(chromium, c.t, []string{host(c.url)}, chromedp.WithNewBrowserContext())
}

// open visits a page of the console, such as "/groups", and waits until it is loaded.
func (c *console) open(b *tab, path string) {
	c.t.Helper()
	b.visit(c.url + "/ui" + path)
	b.until("document.readyState === 'complete' && document.querySelector('main h1')")
}

// submit creates a group. Its type is NOOP if g has none.
func (c *console) submit(g client.Submission) {
	c.t.Helper()
	if g.Type == "" {
		g.Type = "NOOP"
	}
	_, err := c.api.Submit(c.t.Context(), g)
	require.NoError(c.t, err)
}

// wait waits until a group has ended.
func (c *console) wait(group string) api.Group {
	c.t.Helper()
	g, err := c.api.Wait(c.t.Context(), group)
	require.NoError(c.t, err)
	return g
}

func jobs(n int, payload func(i int) string) []client.NewJob {
	all := make([]client.NewJob, n)
	for i := range all {
		all[i] = client.NewJob{Payload: json.RawMessage(payload(i)), Key: fmt.Sprintf("user-%d", i)}
	}
	return all
}

// sleeps returns the payload of a job that runs longer than the test, if its timeout is long.
func sleeps(int) string { return `{"sleep_ms": 3600000}` }

// fill creates data for the pages of the console: groups that run, are paused, empty, completed or
// failed, with hostile texts; also tenants, a paused type, a rejected message and a pool.
func (c *console) fill() {
	c.t.Helper()
	ctx := c.t.Context()
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, hostile, http.StatusBadRequest)
	}))
	c.t.Cleanup(refuses.Close)

	quoted, err := json.Marshal(hostile)
	require.NoError(c.t, err)
	c.submit(client.Submission{
		ID: "newsletter", Tenant: "acme", Name: hostile, Seal: true,
		Aggregate: []client.Aggregate{
			{As: "cost", Op: "sum", Field: "data.cost"}, {As: "took", Op: "distribution", Field: "duration_ms"},
			{As: "country", Op: "count_by", Field: "data.country"},
		},
		Jobs: jobs(400, func(i int) string {
			switch {
			case i%40 == 7:
				return `{"fail": "permanent"}`
			case i%5 == 0:
				return `{"result": {"cost": 2.5, "country": ` + string(quoted) + `}}`
			}
			return `{"result": {"cost": 1.25, "country": "` + []string{"DE", "KR", "US"}[i%3] + `"}}`
		}),
	})
	refused := client.Submission{ID: "refused", Tenant: "globex", Type: "HTTP", Seal: true}
	for i := range 3 {
		refused.Jobs = append(refused.Jobs, client.NewJob{
			Key:     hostile[:60],
			Payload: map[string]any{"url": refuses.URL + "/" + strconv.Itoa(i), "body": hostile},
		})
	}
	c.submit(refused)
	c.wait("newsletter")
	require.Equal(c.t, api.StatusFailed, c.wait("refused").Status)

	c.submit(client.Submission{ID: "welcome", Tenant: "initech", Priority: "high", JobTimeout: time.Hour, Jobs: jobs(60, sleeps)})
	c.submit(client.Submission{ID: "reminder", Tenant: "acme", Seal: true, Jobs: jobs(30, sleeps)})
	_, err = c.api.Pause(ctx, "reminder")
	require.NoError(c.t, err)
	c.submit(client.Submission{ID: "empty", Tenant: "initech"})
	_, err = c.api.SetTenant(ctx, "initech", api.TenantSettings{RPS: new(50.0)})
	require.NoError(c.t, err)
	_, err = c.api.PauseType(ctx, "EXPORT")
	require.NoError(c.t, err)

	require.NoError(c.t, c.rdb.XAdd(ctx, &redis.XAddArgs{
		Stream: c.prefix + "ingest", Values: []any{"type", "group.submit", "data", `{"id": "` + strings.ReplaceAll(hostile, `"`, `\"`) + `"}`},
	}).Err())
	require.Eventually(c.t, func() bool {
		rejected, err := c.api.Rejected(ctx, client.RejectedQuery{})
		return err == nil && len(rejected.Rejected) > 0
	}, patience, 20*time.Millisecond)

	c.guards()
}

// callbackKey returns the path of a file with a master key of callbacks.
func callbackKey(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "callbacks.key")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("k"), 32), 0o600))
	return path
}

// enableEndpoint enables the endpoint of the tenant globex, which has disabled itself.
func (c *console) enableEndpoint() {
	c.t.Helper()
	at, err := c.api.Callback(c.t.Context(), "globex")
	require.NoError(c.t, err)
	require.NotNil(c.t, at.DisabledAt)
	_, err = c.api.SetCallback(c.t.Context(), "globex", api.CallbackSettings{URL: at.URL})
	require.NoError(c.t, err)
}

// deadCallback gives the tenant globex an endpoint that answers 410 with a hostile text to the end of
// the group told, which disables it, and waits until the callback is dead.
func (c *console) deadCallback() {
	c.t.Helper()
	ctx := c.t.Context()
	gone := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, hostile, http.StatusGone) }))
	c.t.Cleanup(gone.Close)
	_, err := c.api.SetCallback(ctx, "globex", api.CallbackSettings{URL: gone.URL + "/?" + url.QueryEscape(hostile)})
	require.NoError(c.t, err)
	c.submit(client.Submission{ID: "told", Tenant: "globex", Jobs: jobs(1, sleeps)})
	_, err = c.api.Cancel(ctx, "told")
	require.NoError(c.t, err)
	require.Eventually(c.t, func() bool {
		for one, err := range c.api.Callbacks(ctx, client.CallbackFilter{}) {
			return err == nil && one.Answer != ""
		}
		return false
	}, patience, 20*time.Millisecond)
}

// dryRun starts a dry run of an operation, waits for its end and returns its id.
func (c *console) dryRun() string {
	c.t.Helper()
	o, err := c.api.StartOperation(c.t.Context(), api.OperationRequest{Do: api.OpPause, Filter: api.OperationFilter{Prefix: strings.Repeat("W", 128)}, DryRun: true})
	require.NoError(c.t, err)
	require.Eventually(c.t, func() bool {
		o, err = c.api.Operation(c.t.Context(), o.ID)
		return err == nil && o.State.Ended()
	}, patience, 20*time.Millisecond)
	return o.ID
}

// guards creates a pool of three accounts for the page of guards. The use of one account has
// failed, so its breaker is open for ten minutes.
func (c *console) guards() {
	c.t.Helper()
	ctx := c.t.Context()
	guards := guard.New(c.rdb, guard.Prefix(c.prefix))
	c.t.Cleanup(func() { require.NoError(c.t, guards.Close(context.WithoutCancel(ctx))) })
	pool, err := guards.Pool(ctx, "mail", guard.Spec{
		Members: []guard.Member{{ID: "first"}, {ID: "second"}, {ID: "third"}},
		Rate:    guard.PerWindow(80, 10*time.Minute),
		Breaker: guard.BreakerPolicy{Failures: 1, OpenFor: 10 * time.Minute, Successes: 1},
	})
	require.NoError(c.t, err)
	for _, outcome := range []guard.Outcome{guard.Success, guard.Failure} {
		lease, err := pool.Acquire(ctx)
		require.NoError(c.t, err)
		require.NoError(c.t, lease.Release(ctx, outcome))
	}
}
