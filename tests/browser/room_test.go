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

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
