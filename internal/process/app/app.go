// Package app turns a stage into a process: flags, configuration, telemetry, health checks, signals
// and an orderly stop. A process is a value: [Run] takes its environment as arguments, so a test
// can start several processes inside its own.
package app

import (
	"context"
	_ "embed" // for help.txt
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Exit codes of a process.
const (
	ExitOK    = 0 // stopped without an error, healthy, or only printed what a flag asks for
	ExitError = 1 // the role failed, or the process is not healthy
	ExitUsage = 2 // wrong flags or configuration
)

// ErrConfig marks an error that a role returns because its configuration is wrong. The process then
// exits with ExitUsage.
var ErrConfig = errors.New("wrong configuration")

// Options are the environment of a process.
type Options struct {
	Role string
	// Processors are the sections of the program's processors, see [Config.Processors].
	Processors any
	Args       []string  // command line, without the program's name
	Environ    []string  // NAME=value; for a repeated name the last value counts
	Stdout     io.Writer // io.Discard when nil
	Stderr     io.Writer // io.Discard when nil
}

// Main runs a role as this process and exits. SIGTERM and SIGINT end run's context; a second signal
// ends the process at once. processors becomes [Config.Processors].
func Main(role string, processors any, run func(context.Context, *Process) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // after the first signal, signals have their default effect
	ballast := newBallast()
	code := Run(ctx, Options{
		Role: role, Processors: processors, Args: os.Args[1:], Environ: os.Environ(), Stdout: os.Stdout, Stderr: os.Stderr,
	}, run)
	runtime.KeepAlive(ballast)
	os.Exit(code)
}

// Run runs a role until run returns, and returns the exit code. It ends run's context when ctx
// ends, or when a server of the process fails. run should then return; the end of ctx is not an
// error. Afterwards the functions registered with [Process.OnStop] run, also when the process
// failed to start. Run does not start the role if a flag asks for something else, or if flags or
// configuration are wrong.
func Run(ctx context.Context, o Options, run func(context.Context, *Process) error) int {
	if o.Stdout == nil {
		o.Stdout = io.Discard
	}
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	if o.Role != "dev" { // which should end with its terminal
		// A hang-up reloads the accounts of a worker; it must end no role.
		ignored := make(chan os.Signal, 1)
		signal.Notify(ignored, syscall.SIGHUP)
		defer signal.Stop(ignored)
	}
	flags := flag.NewFlagSet("bulkaction-"+o.Role, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // Run prints the errors
	healthcheck := flags.Bool("healthcheck", false, "ask the running process whether it is ready: exit code 0 or 1")
	version := flags.Bool("version", false, "print the version")
	flags.Usage = func() {} // a wrong flag gets one line, not the list of all variables
	switch err := flags.Parse(o.Args); {
	case errors.Is(err, flag.ErrHelp):
		flags.SetOutput(o.Stderr)
		usage(flags)
		return ExitOK
	case err != nil:
		problem, hint := err.Error(), "--help lists the flags and the variables"
		if name, ok := strings.CutPrefix(problem, undefinedFlag); ok {
			problem = "unknown flag: --" + name
			if variable := variableFor(name); variable != "" {
				hint = "set the environment variable " + variable + " instead"
			}
		}
		fmt.Fprintf(o.Stderr, "%s: %s; %s\n", flags.Name(), problem, hint)
		return ExitUsage
	case flags.NArg() > 0:
		fmt.Fprintf(o.Stderr, "%s: takes no arguments; configure it by environment variables, see -help\n",
			flags.Name())
		return ExitUsage
	case *version:
		fmt.Fprintf(o.Stdout, "%s %s (%s)\n", flags.Name(), Version(), runtime.Version())
		return ExitOK
	}
	cfg, unknown, err := Load(o.Environ, o.Processors)
	if err != nil {
		fmt.Fprintf(o.Stderr, "%s: wrong configuration:\n%s\n", flags.Name(), err)
		return ExitUsage
	}
	if *healthcheck {
		return report(o.Stderr, flags.Name(), checkHealth(ctx, cfg.Telemetry.AdminAddr))
	}

	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	p := newProcess(cfg, o.Role, fail)
	if err := p.startTelemetry(ctx, o.Stderr); err != nil {
		fmt.Fprintf(o.Stderr, "%s: wrong configuration:\n%s\n", flags.Name(), err)
		return ExitUsage
	}
	for _, u := range unknown {
		log := p.Tel.Log.With("name", u.Name)
		if u.DidYouMean != "" {
			log = log.With("did_you_mean", u.DidYouMean)
		}
		log.Warn("unknown variable")
	}
	err = errors.Join(p.run(ctx, run), p.stop(stopTimeout))
	if err != nil {
		p.Tel.Log.Error("failed", "error", err)
		if errors.Is(err, ErrConfig) {
			return ExitUsage
		}
		return ExitError
	}
	p.Tel.Log.Info("stopped")
	return ExitOK
}

func (p *Process) startTelemetry(ctx context.Context, logs io.Writer) error {
	tel, err := telemetry.Setup(ctx, telemetry.Options{
		Service: "bulkaction-" + p.Role, Instance: p.Instance, Version: Version(),
		LogLevel: p.Config.Telemetry.LogLevel, LogFormat: p.Config.Telemetry.LogFormat, LogWriter: logs,
	})
	if err != nil {
		return err
	}
	p.Tel = tel
	p.OnStop("telemetry", func(ctx context.Context) error {
		if err := tel.Shutdown(ctx); err != nil { // an unreachable collector does not make the process fail
			p.Tel.Log.Warn("telemetry was not sent", "error", err)
		}
		return nil
	})
	return nil
}

func (p *Process) run(ctx context.Context, run func(context.Context, *Process) error) error {
	p.Tel.Log.Info("starting", "role", p.Role, "version", Version(), "config", p.Config)
	if p.hasAdmin {
		if err := p.serveAdmin(ctx); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, p.Ready.SetDraining)()
	err := run(ctx, p)
	if end := ctx.Err(); end != nil && IsOnly(err, end) {
		err = nil
	}
	if cause := context.Cause(ctx); cause != nil && !IsOnly(cause, ctx.Err()) {
		err = errors.Join(err, cause)
	}
	return err
}

// IsOnly reports whether err consists of nothing but end, the error of an ended context. errors.Is
// is not enough: it is also true if other errors are joined to end.
func IsOnly(err, end error) bool {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(several.Unwrap(), func(e error) bool { return !IsOnly(e, end) })
	}
	if inner := errors.Unwrap(err); inner != nil {
		return IsOnly(inner, end)
	}
	return errors.Is(err, end)
}

// checkHealth asks the process whose admin server listens on addr whether it is ready. The flag
// -healthcheck uses it.
func checkHealth(ctx context.Context, addr string) error {
	host, port, _ := net.SplitHostPort(addr)
	if port == "0" {
		return fmt.Errorf("ask %s: the port was picked at start, so it is not known; set %sADMIN_ADDR", addr, envPrefix)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	ctx, cancel := context.WithTimeout(ctx, 2*checkTimeout)
	defer cancel()
	url := "http://" + net.JoinHostPort(host, port) + "/readyz"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("ask %s: %w", url, err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // without a proxy
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("ask for health: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		return fmt.Errorf("ask %s: %s: %s", url, response.Status, body)
	}
	return nil
}

func report(w io.Writer, name string, err error) int {
	if err == nil {
		return ExitOK
	}
	fmt.Fprintf(w, "%s: %s\n", name, err)
	return ExitError
}

// undefinedFlag begins the flag library's error about an unknown flag.
const undefinedFlag = "flag provided but not defined: -"

// variablesHelp lists the environment variables with their defaults, meanings and rules.
//
//go:embed help.txt
var variablesHelp string

// variableFor returns the environment variable with the name of an unknown flag, such as
// BULKACTION_REDIS_URL for -redis-url, which is a flag of some subcommands. It returns "" if no
// variable has this name.
func variableFor(name string) string {
	variable := envPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
	if !slices.Contains(known(), variable) {
		return ""
	}
	return variable
}

func usage(flags *flag.FlagSet) {
	fmt.Fprintf(flags.Output(), "%s is configured by environment variables alone. Flags:\n", flags.Name())
	flags.PrintDefaults()
	fmt.Fprint(flags.Output(), variablesHelp)
}

// version is set by the linker:
// -ldflags "-X github.com/bulkaction/bulkaction/internal/process/app.version=v1.2.3".
var version string

// Version returns the version set by the linker; without it, the module's version, the revision, or
// "devel".
func Version() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return s.Value[:12]
		}
	}
	return "devel"
}

