//go:build browser

package browser

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// TestAnotherBroker: two visitors wait while their broker is killed, and later while the next one
// is stopped. Another broker behind the same address serves them, and they keep their places.
func TestAnotherBroker(t *testing.T) {
	t.Parallel()
	var broker atomic.Pointer[url.URL]
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite: func(q *httputil.ProxyRequest) {
			q.SetURL(broker.Load())
			q.Out.Host = q.In.Host
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	})
	t.Cleanup(proxy.Close)
	redisURL, prefix := shared(t)
	env := map[string]string{
		"BULKACTION_KEY_PREFIX": prefix, "BULKACTION_BROKER_PUBLIC_URL": proxy.URL, "BULKACTION_BROKER_DRAIN": "500ms",
		"BULKACTION_BROKER_TOKEN_KEYS_FILE": tokenKeys(t),
	}
	r := &room{t: t, broker: proxy.URL, process: startDev(t, env, "--redis-url", redisURL)}
	use := func() {
		broker.Store(&url.URL{Scheme: "http", Host: r.process.BrokerAddr()})
		r.api = client.NewAPI("http://" + r.process.APIAddr())
	}
	use()
	r.openShop(api.EventSettings{})
	second := startDev(t, env, "--redis-url", redisURL)

	r.inside()
	ben := r.buyer()
	ben.seesPlace(1, 1)
	cat := r.buyer()
	cat.seesPlace(2, 2)
	ben.seesPlace(1, 2)
	back := func(change func()) {
		t.Helper()
		type seen struct{ streams, frames int }
		before := map[*tab]seen{}
		for _, b := range []*tab{ben, cat} {
			b.expect("net::ERR_")
			streams, frames := b.streamed()
			before[b] = seen{streams, frames}
		}
		change()
		for b, was := range before {
			b.await("a position by a new stream", func() bool {
				streams, frames := b.streamed()
				return streams > was.streams && frames > was.frames
			})
		}
		ben.seesPlace(1, 2)
		cat.seesPlace(2, 2)
	}
	back(func() {
		first := r.process
		r.process = second
		use()
		first.Kill()
	})
	third := startDev(t, env, "--redis-url", redisURL)
	back(func() {
		r.process = third
		use()
		second.Signal(syscall.SIGTERM)
	})
	require.Zero(t, second.Wait(patience))

	_, err := r.api.Recalibrate(t.Context(), event, api.Recalibration{Capacity: new(int64(3))})
	require.NoError(t, err)
	ben.at(r.shop + "/buy")
	cat.at(r.shop + "/buy")
}
