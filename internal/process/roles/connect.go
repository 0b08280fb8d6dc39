package roles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

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

func (b Base) of(p *app.Process) stage.Process {
	newest := map[string]int{}
	for _, part := range append(slices.Clone(Layouts), layout.GuardPart) {
		newest[part.Name] = part.Newest
	}
	limits := configured(p.Config)
	telemetry.ShowBuild(p.Tel.Meter, app.Version(), p.Role)
	return stage.Process{
		ID: p.Instance, Version: app.Version(), Layouts: newest, Limits: &limits, Conn: b.Conn, Space: b.Space, Tel: p.Tel,
	}
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
	if t := p.Config.Worker.Timeout; t > redisx.MaxBlock {
		p.Tel.Log.Warn("BULKACTION_WORKER_TIMEOUT is longer than one read may block: the rest of it has no effect",
			"timeout", t, "longest", redisx.MaxBlock)
	}
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
	use := func(numbers []layout.Number) {
		shown := map[string]string{}
		for i, n := range numbers {
			shown[Layouts[i].Name] = n.String()
		}
		p.Ready.SetLayouts(shown)
		space.SetLayout(numbers[0].Layout)
	}
	if err := awaitFit(ctx, p, conn, space, rights, use); err != nil {
		return Base{}, err
	}
	fit.Store(ctx.Err() == nil)
	p.OnStop("check of rights", rights.start())
	p.OnStop("check of the layout", watchLayouts(p, conn, space, use))
	p.OnStop("check of the limits", watchLimits(p, conn, space))
	return Base{Conn: conn, Space: space, Guards: guards, listening: func() { listening.Store(true) }}, nil
}

var (
	errStarting     = errors.New("waiting for redis")
	errNotListening = errors.New("the server does not listen yet")
)

