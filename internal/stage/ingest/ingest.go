// Package ingest is the role that takes work in: over HTTP and from the ingest stream. It
// validates, stores jobs, and puts groups into their tenants' fair queues. It hides that many small
// messages are stored together, and what becomes of those that can't be accepted.
package ingest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/groups"
	"github.com/bulkaction/bulkaction/internal/httpapi"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config is what the role can be told.
type Config struct {
	APIAddr string
	Version string
	Lease   time.Duration // messages of an ingest that is silent for so long are taken over

	// MaxInFlight is how many messages may wait here, for room or for what they belong to, before
	// no more are read; 10,000 when 0.
	MaxInFlight int
}

// Ingest is one process's ingest.
type Ingest struct {
	cfg     Config
	conn    *redisx.Conn
	space   keyspace.Space
	tel     *telemetry.Telemetry
	id      string
	store   *groups.Store
	decoder messages.Decoder

	sub         *wm.Subscriber
	listener    net.Listener
	oldest      oldestPending
	created     time.Time
	running     atomic.Bool
	lastRefusal atomic.Int64 // when a message last found no room, in Unix nanoseconds
}

// defaultInFlight is more than the 1,000 of others, since appends may come before their group's
// submission. Of large ones so many bytes may: with what is made of them and with garbage, a
// process stays below 150 MB.
const (
	defaultInFlight = 10_000
	inFlightBytes   = 32 << 20
)

// New returns an ingest named id, which must be unique to the process's start. It listens at once,
// so that a taken address is an error here.
func New(
	ctx context.Context, cfg Config, conn *redisx.Conn, space keyspace.Space,
	tel *telemetry.Telemetry, id string, store *groups.Store, decoder messages.Decoder,
) (*Ingest, error) {
	sub, err := wm.NewSubscriber(conn, wm.SubscriberConfig{
		Group:        keyspace.GroupIngest,
		Consumer:     id,
		MinIdle:      cfg.Lease,
		MaxInFlight:  cmp.Or(cfg.MaxInFlight, defaultInFlight),
		MaxBytes:     inFlightBytes,
		DeleteOnAck:  true,
		CloseTimeout: drainTimeout,
		Logger:       tel.Log,
	})
	if err != nil {
		return nil, err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.APIAddr)
	if err != nil {
		return nil, fmt.Errorf("listen for the API: %w: set BULKACTION_API_ADDR to another address", err)
	}
	tel.Log.Info("listening", "server", "api", "addr", listener.Addr().String())
	return &Ingest{
		cfg:      cfg,
		conn:     conn,
		space:    space,
		tel:      tel,
		id:       id,
		store:    store,
		decoder:  decoder,
		sub:      sub,
		listener: listener,
		created:  time.Now(),
	}, nil
}

// APIAddr is where the API listens, host:port.
func (in *Ingest) APIAddr() string { return in.listener.Addr().String() }

// Run takes work in until ctx ends; what it has begun by then it finishes.
func (in *Ingest) Run(ctx context.Context) error {
	in.running.Store(true)
	defer presence.Withdraw(ctx, in.conn, in.space, in.id)
	return stage.RunAll(ctx, in.serveAPI, in.consumeStream,
		func(ctx context.Context) error {
			return stage.Every(ctx, in.tel.Log, "status", presence.Interval, in.publishStatus)
		},
		func(ctx context.Context) error {
			return stage.Every(ctx, in.tel.Log, "look for cancellations", earlyCancelInterval, new(earlyCancel).runOnce(in))
		})
}

// Status is what the process shows of itself. The others count by it with how many they share the
// room for more work.
func (in *Ingest) Status() api.StageStatus {
	return api.StageStatus{ID: in.id, Role: "ingest", Running: in.running.Load(), SeenAt: time.Now()}
}

func (in *Ingest) publishStatus(ctx context.Context) error {
	return presence.PublishStage(ctx, in.conn, in.space, in.Status())
}

// drainTimeout is how long a stopping API lets open requests finish.
const drainTimeout = 5 * time.Second

func (in *Ingest) serveAPI(ctx context.Context) error {
	srv := httpapi.NewServer(in.cfg.APIAddr, httpapi.Options{
		Backend: backend{in.store},
		Log:     in.tel.Log,
		Decoder: in.decoder,
		Version: in.cfg.Version,
	})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		if srv.Shutdown(end) != nil {
			_ = srv.Close()
		}
	}()
	err := srv.Serve(in.listener)
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the API: %w", err)
	}
	<-stopped
	return nil
}

// consumeStream hears the ingest stream.
func (in *Ingest) consumeStream(ctx context.Context) error {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: drainTimeout}, routerLog(in.tel.Log))
	if err != nil {
		return fmt.Errorf("create router: %w", err)
	}
	router.AddMiddleware(in.decideOutcome, middleware.Recoverer)
	router.AddConsumerHandler("ingest", in.space.Ingest(), in.sub, in.handleMessage)
	err = router.Run(ctx)
	if ctx.Err() == nil { // it also returns when its subscription has ended
		return fmt.Errorf("hear the ingest stream: %w",
			errors.Join(err, in.sub.Close(), errors.New("it is heard no more")))
	}
	return in.sub.Close()
}
