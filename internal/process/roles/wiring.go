// Package roles is the wiring of a process: which roles there are, and what each is built from. The
// table is [Own.Jobs]; beside it there are [Own.Broker], the waiting room, and [Console]. cmd/ROLE
// runs one role as a process; `bulkaction all` and `bulkaction dev` run several in one.
package roles

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/audit/checkers"
	"github.com/bulkaction/bulkaction/internal/jobs/aggregator"
	"github.com/bulkaction/bulkaction/internal/jobs/callbacks"
	"github.com/bulkaction/bulkaction/internal/jobs/dispatcher"
	"github.com/bulkaction/bulkaction/internal/jobs/fetcher"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/operations"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/room/broker"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Names lists the six roles of jobs in the order of the pipeline.
var Names = api.Roles

// Role is a function that runs a role of a process, which may run others, too, until its context
// ends, or until an error.
type Role func(context.Context, *app.Process, Base) error

// Own is what a program adds to the roles that it runs, such as its processors. The zero value
// serves no job type.
type Own struct {
	Processors []processor.Runner
	// BuiltIn creates processors that the worker serves besides (see package builtin); nil: none.
	BuiltIn    func(context.Context, *app.Process, *guard.Client) (list []processor.Runner, stop func(), err error)
	Middleware []processor.Middleware // around all processors, the first one outermost
	// BatchMiddleware is around all batchers, the first one outermost
	BatchMiddleware []processor.BatchMiddleware
	Reducers        *reducer.Registry      // nil: only the built-in ones
	Listening       func(addr string)      // called with the API's address before it accepts submissions
	RoomListening   func(publicURL string) // called as soon as the broker's server answers requests
	// RoomAnyPort lets the broker listen at a free port if its address is taken. A broker with a
	// configured public URL does not: visitors would not find it.
	RoomAnyPort bool
}

// Jobs returns the six roles of jobs by name. It is a function, not a variable, so that a program
// links only the roles that it runs, and so that a role's rights in Redis are not those of all.
func (o Own) Jobs() map[string]Role {
	return map[string]Role{
		"ingest":     Ingest(o.reducers(), o.Listening), // API, console, ingest streams: store, room admin, API keys
		"fetcher":    Fetcher,                           // ledger
		"dispatcher": Dispatcher,                        // ledger
		"worker":     o.Worker,                          // ledger, processors, guards
		"aggregator": o.Aggregator,                      // ledger, reducers
		"watcher":    o.Watcher,                         // store, events, guards, audit
	}
}

// Alone returns the function that [app.Main] runs for one role, or for several by [Together]: it
// connects to Redis (see [Connect]) and then calls run, unless ctx ends before Redis answers.
func Alone(run Role) func(context.Context, *app.Process) error {
	return func(ctx context.Context, p *app.Process) error {
		b, err := Connect(ctx, p)
		if err != nil || ctx.Err() != nil {
			return err
		}
		return run(ctx, p, b)
	}
}

// Together runs roles, given by their names, in one process until ctx ends or one of them fails.
// Then it stops the others: first all but the aggregator and the watcher, which bring to an end what
// the worker has done until it stopped, and then these two, one after the other. It waits for the
// roles before the two only for SHUTDOWN_GRACE_PERIOD. It returns all errors, joined. A role that
// was stopped while it started and returns nothing but the error of its context has no error. The
// roles share the Redis connection of b.
func Together(ctx context.Context, p *app.Process, b Base, named map[string]Role) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var front, every, all sync.WaitGroup
	stops, ended := map[string]func(){}, map[string]chan struct{}{}
	errs := make(chan error, len(named))
	for name, role := range named {
		roleCtx := ctx
		if slices.Contains(last, name) {
			roleCtx, stops[name] = context.WithCancel(context.WithoutCancel(ctx))
			defer stops[name]()
			ended[name] = make(chan struct{})
		} else {
			front.Add(1)
		}
		done := ended[name]
		every.Go(func() {
			err := role(roleCtx, p.As(name), b)
			if end := roleCtx.Err(); end != nil && err != nil && app.IsOnly(err, end) {
				err = nil
			}
			if err != nil {
				cancel()
			}
			errs <- err
			if done != nil {
				close(done)
			} else {
				front.Done()
			}
		})
	}
	frontEnded := make(chan struct{})
	all.Go(func() { front.Wait(); close(frontEnded) })
	all.Go(func() { every.Wait(); cancel() })
	<-ctx.Done()
	grace := time.After(p.Config.Worker.ShutdownGracePeriod)
	waitFor(frontEnded, grace)
	for _, name := range last {
		if stop := stops[name]; stop != nil {
			stop()
			waitFor(ended[name], grace)
		}
	}
	all.Wait()
	close(errs)
	var joined error
	for err := range errs {
		joined = errors.Join(joined, err)
	}
	return joined
}

