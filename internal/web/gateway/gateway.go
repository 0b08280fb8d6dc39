// Package gateway serves the HTTP API and the web console on one address, beside the stream
// consumer of the role ingest or alone. It hides how the two share their stores, limits and API
// keys, and how both end when the process stops.
package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/netutil"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/web/console"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// Config configures a gateway.
type Config struct {
	Addr        string
	AddrSetting string      // what sets Addr, for errors; "": BULKACTION_API_ADDR
	TLS         *tls.Config // nil: plain HTTP
	// MaxConnections is how many connections there are at most; further ones wait. 0: 4,096.
	MaxConnections int
	// DrainDelay is how long connections are still accepted after the context of Run has ended, and
	// Grace how long begun requests go on after that.
	DrainDelay, Grace time.Duration
	// Listen opens the listener; nil: it is a TCP listener on addr, which is Addr.
	Listen func(ctx context.Context, addr string) (net.Listener, error)

	Store   *groups.Store
	Decoder messages.Decoder
	Guards  *guard.Client // the guards that operators control
	Rooms   httpapi.Rooms // what serves the calls on the waiting room; nil: there are no such calls
	// Keys checks the API keys of requests. nil: nobody is asked for a key, and every caller may do
	// everything.
	Keys     *apikey.Authenticator
	KeyStore *apikey.Store // the API keys in Redis, which admins manage; needed with Keys
	KeyRPS   int           // most requests of a key in a second; 0: any number
	Proxies  auth.Proxies  // in front of the gateway
	// KeepActivity is how long entries of the activity log are kept. 0: without a limit of time.
	KeepActivity time.Duration

	NoAPI    bool           // only the console is served
	UI       bool           // the console is served, at /ui/
	Sessions *session.Store // of the console; needed with UI and Keys
	Secure   bool           // browsers reach the console over https alone
	Prefix   string         // of the path under which a proxy shows the console; "": none
	TraceURL string         // of the links to traces in the console, with placeholders; "": there are none
}

const defaultConnections = 4096

// Gateway is the gateway of one process.
type Gateway struct {
	stage.Process
	cfg      Config
	listener net.Listener
}

// New returns the gateway of a process. It opens the listener, so that an address that is in use is
// an error of New.
func New(ctx context.Context, p stage.Process, cfg Config) (*Gateway, error) {
	if cfg.Listen == nil {
		cfg.Listen = func(ctx context.Context, addr string) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", addr)
		}
	}
	listener, err := cfg.Listen(ctx, cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("listen for the API: %w: set %s to another address", err,
			cmp.Or(cfg.AddrSetting, "BULKACTION_API_ADDR"))
	}
	listener = netutil.LimitListener(listener, cmp.Or(cfg.MaxConnections, defaultConnections))
	p.Tel.Log.Info("listening", "server", "api", "addr", listener.Addr().String(), "tls", cfg.TLS != nil)
	return &Gateway{p, cfg, listener}, nil
}

// Addr returns the address on which the gateway listens, as host:port.
func (g *Gateway) Addr() string { return g.listener.Addr().String() }

// Run serves requests until ctx ends, and for Config.DrainDelay longer. It then finishes the
// requests that have begun, for at most Config.Grace. If the server fails for good, Run returns the
// error.
func (g *Gateway) Run(ctx context.Context) error {
	if g.cfg.Keys == nil {
		return g.serve(ctx)
	}
	return stage.RunAll(ctx, g.serve, g.readKeys)
}

// readKeys keeps this process's copy of the API keys fresh, until ctx ends. It is not a loop of a
// stage.Runner, which would read the keys more often than necessary.
func (g *Gateway) readKeys(ctx context.Context) error {
	loops := redisx.Loops{Log: g.Tel.Log}
	retry := redisx.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second}
	loops.Run(ctx, "read API keys", retry, g.cfg.Keys.Step, redisx.Sleep)
	return nil
}

func (g *Gateway) serve(ctx context.Context) error {
	srv := httpapi.NewServer(g.cfg.Addr, g.options())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		_ = redisx.Sleep(context.WithoutCancel(ctx), g.cfg.DrainDelay) // load balancers still send requests
		srv.Stop(g.cfg.Grace)
	}()
	err := srv.Serve(g.listener)
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the API: %w", err)
	}
	<-stopped
	return nil
}

