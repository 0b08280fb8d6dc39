// Package roles builds the six roles of jobs, and the broker of the waiting room, from a process's
// configuration. cmd/ROLE runs one of them as a process; `bulkaction all` and `bulkaction dev` run
// the six in one process, and on demand the broker.
package roles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/audit/checkers"
	"github.com/bulkaction/bulkaction/internal/jobs/aggregator"
	"github.com/bulkaction/bulkaction/internal/jobs/dispatcher"
	"github.com/bulkaction/bulkaction/internal/jobs/fetcher"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Role is a function that runs a role in a process until its context ends, or until an error.
type Role func(context.Context, *app.Process) error

// Base holds what every role of a process needs: the Redis connection, the key space, and the
// guards.
type Base struct {
	Conn   *redisx.Conn
	Space  keyspace.Space
	Guards *guard.Client

	// listening is called by the roles ingest and broker when their servers listen. A process whose
	// only role is one of these two is not ready before.
	listening func()
}

// BasedRole is a function that runs a role on the connection of a Base, which other roles of the
// process may share, until its context ends, or until an error.
type BasedRole func(context.Context, *app.Process, Base) error

// of returns what the role of p gets.
func (b Base) of(p *app.Process) stage.Process {
	return stage.Process{ID: p.Instance, Version: app.Version(), Conn: b.Conn, Space: b.Space, Tel: p.Tel}
}

// fewPartitions is the number of partitions below which Connect warns on a Redis Cluster: its
// masters then get unequal numbers of partitions.
const fewPartitions = 16

// Connect opens the Redis connection of a process, makes the process's readiness depend on it, and
// waits until Redis answers and fits (see awaitFit). It then checks the rights of the Redis user
// regularly. The process closes the connection when it stops. If ctx ends first, Connect returns no
// error.
func Connect(ctx context.Context, p *app.Process) (Base, error) {
	cfg := p.Config.Redis
	space, err := keyspace.New(cfg.KeyPrefix, cfg.Partitions)
	if err != nil {
		return Base{}, err
	}
	rights, err := newRights(p)
	if err != nil {
		return Base{}, err
	}
	connection := cfg.Connection()
	connection.ClientName, connection.Log = p.Instance, p.Tel.Log
	// Enough for a process that runs all roles: each role has a blocking read in each partition
	connection.BlockingReads = len(Names)*(cfg.Partitions+1) + blockingReadsOfBroker(cfg.Partitions) +
		len(p.Config.Ingest.Streams)
	conn, err := redisx.Connect(ctx, connection)
	if call.IsNoPermission(err) {
		return Base{}, fmt.Errorf("%w; %s", err, acl.Advice(rights.user.Name))
	}
	if err != nil {
		return Base{}, err
	}
	rights.conn = conn
	if conn.IsCluster() && cfg.Partitions < fewPartitions {
		p.Tel.Log.Warn(
			"a cluster with few partitions: they spread unevenly over its masters, and their number can't be "+
				"changed later",
			"partitions", cfg.Partitions, "recommended", fewPartitions,
		)
	}
	p.OnStop("redis connection", func(context.Context) error { return conn.Close() })
	p.Ready.AddShared("redis", conn.Ping)
	p.Ready.Add("redis rights", rights.ready)
	var fit, listening atomic.Bool
	listening.Store(p.Role != "ingest" && p.Role != "broker")
	p.Ready.Add("start", func(context.Context) error {
		switch {
		case !fit.Load():
			return errStarting
		case !listening.Load():
			return errNotListening
		}
		return nil
	})
	guards := guard.New(conn.Cmd, guard.Prefix(cfg.KeyPrefix), guard.Process(p.Instance), guard.Meter(p.Tel.Meter),
		guard.MetricPrefix(telemetry.NamePrefix), guard.TracerProvider(p.Tel.TracerProvider), guard.Logger(p.Tel.Log))
	p.OnStop("guards", guards.Close)
	if err := awaitFit(ctx, p, conn, space, rights); err != nil {
		return Base{}, err
	}
	fit.Store(ctx.Err() == nil)
	p.OnStop("check of rights", rights.start())
	return Base{Conn: conn, Space: space, Guards: guards, listening: func() { listening.Store(true) }}, nil
}