// last are the roles that [Together] stops last, in this order.
var last = []string{"aggregator", "watcher"}

func waitFor(done <-chan struct{}, most <-chan time.Time) {
	select {
	case <-done:
	case <-most:
	}
}

// Fetcher runs the role that admits waiting jobs.
func Fetcher(ctx context.Context, p *app.Process, b Base) error {
	c := p.Config
	var alpha *float64
	if c.FairQueue.Policy == "priority" {
		alpha = &c.FairQueue.Alpha
	}
	return fetcher.New(b.of(p), fetcher.Config{
		Interval:    c.Worker.FetchInterval,
		BatchSize:   c.Worker.FetchBatchSize,
		ReadyCap:    c.Backpressure.ReadyQueueMaxSize,
		Meter:       meter(c),
		Configured:  configured(c),
		LaneWeights: [3]int(c.FairQueue.LaneWeights),
		Alpha:       alpha,
		KeepStats:   c.Congestion.StatsRetention,
		OnPermits:   HooksOf(ctx).Admitted,
	}).Run(ctx)
}

// Dispatcher runs the role that promotes due non-ready jobs and reclaims the jobs of dead workers.
func Dispatcher(ctx context.Context, p *app.Process, b Base) error {
	c := p.Config
	return dispatcher.New(b.of(p), dispatcher.Config{
		Interval:   c.Backpressure.DispatchInterval,
		BatchSize:  c.Backpressure.DispatchBatchSize,
		FetchBatch: c.Worker.FetchBatchSize,
		ReadyCap:   c.Backpressure.ReadyQueueMaxSize,
		Meter:      meter(c),
		Lease:      c.Worker.Lease,
		MaxLosses:  c.Worker.MaxDeliveries,
		OnPermits:  HooksOf(ctx).Promoted,
	}).Run(ctx)
}

// Worker runs the role that runs jobs. Its admin server shows the slots (GET /pool) and changes
// their number (PUT /pool).
func (o Own) Worker(ctx context.Context, p *app.Process, b Base) error {
	var procs []processor.Runner
	if o.BuiltIn != nil {
		builtIn, stop, err := o.BuiltIn(ctx, p, b.Guards)
		if err != nil || ctx.Err() != nil {
			return err
		}
		defer stop()
		procs = builtIn
	}
	procs, err := o.withMiddleware(p, append(procs, o.Processors...))
	if err != nil {
		return fmt.Errorf("%w: %w", app.ErrConfig, err)
	}
	c := p.Config
	congestion := ledger.Congestion{
		Base:      c.Backpressure.DefaultBackoff,
		Cap:       c.Backpressure.MaxBackoff,
		Flat:      true,
		KeepStats: c.Congestion.StatsRetention,
	}
	if c.Congestion.Enabled {
		congestion = ledger.Congestion{
			Base:      c.Congestion.BaseBackoff,
			Cap:       c.Congestion.MaxBackoff,
			RPS:       ledger.RPSOf(int64(c.Backpressure.GlobalRPS), b.Space.Partitions()),
			KeepStats: c.Congestion.StatsRetention,
		}
	}
	w, err := worker.New(b.of(p), worker.Config{
		Count:        c.Worker.Count,
		Types:        c.Worker.Types,
		Block:        c.Worker.Timeout,
		JobTimeout:   c.Worker.JobTimeout,
		TypeTimeouts: c.Worker.JobTimeouts,
		MaxRetries:   c.Worker.MaxRetryCount,
		MaxThrottles: c.Worker.MaxThrottles,
		Lease:        c.Worker.Lease,
		Grace:        c.Worker.ShutdownGracePeriod,
		Backoff:      c.Backpressure.DefaultBackoff,
		MaxBackoff:   c.Backpressure.MaxBackoff,
		Congestion:   congestion,
		OnStart:      HooksOf(ctx).Started,
	}, procs...)
	if errors.Is(err, worker.ErrNoProcessor) {
		err = fmt.Errorf("BULKACTION_WORKER_TYPES: %w", err)
	}
	if err != nil { // WORKER_TYPES and the processors do not fit together
		return fmt.Errorf("%w: %w", app.ErrConfig, err)
	}
	handlePool(p, w)
	return w.Run(ctx)
}

