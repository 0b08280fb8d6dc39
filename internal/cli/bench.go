package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
)

func newBench(r *Root) *cobra.Command {
	set := new(variables)
	cmd := parentCommand("bench", "Measure the system: real processes on a private redis-server",
		newBenchThroughput(r, set), newBenchLatency(r, set), newBenchCeiling(r, set), newBenchBig(r, set),
		newBenchPerformance(r, set), newBenchCompare(r, set),
		newBenchCongestion(r, set), newBenchLimits(r, set), newBenchFairness(r, set), newBenchGuards(r, set),
		newBenchRoom(r, set), newBenchConsole(r, set))
	cmd.Long = "Measure the system: real processes on a private redis-server, with default settings. The JSON lists\n" +
		"settings that differ as overrides. BULKACTION_ variables of the environment do not reach the\n" +
		"processes; settings of --set do. Without --json, the figures have the same names as in the JSON."
	cmd.PersistentFlags().StringArrayVar((*[]string)(set), "set", nil,
		"setting of the processes, NAME=VALUE with or without BULKACTION_ (repeatable)")
	return cmd
}

// variables has the values of the flag --set: NAME=VALUE for environment variables of the measured
// processes.
type variables []string

// reservedVariables are the names, without BULKACTION_, of environment variables that the
// benchmarks themselves set, so --set refuses them.
var reservedVariables = []string{
	"REDIS_URL", "KEY_PREFIX", "PARTITIONS", "API_ADDR", "WORKER_TYPES",
	"BACKPRESSURE_GLOBAL_RPS", "BACKPRESSURE_LIMITER",
	"BACKPRESSURE_RATE_LIMIT_WINDOW", "INGEST_MAX_BACKLOG",
	"BROKER_ADDR", "BROKER_PUBLIC_URL", "BROKER_TOKEN_KEYS_FILE", "BROKER_TOKEN_AUDIENCE", "BROKER_IDENTITY",
	"BROKER_IDENTITY_HEADER", "BROKER_TRUSTED_PROXIES",
}

func (s *variables) env() ([]string, error) {
	env := make([]string, len(*s))
	for i, kv := range *s {
		name, _, ok := strings.Cut(kv, "=")
		name = strings.TrimPrefix(name, "BULKACTION_")
		switch {
		case !ok || name == "":
			return nil, usagef("--set %q: write it as NAME=VALUE", kv)
		case slices.Contains(reservedVariables, name):
			return nil, usagef("--set %s: the benchmark sets this itself; see its flags", kv)
		}
		env[i] = "BULKACTION_" + strings.TrimPrefix(kv, "BULKACTION_")
	}
	_, unknown, err := app.Load(env, new(builtin.Config))
	if len(unknown) > 0 {
		instead := "docs/configuration.md lists them"
		if near := unknown[0].DidYouMean; near != "" {
			instead = "did you mean " + near + "?"
		}
		return nil, usagef("--set %s: there is no such setting; %s", unknown[0].Name, instead)
	}
	if err != nil {
		return nil, usagef("--set: %v", err)
	}
	return env, nil
}

// benchmark describes a command that checks its flags, runs a benchmark and prints its result.
type benchmark struct {
	use, short string
	options    *bench.Options // of the benchmark; the command sets what all benchmarks have in common
	check      func(cmd *cobra.Command, args []string) error
	// run runs the benchmark. Its result is printed even if it also returns an error, because a
	// part may have been measured. A nil result: nothing is printed.
	run func(ctx context.Context) (any, error)
}

func (b benchmark) command(r *Root, set *variables) *cobra.Command {
	return &cobra.Command{
		Use: b.use, Short: b.short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := b.check(cmd, args); err != nil {
				return err
			}
			done, err := r.prepareBench(b.options, set)
			if err != nil {
				return err
			}
			result, err := b.run(cmd.Context())
			done()
			if result == nil {
				return err
			}
			return errors.Join(err, r.showBench(result))
		},
	}
}

// whole makes the result of a benchmark nil if the benchmark failed, so that a part of it is not
// printed.
func whole[T any](result T, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return result, nil
}

// prepareBench fills in the options that all benchmarks share: the command that starts a role, the
// variables of --set, the access to the Redis of --redis-url, and a progress bar. The caller must
// call done at the end.
func (r *Root) prepareBench(o *bench.Options, set *variables) (done func(), err error) {
	if o.Env, err = set.env(); err != nil {
		return nil, err
	}
	if o.RedisURL != "" {
		cfg, err := app.LoadRedis(os.Environ(), o.RedisURL)
		if err != nil {
			return nil, usagef("%v", err)
		}
		o.Access = cfg.Connection().Access
		for _, name := range app.RedisAccess() {
			o.AccessEnv = append(o.AccessEnv, name+"="+os.Getenv(name))
		}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	o.Role = []string{self, "role"}
	bar := r.newProgress()
	o.Progress = func(part string, done, total int64) { bar.show("bench", part, "", done, max(total, 1)) }
	return bar.stop, nil
}

// redisFlag adds the flag --redis-url to a benchmark.
func redisFlag(cmd *cobra.Command, o *bench.Options) {
	cmd.Flags().StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of private redis-servers")
}

func aofFlag(cmd *cobra.Command, o *bench.Options) {
	cmd.Flags().BoolVar(&o.AOF, "aof", false,
		"the private redis-server writes an append-only file, synced every second")
}

// checkParts refuses values of --only that are no parts of the benchmark.
func checkParts(only, parts []string) error {
	for _, part := range only {
		if !slices.Contains(parts, part) {
			return usagef("--only %q: must be among %s", part, strings.Join(parts, ","))
		}
	}
	return nil
}

// atLeast is a flag with its value n and the smallest value that it may have.
type atLeast struct {
	flag     string
	n, least int
}

func checkLeast(flags ...atLeast) error {
	for _, f := range flags {
		if f.n < f.least {
			return usagef("--%s %d: must be at least %d", f.flag, f.n, f.least)
		}
	}
	return nil
}
