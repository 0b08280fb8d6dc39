package httpapi

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// anyKey takes each token for the key of a producer.
type anyKey struct{}

func (anyKey) Authenticate(_ context.Context, token string, _ netip.Addr) (auth.Principal, error) {
	return auth.Principal{KeyID: "key_" + token, Role: auth.Producer, Tenant: "acme"}, nil
}

func (anyKey) Still(auth.Principal) bool { return true }

// TestAppendsOfOneCaller: an API key may send maxAppends bodies at once, independently of other
// keys. After the end of a body it may send another one.
func TestAppendsOfOneCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend().withGroup("g")
		o := options(b)
		o.Keys = anyKey{}
		client := serve(t, New(o))
		appendBody := func(body io.Reader, key string) (status int, retryAfter, answer string) {
			req, err := http.NewRequestWithContext(t.Context(), "POST", "http://localhost/v1/groups/g/jobs", body)
			require.NoError(t, err)
			req.Header.Set("Authorization", "Bearer "+key)
			req.Header.Set("Content-Type", "application/x-ndjson")
			res, err := client.Do(req)
			require.NoError(t, err)
			defer res.Body.Close()
			text, err := io.ReadAll(res.Body)
			require.NoError(t, err)
			return res.StatusCode, res.Header.Get("Retry-After"), string(text)
		}
		var open []*io.PipeWriter
		answers := make(chan int, maxAppends)
		for range maxAppends {
			body, w := io.Pipe()
			open = append(open, w)
			go func() {
				status, _, _ := appendBody(body, "a")
				answers <- status
			}()
		}
		synctest.Wait()
		line := `{"payload":{}}` + "\n"
		status, retryAfter, text := appendBody(strings.NewReader(line), "a")
		require.Equal(t, 429, status)
		require.Equal(t, "5", retryAfter)
		require.Contains(t, text, api.TooManyStreams)
		require.Contains(t, text, "64 bodies of jobs")

		taken := func(key string) int {
			status, _, _ := appendBody(strings.NewReader(line), key)
			return status
		}
		require.Equal(t, 200, taken("b"))

		require.NoError(t, open[0].Close())
		require.Equal(t, 200, <-answers)
		require.Equal(t, 200, taken("a"))
		for _, w := range open[1:] {
			require.NoError(t, w.Close())
			require.Equal(t, 200, <-answers)
		}
	})
}

// TestStreamsOfOneKey: an API key may have maxKeyStreams open streams, independently of other keys.
// After the end of a stream it may open another one.
func TestStreamsOfOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend()
		b.onGroup = func(context.Context, int) (api.Group, error) { return groupInStates(1, created), nil }
		o := options(b)
		o.Keys = anyKey{}
		client := serve(t, New(o))
		get := func(path, key string) *http.Response {
			req, err := http.NewRequestWithContext(t.Context(), "GET", "http://localhost"+path, nil)
			require.NoError(t, err)
			req.Header.Set("Authorization", "Bearer "+key)
			res, err := client.Do(req)
			require.NoError(t, err)
			return res
		}
		status := func(path, key string) int {
			res := get(path, key)
			require.NoError(t, res.Body.Close())
			synctest.Wait()
			return res.StatusCode
		}
		const events = "/v1/groups/g/events"
		var open []*http.Response
		for range maxKeyStreams {
			res := get(events, "a") //nolint:bodyclose // they are closed below
			require.Equal(t, 200, res.StatusCode)
			open = append(open, res) //nolint:bodyclose // they are closed below
		}
		res := get(events, "a")
		text, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		require.Equal(t, 429, res.StatusCode)
		require.Equal(t, "5", res.Header.Get("Retry-After"))
		require.Contains(t, string(text), api.TooManyStreams)
		require.Contains(t, string(text), "500 streams")
		require.Equal(t, 429, status("/v1/groups/g/results", "a"))
		require.Equal(t, 429, status("/v1/groups/g/failures", "a"))
		require.Equal(t, 200, status("/v1/groups/g", "a"))
		require.Equal(t, 200, status(events, "b"))

		require.NoError(t, open[0].Body.Close())
		time.Sleep(time.Second) // until the server notices
		require.Equal(t, 200, status(events, "a"))
		for _, res := range open[1:] {
			require.NoError(t, res.Body.Close())
		}
	})
}

func TestRequestRateOfKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Admin}}
		o := keyOptions(newFakeBackend().withGroup("g"), k)
		o.KeyRPS = 3
		h := New(o)
		get := func() int {
			rec := call(t, h, "GET", "/v1/groups/g", "", "Authorization", "Bearer good")
			if rec.Code == 429 {
				require.Equal(t, api.TooManyRequests, requireProblem(t, rec, 429, "").Code)
				require.Equal(t, "1", rec.Header().Get("Retry-After"))
			}
			return rec.Code
		}
		for range 3 {
			require.Equal(t, 200, get())
		}
		require.Equal(t, 429, get())
		k.principal.KeyID = "key_b"
		require.Equal(t, 200, get(), "another key")
		k.principal.KeyID = "key_a"
		time.Sleep(time.Second / 3)
		require.Equal(t, 200, get())
		require.Equal(t, 429, get())
	})
}

// TestRatesAreBounded: after one request of each of 3*maxRates keys, 1 ms apart, at most maxRates
// limiters are kept.
func TestRatesAreBounded(t *testing.T) {
	c := newCallers(10)
	now := time.Now()
	for i := range 3 * maxRates {
		p := auth.Principal{KeyID: "key_" + strconv.Itoa(i)}
		require.NoError(t, c.request(p, now.Add(time.Duration(i)*time.Millisecond)))
	}
	require.LessOrEqual(t, len(c.rates), maxRates)
}
