// Command bench measures the system as it is deployed: real processes of the product's binary on a
// private redis-server, or on the one of --redis-url.
//
//	cd bench && go run . throughput --json
//
// Its figures come from Redis, the operating system, the processes' journals and the load
// generator's clock, not from metrics that the processes show about themselves. A fleet is Redis and
// the processes of the roles, a run publishes a load to it and waits for its end; each benchmark is a
// file with its load, its figures and its result.
//
// A benchmark is one thread of steps, and the first error ends it. So its steps do not return errors:
// check and must panic with the error, and attempt returns it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(runMain(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

var benchmarks = []benchmark{
	throughputBenchmark, latencyBenchmark, ceilingBenchmark, bigBenchmark, performanceBenchmark, compareBenchmark,
	congestionBenchmark, limitsBenchmark, boundsBenchmark, fairnessBenchmark, batchBenchmark, guardsBenchmark, roomBenchmark,
	callbacksBenchmark, consoleBenchmark, operationsBenchmark, peersBenchmark, plotsBenchmark,
}

// runMain runs a command line and returns the exit code: 0 fine, 1 error, 2 wrong usage, 130
// interrupted.
func runMain(ctx context.Context, args []string, in io.Reader, out, says io.Writer) int {
	err := runCommand(ctx, args, in, out, says)
	var usage usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(says, "bench: interrupted")
		return 130
	}
	fmt.Fprintln(says, "bench:", err)
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// usageError is an error of the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

func runCommand(ctx context.Context, args []string, in io.Reader, out, says io.Writer) error {
	if len(args) == 1 && args[0] == guardLoadCommand {
		return serveGuardLoad(ctx, in, out)
	}
	if len(args) == 1 && args[0] == batchWorkerCommand {
		batchWorker()
	}
	name := strings.Join(args[:min(1, len(args))], "")
	i := slices.IndexFunc(benchmarks, func(b benchmark) bool { return b.name == name })
	if i < 0 {
		text := "usage: go run . WHAT [--json] [flags]; --help shows the flags of"
		for _, b := range benchmarks {
			text += fmt.Sprintf("\n  %-12s %s", b.name, b.short)
		}
		return usageError(text)
	}
	f := &flags{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError)}
	f.SetOutput(io.Discard) // the error says what is wrong
	f.BoolVar(&f.json, "json", false, "print one JSON object")
	f.Func("set", "setting of the processes, NAME=VALUE with or without BULKACTION_ (repeatable)", func(s string) error {
		f.set = append(f.set, s)
		return nil
	})
	run := benchmarks[i].declare(f)
	if err := f.parse(args[1:], says); err != nil {
		return err
	}
	return attempt("", func() {
		o, done := f.options(ctx, says)
		defer done()
		result, err := run(ctx, o)
		done()
		if result != nil { // a part may have been measured before the error
			check(show(out, result, f.json))
		}
		check(err)
	})
}

// benchmark is one WHAT of the command line. declare declares its flags, and returns what runs it
// after they are parsed.
type benchmark struct {
	name, short string
	declare     func(*flags) runner
}

// runner runs a benchmark. Its result is printed even if it also returns an error; if it fails by
// check, there is no result.
type runner func(ctx context.Context, o options) (any, error)

// values are figures, by their names in the JSON.
type values map[string]any

// with adds more to v, and returns v.
func (v values) with(more values) values {
	maps.Copy(v, more)
	return v
}

// part is one experiment of a benchmark that has several. It returns its figures.
type part struct {
	name string
	run  func(context.Context) values
}

// runParts runs parts one after the other and returns the figures of all that have succeeded. The
// first error ends it, unless all is set.
func runParts(ctx context.Context, o options, parts []part, all bool) (values, error) {
	out := values{}
	var errs []error
	for i, p := range parts {
		o.show(p.name, i, len(parts))
		if err := attempt(p.name, func() { out.with(p.run(ctx)) }); err != nil {
			if errs = append(errs, err); !all || ctx.Err() != nil {
				break
			}
		}
	}
	return out, errors.Join(errs...)
}

// failure is what check panics with.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func failf(format string, args ...any) { check(fmt.Errorf(format, args...)) }

