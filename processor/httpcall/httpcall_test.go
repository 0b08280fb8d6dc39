package httpcall_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caarlos0/env/v10"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start returns a processor that may call servers on 127.0.0.1.
func start(t testing.TB, change func(*httpcall.Config)) *httpcall.Processor {
	c := parse(t, map[string]string{"HTTP_PROCESSOR_ALLOWED_CIDRS": "127.0.0.1/32"})
	if change != nil {
		change(&c)
	}
	p, err := httpcall.New(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func serve(t testing.TB, handler http.HandlerFunc) *httptest.Server {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

func job(payload string) processor.Job {
	return processor.Job{Tenant: "acme", Group: "sync", Ordinal: 3, Type: httpcall.Type, Attempt: 1, Payload: json.RawMessage(payload)}
}

func TestRequest(t *testing.T) {
	type seen struct {
		method, path, body string
		header             http.Header
	}
	var got seen
	server := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = seen{r.Method, r.URL.RequestURI(), string(body), r.Header}
	})
	p := start(t, nil)
	tests := map[string]struct {
		payload string // %s stands for the server's URL
		want    seen
		headers map[string]string
	}{
		"url alone": {`{"url":"%s/a?b=c"}`, seen{method: "POST", path: "/a?b=c"},
			map[string]string{"Idempotency-Key": "sync.3", "User-Agent": "bulkaction", "Content-Type": ""}},
		"object": {`{"url":"%s","body":{"a": [1]}}`, seen{method: "POST", path: "/", body: `{"a": [1]}`},
			map[string]string{"Content-Type": "application/json"}},
		"number": {`{"url":"%s","body":7}`, seen{method: "POST", path: "/", body: `7`},
			map[string]string{"Content-Type": "application/json"}},
		"string": {`{"url":"%s","body":"a=\"ü\""}`, seen{method: "POST", path: "/", body: `a="ü"`},
			map[string]string{"Content-Type": "text/plain; charset=utf-8"}},
		"null":   {`{"url":"%s","body":null}`, seen{method: "POST", path: "/"}, map[string]string{"Content-Type": ""}},
		"method": {`{"url":"%s","method":"get"}`, seen{method: "GET", path: "/"}, nil},
		"headers": {`{"url":"%s","body":"a=b","headers":{"content-type":"application/x-www-form-urlencoded","X-Key":"k v","idempotency-key":"own"}}`,
			seen{method: "POST", path: "/", body: "a=b"},
			map[string]string{"Content-Type": "application/x-www-form-urlencoded", "X-Key": "k v", "Idempotency-Key": "own"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := p.Process(t.Context(), job(fmt.Sprintf(tt.payload, server.URL)))
			require.NoError(t, err)
			header := got.header
			got.header = nil
			require.Equal(t, tt.want, got)
			for name, value := range tt.headers {
				require.Equal(t, value, header.Get(name), name)
			}
			require.Empty(t, header.Get("Traceparent"))
		})
	}
}

func TestTraceGoesOn(t *testing.T) {
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	var got string
	server := serve(t, func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Get("Traceparent") })
	ctx := propagation.TraceContext{}.Extract(t.Context(), propagation.MapCarrier{"traceparent": parent})
	_, err := start(t, nil).Process(ctx, job(`{"url":"`+server.URL+`"}`))
	require.NoError(t, err)
	require.Equal(t, parent, got)
}