var (
	errStarting     = errors.New("waiting for redis")
	errNotListening = errors.New("the server does not listen yet")
)

// awaitFit waits until Redis answers and has free memory, and checks that this process may use it:
// that Redis is not too old and evicts no keys, that the Redis user has all rights that the role
// needs, that Redis can have replicas if writes have to wait for some, and that its data has this
// number of partitions. If ctx ends first, awaitFit returns nil although nothing is checked.
func awaitFit(
	ctx context.Context, p *app.Process, conn *redisx.Conn, space keyspace.Space, rights *rights,
) error {
	backoff := redisx.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	var logged time.Time
	for {
		err := conn.CheckVersion(ctx)
		if err == nil {
			err = conn.CheckEviction(ctx)
		}
		if err == nil {
			err = rights.check(ctx) // an old Redis can't answer this
		}
		if err == nil && p.Config.Redis.WaitReplicas > 0 {
			err = conn.CheckReplicas(ctx)
		}
		if err == nil {
			err = stage.CheckPartitions(ctx, conn, space)
		}
		if err == nil || !call.IsUnavailable(err) && !call.IsOOM(err) {
			return err
		}
		if time.Since(logged) >= time.Minute {
			logged = time.Now()
			setting := "BULKACTION_REDIS_URL"
			switch {
			case p.Embedded:
				setting = "RedisURL"
			case p.Role == "dev":
				setting = "--redis-url" // of the commands dev and demo
			}
			p.Tel.Log.Warn("redis is away or its memory is full, waiting for it",
				"redis", conn.String(), "address_set_by", setting, "error", err)
		}
		if redisx.Sleep(ctx, backoff.Next()) != nil {
			return nil // the process was told to stop
		}
	}
}

func rate(c app.Config) ledger.Rate {
	b := c.Backpressure
	return ledger.Rate{RPS: int64(b.GlobalRPS), Window: b.RateLimitWindow, Limiter: b.Limiter, Share: b.Share}
}

func store(p *app.Process, b Base, reducers *reducer.Registry, appender redis.Cmdable) *groups.Store {
	c := p.Config
	return groups.New(groups.Config{
		MaxBacklog:          int64(c.Ingest.MaxBacklog),
		MaxMemoryRatio:      c.Ingest.MaxMemoryRatio,
		KeepIdempotencyKeys: c.Retention.IdempotencyKeys,
		Rate:                rate(c),
		Limiter:             c.Backpressure.Limiter,
		LimiterMode:         c.Backpressure.Share,
		WaitReplicas:        c.Redis.WaitReplicas,
		WaitTimeout:         c.Redis.CommandTimeout / 2, // so that the answer arrives before the timeout
	}, b.Conn, b.Space, p.Tel, reducers, appender)
}

// Fetcher runs the role that admits waiting jobs, until ctx ends.
func Fetcher(ctx context.Context, p *app.Process, b Base) error {
	c := p.Config
	weights := [3]int(c.FairQueue.LaneWeights)
	var alpha *float64
	if c.FairQueue.Policy == "priority" {
		alpha = &c.FairQueue.Alpha
	}
	return fetcher.New(b.of(p), fetcher.Config{
		Interval:    c.Worker.FetchInterval,
		BatchSize:   c.Worker.FetchBatchSize,
		ReadyCap:    c.Backpressure.ReadyQueueMaxSize,
		Rate:        rate(c),
		LaneWeights: weights,
		Alpha:       alpha,
		KeepStats:   c.Congestion.StatsRetention,
		OnPermits:   HooksOf(ctx).Admitted,
	}).Run(ctx)
}

