package app

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// drainTimeout is how long at most a stopping server waits for open requests before it closes their
// connections. It also waits for at most half of the time that the process has left, so that later
// clean-ups have time too.
const drainTimeout = 5 * time.Second

// ServeOptions are the TLS files, limits and TCP options of an HTTP server. The zero value means
// plain HTTP, headers of up to 1 MiB, and no limit of the time in which a body is read.
type ServeOptions struct {
	TLS            TLSFiles      // with a CertFile the server speaks TLS, see ServerTLS
	MaxHeaderBytes int           // a request with more is answered with 431; 0: 1 MiB
	ReadTimeout    time.Duration // longest time to read a request with its body; 0: no limit
	KeepAlive      net.KeepAliveConfig
}

// Server is an HTTP server whose port is open. Connections wait until Serve is called.
type Server struct {
	p        *Process
	name     string
	listener net.Listener
	http     *http.Server
	served   chan struct{} // closed when Serve's goroutine has ended; nil before Serve
}

// Serve starts an HTTP server that stops with the process, and returns its address. It returns an
// error if it can't listen on addr or read the TLS files. If the server fails later, the process
// ends with an error.
func (p *Process) Serve(
	ctx context.Context, name, addr string, o ServeOptions, handler http.Handler,
) (net.Addr, error) {
	s, err := p.Listen(ctx, name, addr, o)
	if err != nil {
		return nil, err
	}
	s.Serve(handler)
	return s.Addr(), nil
}

// Listen opens a server's listener, so that its address is known before its handler is made. The
// caller must call Serve. The server stops with the process.
func (p *Process) Listen(ctx context.Context, name, addr string, o ServeOptions) (*Server, error) {
	var tlsConfig *tls.Config
	if o.TLS.CertFile != "" {
		var err error
		if tlsConfig, err = ServerTLS(o.TLS, p.Tel.Log); err != nil {
			return nil, err
		}
	}
	listener, err := (&net.ListenConfig{KeepAliveConfig: o.KeepAlive}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", name, err)
	}
	s := p.newServer(name, listener)
	s.http.MaxHeaderBytes, s.http.ReadTimeout = o.MaxHeaderBytes, o.ReadTimeout
	s.http.TLSConfig = tlsConfig
	return s, nil
}

// newServer returns a server on a listener. It closes the listener when the process stops.
func (p *Process) newServer(name string, listener net.Listener) *Server {
	s := &Server{p: p, name: name, listener: listener, http: &http.Server{
		ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(p.Tel.Log.Handler(), slog.LevelWarn),
	}}
	p.OnStop(name+" server", s.stop)
	return s
}

// Addr returns the address on which the server listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve starts to answer requests. It may be called once.
func (s *Server) Serve(handler http.Handler) {
	s.http.Handler = handler
	s.served = make(chan struct{})
	serve := func() error { return s.http.Serve(s.listener) }
	if s.http.TLSConfig != nil {
		// With TLS, log the errors of connections only at level debug. Most are of handshakes that
		// clients break off, which is no fault of this server.
		s.http.ErrorLog = slog.NewLogLogger(s.p.Tel.Log.Handler(), slog.LevelDebug)
		serve = func() error { return s.http.ServeTLS(s.listener, "", "") }
	}
	go func() {
		defer close(s.served)
		if err := serve(); !errors.Is(err, http.ErrServerClosed) {
			s.p.fail(fmt.Errorf("serve %s: %w", s.name, err))
		}
	}()
	s.p.Tel.Log.Info("listening", "server", s.name, "addr", s.Addr().String())
}

// stop waits for the end of open requests (see drainTimeout), and then closes the remaining
// connections.
func (s *Server) stop(ctx context.Context) error {
	if s.served == nil {
		return s.listener.Close()
	}
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, min(drainTimeout, time.Until(end)/2))
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close() // the remaining requests are streams that their clients keep open
	}
	<-s.served
	return err
}

// certificateInterval is the least time between two checks of the certificate files for changes.
const certificateInterval = 5 * time.Second

// TLSFiles are the PEM files of a server that speaks TLS. The certificate and its key may be in one
// file.
type TLSFiles struct {
	CertFile, KeyFile string
	// ClientCAFile has the certificates of the authorities that sign client certificates; the
	// server then demands one of each client. "": clients need no certificate.
	ClientCAFile string
}

// certificate is the TLS configuration of a server. A handshake loads it again when its files have
// changed; open connections keep the certificate with which they began. No goroutine watches the
// files.
type certificate struct {
	files TLSFiles
	log   *slog.Logger
	now   func() time.Time

	mu      sync.Mutex
	loaded  *tls.Config
	leaf    *x509.Certificate
	state   fileState // of the files when loaded was read
	checked time.Time
}

// fileState is the sizes and times of change of the files. If it differs, one of them was written
// or replaced.
type fileState [3]fileVersion

type fileVersion struct {
	modified time.Time
	size     int64
}

