package httpapi_test

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// answer is the status and the body of an answer, and how long the client waited for it.
type answer struct {
	status int
	after  time.Duration
	body   string
}

// send posts a body in pieces, with a pause after each. If the body is not complete, it then keeps
// the connection open without sending. size is the announced size; -1: chunked encoding.
func send(t *testing.T, client *http.Client, target, typ string, size int64, pause time.Duration, complete bool, pieces ...string) <-chan answer {
	t.Helper()
	in, out := io.Pipe()
	t.Cleanup(func() { in.Close() })
	go func() {
		for _, piece := range pieces {
			if _, err := io.WriteString(out, piece); err != nil {
				return
			}
			<-time.After(pause)
		}
		if complete {
			out.Close()
		}
	}()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://localhost"+target, in)
	require.NoError(t, err)
	req.ContentLength = size
	req.Header.Set("Content-Type", typ)
	answered := make(chan answer, 1)
	start := time.Now()
	go func() {
		resp, err := client.Do(req)
		if err != nil {
			answered <- answer{body: err.Error()}
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		answered <- answer{resp.StatusCode, time.Since(start), string(body)}
	}()
	return answered
}

// TestSendersThatStopBlockNoOthers: eight clients, of which four announce 32 MiB, send three bytes
// and no more. Meanwhile two larger bodies are accepted. The eight get 408 after slowStart.
func TestSendersThatStopBlockNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := serve(t, httpapi.New(options(apitest.NewBackend())))
		var stalled []<-chan answer
		for _, size := range []int64{32 << 20, 32 << 20, 32 << 20, 32 << 20, -1, -1, -1, -1} {
			stalled = append(stalled, send(t, client, "/v1/groups", httpapi.JSONType, size, 0, false, `{"t`))
		}
		synctest.Wait()
		large := `{"type":"NOOP"}` + strings.Repeat(" ", httpapi.SmallBody)
		require.Equal(t, answer{status: 202}, withoutBody(<-send(t, client, "/v1/groups", httpapi.JSONType, -1, 0, true, large)))
		require.Equal(t, answer{status: 202}, withoutBody(<-send(t, client, "/v1/groups", httpapi.JSONType, int64(len(large)), 0, true, large)))
		for _, s := range stalled {
			got := <-s
			require.Equal(t, answer{408, httpapi.SlowStart, ""}, withoutBody(got))
			require.Contains(t, got.body, "after 5s it must bring 1024 bytes a second, and be complete after 1m0s")
		}
		<-time.After(time.Second) // net/http closes the connections a moment after the answers
	})
}

func withoutBody(a answer) answer { a.body = ""; return a }

func TestSlowBodiesAreRefused(t *testing.T) {
	spaces := func(n int) string { return strings.Repeat(" ", n) }
	group := `{"type":"NOOP"}`
	// In no case does a piece arrive at the moment of the refusal: the client might then see its
	// failed write before the answer.
	for name, c := range map[string]struct {
		target, typ string
		pause       time.Duration
		complete    bool
		pieces      []string
		want        answer
	}{
		"fast enough":       {"/v1/groups", httpapi.JSONType, time.Second, true, []string{group, spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200)}, answer{202, 8 * time.Second, ""}},
		"too slow":          {"/v1/groups", httpapi.JSONType, 2 * time.Second, true, []string{group, spaces(500), spaces(500), spaces(500), spaces(500), spaces(500), spaces(500)}, answer{status: 408}},
		"stops in between":  {"/v1/groups", httpapi.JSONType, 0, false, []string{group, spaces(1 << 20)}, answer{408, httpapi.SlowStart, ""}},
		"not complete":      {"/v1/groups", httpapi.JSONType, 1300 * time.Millisecond, true, strings.Split(strings.Repeat(spaces(2000)+"|", 100), "|"), answer{408, httpapi.BodyTimeout, ""}},
		"lines, slow":       {"/v1/groups/g/jobs", ndjson, httpapi.IdleTimeout - time.Second, true, []string{"{\"payload\":1}\n", "{\"payload\":2}\n", "{\"payload\":3}\n"}, answer{200, 3 * (httpapi.IdleTimeout - time.Second), ""}},
		"a line, slow":      {"/v1/groups/g/jobs", ndjson, 2 * time.Second, true, []string{`{"payload":`, "1", "2", "3", "4", "5", "}\n"}, answer{status: 408}},
		"lines that stop":   {"/v1/groups/g/jobs", ndjson, 0, false, []string{"{\"payload\":1}\n"}, answer{408, httpapi.IdleTimeout, ""}},
		"no line":           {"/v1/groups/g/jobs", ndjson, 0, false, []string{`{"p`}, answer{408, httpapi.SlowStart, ""}},
		"a header, no line": {"/v1/groups/g/jobs", "text/csv", 0, false, []string{"to"}, answer{408, httpapi.SlowStart, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := serve(t, httpapi.New(options(apitest.NewBackend().WithGroup("g"))))
				got := <-send(t, client, c.target, c.typ, -1, c.pause, c.complete, c.pieces...)
				require.Equal(t, c.want.status, got.status, got.body)
				if c.want.after > 0 {
					require.InDelta(t, c.want.after, got.after, float64(50*time.Millisecond))
				}
				if got.status == 408 {
					require.Contains(t, got.body, "the body arrived too slowly")
				}
				<-time.After(time.Minute) // net/http closes the connection a moment after the answer
			})
		})
	}
}

// TestSlowStoreUsesNoCredit: a body of nine batches that the client sends without a pause gets 200,
// although the store takes storeTimeout less 1 s for a batch.
func TestSlowStoreUsesNoCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		client := serve(t, httpapi.New(options(slowStore{f, httpapi.StoreTimeout - time.Second})))
		got := <-send(t, client, "/v1/groups/g/jobs", ndjson, -1, 0, true, numbered(9*httpapi.MaxBatchLines))
		require.Equal(t, 200, got.status, got.body)
	})
}

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
		b := apitest.NewBackend().WithGroup("g")
		o := options(b)
		o.Keys = anyKey{}
		client := serve(t, httpapi.New(o))
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
		answers := make(chan int, httpapi.MaxAppends)
		for range httpapi.MaxAppends {
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
		b := apitest.NewBackend()
		b.OnGroup = func(context.Context, int) (api.Group, error) { return groupInStates(1, created), nil }
		o := options(b)
		o.Keys = anyKey{}
		client := serve(t, httpapi.New(o))
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
		for range httpapi.MaxKeyStreams {
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
		o := keyOptions(apitest.NewBackend().WithGroup("g"), k)
		o.KeyRPS = 3
		h := httpapi.New(o)
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