func (g *Gateway) options() httpapi.Options {
	c := g.cfg
	opt := httpapi.Options{
		TLS:      c.TLS,
		Backend:  backend{c.Store, c.Guards},
		Rooms:    c.Rooms,
		Activity: activity.New(g.Conn.Cmd, g.Space, c.KeepActivity, g.Tel.Log),
		KeyRPS:   c.KeyRPS,
		Proxies:  c.Proxies,
		Log:      g.Tel.Log,
		Metrics:  telemetry.NewServerMetrics(g.Tel.Meter),
		Decoder:  c.Decoder,
		Version:  g.Version,
		Prefix:   c.Prefix,
	}
	ui := console.Options{Secure: c.Secure, TraceURL: c.TraceURL}
	if c.Keys != nil {
		opt.Keys, opt.KeyStore, ui.Sessions = c.Keys, c.KeyStore, c.Sessions
	}
	if c.UI {
		opt.UI = func(s httpapi.Shared) http.Handler { return console.New(s, ui) }
		opt.OnlyUI = c.NoAPI
	}
	return opt
}

// backend implements httpapi.Backend, by which the HTTP API and the console read and change data.
// It uses the store of groups and the guards.
type backend struct {
	*groups.Store
	guards *guard.Client
}

func (b backend) Guards(ctx context.Context, q guard.Query) (api.GuardList, error) {
	l, err := b.guards.List(ctx, q)
	return l, guardError(err)
}

func (b backend) Guard(ctx context.Context, name string) (api.Guard, error) {
	v, err := b.guards.Inspect(ctx, name)
	return v, guardError(err)
}

func (b backend) GuardKeys(ctx context.Context, name string) (keys []string, more bool, err error) {
	keys, more, err = b.guards.Keys(ctx, name)
	return keys, more, guardError(err)
}

func (b backend) GuardHealth(ctx context.Context) api.GuardHealth { return b.guards.Health(ctx) }

func (b backend) ControlGuard(ctx context.Context, name, member string, do guard.Action) error {
	return guardError(b.guards.Control(ctx, name, member, do))
}

// guardError wraps an error of package guard in the error of package api that decides the HTTP
// status.
func guardError(err error) error {
	switch {
	case errors.Is(err, guard.ErrUnknownGuard), errors.Is(err, guard.ErrUnknownMember):
		return &api.NotFoundError{Text: err.Error()}
	case errors.Is(err, guard.ErrNoBreaker):
		return fmt.Errorf("%w: %w", err, api.ErrConflict)
	case errors.Is(err, guard.ErrInvalid):
		return fmt.Errorf("%w: %w", err, api.ErrInvalid)
	case errors.Is(err, guard.ErrUnavailable):
		return fmt.Errorf("%w: %w", err, api.ErrUnavailable)
	}
	return err
}

func (b backend) Submit(ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions) (api.Accepted, error) {
	key, unique := clientKey(ctx, g, o)
	ctx, request := backpressure.WithRequest(ctx, key, unique)
	defer request.End()
	return b.Store.Submit(ctx, g, groups.Origin{
		IdempotencyKey: o.IdempotencyKey,
		GeneratedID:    o.GeneratedID,
		TraceParent:    o.TraceParent,
		At:             time.Now(),
	})
}

// clientKey returns the key under which the admission controller recognizes a submission when the
// client sends it again. It is the client's idempotency key or group id. If the client gave
// neither, it is made of a few fields that a repetition has in common with the first request; then
// unique is false, because submissions of other clients of the tenant may have the same key.
// Clients of different tenants never have the same key.
func clientKey(
	ctx context.Context, g *messages.SubmitGroup, o httpapi.SubmitOptions,
) (key string, unique bool) {
	who, _ := auth.From(ctx)
	switch {
	case o.IdempotencyKey != "":
		return who.Tenant + " key " + o.IdempotencyKey, true
	case !o.GeneratedID:
		return who.Tenant + " group " + g.ID, true
	}
	return strings.Join([]string{who.Tenant, "new", g.Tenant, g.Type, g.Name, strconv.Itoa(len(g.Jobs))}, " "), false
}

func (b backend) Append(ctx context.Context, group string, jobs []messages.Job, o httpapi.AppendOptions) error {
	base, number, _ := strings.Cut(o.RequestID, ".")
	part, _ := strconv.ParseInt(number, 10, 64)
	ctx, request := backpressure.WithPiece(ctx, "append "+group, base, part)
	defer request.End()
	return b.Store.Append(ctx, group, jobs, o.RequestID, groups.Origin{TraceParent: o.TraceParent, At: time.Now()})
}
