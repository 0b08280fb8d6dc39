// Package run builds the binary of a role with your own processors or reducers. A worker that runs
// your jobs is a main function with one call:
//
//	func main() { run.Worker(myProcessor{}) }
//
// It has the same environment variables as the built-in worker, serves /healthz, /readyz and
// /metrics, and stops on SIGTERM after its running jobs have ended. [NewWorker] and [NewAll] run
// roles inside a program of yours.
package run

import (
	"context"
	"log/slog"
	"maps"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
)

// Worker is the main function of a worker process with these processors, and none of the built-in
// ones. It exits the process.
func Worker(procs ...processor.Runner) {
	main("worker", roles.Own{Processors: procs}.Worker)
}

// Aggregator is the main function of an aggregator process with these reducers; it exits the
// process. Groups may ask for a reducer that Ingest has. Their results wait for an Aggregator, and
// their failures for a Watcher, that has it; others leave them alone.
func Aggregator(reducers *reducer.Registry) {
	main("aggregator", roles.Own{Reducers: reducers}.Aggregator)
}

// Ingest is the main function of an ingest process that accepts groups that ask for these reducers.
// It exits the process.
func Ingest(reducers *reducer.Registry) {
	main("ingest", roles.Ingest(reducers, nil))
}

// Watcher is the main function of a watcher process that can show the aggregates of these reducers,
// and computes those of failed jobs.
// It exits the process.
func Watcher(reducers *reducer.Registry) {
	main("watcher", roles.Own{Reducers: reducers}.Watcher)
}

// Broker runs a broker process of the waiting room and exits.
func Broker() { main("broker", roles.Own{}.Broker) }

func main(name string, role roles.Role) { app.Main(name, new(builtin.Config), roles.Alone(role)) }

// Config configures roles that run inside your program. The zero value is for a Redis at
// 127.0.0.1:6379 and the defaults of all settings.
type Config struct {
	// RedisURL is the address of Redis: redis://host:port/db, a comma list for a cluster, or
	// redis-sentinel://host:port,…/master; with TLS rediss:// and rediss-sentinel://. All processes
	// of an installation need the same one. Settings has the user and the files of TLS, such as
	// REDIS_TLS_CA_FILE.
	RedisURL string
	// Settings are additional settings by name, without the prefix BULKACTION_, such as
	// {"WORKER_COUNT": "50"}; docs/configuration.md lists them. With ADMIN_ADDR the program also
	// serves /healthz, /readyz and /metrics there; without, it does not.
	Settings map[string]string
	// BuiltIn serves SEND_EMAIL, HTTP, HTTP_BATCH and, with PUSH_ACCOUNTS_FILE, PUSH_NOTIFICATION beside your
	// own processors; NOOP, too, if WORKER_TYPES names it.
	BuiltIn bool
	// Middleware is called around each attempt of each processor; the first one is called first.
	Middleware []processor.Middleware
	// BatchMiddleware is called around each call of each processor.Batcher.
	BatchMiddleware []processor.BatchMiddleware
	// Reducers are the reducers for aggregates; nil: the built-in ones. Only NewAll uses them.
	Reducers *reducer.Registry

	// OnStart is called once, when Redis has answered and is suitable, before anything else is
	// done. Its error ends Run.
	OnStart func(ctx context.Context) error
	// OnStop is called once at the end, when all work has ended, if OnStart has succeeded. Its
	// context has ten seconds at most, which it shares with other clean-ups, and is not cancelled
	// with that of Run. Run returns its error.
	OnStop func(ctx context.Context) error
	// Listening is called with the address of the HTTP API when that listens. Only NewAll uses it.
	Listening func(addr string)

	Logger         *slog.Logger         // nil: slog.Default
	TracerProvider trace.TracerProvider // nil: no traces
	MeterProvider  metric.MeterProvider // nil: metrics only at ADMIN_ADDR
}

// Embedded is a worker, or all roles, inside your program. Make it with NewWorker or NewAll.
type Embedded struct {
	name   string
	config Config
	role   roles.Role
}

// NewWorker returns a worker that runs jobs with these processors. The other roles run elsewhere,
// for example as `bulkaction all`.
func NewWorker(c Config, procs ...processor.Runner) *Embedded {
	return &Embedded{"worker", c, c.own(procs).Worker}
}

// NewAll returns all six roles in one, with a worker that runs jobs with these processors. Several
// programs with all roles, or with single ones, may share a Redis.
func NewAll(c Config, procs ...processor.Runner) *Embedded {
	return &Embedded{"all", c, func(ctx context.Context, p *app.Process, b roles.Base) error {
		return roles.Together(ctx, p, b, c.own(procs).Jobs())
	}}
}

func (c Config) own(procs []processor.Runner) roles.Own {
	own := roles.Own{Processors: procs, Middleware: c.Middleware, BatchMiddleware: c.BatchMiddleware, Reducers: c.Reducers, Listening: c.Listening}
	if c.BuiltIn {
		own.BuiltIn = builtin.Create
	}
	return own
}

// Run works until ctx ends, and returns nil when the running jobs have ended, at most after
// SHUTDOWN_GRACE_PERIOD; jobs that take longer run again elsewhere. While Redis is away, Run logs
// that and waits. It returns an error if settings are wrong, if a processor is nil, if Redis is not
// suitable, if a hook fails or panics, or if an address is taken. It reads no environment variables and no arguments, handles no
// signals and never exits the process. Call it once.
func (e *Embedded) Run(ctx context.Context) error {
	c := e.config
	settings := maps.Clone(c.Settings)
	if c.RedisURL != "" {
		if settings == nil {
			settings = map[string]string{}
		}
		settings["REDIS_URL"] = c.RedisURL
	}
	log := c.Logger
	if log == nil {
		log = slog.Default()
	}
	host := app.Host{
		Role: e.name, Processors: new(builtin.Config), Settings: settings,
		Log: log, Tracers: c.TracerProvider, Meters: c.MeterProvider,
	}
	return app.RunEmbedded(ctx, host, roles.Alone(e.hooked))
}

// hooked runs the role between the hooks.
func (e *Embedded) hooked(ctx context.Context, p *app.Process, b roles.Base) error {
	if start := e.config.OnStart; start != nil {
		if err := p.Guard("OnStart", func() error { return start(ctx) }); err != nil {
			return err
		}
	}
	if stop := e.config.OnStop; stop != nil {
		p.OnStop("the program", func(ctx context.Context) error {
			return p.Guard("OnStop", func() error { return stop(ctx) })
		})
	}
	return e.role(ctx, p, b)
}
