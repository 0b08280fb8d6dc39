package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// drainTimeout is how long a stopping server waits for open requests before it closes them. If less
// than twice this time is left, it waits half of the rest, so that later clean-ups have time too.
const drainTimeout = 5 * time.Second

// Serve starts an HTTP server that stops with the process, and returns its address. It returns an
// error if it can't listen on addr. If the server fails later, the process ends with an error.
func (p *Process) Serve(ctx context.Context, name, addr string, handler http.Handler) (net.Addr, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", name, err)
	}
	p.serve(name, listener, handler)
	p.Tel.Log.Info("listening", "server", name, "addr", listener.Addr().String())
	return listener.Addr(), nil
}

func (p *Process) serve(name string, listener net.Listener, handler http.Handler) {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(p.Tel.Log.Handler(), slog.LevelWarn),
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			p.fail(fmt.Errorf("serve %s: %w", name, err))
		}
	}()
	p.OnStop(name+" server", func(ctx context.Context) error {
		end, _ := ctx.Deadline()
		ctx, cancel := context.WithTimeout(ctx, min(drainTimeout, time.Until(end)/2))
		defer cancel()
		err := server.Shutdown(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			err = server.Close() // the remaining requests are streams that their clients keep open
		}
		<-served
		return err
	})
}

// HandleAdmin adds a route to the admin server; pattern has the syntax of [http.ServeMux]. The
// admin server has no authentication. So it accepts requests other than GET and HEAD only from this
// host, unless API_ALLOW_UNAUTHENTICATED is set.
func (p *Process) HandleAdmin(pattern string, handler http.Handler) {
	open := p.Config.Ingest.AllowUnauthenticated
	p.admin.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		reads := r.Method == http.MethodGet || r.Method == http.MethodHead
		if !reads && !open && !fromLoopback(r) {
			http.Error(w, "changes are for this host only", http.StatusForbidden)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

func fromLoopback(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && peer.Addr().Unmap().IsLoopback()
}

func (p *Process) serveAdmin(ctx context.Context) error {
	p.admin.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	p.admin.Handle("GET /readyz", p.Ready)
	p.admin.Handle("GET /metrics", p.Tel.MetricsHandler())
	addr, err := p.Serve(ctx, "admin", p.Config.Telemetry.AdminAddr, p.admin)
	if err != nil {
		return fmt.Errorf("%w; choose another %sADMIN_ADDR", err, envPrefix)
	}
	p.adminAddr = addr
	return nil
}
