package cli

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/certtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestHTTPS: with --ca-file, --cert-file and --key-file, or BULKACTION_CA_FILE, a command calls an
// API that speaks https. It explains each of eleven mistakes.
func TestHTTPS(t *testing.T) {
	ca, other := certtest.New(t), certtest.New(t)
	server, own, wrong := ca.Issue(), ca.Issue(), ca.Issue(certtest.Name("bulk.example"))
	serve := func(pair certtest.Pair, auth tls.ClientAuthType) string {
		loaded, err := tls.LoadX509KeyPair(pair.CertFile, pair.KeyFile)
		require.NoError(t, err)
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"tenants":[]}`))
		}))
		s.TLS = &tls.Config{Certificates: []tls.Certificate{loaded}, ClientAuth: auth, ClientCAs: ca.Pool()}
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	open, closed, misnamed := serve(server, tls.NoClientCert), serve(server, tls.RequireAndVerifyClientCert), serve(wrong, tls.NoClientCert)
	plain := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(plain.Close)
	tenants := func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"tenant", "ls"}, args...)...)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"authority":           {[]string{"--api", open, "--ca-file", ca.CAFile}, exitOK, ""},
		"certificate":         {[]string{"--api", closed, "--ca-file", ca.CAFile, "--cert-file", own.CertFile, "--key-file", own.KeyFile}, exitOK, ""},
		"unknown authority":   {[]string{"--api", open, "--ca-file", other.CAFile}, exitError, "Give the authority that signed the API's certificate with --ca-file or BULKACTION_CA_FILE."},
		"no authority":        {[]string{"--api", open}, exitError, "Give the authority that signed the API's certificate with --ca-file"},
		"wrong name":          {[]string{"--api", misnamed, "--ca-file", ca.CAFile}, exitError, "Give --api a name that the API's certificate has."},
		"no certificate":      {[]string{"--api", closed, "--ca-file", ca.CAFile}, exitError, "The API demands a certificate that it trusts: give it with --cert-file and --key-file."},
		"https to http":       {[]string{"--api", "https://" + plain.Listener.Addr().String(), "--ca-file", ca.CAFile}, exitError, "The API does not speak TLS: give --api with http://."},
		"http to https":       {[]string{"--api", "http" + open[len("https"):]}, exitError, "The API speaks TLS: give --api with https://."},
		"flags without https": {[]string{"--api", plain.URL, "--ca-file", ca.CAFile}, exitUsage, "need an --api that begins with https://"},
		"no key":              {[]string{"--api", open, "--cert-file", own.CertFile}, exitUsage, "give --cert-file and --key-file together"},
		"absent file":         {[]string{"--api", open, "--ca-file", "nosuch.pem"}, exitUsage, "--ca-file: open nosuch.pem"},
		"empty file":          {[]string{"--api", open, "--ca-file", own.KeyFile}, exitUsage, "has no certificate in PEM"},
		"wrong key":           {[]string{"--api", open, "--cert-file", own.CertFile, "--key-file", server.KeyFile}, exitUsage, "--cert-file: "},
	} {
		got := tenants(c.args...)
		require.Equal(t, c.code, got.code, "%s: %s", name, got.err)
		require.Contains(t, got.err, c.says, name)
	}
	t.Setenv("BULKACTION_CA_FILE", ca.CAFile)
	require.Equal(t, exitOK, tenants("--api", open).code)
}

// TestAuditOverTLS: audit, as a command that goes to Redis, uses the environment variables of the
// roles for TLS and for the password.
func TestAuditOverTLS(t *testing.T) {
	ca := certtest.New(t)
	own := ca.Issue()
	s := redistest.Server(t, redistest.TLS(ca), redistest.Args("--requirepass", "sesame"))
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("sesame\n"), 0o600))
	url := "rediss://" + s.TLSAddr()
	t.Setenv("BULKACTION_REDIS_URL", "redis://127.0.0.1:1")
	t.Setenv("BULKACTION_REDIS_PASSWORD_FILE", password)
	got := console{}.exec(t.Context(), "audit", "--redis-url", url)
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "set REDIS_TLS_CA_FILE")
	t.Setenv("BULKACTION_REDIS_TLS_CA_FILE", ca.CAFile)
	t.Setenv("BULKACTION_REDIS_TLS_CERT_FILE", own.CertFile)
	got = console{}.exec(t.Context(), "audit", "--redis-url", url)
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, "BULKACTION_REDIS_TLS_CERT_FILE: must be set together with TLS_KEY_FILE")
	t.Setenv("BULKACTION_REDIS_TLS_KEY_FILE", own.KeyFile)
	got = console{}.exec(t.Context(), "audit", "--redis-url", url)
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "no role has used this Redis", "it has connected")
}