// withMiddleware returns processors, of which the last are the program's own, with its middleware.
// The error names what is nil, or panics in its use.
func (o Own) withMiddleware(p *app.Process, procs []processor.Runner) ([]processor.Runner, error) {
	for i, m := range o.Middleware {
		if m == nil {
			return nil, fmt.Errorf("middleware %d is nil", i)
		}
	}
	for i, m := range o.BatchMiddleware {
		if m == nil {
			return nil, fmt.Errorf("batch middleware %d is nil", i)
		}
	}
	builtIn := len(procs) - len(o.Processors)
	for i, proc := range procs {
		name := fmt.Sprintf("processor %d", i-builtIn)
		if v := reflect.ValueOf(proc); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
			return nil, fmt.Errorf("%s is nil (%T)", name, proc)
		}
		err := p.Guard(fmt.Sprintf("%s (%T) or its middleware", name, proc), func() error {
			switch proc := proc.(type) {
			case processor.Processor:
				procs[i] = processor.Use(proc, o.Middleware...)
			case processor.Batcher:
				procs[i] = processor.UseBatch(proc, o.BatchMiddleware...)
			}
			_ = proc.Type() // the worker calls it, too
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return procs, nil
}

// Aggregator runs the role that reduces results.
func (o Own) Aggregator(ctx context.Context, p *app.Process, b Base) error {
	cfg := aggregator.Config{Block: p.Config.Worker.Timeout, Lease: p.Config.Worker.Lease}
	return aggregator.New(b.of(p), cfg, o.reducers()).Run(ctx)
}

// Watcher runs the role that moves groups through their states, publishes events, deletes old data
// and audits.
func (o Own) Watcher(ctx context.Context, p *app.Process, b Base) error {
	events, err := wm.NewPublisher(b.Conn)
	if err != nil {
		return err
	}
	told, err := callbacksOf(p.Config.Callback)
	if err != nil {
		return err
	}
	r := p.Config.Retention
	acts := activity.New(b.Conn.Cmd, b.Space, r.Activity, p.Tel.Log)
	return watcher.New(b.of(p), watcher.Config{
		Interval: 30 * time.Second, NoProcessorTimeout: p.Config.Worker.NoProcessorTimeout,
		Retention: watcher.Retention{
			Groups:      r.Groups,
			Results:     r.Results,
			MessageIDs:  r.MessageIDs,
			DeadLetters: r.DeadLetters,
			Events:      r.Events,
			Callbacks:   r.Callbacks,
		},
		Audit: watcher.Audit{
			Interval:     p.Config.Audit.Interval,
			FullInterval: p.Config.Audit.DeepInterval,
			Lease:        p.Config.Worker.Lease,
			Others:       checkers.CheckRoomsOf,
			OtherLaws:    checkers.Laws,
		},
		Guards:     b.Guards,
		Operations: operations.New(b.Conn, b.Space, p.Tel.Log, acts),
		Callbacks:  callbacks.Config{Callbacks: told, Concurrency: p.Config.Callback.Concurrency, Activity: acts},
	}, store(p, b, o.reducers(), nil, told), events).Run(ctx)
}

// Broker runs the waiting room.
func (o Own) Broker(ctx context.Context, p *app.Process, b Base) error {
	c := p.Config.Broker
	if c.TokenKeysFile == "" {
		return fmt.Errorf("%w: BULKACTION_BROKER_TOKEN_KEYS_FILE is required: a file with an Ed25519 key, "+
			"such as `openssl genpkey -algorithm ed25519` makes", app.ErrConfig)
	}
	keys, err := entrytoken.Read(c.TokenKeysFile, p.Tel.Log)
	if err != nil {
		return tokenKeysError(c.TokenKeysFile, err)
	}
	serve := app.ServeOptions{
		TLS: app.TLSFiles{CertFile: c.TLSCertFile, KeyFile: c.TLSKeyFile}, MaxHeaderBytes: roomapi.MaxHeaderBytes,
		KeepAlive: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
	server, err := p.Listen(ctx, "broker", c.Addr, serve)
	if o.RoomAnyPort && c.PublicURL == "" && errors.Is(err, syscall.EADDRINUSE) {
		host, _, _ := net.SplitHostPort(c.Addr) // it was good enough to listen
		server, err = p.Listen(ctx, "broker", net.JoinHostPort(host, "0"), serve)
	}
	if err != nil {
		return fmt.Errorf("%w: set BULKACTION_BROKER_ADDR to another address", err)
	}
	publicURL := c.PublicURLOf(server.Addr())
	var capacity int64 // of an event that is created because the seat service knows it
	cfg := broker.Config{
		PublicURL: publicURL, Audience: c.TokenAudience, PromoteInterval: c.PromoteInterval,
		PositionInterval: c.PositionInterval, Drain: c.Drain,
		Defaults: RoomRules(c).Fill(api.EventSettings{Capacity: &capacity}),
	}
	if c.SeatsURL != "" {
		service, err := roomadmin.NewSeatService(c.SeatsURL, c.SeatsTimeout)
		if err != nil {
			return fmt.Errorf("%w: BULKACTION_BROKER_SEATS_URL: %w", app.ErrConfig, err)
		}
		cfg.Seats = service.Seats
	}
	look, err := roomapi.ReadLook(roomapi.LookSettings{Texts: c.PageTextsDir, Logo: c.PageLogo, Color: c.PageColor})
	if err != nil {
		return fmt.Errorf("%w: %w", app.ErrConfig, err)
	}
	role := broker.New(b.of(p), cfg, keys)
	// A broker that stops is not ready, so that load balancers send no new visitors.
	defer context.AfterFunc(ctx, p.Ready.SetDraining)()
	options := roomapi.Options{
		Room: role, Log: p.Tel.Log, PublicURL: publicURL, CookieKeys: keys.CookieKeys,
		TrustedProxies: c.Proxies(), Heartbeat: c.Heartbeat, WriteTimeout: c.WriteTimeout,
		MaxConnections: c.MaxConnections, MaxConnectionsPerIP: c.MaxConnectionsPerIP,
		EnterRatePerIP: c.EnterRatePerIP, Look: look,
		Metrics: roomapi.Metrics{
			SlowReader: func(event string) { role.Metrics().Count(telemetry.RoomSlowReaders, event, 1) },
			Refused:    role.Metrics().Refused,
			Served:     telemetry.NewServerMetrics(p.Tel.Meter).Served,
		},
	}
	if c.Identity == "header" {
		options.IdentityHeader = c.IdentityHeader
	}
	server.Serve(roomapi.New(options))
	b.listening()
	if o.RoomListening != nil {
		o.RoomListening(publicURL)
	}
	return role.Run(ctx)
}