func TestRefusesPayloadsThatMakeNoCall(t *testing.T) {
	p := start(t, nil)
	for name, payload := range map[string]string{
		"nothing":            ``,
		"not JSON":           `{`,
		"no url":             `{"method":"GET"}`,
		"relative":           `{"url":"/secret/a"}`,
		"other scheme":       `{"url":"file:///secret/passwd"}`,
		"no host":            `{"url":"http://:80/secret"}`,
		"bad port":           `{"url":"http://127.0.0.1:x/secret"}`,
		"control in url":     `{"url":"http://127.0.0.1/secret\r\n"}`,
		"unknown method":     `{"url":"http://127.0.0.1/secret","method":"CONNECT"}`,
		"method injection":   `{"url":"http://127.0.0.1/","method":"GET /secret HTTP/1.1\r\n"}`,
		"header name":        `{"url":"http://127.0.0.1/","headers":{"a b":"secret"}}`,
		"empty header name":  `{"url":"http://127.0.0.1/","headers":{"":"secret"}}`,
		"header injection":   `{"url":"http://127.0.0.1/","headers":{"a":"secret\r\nX: y"}}`,
		"header NUL":         `{"url":"http://127.0.0.1/","headers":{"a":"secret\u0000"}}`,
		"header is a number": `{"url":"http://127.0.0.1/","headers":{"a":1}}`,
		"other host":         `{"url":"http://127.0.0.1/","headers":{"host":"secret"}}`,
		"connection":         `{"url":"http://127.0.0.1/","headers":{"connection":"secret"}}`,
		"transfer-encoding":  `{"url":"http://127.0.0.1/","headers":{"Transfer-Encoding":"secret"}}`,
		"the job's headers":  `{"url":"http://127.0.0.1/","headers":{"bulkaction-tenant":"secret"}}`,
		"content-length":     `{"url":"http://127.0.0.1/","headers":{"CONTENT-LENGTH":"7"}}`,
		"te":                 `{"url":"http://127.0.0.1/","headers":{"TE":"secret"}}`,
		"upgrade":            `{"url":"http://127.0.0.1/","headers":{"upgrade":"secret"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := p.Process(t.Context(), job(payload))
			v := processor.Classify(err)
			require.Equal(t, processor.Fail, v.Kind)
			require.Equal(t, processor.CodeInvalidPayload, v.Code)
			require.NotContains(t, v.Message, "secret", "a payload does not go into errors")
		})
	}
}

func TestHostHeaderOfTheURLIsFine(t *testing.T) {
	server := serve(t, func(http.ResponseWriter, *http.Request) {})
	host := strings.TrimPrefix(server.URL, "http://")
	_, err := start(t, nil).Process(t.Context(), job(`{"url":"`+server.URL+`","headers":{"Host":"`+host+`"}}`))
	require.NoError(t, err)
}

func TestAnswersBecomeVerdicts(t *testing.T) {
	tests := map[string]struct {
		status     int
		retryAfter string
		kind       processor.Kind
		code       string
		after      time.Duration
	}{
		"200":                   {status: 200, kind: processor.Done},
		"204":                   {status: 204, kind: processor.Done},
		"301":                   {status: 301, kind: processor.Fail, code: "HTTP_301"},
		"304":                   {status: 304, kind: processor.Fail, code: "HTTP_304"},
		"400":                   {status: 400, kind: processor.Fail, code: "HTTP_400"},
		"404":                   {status: 404, retryAfter: "5", kind: processor.Fail, code: "HTTP_404"},
		"429":                   {status: 429, kind: processor.Throttle, code: "API_THROTTLED"},
		"429 seconds":           {status: 429, retryAfter: "7", kind: processor.Throttle, code: "API_THROTTLED", after: 7 * time.Second},
		"429 nonsense":          {status: 429, retryAfter: "soon", kind: processor.Throttle, code: "API_THROTTLED"},
		"429 in the past":       {status: 429, retryAfter: "Mon, 02 Jan 2006 15:04:05 GMT", kind: processor.Throttle, code: "API_THROTTLED"},
		"429 far in the future": {status: 429, retryAfter: "Fri, 31 Dec 9999 23:59:59 GMT", kind: processor.Throttle, code: "API_THROTTLED", after: 24 * time.Hour},
		"429 huge":              {status: 429, retryAfter: "18446744073709551615", kind: processor.Throttle, code: "API_THROTTLED", after: 24 * time.Hour},
		"429 negative":          {status: 429, retryAfter: "-1", kind: processor.Throttle, code: "API_THROTTLED"},
		"429 above 2^64":        {status: 429, retryAfter: "18446744073709551616", kind: processor.Throttle, code: "API_THROTTLED", after: 24 * time.Hour},
		"503 far above 2^64":    {status: 503, retryAfter: strings.Repeat("9", 400), kind: processor.Throttle, code: "API_THROTTLED", after: 24 * time.Hour},
		"429 fraction":          {status: 429, retryAfter: "1.5", kind: processor.Throttle, code: "API_THROTTLED", after: 1500 * time.Millisecond},
		"503 fraction":          {status: 503, retryAfter: "1.5", kind: processor.Throttle, code: "API_THROTTLED", after: 1500 * time.Millisecond},
		"503 small fraction":    {status: 503, retryAfter: "0.0001", kind: processor.Throttle, code: "API_THROTTLED", after: time.Millisecond},
		"429 exponent":          {status: 429, retryAfter: "1e3", kind: processor.Throttle, code: "API_THROTTLED"},
		"503 no number":         {status: 503, retryAfter: "1.5.0", kind: processor.RetryLater, code: "HTTP_503"},
		"503 infinity":          {status: 503, retryAfter: "Inf", kind: processor.RetryLater, code: "HTTP_503"},
		"500":                   {status: 500, kind: processor.RetryLater, code: "HTTP_500"},
		"502 Retry-After":       {status: 502, retryAfter: "7", kind: processor.RetryLater, code: "HTTP_502"},
		"503":                   {status: 503, kind: processor.RetryLater, code: "HTTP_503"},
		"503 seconds":           {status: 503, retryAfter: "120", kind: processor.Throttle, code: "API_THROTTLED", after: 2 * time.Minute},
		"503 at once":           {status: 503, retryAfter: "0", kind: processor.Throttle, code: "API_THROTTLED"},
		"503 nonsense":          {status: 503, retryAfter: "soon", kind: processor.RetryLater, code: "HTTP_503"},
		"599":                   {status: 599, kind: processor.RetryLater, code: "HTTP_599"},
		"600":                   {status: 600, kind: processor.Fail, code: "HTTP_600"},
	}
	p := start(t, nil)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if tt.retryAfter != "" {
					w.Header().Set("Retry-After", tt.retryAfter)
				}
				w.Header().Set("Location", "/elsewhere")
				if r.URL.Path == "/elsewhere" {
					t.Error("a redirect was followed")
				}
				w.WriteHeader(tt.status)
			})
			_, err := p.Process(t.Context(), job(`{"url":"`+server.URL+`/?token=secret"}`))
			v := processor.Classify(err)
			require.Equal(t, tt.kind, v.Kind, "%v", err)
			require.Equal(t, tt.code, v.Code)
			require.Equal(t, tt.after, v.After)
			require.NotContains(t, v.Message, "secret")
		})
	}
}

func TestRetryAfterDate(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	_, err := start(t, nil).Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
	v := processor.Classify(err)
	require.Equal(t, processor.Throttle, v.Kind)
	require.InDelta(t, time.Hour, v.After, float64(time.Minute))
}

func TestAddressesThatAreNotAllowed(t *testing.T) {
	var calls atomic.Int64
	server := serve(t, func(http.ResponseWriter, *http.Request) { calls.Add(1) })
	port := server.URL[strings.LastIndexByte(server.URL, ':'):]
	closed := start(t, func(c *httpcall.Config) { c.AllowedCIDRs = nil })
	for _, host := range []string{"127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::1]", "0.0.0.0", "[::]", "169.254.169.254", "[64:ff9b::7f00:1]", "[fe80::1%25lo]"} {
		_, err := closed.Process(t.Context(), job(`{"url":"http://`+host+port+`/"}`))
		v := processor.Classify(err)
		require.Equal(t, processor.Fail, v.Kind, host)
		require.Equal(t, httpcall.CodeAddressRefused, v.Code, host)
	}
	require.Zero(t, calls.Load())

	for name, p := range map[string]*httpcall.Processor{
		"by network":         start(t, func(c *httpcall.Config) { c.AllowedCIDRs = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")} }),
		"as all private are": start(t, func(c *httpcall.Config) { c.AllowedCIDRs, c.AllowPrivate = nil, true }),
	} {
		for _, host := range []string{"127.0.0.1", "[::ffff:127.0.0.1]"} {
			_, err := p.Process(t.Context(), job(`{"url":"http://`+host+port+`/"}`))
			require.NoError(t, err, "%s %s", name, host)
		}
	}
	require.EqualValues(t, 4, calls.Load())
}

func TestProxiesOfTheEnvironmentAreNotUsed(t *testing.T) {
	proxy := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("the proxy was called") })
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	_, err := start(t, nil).Process(t.Context(), job(`{"url":"http://10.255.255.1/"}`))
	require.Equal(t, httpcall.CodeAddressRefused, processor.Classify(err).Code)
}

func TestUnreachable(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gone := "http://" + listener.Addr().String()
	require.NoError(t, listener.Close())
	encrypted := httptest.NewUnstartedServer(http.NotFoundHandler())
	encrypted.Config.ErrorLog = log.New(io.Discard, "", 0) // the TLS handshake fails on purpose
	encrypted.StartTLS()
	defer encrypted.Close()
	cut := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "half")
	})
	for name, url := range map[string]string{"nobody listens": gone, "unknown authority": encrypted.URL, "answer cut short": cut.URL} {
		t.Run(name, func(t *testing.T) {
			_, err := start(t, nil).Process(t.Context(), job(`{"url":"`+url+`/?token=secret"}`))
			v := processor.Classify(err)
			require.Equal(t, processor.RetryLater, v.Kind)
			require.Equal(t, httpcall.CodeUnreachable, v.Code)
			require.NotContains(t, v.Message, "secret")
		})
	}
}

func TestHang(t *testing.T) {
	called, release := make(chan struct{}, 3), make(chan struct{})
	hang := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/body" {
			_, _ = io.WriteString(w, "half")
			_ = http.NewResponseController(w).Flush()
		}
		called <- struct{}{}
		<-release
	}
	server := serve(t, hang)
	defer close(release)
	for name, path := range map[string]string{"no answer": "/", "half an answer": "/body"} {
		payload := job(`{"url":"` + server.URL + path + `"}`)
		t.Run(name+", own timeout", func(t *testing.T) {
			p := start(t, func(c *httpcall.Config) { c.Timeout = 50 * time.Millisecond })
			_, err := p.Process(t.Context(), payload)
			require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code)
			<-called
		})
		t.Run(name+", context", func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-called
				cancel()
			}()
			_, err := start(t, nil).Process(ctx, payload)
			require.ErrorIs(t, err, context.Canceled)
		})
	}
}

func TestConnectionsAreReused(t *testing.T) {
	var connections atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/gone" {
			w.WriteHeader(http.StatusGone)
		}
		_, _ = io.WriteString(w, strings.Repeat("x", 1000))
	}))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	server.Start()
	defer server.Close()
	p := start(t, func(c *httpcall.Config) { c.MaxResponseBytes = 10 })
	for i := range 20 {
		path := []string{"/", "/gone"}[i%2]
		_, _ = p.Process(t.Context(), job(`{"url":"`+server.URL+path+`"}`))
	}
	require.EqualValues(t, 1, connections.Load())
}

func BenchmarkProcess(b *testing.B) {
	server := serve(b, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"ok":true}`) })
	p := start(b, nil)
	call := job(`{"url":"` + server.URL + `","body":{"a":1}}`)
	work := make(chan struct{})
	var workers sync.WaitGroup
	for range 10 {
		workers.Go(func() {
			for range work {
				if _, err := p.Process(b.Context(), call); err != nil {
					b.Error(err)
				}
			}
		})
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		work <- struct{}{}
		n++
	}
	close(work)
	workers.Wait()
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "calls/s")
}