// Dispatcher runs the role that promotes due non-ready jobs and reclaims the jobs of dead workers,
// until ctx ends.
func Dispatcher(ctx context.Context, p *app.Process, b Base) error {
	c := p.Config
	return dispatcher.New(b.of(p), dispatcher.Config{
		Interval:   c.Backpressure.DispatchInterval,
		BatchSize:  c.Backpressure.DispatchBatchSize,
		FetchBatch: c.Worker.FetchBatchSize,
		ReadyCap:   c.Backpressure.ReadyQueueMaxSize,
		Rate:       rate(c),
		Lease:      c.Worker.Lease,
		MaxLosses:  c.Worker.MaxDeliveries,
		OnPermits:  HooksOf(ctx).Promoted,
	}).Run(ctx)
}

// Worker returns the role that runs jobs with the given processors. Its admin server shows the
// slots (GET /pool) and changes their number (PUT /pool).
func Worker(procs ...processor.Processor) BasedRole {
	return func(ctx context.Context, p *app.Process, b Base) error {
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
				RPS:       rate(c).RPSOf(b.Space.Partitions()),
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
		if err != nil { // WORKER_TYPES and the processors do not fit together
			return fmt.Errorf("%w: %w", app.ErrConfig, err)
		}
		p.HandleAdmin("GET /pool", http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			writeJSON(rw, w.Status())
		}))
		p.HandleAdmin("PUT /pool", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			asked := api.PoolSize{Workers: -1}
			err := json.NewDecoder(http.MaxBytesReader(rw, r.Body, 1<<10)).Decode(&asked)
			if err == nil {
				err = w.Resize(asked.Workers)
			}
			if err != nil {
				http.Error(rw, `{"workers": n} is expected: `+err.Error(), http.StatusUnprocessableEntity)
				return
			}
			writeJSON(rw, w.Status())
		}))
		return w.Run(ctx)
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // fails only if the client has closed the connection
}

// Watcher returns the role that moves groups through their states, publishes events, deletes old
// data and audits.
func Watcher(reducers *reducer.Registry) BasedRole {
	return func(ctx context.Context, p *app.Process, b Base) error {
		events, err := wm.NewPublisher(b.Conn)
		if err != nil {
			return err
		}
		r := p.Config.Retention
		return watcher.New(b.of(p), watcher.Config{
			Interval: 30 * time.Second, NoProcessorTimeout: p.Config.Worker.NoProcessorTimeout,
			Retention: watcher.Retention{
				Groups:      r.Groups,
				Results:     r.Results,
				MessageIDs:  r.MessageIDs,
				DeadLetters: r.DeadLetters,
				Events:      r.Events,
			},
			Audit: watcher.Audit{
				Interval:     p.Config.Audit.Interval,
				FullInterval: p.Config.Audit.DeepInterval,
				Lease:        p.Config.Worker.Lease,
				Others:       checkers.CheckRoomsOf,
				OtherLaws:    checkers.Laws,
			},
			Guards: b.Guards,
		}, store(p, b, reducers, nil), events).Run(ctx)
	}
}

// Aggregator returns the role that reduces results, with the built-in reducers and those written in
// Go.
func Aggregator(reducers *reducer.Registry) BasedRole {
	return func(ctx context.Context, p *app.Process, b Base) error {
		cfg := aggregator.Config{Block: p.Config.Worker.Timeout, Lease: p.Config.Worker.Lease}
		return aggregator.New(b.of(p), cfg, reducers).Run(ctx)
	}
}

// Alone returns a role that connects to Redis (see Connect) and then calls run, the only role of
// its process or several by Together. If ctx ends before Redis answers, the role ends without
// calling run.
func Alone(run BasedRole) Role {
	return func(ctx context.Context, p *app.Process) error {
		b, err := Connect(ctx, p)
		if err != nil || ctx.Err() != nil {
			return err
		}
		return run(ctx, p, b)
	}
}