// Host is what a surrounding program gives to a process (role) that runs inside it.
type Host struct {
	Role       string
	Processors any               // see [Config.Processors]
	Settings   map[string]string // values of variables, by their names without BULKACTION_
	Log        *slog.Logger
	Tracers    trace.TracerProvider // nil: no traces
	Meters     metric.MeterProvider // nil: the admin server alone shows metrics
}

// RunEmbedded runs a role inside another program until run returns. It reads no environment and no
// arguments, handles no signals, and has an admin server only if Settings names ADMIN_ADDR. Wrong
// settings are an ErrConfig.
func RunEmbedded(ctx context.Context, h Host, run func(context.Context, *Process) error) error {
	cfg, err := LoadSettings(h.Settings, h.Processors)
	if err != nil {
		return err
	}
	// A deadline only says when to stop. As the deadline of commands it would look like an outage of
	// Redis at the end.
	host := ctx
	ctx, fail := context.WithCancelCause(context.WithoutCancel(host))
	defer fail(nil)
	defer context.AfterFunc(host, func() {
		cause := context.Cause(host)
		if errors.Is(cause, context.DeadlineExceeded) {
			cause = nil
		}
		fail(cause)
	})()
	p := newProcess(cfg, h.Role, fail)
	p.Embedded = true
	p.Tel, err = telemetry.Given(h.Log.With("instance", p.Instance), h.Tracers, h.Meters)
	if err != nil {
		return err
	}
	p.OnStop("telemetry", p.Tel.Shutdown)
	p.hasAdmin = h.Settings["ADMIN_ADDR"] != ""
	return errors.Join(p.run(ctx, run), p.stop(stopTimeout))
}