func parse(t testing.TB, vars map[string]string) httpcall.Config {
	var c httpcall.Config
	require.NoError(t, env.ParseWithOptions(&c, env.Options{Prefix: "HTTP_PROCESSOR_", Environment: vars}))
	return c
}

func TestConfig(t *testing.T) {
	c := parse(t, map[string]string{})
	require.NoError(t, c.Validate())
	limits := credential.Limits{
		Rate: credential.Rate{Permits: 80, Window: 10 * time.Minute}, Limiter: credential.Sliding,
		Breaker: credential.Breaker{Failures: 3, OpenFor: 10 * time.Minute, Successes: 3}, Concurrency: 1,
	}
	require.Equal(t, httpcall.Config{
		Timeout: 30 * time.Second, MaxResponseBytes: 65536, MaxIdleConnsPerHost: 64, BatchSize: 100, BatchWait: 50 * time.Millisecond,
		Limits: limits,
	}, c)
	require.False(t, c.GuardsHosts())

	c = parse(t, map[string]string{
		"HTTP_PROCESSOR_TIMEOUT": "5s", "HTTP_PROCESSOR_MAX_RESPONSE_BYTES": "100", "HTTP_PROCESSOR_ALLOW_PRIVATE": "true",
		"HTTP_PROCESSOR_ALLOWED_CIDRS": "10.0.0.0/8,fd00::/8", "HTTP_PROCESSOR_MAX_IDLE_CONNS_PER_HOST": "2",
		"HTTP_PROCESSOR_CREDENTIALS_FILE": "c.yaml", "HTTP_PROCESSOR_ACCOUNT_RATE": "none", "HTTP_PROCESSOR_ACCOUNT_LIMITER": "token",
		"HTTP_PROCESSOR_ACCOUNT_BREAKER": "none", "HTTP_PROCESSOR_ACCOUNT_CONCURRENCY": "unbounded",
		"HTTP_PROCESSOR_HOST_RATE": "100/1s", "HTTP_PROCESSOR_HOST_BREAKER": "5/1m/2",
		"HTTP_PROCESSOR_BATCH_SIZE": "10", "HTTP_PROCESSOR_BATCH_WAIT": "1s",
	})
	require.NoError(t, c.Validate())
	require.Equal(t, httpcall.Config{
		Timeout: 5 * time.Second, MaxResponseBytes: 100, MaxIdleConnsPerHost: 2, AllowPrivate: true,
		AllowedCIDRs:    []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		CredentialsFile: "c.yaml", BatchSize: 10, BatchWait: time.Second, Limits: credential.Limits{Limiter: credential.Token, Concurrency: credential.Unbounded},
		HostRate: credential.Rate{Permits: 100, Window: time.Second}, HostBreaker: credential.Breaker{Failures: 5, OpenFor: time.Minute, Successes: 2},
	}, c)
	require.True(t, c.GuardsHosts())
	require.True(t, parse(t, map[string]string{"HTTP_PROCESSOR_HOST_BREAKER": "5/1m/2"}).GuardsHosts())

	_, err := httpcall.New(httpcall.Config{MaxResponseBytes: 1 << 20, BatchSize: -1, AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}})
	for _, field := range []string{"TIMEOUT", "MAX_RESPONSE_BYTES", "MAX_IDLE_CONNS_PER_HOST", "ALLOWED_CIDRS", "BATCH_SIZE, BATCH_WAIT"} {
		require.ErrorContains(t, err, field+": ")
	}
}