// attempt calls do. If check ends it, attempt calls the functions clean and returns the error, which
// begins with what unless that is "".
func attempt(what string, do func(), clean ...func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failure:
			for _, c := range clean {
				c()
			}
			if err = p.error; what != "" {
				err = fmt.Errorf("%s: %w", what, err)
			}
		default:
			panic(p)
		}
	}()
	do()
	return nil
}

type flags struct {
	*flag.FlagSet
	json     bool
	set      []string
	checks   []func() error
	chosen   []string // by --only
	noRoles  bool     // the benchmark starts no roles
	takes    string   // name of the argument that it takes; "": none
	argument string
	useAOF   bool
	redisURL string
}

// number is like IntVar and Float64Var. It refuses values below least, and above most unless that is
// 0.
func number[T int | float64](f *flags, p *T, name string, value, least, most T, usage string) {
	if n, ok := any(p).(*int); ok {
		f.IntVar(n, name, int(value), usage)
	} else if x, ok := any(p).(*float64); ok {
		f.Float64Var(x, name, float64(value), usage)
	}
	f.checks = append(f.checks, func() error {
		switch {
		case *p < least && most == 0:
			return usageError(fmt.Sprintf("--%s %v: must be at least %v", name, *p, least))
		case most > 0 && (*p < least || *p > most):
			return usageError(fmt.Sprintf("--%s %v: must be from %v to %v", name, *p, least, most))
		}
		return nil
	})
}

func (f *flags) int(p *int, name string, value, least, most int, usage string) {
	number(f, p, name, value, least, most, usage)
}

func (f *flags) float(p *float64, name string, value, least, most float64, usage string) {
	number(f, p, name, value, least, most, usage)
}

// list declares a flag with values that are divided by commas. Without it, p keeps its value.
func list[T any](f *flags, p *[]T, name, usage string, parse func(string) (T, error)) {
	f.Func(name, fmt.Sprintf("%s (default %v)", usage, *p), func(s string) error {
		*p = nil
		for _, text := range strings.Split(s, ",") {
			v, err := parse(text)
			if err != nil {
				return fmt.Errorf("%q %w", text, err)
			}
			*p = append(*p, v)
		}
		return nil
	})
}

// only declares the flag --only, which chooses among names.
func (f *flags) only(names []string) {
	f.chosen = names
	list(f, &f.chosen, "only", "parts to run", func(s string) (string, error) { return s, among(s, names) })
}

// parts declares the flag --only, and returns a function that returns the chosen parts.
func (f *flags) parts(all ...part) func() []part {
	names := make([]string, len(all))
	for i, p := range all {
		names[i] = p.name
	}
	f.only(names)
	return func() []part {
		return slices.DeleteFunc(all, func(p part) bool { return !slices.Contains(f.chosen, p.name) })
	}
}

func among(s string, names []string) error {
	if !slices.Contains(names, s) {
		return errors.New("must be among " + strings.Join(names, ","))
	}
	return nil
}

func (f *flags) aof() {
	f.BoolVar(&f.useAOF, "aof", false, "the private redis-server writes an append-only file, synced every second")
}

func (f *flags) redis() {
	f.StringVar(&f.redisURL, "redis-url", "", "Redis to use instead of private redis-servers")
}

// given says whether the command line has the flag.
func (f *flags) given(name string) (given bool) {
	f.Visit(func(one *flag.Flag) { given = given || one.Name == name })
	return given
}

