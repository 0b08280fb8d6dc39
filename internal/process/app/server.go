package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
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