func TestResult(t *testing.T) {
	tests := map[string]struct {
		body  string
		limit int
		want  string
	}{
		"nothing":           {"", 100, `{"status":200,"body":null}`},
		"JSON":              {" {\"a\": [1, \"ü\"]}\n", 100, `{"status":200,"body":{"a":[1,"ü"]}}`},
		"text":              {"it's \"fine\"\n", 100, `{"status":200,"body":"it's \"fine\"\n"}`},
		"not UTF-8":         {"a\xff", 100, `{"status":200,"body":"a` + "\uFFFD" + `"}`},
		"JSON not UTF-8":    {"\"a\xff\"", 100, `{"status":200,"body":"\"a` + "\uFFFD" + `\""}`},
		"exactly the limit": {"12345", 5, `{"status":200,"body":12345}`},
		"cut":               {"abcdef", 5, `{"status":200,"body":"abcde","truncated":true}`},
		"JSON that is cut":  {"123456", 5, `{"status":200,"body":"12345","truncated":true}`},
		"nothing is kept":   {"abc", 0, `{"status":200,"body":"","truncated":true}`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, tt.body) })
			p := start(t, func(c *httpcall.Config) { c.MaxResponseBytes = tt.limit })
			result, err := p.Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
			require.NoError(t, err)
			require.Equal(t, tt.want, string(result.(json.RawMessage)))
		})
	}
}

func TestResultIsBoundedHoweverItIsEncoded(t *testing.T) {
	for name, body := range map[string]string{
		"plain":                strings.Repeat("a", 70000),
		"escapes":              strings.Repeat("\x01", 65536),
		"escapes at the end":   strings.Repeat("a", 60000) + strings.Repeat("\x01", 5000),
		"escapes at the start": strings.Repeat("<", 9000) + strings.Repeat("a", 50000),
		"wide characters":      strings.Repeat("世", 21845),
		"not UTF-8":            strings.Repeat("a\xff", 32768),
		"JSON of full length":  `"` + strings.Repeat("a", 65534) + `"`,
		"JSON with angles":     `"` + strings.Repeat("<", 30000) + `"`,
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
			result, err := start(t, nil).Process(t.Context(), job(`{"url":"`+server.URL+`"}`))
			require.NoError(t, err)
			encoded, err := json.Marshal(result)
			require.NoError(t, err)
			require.LessOrEqual(t, len(encoded), processor.MaxResultBytes)
			require.Greater(t, len(encoded), processor.MaxResultBytes-8, "no more is cut than must be")
			require.Contains(t, string(encoded), `"truncated":true`)
		})
	}
}
