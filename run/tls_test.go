package run_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// serve runs all roles with these settings and this Redis. It returns the address of the API, and a
// function that stops the roles.
func serve(t *testing.T, redisURL string, settings map[string]string) (addr string, stop func() error) {
	t.Helper()
	listening := make(chan string, 1)
	settings = maps.Clone(settings)
	settings["API_ADDR"] = "127.0.0.1:0"
	stop = start(t, run.NewAll(run.Config{
		RedisURL: redisURL, Settings: settings, Logger: slog.New(slog.DiscardHandler),
		Listening: func(addr string) { listening <- addr },
	}, processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })))
	return <-listening, stop
}

// trusting returns a client's TLS configuration, which trusts the certificates of ca and shows the
// certificate own.
func trusting(t *testing.T, ca *redistest.Authority, own redistest.Pair) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(own.CertFile, own.KeyFile)
	require.NoError(t, err)
	return &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}
}

// TestEverythingOverTLS: with certificates on both sides, a group from a producer and one from the
// API are completed, and a subscriber gets an event. Redis and the API are called over TLS.
func TestEverythingOverTLS(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	server, own := ca.Issue(), ca.Issue()
	redis := redistest.Server(t, redistest.TLS(ca))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, redis.Client().Do(ctx, "acl", "setuser", "bulk", "on", ">sesame", "~*", "&*", "+@all").Err())
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("sesame\n"), 0o600))
	url := "rediss://" + redis.TLSAddr()

	addr, _ := serve(t, url, map[string]string{
		"REDIS_USERNAME": "bulk", "REDIS_PASSWORD_FILE": password, "REDIS_TLS_CA_FILE": ca.CAFile,
		"REDIS_TLS_CERT_FILE": own.CertFile, "REDIS_TLS_KEY_FILE": own.KeyFile,
		"API_TLS_CERT_FILE": server.CertFile, "API_TLS_KEY_FILE": server.KeyFile, "API_TLS_CLIENT_CA_FILE": ca.CAFile,
	})
	a := client.NewAPI("https://"+addr, client.WithTLSConfig(trusting(t, ca, own)))
	events, err := stream.NewSubscriber(ctx, url, stream.Config{TLS: trusting(t, ca, own), Username: "bulk", PasswordFile: password})
	require.NoError(t, err)
	defer events.Close()
	messages, err := events.Subscribe(ctx, events.Events())
	require.NoError(t, err)
	p, err := producer.New(ctx, url, producer.WithTLSConfig(trusting(t, ca, own)), producer.WithPasswordFile("bulk", password))
	require.NoError(t, err)
	defer p.Close()
	_, err = p.Submit(ctx, client.Submission{ID: "by-producer", Type: "T", Seal: true, Jobs: []client.NewJob{{Payload: 1}}})
	require.NoError(t, err)
	_, err = a.Submit(ctx, client.Submission{ID: "by-api", Type: "T", Seal: true, Jobs: []client.NewJob{{Payload: 1}}})
	require.NoError(t, err)
	for _, id := range []string{"by-api", "by-producer"} {
		require.Eventually(t, func() bool { _, err := a.Group(ctx, id); return err == nil }, patience, 10*time.Millisecond)
		g, err := a.Wait(ctx, id)
		require.NoError(t, err)
		require.Equal(t, api.StatusCompleted, g.Status)
	}
	m, ok := <-messages
	require.True(t, ok)
	m.Ack()

	// A client gets an error: without TLS, without a certificate, without the authority of the
	// API's certificate, and with TLS 1.0 and 1.1 only.
	_, err = client.NewAPI("http://"+addr).Group(ctx, "by-api")
	require.ErrorContains(t, err, "Client sent an HTTP request to an HTTPS server.")
	_, err = client.NewAPI("https://"+addr, client.WithTLSConfig(&tls.Config{RootCAs: ca.Pool()}), client.WithRetry(1, 0)).Group(ctx, "by-api")
	require.Error(t, err)
	conn, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: ca.Pool()}) // package http hides the reason
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "tls: certificate required")
	_, err = client.NewAPI("https://"+addr, client.WithRetry(1, 0)).Group(ctx, "by-api")
	require.ErrorContains(t, err, "certificate signed by unknown authority")
	old := trusting(t, ca, own)
	old.MinVersion, old.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	_, err = tls.Dial("tcp", addr, old)
	require.ErrorContains(t, err, "protocol version")
}