// LoadSettings returns the configuration of a process that runs inside another program. settings
// are values of variables, by their names without BULKACTION_. Wrong and unknown settings are an
// ErrConfig. processors becomes [Config.Processors].
func LoadSettings(settings map[string]string, processors any) (Config, error) {
	environ := make([]string, 0, len(settings))
	for name, value := range settings {
		environ = append(environ, envPrefix+name+"="+value)
	}
	slices.Sort(environ) // so that errors have an order
	cfg, unknown, err := Load(environ, processors)
	for _, u := range unknown {
		problem := fmt.Errorf("%s: there is no such setting", u.Name)
		if name := strings.TrimPrefix(u.Name, envPrefix); strings.HasPrefix(name, envPrefix) {
			problem = fmt.Errorf("%s: leave out %s in the names of settings", name, envPrefix)
		} else if u.DidYouMean != "" {
			problem = fmt.Errorf("%w; did you mean %s?", problem, u.DidYouMean)
		}
		err = errors.Join(err, problem)
	}
	if err != nil {
		return Config{}, fmt.Errorf("%w:\n%w", ErrConfig, err)
	}
	return cfg, nil
}

// ballastBytes is the size of an allocation that is never written, so it uses no physical memory,
// but counts as live heap. Go collects garbage when the heap has doubled since the last collection.
// The live heap of a role is only a few MiB, so under load there would be dozens of collections a
// second, a tenth of all CPU time. With the ballast, the heap grows by at least this size before
// each collection. No setting of the runtime does the same: a higher GOGC multiplies large heaps,
// too, such as that of a broker with many streams, and a memory limit makes those collect all the
// time.
const ballastBytes = 16 << 20

// newBallast allocates the ballast. It returns nil if the environment sets GOGC. A GOMEMLIMIT, which
// containers have, does not replace it.
func newBallast() []byte {
	if os.Getenv("GOGC") != "" {
		return nil
	}
	return make([]byte, ballastBytes)
}