func (f *flags) parse(args []string, says io.Writer) error {
	if f.takes != "" && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		f.argument, args = args[0], args[1:]
	}
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(says, "usage: go run . %s %s [flags]\n", f.Name(), f.takes)
		f.SetOutput(says)
		f.PrintDefaults()
		return err
	case err != nil:
		return usageError(err.Error())
	case f.NArg() > 0:
		return usageError(fmt.Sprintf("%s takes no argument %q", f.Name(), f.Arg(0)))
	case f.redisURL != "" && f.useAOF:
		return usageError("--aof is for a private Redis, not for --redis-url")
	case f.noRoles && len(f.set) > 0:
		return usageError("--set: " + f.Name() + " starts no roles")
	}
	for _, check := range f.checks {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// options returns the options that all benchmarks share: the program, which it builds unless
// BULKACTION_BENCH_BIN names it, the variables of --set, the access to the Redis of --redis-url, and
// the progress. The caller must call done at the end, and before it prints the result.
func (f *flags) options(ctx context.Context, says io.Writer) (o options, done func()) {
	o = options{aof: f.useAOF, redisURL: f.redisURL, program: os.Getenv("BULKACTION_BENCH_BIN"), env: f.env()}
	if o.redisURL != "" {
		cfg, err := app.LoadRedis(os.Environ(), o.redisURL)
		if err != nil {
			check(usageError(err.Error()))
		}
		o.access = cfg.Connection().Access
		for _, name := range app.RedisAccess() {
			o.accessEnv = append(o.accessEnv, name+"="+os.Getenv(name))
		}
	}
	if file, ok := says.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		o.progress = func(part string, done, total int) { fmt.Fprintf(says, "\r\x1b[K%s: %d of %d", part, done, total) }
	}
	folder := ""
	done = func() {
		_ = os.RemoveAll(folder) // of "", nothing
		if o.progress != nil {
			fmt.Fprint(says, "\r\x1b[K")
		}
	}
	if o.program == "" && !f.noRoles {
		folder = must(os.MkdirTemp("", "bulkaction-bench-"))
		o.program = filepath.Join(folder, "head")
		check(attempt("build the product, or name its binary with BULKACTION_BENCH_BIN",
			func() { check(buildProduct(ctx, o.program)) }, done))
	}
	return o, done
}

// buildProduct builds the product's binary. The working directory must be in this module.
func buildProduct(ctx context.Context, file string) error {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/bulkaction/bulkaction").Output()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", file, "./cmd/bulkaction")
	cmd.Dir, cmd.Stderr = strings.TrimSpace(string(root)), os.Stderr
	return cmd.Run()
}

// reservedVariables are the names, without BULKACTION_, of environment variables that the
// benchmarks themselves set, so --set refuses them.
var reservedVariables = []string{
	"REDIS_URL", "KEY_PREFIX", "PARTITIONS", "API_ADDR", "WORKER_TYPES",
	"BACKPRESSURE_GLOBAL_RPS", "BACKPRESSURE_LIMITER",
	"BACKPRESSURE_RATE_LIMIT_WINDOW", "INGEST_MAX_BACKLOG",
	"BROKER_ADDR", "BROKER_PUBLIC_URL", "BROKER_TOKEN_KEYS_FILE", "BROKER_TOKEN_AUDIENCE", "BROKER_IDENTITY",
	"BROKER_IDENTITY_HEADER", "BROKER_TRUSTED_PROXIES",
}

// env returns the environment variables of --set.
func (f *flags) env() []string {
	env := make([]string, len(f.set))
	for i, kv := range f.set {
		name, _, ok := strings.Cut(strings.TrimPrefix(kv, "BULKACTION_"), "=")
		if !ok || name == "" {
			check(usageError(fmt.Sprintf("--set %q: write it as NAME=VALUE", kv)))
		}
		if slices.Contains(reservedVariables, name) {
			check(usageError(fmt.Sprintf("--set %s: the benchmark sets this itself; see its flags", kv)))
		}
		env[i] = "BULKACTION_" + strings.TrimPrefix(kv, "BULKACTION_")
	}
	_, unknown, err := app.Load(env, new(builtin.Config))
	if len(unknown) > 0 {
		err = fmt.Errorf("there is no setting %s; docs/configuration.md lists them", unknown[0].Name)
	}
	if err != nil {
		check(usageError("--set: " + err.Error()))
	}
	return env
}

// show prints a result: as JSON, or a line for each figure with its name in the JSON.
func show(out io.Writer, result any, asJSON bool) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	if asJSON {
		return e.Encode(result)
	}
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	if c, ok := result.(Comparison); ok {
		c.show(t)
		return t.Flush()
	}
	var v any
	if err := json.Unmarshal(must(json.Marshal(result)), &v); err != nil {
		return err
	}
	showFigures(t, "", v)
	return t.Flush()
}

// showFigures prints a decoded JSON value. It leaves out settings, and lists with more than 20
// elements.
func showFigures(out io.Writer, name string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if key != "overrides" {
				showFigures(out, strings.TrimPrefix(name+"."+key, "."), v[key])
			}
		}
	case []any:
		if len(v) > 20 {
			return
		}
		for i, element := range v {
			showFigures(out, fmt.Sprintf("%s.%d", name, i), element)
		}
	case float64:
		fmt.Fprintf(out, "%s\t%s\n", name, formatNumber(v))
	default:
		fmt.Fprintf(out, "%s\t%v\n", name, v)
	}
}