// awaitFit waits until Redis answers and has free memory, and checks that this process may use it:
// that Redis is not too old and evicts no keys, that the Redis user has all rights that the role
// needs, that Redis can have replicas if writes have to wait for some, and that its data has this
// number of partitions and a layout that this version reads. It calls use with the numbers of the
// layouts. If ctx ends first, awaitFit returns nil although nothing is checked.
func awaitFit(
	ctx context.Context, p *app.Process, conn *redisx.Conn, space keyspace.Space, rights *rights,
	use func([]layout.Number),
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
			err = startLayouts(ctx, conn, space, use)
		}
		if err == nil {
			err = stage.CheckPartitions(ctx, conn, space)
		}
		if err == nil {
			err = checkMeter(ctx, p, conn, space)
		}
		if call.IsMoved(err) && !conn.IsCluster() {
			return stage.ErrOneNode
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

// Layouts are the parts of the data that the roles use; the first are the jobs.
var Layouts = []layout.Part{ledger.Layout, waitingroom.Layout}

// startLayouts checks that this version can use the data in Redis.
func startLayouts(ctx context.Context, conn *redisx.Conn, space keyspace.Space, use func([]layout.Number)) error {
	numbers, err := layout.Start(ctx, conn.Cmd, space.Layouts(), func() (bool, error) {
		n, err := conn.Cmd.Exists(ctx, space.PartitionCount()).Result()
		return n == 0, err
	}, Layouts...)
	if err == nil {
		use(numbers)
	}
	return err
}

// CheckLayouts checks that this version can use the data in Redis, for a program that is no role.
func CheckLayouts(ctx context.Context, conn *redisx.Conn, space keyspace.Space) error {
	numbers, err := layout.ReadUsable(ctx, conn.Cmd, space.Layouts(), Layouts...)
	if err == nil {
		space.SetLayout(numbers[0].Layout)
	}
	return err
}

// Migrations returns the migrations of all parts of the data.
func Migrations(conn *redisx.Conn, space keyspace.Space, say func(string, ...any)) (all []layout.Migration) {
	add := func(key string, part layout.Part) {
		all = append(all, layout.Migration{
			Part: part, Key: key, Conn: conn, Space: space, Say: say,
			Older: func(ctx context.Context) ([]string, error) {
				return presence.Older(ctx, conn, space, part.Name, part.Newest)
			},
		})
	}
	for _, part := range Layouts {
		add(space.Layouts(), part)
	}
	add(keyspace.GuardLayout(space.Prefix()), layout.GuardPart)
	return all
}

// watchLayouts reads the numbers of the layouts until stop is called. The process stops if it can't
// use one that another version has announced or written.
func watchLayouts(
	p *app.Process, conn *redisx.Conn, space keyspace.Space, use func([]layout.Number),
) (stop func(context.Context) error) {
	return background(func(ctx context.Context) {
		start := func(ctx context.Context) error {
			err := startLayouts(ctx, conn, space, use)
			if err == nil {
				err = stage.CheckPartitions(ctx, conn, space)
			}
			if err == nil {
				err = checkMeter(ctx, p, conn, space)
			}
			return err
		}
		layout.Watch(ctx, conn.Cmd, space.Layouts(), p.Tel.Log, use, p.Fail, start, Layouts...)
	})
}

// checkMeter checks that the process counts permits as the installation does. A broker counts none.
func checkMeter(ctx context.Context, p *app.Process, conn *redisx.Conn, space keyspace.Space) error {
	if p.Role == "broker" {
		return nil
	}
	return ledger.CheckMeter(ctx, conn.Cmd, space, meter(p.Config))
}

// watchLimits warns when the process that leads the limits has other global limits in its environment
// than this one, until stop is called. The process stops if the installation counts permits in another
// way by now: it was frozen meanwhile.
func watchLimits(p *app.Process, conn *redisx.Conn, space keyspace.Space) (stop func(context.Context) error) {
	own := configured(p.Config)
	return background(func(ctx context.Context) {
		for warned := own; p.Role != "broker" && redisx.Sleep(ctx, rightsInterval) == nil; {
			if err := checkMeter(ctx, p, conn, space); errors.Is(err, ledger.ErrMeter) {
				p.Fail(err)
				return
			}
			set, err := ledger.ReadLimitSettings(ctx, conn.Cmd, space)
			if err != nil || set.Leader == nil || *set.Leader == warned {
				continue
			}
			if warned = *set.Leader; warned != own {
				p.Tel.Log.Warn("the limits in the environment differ from those of the process that leads the limits; "+
					"its rps and share are in effect, as far as the API has not set others: give all processes the same",
					"rps", own.RPS, "share", own.Share, "default_backoff", own.DefaultBackoff, "max_backoff", own.MaxBackoff,
					"leader_rps", warned.RPS, "leader_share", warned.Share, "leader_default_backoff", warned.DefaultBackoff,
					"leader_max_backoff", warned.MaxBackoff)
			}
		}
	})
}

// background calls run in a goroutine. stop ends its context and waits for its end.
func background(run func(context.Context)) (stop func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	return func(context.Context) error {
		cancel()
		running.Wait()
		return nil
	}
}

// blockingReadsOfBroker is how many blocking reads of Redis a broker does at once: three in each
// partition (of wake tokens, and of the Redis streams "entry" and "moves"), and one of its dispatch
// messages.
func blockingReadsOfBroker(partitions int) int { return 3*partitions + 1 }

// rightsInterval is how often a process checks the rights of its Redis user while it runs.
const rightsInterval = 30 * time.Second

// rights checks that the Redis user of a process has all rights that its role needs. If one were
// missing, Redis would stop a script half way.
type rights struct {
	conn *redisx.Conn
	user acl.User
	log  *slog.Logger

	mu      sync.Mutex
	missing error // what the last check that Redis answered has found; nil: nothing
}

// newRights returns the check of the rights that the role of p needs; the caller sets the
// connection. A console needs the rights of ingest. A process whose role has no Redis user of its
// own, such as dev, needs the rights of all roles.
func newRights(p *app.Process) (*rights, error) {
	name := p.Role
	if name == "console" {
		name = "ingest"
	}
	if !slices.Contains(acl.Roles(), name) {
		name = acl.All
	}
	user, err := acl.Of(name, p.Config.Redis.KeyPrefix)
	return &rights{user: user, log: p.Tel.Log}, err
}

func (r *rights) check(ctx context.Context) error { return acl.Check(ctx, r.conn, r.user) }

// step checks the rights once and stores the result. It logs when rights have got lost, and when
// all are there again. If the check fails for another reason, such as no answer from Redis, the
// last result stays.
func (r *rights) step(ctx context.Context) {
	err := r.check(ctx)
	var missing *acl.Missing
	if err != nil && !errors.As(err, &missing) {
		r.log.Debug("checking the rights of the redis user failed", "error", err)
		return
	}
	r.mu.Lock()
	before := r.missing
	r.missing = err
	r.mu.Unlock()
	switch {
	case err != nil && before == nil:
		r.log.Error("the redis user has lost rights", "error", err)
	case err == nil && before != nil:
		r.log.Info("the redis user has all rights again")
	}
}

// ready is the process's check of readiness: it returns the missing rights that the last step has
// found, without asking Redis.
func (r *rights) ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.missing
}

// start checks the rights every rightsInterval, in a goroutine, until stop is called. The caller
// must call stop.
func (r *rights) start() (stop func(context.Context) error) {
	return background(func(ctx context.Context) {
		for redisx.Sleep(ctx, rightsInterval) == nil {
			r.step(ctx)
		}
	})
}
