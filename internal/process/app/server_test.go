package app

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestServerSpeaksTLS(t *testing.T) {
	ca := redistest.NewAuthority(t)
	pair := ca.Issue()
	p := newProcess(Config{}, "broker", nil)
	s, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{
		TLS: TLSFiles{CertFile: pair.CertFile, KeyFile: pair.KeyFile}, MaxHeaderBytes: 1 << 10,
	})
	require.NoError(t, err)
	s.Serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }))

	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: ca.Pool()}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get("https://" + s.Addr().String())
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, "HTTP/2.0", string(body))

	_, err = tls.Dial("tcp", s.Addr().String(), &tls.Config{RootCAs: ca.Pool(), MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11})
	require.ErrorContains(t, err, "protocol version")
	transport.CloseIdleConnections()
	require.NoError(t, p.stop(time.Second))
}

// older sets the times of files back by a minute, so that files that replace them have a different
// time.
func older(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		past := time.Now().Add(-time.Minute) // the clock of the file system may be coarse
		require.NoError(t, os.Chtimes(name, past, past))
	}
}

func TestCertificateIsLoadedAgain(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	pair := ca.Issue()
	first := ca.Replace(pair)
	older(t, pair.CertFile, pair.KeyFile)
	logs := new(output)
	c, err := loadCertificate(TLSFiles{CertFile: pair.CertFile, KeyFile: pair.KeyFile}, slog.New(slog.NewJSONHandler(logs, nil)))
	require.NoError(t, err)
	now := time.Now()
	c.now = func() time.Time { return now }
	serial := func() *big.Int {
		t.Helper()
		config, err := c.get(nil)
		require.NoError(t, err)
		return config.Certificates[0].Leaf.SerialNumber
	}
	require.Equal(t, first.SerialNumber, serial())

	second := ca.Replace(pair)
	require.Equal(t, first.SerialNumber, serial(), "the files are not read at each handshake")
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial())
	logs.line(t, "certificate changed")

	require.NoError(t, os.WriteFile(pair.KeyFile, []byte("half"), 0o600))
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial(), "a wrong file does not end the service")
	logs.line(t, "certificate could not be read again, the old one stays in use")
	require.NoError(t, os.Remove(pair.CertFile))
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial())
	third := ca.Replace(pair)
	now = now.Add(certificateInterval)
	require.Equal(t, third.SerialNumber, serial())
}

// TestAuthoritiesOfClients: the file of client authorities is reloaded like the certificate. If the
// new file has no authority, the earlier ones stay in force: otherwise the server would be open to
// every client.
func TestAuthoritiesOfClients(t *testing.T) {
	t.Parallel()
	ca, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	pair, trusted := ca.Issue(), filepath.Join(t.TempDir(), "clients.pem")
	write := func(text []byte) { require.NoError(t, os.WriteFile(trusted, text, 0o600)) }
	read := func(name string) []byte {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		return text
	}
	write(read(ca.CAFile))
	older(t, trusted)
	logs := new(output)
	c, err := loadCertificate(TLSFiles{CertFile: pair.CertFile, KeyFile: pair.KeyFile, ClientCAFile: trusted}, slog.New(slog.NewJSONHandler(logs, nil)))
	require.NoError(t, err)
	now := time.Now()
	c.now = func() time.Time { return now }
	accepts := func(a *redistest.Authority) bool {
		t.Helper()
		config, err := c.get(nil)
		require.NoError(t, err)
		require.Equal(t, tls.RequireAndVerifyClientCert, config.ClientAuth)
		return config.ClientCAs.Equal(a.Pool())
	}
	require.True(t, accepts(ca))
	write([]byte("no certificate"))
	now = now.Add(certificateInterval)
	require.True(t, accepts(ca))
	require.Contains(t, logs.line(t, "certificate could not be read again, the old one stays in use")["error"], "has no certificate in PEM")
	write(read(other.CAFile))
	now = now.Add(certificateInterval)
	require.True(t, accepts(other))

	_, err = ServerTLS(TLSFiles{CertFile: pair.CertFile, KeyFile: pair.KeyFile, ClientCAFile: pair.KeyFile}, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "has no certificate in PEM")
}

func TestListenErrors(t *testing.T) {
	p := newProcess(Config{}, "broker", nil)
	_, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{TLS: TLSFiles{CertFile: "absent.pem", KeyFile: "absent.pem"}})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "absent.pem")
	_, err = p.Listen(t.Context(), "rooms", "127.0.0.1:99999", ServeOptions{})
	require.ErrorContains(t, err, "listen for rooms")

	s, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{})
	require.NoError(t, err)
	require.NoError(t, p.stop(time.Second), "a server that was not started ends, too")
	_, err = net.Dial("tcp", s.Addr().String())
	require.Error(t, err)
}

func TestTooManyHeadersAreRefused(t *testing.T) {
	p := newProcess(Config{}, "broker", nil)
	s, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{
		MaxHeaderBytes: 32 << 10,
		KeepAlive:      net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	})
	require.NoError(t, err)
	s.Serve(http.NotFoundHandler())
	conn, err := net.Dial("tcp", s.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\nCookie: "+strings.Repeat("x", 64<<10)+"\r\n\r\n")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, response.StatusCode)
	require.NoError(t, p.stop(time.Second))
}

