package app

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

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
