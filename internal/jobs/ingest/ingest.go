// Package ingest is the role that accepts submissions, over HTTP and from the ingest stream. It
// validates them, stores their jobs, and puts groups into their tenants' fair queues. The package
// hides that small messages are stored together, and how messages that can't be accepted are
// retried or quarantined.
package ingest

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/clientaddr"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/web/console"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// Config configures the role.
type Config struct {
	APIAddr     string
	AddrSetting string      // what sets APIAddr, for errors; "": BULKACTION_API_ADDR
	TLS         *tls.Config // of the API; nil: plain HTTP
	// MaxConnections is how many connections the API has at most; further ones wait. 0: 4,096.
	MaxConnections int
	// DrainDelay is how long the API still accepts connections after the context of Run has ended.
	DrainDelay time.Duration

	Lease  time.Duration // after a silence of this length, other processes take over the messages of an ingest process
	Guards *guard.Client // the guards that operators control; nil: those of the connection's key space
	Events httpapi.Rooms // what serves the calls on the waiting room; nil: the API has no such calls
	// Keys checks the API keys of requests. nil: the API asks for no keys, and every caller may do
	// everything.
	Keys *apikey.Authenticator
	// KeyStore holds the API keys in Redis, which admins manage through the API. nil: the API
	// manages none.
	KeyStore *apikey.Store
	KeyRPS   int                // most requests of a key in a second; 0: any number
	Proxies  clientaddr.Proxies // in front of the API
	// KeepActivity is how long entries of the activity log are kept. 0: without a limit of time.
	KeepActivity time.Duration

	NoAPI    bool           // only the console is served
	UI       bool           // the console is served, at /ui/
	Logins   *session.Store // of the console; needed with UI and Keys
	Secure   bool           // browsers reach the console over https alone
	TraceURL string         // of the links to traces in the web console, with placeholders; "": there are none
	NoStream bool           // the messages of the ingest streams are left to other processes
	Streams  []Stream       // further ingest streams, each of one tenant

	Grace time.Duration // how long begun messages go on after Run's ctx; requests: after DrainDelay

	// MaxInFlight is how many messages of the ingest stream this process holds at most while they
	// wait for the backlog or for their group. At this number it reads no more messages. 0 means
	// 10,000. Each further stream may have as many.
	MaxInFlight int
	// Listen opens the API's listener; nil: it is a TCP listener on addr, which is APIAddr.
	Listen func(ctx context.Context, addr string) (net.Listener, error)
}

// Ingest is the ingest of one process.
type Ingest struct {
	stage.Process
	cfg     Config
	store   *groups.Store
	decoder messages.Decoder

	sources     []*source // the ingest stream, and the further ones
	listener    net.Listener
	created     time.Time
	lastRefusal atomic.Int64 // when a message was last refused because the backlog was full, in Unix nanoseconds
}

// defaultInFlight and inFlightBytes bound the messages that one process holds. The number is higher
// than the 1,000 of other consumers, because appends may arrive long before their group's
// submission. The bytes keep a process without further streams below 150 MB, including decoded
// messages and the garbage collector's reserve.
const (
	defaultInFlight = 10_000
	inFlightBytes   = 32 << 20
)

const defaultConnections = 4096

// New returns the ingest of a process. It opens the API's listener, so that an address that is in
// use is an error of New.
func New(
	ctx context.Context, p stage.Process, cfg Config, store *groups.Store, decoder messages.Decoder,
) (*Ingest, error) {
	if cfg.Listen == nil {
		cfg.Listen = func(ctx context.Context, addr string) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", addr)
		}
	}
	listener, err := cfg.Listen(ctx, cfg.APIAddr)
	if err != nil {
		return nil, fmt.Errorf("listen for the API: %w: set %s to another address", err,
			cmp.Or(cfg.AddrSetting, "BULKACTION_API_ADDR"))
	}
	if cfg.Guards == nil {
		cfg.Guards = guard.New(p.Conn.Cmd, guard.Prefix(p.Space.Prefix()))
	}
	listener = netutil.LimitListener(listener, cmp.Or(cfg.MaxConnections, defaultConnections))
	p.Tel.Log.Info("listening", "server", "api", "addr", listener.Addr().String(), "tls", cfg.TLS != nil)
	in := &Ingest{
		Process:  p,
		cfg:      cfg,
		store:    store,
		decoder:  decoder,
		listener: listener,
		created:  time.Now(),
	}
	inFlight := cmp.Or(cfg.MaxInFlight, defaultInFlight)
	in.sources = append(in.sources, newSource(in, Stream{}, inFlight, inFlightBytes))
	for _, further := range cfg.Streams {
		// The further streams together may hold as many bytes as the ingest stream. The number of
		// entries is not divided: appends may stand before their group's submission, which must be
		// read, too.
		in.sources = append(in.sources, newSource(in, further, inFlight, inFlightBytes/len(cfg.Streams)))
	}
	return in, nil
}