func TestWhoMayUseTheAdminServer(t *testing.T) {
	const token, local = "0123456789abcdef", "127.0.0.1:9090"
	for name, c := range map[string]struct {
		method, peer, host, token, sent string
		want                            int
	}{
		"change from here":                {http.MethodPut, "127.0.0.1:1", local, "", "", http.StatusOK},
		"change from here, IPv6":          {http.MethodPut, "[::1]:1", "[::1]:9090", "", "", http.StatusOK},
		"change from here, by name":       {http.MethodPut, "[::1]:1", "LocalHost", "", "", http.StatusOK},
		"change by DNS rebinding":         {http.MethodPut, "127.0.0.1:1", "evil.example:9090", "", "", http.StatusForbidden},
		"change from there":               {http.MethodPut, "192.0.2.1:1", local, "", "", http.StatusForbidden},
		"change from nowhere":             {http.MethodPut, "@", local, "", "", http.StatusForbidden},
		"read from there":                 {http.MethodGet, "192.0.2.1:1", "10.0.0.1:9090", "", "", http.StatusOK},
		"head from there":                 {http.MethodHead, "192.0.2.1:1", "10.0.0.1:9090", "", "", http.StatusOK},
		"change from there, token":        {http.MethodPut, "192.0.2.1:1", "10.0.0.1:9090", token, "Bearer " + token, http.StatusOK},
		"scheme in lower case":            {http.MethodPut, "192.0.2.1:1", "10.0.0.1:9090", token, "bearer " + token, http.StatusOK},
		"change from here without token":  {http.MethodPut, "127.0.0.1:1", local, token, "", http.StatusUnauthorized},
		"read from here without token":    {http.MethodGet, "127.0.0.1:1", local, token, "", http.StatusUnauthorized},
		"read from there, wrong token":    {http.MethodGet, "192.0.2.1:1", local, token, "Bearer 0123456789abcdeX", http.StatusUnauthorized},
		"read from there, part of it":     {http.MethodGet, "192.0.2.1:1", local, token, "Bearer 0123", http.StatusUnauthorized},
		"read from there, another scheme": {http.MethodGet, "192.0.2.1:1", local, token, "Basic " + token, http.StatusUnauthorized},
	} {
		p := newProcess(Config{Telemetry: TelemetryConfig{AdminToken: c.token}, Ingest: IngestConfig{AllowUnauthenticated: true}}, "worker", nil)
		p.HandleAdmin("/pool", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		request := httptest.NewRequest(c.method, "/pool", nil)
		request.RemoteAddr, request.Host = c.peer, c.host
		if c.sent != "" {
			request.Header.Set("Authorization", c.sent)
		}
		response := httptest.NewRecorder()
		p.admin.ServeHTTP(response, request)
		require.Equal(t, c.want, response.Code, name)
		require.Equal(t, c.want == http.StatusUnauthorized, response.Header().Get("WWW-Authenticate") == "Bearer", name)
	}
}

// TestAdminServer: /healthz (200) and /readyz (503) of a process that is starting answer without
// the admin token, /metrics only with it. A request with a foreign Host, as a web page sends it by
// DNS rebinding, is refused with 421.
func TestAdminServer(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600))
	p := start(t, "BULKACTION_ADMIN_TOKEN_FILE="+file)
	get := func(path, host, token string) int {
		request, err := http.NewRequest(http.MethodGet, "http://"+p.AdminAddr()+path, nil)
		require.NoError(t, err)
		request.Host = host
		request.Header.Set("Authorization", "Bearer "+token)
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := client.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	require.Equal(t, http.StatusOK, get("/healthz", p.AdminAddr(), ""))
	require.Equal(t, http.StatusServiceUnavailable, get("/readyz", p.AdminAddr(), ""), "it is open, and says starting")
	require.Equal(t, http.StatusMisdirectedRequest, get("/healthz", "evil.example", ""))
	require.Equal(t, http.StatusMisdirectedRequest, get("/metrics", "evil.example", "0123456789abcdef"))
	require.Equal(t, http.StatusUnauthorized, get("/metrics", p.AdminAddr(), ""))
	require.Equal(t, http.StatusOK, get("/metrics", p.AdminAddr(), "0123456789abcdef"))
}

// TestAdminServerReadsNoEndlessBody: the client sends one of the ten bytes that it has announced.
// The handler's read ends with an error, and its answer, 408, reaches the client.
func TestAdminServerReadsNoEndlessBody(t *testing.T) {
	t.Parallel()
	p := start(t)
	p.HandleAdmin("PUT /pool", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		http.Error(w, err.Error(), http.StatusRequestTimeout)
	}))
	conn, err := net.Dial("tcp", p.AdminAddr())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "PUT /pool HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusRequestTimeout, response.StatusCode)
}

