package app

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// writeCertificate writes a certificate of 127.0.0.1 and its key, and returns the certificate.
func writeCertificate(t *testing.T, certFile, keyFile string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
	require.NoError(t, os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return cert
}

func TestServerSpeaksTLS(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	cert := writeCertificate(t, certFile, keyFile)
	p := newProcess(Config{}, "broker", nil)
	s, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{CertFile: certFile, KeyFile: keyFile, MaxHeaderBytes: 1 << 10})
	require.NoError(t, err)
	s.Serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }))

	roots := x509.NewCertPool()
	roots.AddCert(cert)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get("https://" + s.Addr().String())
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, "HTTP/2.0", string(body))

	_, err = tls.Dial("tcp", s.Addr().String(), &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11})
	require.ErrorContains(t, err, "protocol version")
	transport.CloseIdleConnections()
	require.NoError(t, p.stop(time.Second))
}

func TestCertificateIsLoadedAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	first := writeCertificate(t, certFile, keyFile)
	logs := new(output)
	c, err := loadCertificate(certFile, keyFile, slog.New(slog.NewJSONHandler(logs, nil)))
	require.NoError(t, err)
	now := time.Now()
	c.now = func() time.Time { return now }
	serial := func() *big.Int {
		t.Helper()
		cert, err := c.get(nil)
		require.NoError(t, err)
		return cert.Leaf.SerialNumber
	}
	require.Equal(t, first.SerialNumber, serial())

	second := writeCertificate(t, certFile, keyFile)
	later := now.Add(time.Minute) // the clock of the file system may be coarse
	require.NoError(t, os.Chtimes(certFile, later, later))
	require.Equal(t, first.SerialNumber, serial(), "the files are not read at each handshake")
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial())
	logs.line(t, "certificate changed")

	require.NoError(t, os.WriteFile(keyFile, []byte("half"), 0o600))
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial(), "a wrong file does not end the service")
	logs.line(t, "certificate could not be read again, the old one stays in use")
	require.NoError(t, os.Remove(certFile))
	now = now.Add(certificateInterval)
	require.Equal(t, second.SerialNumber, serial())
	third := writeCertificate(t, certFile, keyFile)
	now = now.Add(certificateInterval)
	require.Equal(t, third.SerialNumber, serial())
}

func TestListenErrors(t *testing.T) {
	p := newProcess(Config{}, "broker", nil)
	_, err := p.Listen(t.Context(), "rooms", "127.0.0.1:0", ServeOptions{CertFile: "absent.pem", KeyFile: "absent.pem"})
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