// APIAddr returns the address on which the API listens, as host:port.
func (in *Ingest) APIAddr() string { return in.listener.Addr().String() }

// Run accepts submissions until ctx ends, and over HTTP for Config.DrainDelay longer. It then
// finishes the requests and messages that it has begun, for at most Config.Grace. If the API or an
// ingest stream fails for good, it stops and returns the error.
func (in *Ingest) Run(ctx context.Context) error {
	r := in.Runner()
	r.Add(in.serveAPI)
	if !in.cfg.NoStream {
		for _, src := range in.sources {
			r.Add(src.consumer.Run)
			r.Every("apply cancellations early", earlyCancelInterval, new(earlyCancel).runOnce(src))
		}
		r.ReportAlive("ingest")
	}
	if in.cfg.Keys != nil {
		r.Add(in.readKeys)
	}
	return r.Run(ctx)
}

// readKeys keeps this process's copy of the API keys fresh, until ctx ends. It is not a loop of the
// Runner, which would read the keys more often than necessary.
func (in *Ingest) readKeys(ctx context.Context) error {
	loops := redisx.Loops{Log: in.Tel.Log}
	retry := redisx.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second}
	loops.Run(ctx, "read API keys", retry, in.cfg.Keys.Step, redisx.Sleep)
	return nil
}

// retryAfter is the wait before a message that was put off is handled for the second time; later
// waits are longer.
const retryAfter = 250 * time.Millisecond

func (in *Ingest) serveAPI(ctx context.Context) error {
	opt := httpapi.Options{
		TLS:     in.cfg.TLS,
		Backend: backend{in.store, in.cfg.Guards},
		Rooms:   in.cfg.Events,
		Log:     in.Tel.Log,
		Decoder: in.decoder,
		Version: in.Version,
		KeyRPS:  in.cfg.KeyRPS,
		Proxies: in.cfg.Proxies,

		Activity: activity.New(in.Conn.Cmd, in.Space, in.cfg.KeepActivity, in.Tel.Log),
	}
	if in.cfg.Keys != nil {
		opt.Keys = in.cfg.Keys
	}
	if in.cfg.KeyStore != nil {
		opt.KeyStore = in.cfg.KeyStore
	}
	closing, closeUI := context.WithCancel(context.WithoutCancel(ctx))
	defer closeUI()
	if in.cfg.UI {
		ui := console.Options{
			Backend: opt.Backend, Rooms: opt.Rooms, Activity: opt.Activity, Keys: opt.Keys, Proxies: opt.Proxies,
			Decoder: opt.Decoder, Version: opt.Version, Log: opt.Log, Secure: in.cfg.Secure, TLS: in.cfg.TLS != nil,
			Closing: closing, TraceURL: in.cfg.TraceURL,
		}
		if in.cfg.Logins != nil {
			ui.Sessions = in.cfg.Logins
		}
		ui.KeyStore, ui.NoAPI = opt.KeyStore, in.cfg.NoAPI
		opt.UI, opt.OnlyUI = console.New(ui), in.cfg.NoAPI
	}
	srv := httpapi.NewServer(in.cfg.APIAddr, opt)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		_ = redisx.Sleep(context.WithoutCancel(ctx), in.cfg.DrainDelay) // load balancers still send requests
		closeUI()
		srv.Stop(in.cfg.Grace)
	}()
	err := srv.Serve(in.listener)
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the API: %w", err)
	}
	<-stopped
	return nil
}