func TestReadinessReport(t *testing.T) {
	ok := func(context.Context) error { return nil }
	r := NewReadiness()
	require.Equal(t, ReadyReport{Status: "starting"}, r.Report(t.Context(), ForWork))
	r.Add("redis", ok)
	require.Equal(t, ReadyReport{Status: "ready"}, r.Report(t.Context(), ForWork))
	r.Add("redis", func(context.Context) error { return errors.New("away") }) // the check of another role in this process
	r.Add("leader", func(context.Context) error { return errors.New("none") })
	require.Equal(t, ReadyReport{Status: "failing", Failing: map[string]string{"redis": "away", "leader": "none"}}, r.Report(t.Context(), ForWork))
	r.SetDraining()
	require.Equal(t, ReadyReport{Status: "draining"}, r.Report(t.Context(), ForWork))
}

// TestReadinessForTraffic: while a shared check (Redis) fails, a process is ready for traffic, but
// not while it starts or drains. Only callers on this host see the failing checks.
func TestReadinessForTraffic(t *testing.T) {
	r := NewReadiness()
	redis, start := errors.New("away"), errors.New("waiting for redis")
	r.AddShared("redis", func(context.Context) error { return redis })
	require.Equal(t, "starting", r.Report(t.Context(), ForTraffic).Status)
	r.Add("start", func(context.Context) error { return start })
	get := func(query, peer string) (int, string) {
		request := httptest.NewRequest(http.MethodGet, "/readyz"+query, nil)
		request.RemoteAddr = peer
		response := httptest.NewRecorder()
		r.ServeHTTP(response, request)
		return response.Code, response.Body.String()
	}
	const here, there = "127.0.0.1:1", "192.0.2.1:1"
	for _, step := range []struct {
		query, peer string
		status      int
		body        string
	}{
		{"", here, 503, `{"status":"failing","failing":{"redis":"away","start":"waiting for redis"}}`},
		{"", there, 503, `{"status":"failing"}`},
		{"?for=traffic", here, 503, `{"status":"failing","failing":{"start":"waiting for redis"}}`},
		{"?for=traffic", there, 503, `{"status":"failing"}`},
	} {
		status, body := get(step.query, step.peer)
		require.Equal(t, step.status, status, step)
		require.JSONEq(t, step.body, body, step)
	}
	start = nil
	status, body := get("?for=traffic", there)
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"status":"ready"}`, body)
	status, _ = get("", there)
	require.Equal(t, http.StatusServiceUnavailable, status, "it can't work")
	status, _ = get("?for=fun", here)
	require.Equal(t, http.StatusBadRequest, status)
	r.SetDraining()
	redis = nil
	status, body = get("?for=traffic", there)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.JSONEq(t, `{"status":"draining"}`, body)
}

func TestReadinessChecksRunAtOnceAndEndInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		slow := func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		r.Add("a", slow)
		r.Add("b", slow)
		began := time.Now()
		report := r.Report(t.Context(), ForWork)
		require.Equal(t, time.Second, time.Since(began))
		require.Len(t, report.Failing, 2)
		synctest.Wait()
	})
}

func TestHangingCheckDoesNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		hangs, calls := make(chan struct{}), 0
		r.Add("stuck", func(context.Context) error { // ignores its context
			calls++
			<-hangs
			return nil
		})
		for range 3 {
			require.Equal(t, map[string]string{"stuck": "no answer within 1s"}, r.Report(t.Context(), ForWork).Failing)
		}
		synctest.Wait()
		require.Equal(t, 1, calls)
		close(hangs)
		synctest.Wait()
		require.Equal(t, "ready", r.Report(t.Context(), ForWork).Status)
		synctest.Wait()
		require.Equal(t, 2, calls)
	})
}

// TestCheckOutlivesTheFirstRequest: when the request that started a check is cancelled, the other
// requests still get the result.
func TestCheckOutlivesTheFirstRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		answer := make(chan struct{})
		r.Add("redis", func(ctx context.Context) error {
			select {
			case <-answer:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		first, hangUp := context.WithCancel(t.Context())
		reports := make(chan ReadyReport, 2)
		go func() { reports <- r.Report(first, ForWork) }()
		synctest.Wait()
		go func() { reports <- r.Report(t.Context(), ForWork) }()
		synctest.Wait()
		hangUp()
		require.Equal(t, map[string]string{"redis": "context canceled"}, (<-reports).Failing)
		close(answer)
		require.Equal(t, "ready", (<-reports).Status)
	})
}

func TestStopIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProcess(Config{}, "worker", nil)
		release := make(chan struct{})
		defer close(release)
		var order []string
		p.OnStop("last", func(context.Context) error {
			order = append(order, "last")
			return nil
		})
		p.OnStop("stuck", func(context.Context) error {
			<-release
			return nil
		})
		p.OnStop("first", func(context.Context) error {
			order = append(order, "first")
			return errors.New("broken")
		})
		began := time.Now()
		err := p.stop(time.Minute)
		require.Equal(t, time.Minute, time.Since(began))
		synctest.Wait()
		require.Equal(t, []string{"first", "last"}, order)
		require.ErrorContains(t, err, "stop first: broken\nstop stuck: context deadline exceeded")
		require.Equal(t, "draining", p.Ready.Report(t.Context(), ForWork).Status)
	})
}