// ServerTLS returns the TLS configuration of a server: TLS 1.2 and newer, HTTP/2 and HTTP/1.1. When
// the files change, new connections use the new ones within certificateInterval, unless these can't
// be used.
func ServerTLS(files TLSFiles, log *slog.Logger) (*tls.Config, error) {
	c, err := loadCertificate(files, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: c.get}, nil
}

// loadCertificate reads the files.
func loadCertificate(files TLSFiles, log *slog.Logger) (*certificate, error) {
	c := &certificate{files: files, log: log, now: time.Now}
	state, err := c.look()
	if err != nil {
		return nil, err
	}
	if err := c.load(state); err != nil {
		return nil, err
	}
	c.checked = c.now()
	return c, nil
}

// get returns the configuration for a handshake. Files that can't be used don't replace the present
// ones: get logs the reason. The first handshake after certificateInterval tries again, because a
// key may be written after its certificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if now.Sub(c.checked) < certificateInterval {
		return c.loaded, nil
	}
	c.checked = now
	state, err := c.look()
	if err == nil && state != c.state {
		if err = c.load(state); err == nil {
			c.log.Info("certificate changed", "file", c.files.CertFile, "not_after", c.leaf.NotAfter)
		}
	}
	if err != nil {
		c.log.Error("certificate could not be read again, the old one stays in use", "error", err)
	}
	return c.loaded, nil
}

func (c *certificate) load(state fileState) error {
	f := c.files
	pair, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile)
	if err != nil {
		return fmt.Errorf("read the certificate %s and its key %s: %w", f.CertFile, f.KeyFile, err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"},
	}
	if f.ClientCAFile != "" {
		pem, err := os.ReadFile(f.ClientCAFile)
		if err != nil {
			return fmt.Errorf("read the authorities of clients: %w", err)
		}
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("read the authorities of clients: %s has no certificate in PEM", f.ClientCAFile)
		}
	}
	c.loaded, c.leaf, c.state = config, pair.Leaf, state
	return nil
}

func (c *certificate) look() (fileState, error) {
	var s fileState
	for i, name := range []string{c.files.CertFile, c.files.KeyFile, c.files.ClientCAFile} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return fileState{}, fmt.Errorf("read the certificate: %w", err)
		}
		s[i] = fileVersion{info.ModTime(), info.Size()}
	}
	return s, nil
}

// adminReadTimeout is the longest time that the admin server waits for a request and its body.
const adminReadTimeout = 5 * time.Second

// HandleAdmin adds a route to the admin server; pattern has the syntax of [http.ServeMux]. If the
// process has an admin token, requests must show it. Without a token, GET and HEAD are open to all,
// and other methods only to callers on this host whose Host header is a loopback one.
func (p *Process) HandleAdmin(pattern string, handler http.Handler) {
	p.admin.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		token := p.Config.Telemetry.AdminToken
		reads := r.Method == http.MethodGet || r.Method == http.MethodHead
		switch {
		case token != "" && !hasToken(r, token):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "send the admin token: Authorization: Bearer TOKEN", http.StatusUnauthorized)
		case token == "" && !reads && (!fromLoopback(r) || !isLoopbackHost(r.Host)):
			http.Error(w, "without an admin token ("+envPrefix+"ADMIN_TOKEN_FILE), changes are for this host only",
				http.StatusForbidden)
		default:
			handler.ServeHTTP(w, r)
		}
	})
}

// hasToken reports whether a request has the token. The time that it takes does not depend on how
// much of the token is right.
func hasToken(r *http.Request, token string) bool {
	scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	got, want := sha256.Sum256([]byte(strings.TrimSpace(given))), sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && strings.EqualFold(scheme, "Bearer")
}

func fromLoopback(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && peer.Addr().Unmap().IsLoopback()
}

// isLoopbackHost reports whether a Host header names this host by a name that no DNS server can
// point elsewhere.
func isLoopbackHost(host string) bool {
	if _, _, err := net.SplitHostPort(host); err != nil {
		host = net.JoinHostPort(strings.Trim(host, "[]"), "0")
	}
	return isLoopback(strings.ToLower(host))
}

// onlyLoopbackHosts returns a handler that refuses requests with another Host header than a
// loopback one, so that no web page reaches a server on loopback by DNS rebinding.
func onlyLoopbackHosts(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLoopbackHost(r.Host) {
			http.Error(w, "this server listens on loopback and serves only the hosts localhost and loopback addresses",
				http.StatusMisdirectedRequest)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

func (p *Process) serveAdmin(ctx context.Context) error {
	p.admin.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	p.admin.Handle("GET /readyz", p.Ready)
	p.HandleAdmin("GET /metrics", p.Tel.MetricsHandler())
	addr, handler := p.Config.Telemetry.AdminAddr, http.Handler(p.admin)
	if isLoopback(addr) {
		handler = onlyLoopbackHosts(handler)
	}
	listening, err := p.Serve(ctx, "admin", addr, ServeOptions{ReadTimeout: adminReadTimeout}, handler)
	if err != nil {
		return fmt.Errorf("%w; choose another %sADMIN_ADDR", err, envPrefix)
	}
	p.adminAddr = listening
	return nil
}