// TestCertificateIsReplacedUnderLoad replaces the API's certificate, also by a broken one, while
// clients open and use connections. No request fails, and new connections get the new certificate.
func TestCertificateIsReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	ca := redistest.NewAuthority(t)
	pair := ca.Issue()
	url, prefix := redistest.Shared(t)
	addr, _ := serve(t, url, map[string]string{"KEY_PREFIX": prefix, "API_TLS_CERT_FILE": pair.CertFile, "API_TLS_KEY_FILE": pair.KeyFile})
	var requests, failures atomic.Int64
	var failure atomic.Value
	ended := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 4 {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: ca.Pool()}, ForceAttemptHTTP2: i%2 == 0, DisableKeepAlives: i >= 2}
		clients.Go(func() {
			defer transport.CloseIdleConnections()
			for {
				select {
				case <-ended:
					return
				default:
				}
				requests.Add(1)
				response, err := (&http.Client{Transport: transport}).Get("https://" + addr + "/v1/stats")
				if err == nil {
					_, err = io.Copy(io.Discard, response.Body)
					err = errors.Join(err, response.Body.Close())
					if response.StatusCode != http.StatusOK {
						err = errors.Join(err, errors.New(response.Status))
					}
				}
				if err != nil {
					failures.Add(1)
					failure.Store(err.Error())
				}
			}
		})
	}
	serial := func() string {
		conn, err := tls.Dial("tcp", addr, &tls.Config{RootCAs: ca.Pool()})
		require.NoError(t, err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	before := serial()
	second := ca.Replace(pair)
	require.NotEqual(t, before, second.SerialNumber.String())
	require.Eventually(t, func() bool { return serial() == second.SerialNumber.String() }, patience, 50*time.Millisecond)

	require.NoError(t, os.WriteFile(pair.CertFile, []byte("broken"), 0o600))
	served := requests.Load()
	require.Eventually(t, func() bool { return requests.Load() > served+100 }, patience, 10*time.Millisecond)
	require.Equal(t, second.SerialNumber.String(), serial())
	third := ca.Replace(pair)
	require.Eventually(t, func() bool { return serial() == third.SerialNumber.String() }, patience, 50*time.Millisecond)
	close(ended)
	clients.Wait()
	require.Zero(t, failures.Load(), "%v", failure.Load())
	t.Logf("%d requests", requests.Load())
}

// TestAPIHasABoundOfConnections: a connection above the limit is served when another one is closed.
func TestAPIHasABoundOfConnections(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	addr, _ := serve(t, url, map[string]string{"KEY_PREFIX": prefix, "API_MAX_CONNECTIONS": "2"})
	open := func() net.Conn {
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	ask := func(conn net.Conn) error {
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
			return err
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, response.Body)
		return errors.Join(err, response.Body.Close())
	}
	first, second, third := open(), open(), open()
	require.NoError(t, ask(first))
	require.NoError(t, ask(second))
	answered := make(chan error, 1)
	go func() { answered <- ask(third) }()
	for range 100 { // meanwhile the others are served
		require.NoError(t, ask(second))
	}
	require.Empty(t, answered)
	require.NoError(t, first.Close())
	require.NoError(t, <-answered)
}

// TestDrainDelay: a process that was told to stop answers /readyz?for=traffic with 503, and still
// answers new connections to the API with 200, until the drain delay of 2 s is over or later.
func TestDrainDelay(t *testing.T) {
	t.Parallel()
	const delay = 2 * time.Second
	url, prefix := redistest.Shared(t)
	admin := childproc.FreeAddr()
	addr, stop := serve(t, url, map[string]string{
		"KEY_PREFIX": prefix, "API_DRAIN_DELAY": delay.String(), "ADMIN_ADDR": admin,
	})
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(url string) int {
		response, err := hc.Get(url)
		if err != nil {
			return 0
		}
		_ = response.Body.Close()
		return response.StatusCode
	}
	require.Eventually(t, func() bool { return get("http://"+admin+"/readyz?for=traffic") == http.StatusOK }, patience, 10*time.Millisecond)
	began := time.Now()
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	served := 0 // after the process said that it drains
	for draining := false; ; {
		draining = draining || get("http://"+admin+"/readyz?for=traffic") == http.StatusServiceUnavailable
		if get("http://"+addr+"/") != http.StatusOK {
			break
		}
		if draining {
			served++
		}
	}
	require.GreaterOrEqual(t, time.Since(began), delay)
	require.Positive(t, served)
	require.NoError(t, <-stopped)
}
