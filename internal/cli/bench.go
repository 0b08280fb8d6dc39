package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/app"
)

func newBench(r *Root) *cobra.Command {
	set := new(variables)
	cmd := parentCommand("bench", "Measure the system: real processes on a private redis-server",
		newBenchThroughput(r, set), newBenchLatency(r, set), newBenchCeiling(r, set), newBenchBig(r, set),
		newBenchPerformance(r, set), newBenchCompare(r, set),
		newBenchCongestion(r, set), newBenchLimits(r, set), newBenchFairness(r, set))
	cmd.Long = "Measure the system: real processes on a private redis-server, with default settings. The JSON lists\n" +
		"settings that differ as overrides. BULKACTION_ variables of the environment do not reach the\n" +
		"processes; settings of --set do."
	cmd.PersistentFlags().StringArrayVar((*[]string)(set), "set", nil,
		"setting of the processes, NAME=VALUE with or without BULKACTION_ (repeatable)")
	return cmd
}

// variables has the values of --set: settings of the measured processes that differ from the
// defaults.
type variables []string

// reservedVariables are set by the benchmarks, so --set refuses them.
var reservedVariables = []string{
	"REDIS_URL", "KEY_PREFIX", "PARTITIONS", "API_ADDR", "WORKER_TYPES",
	"BACKPRESSURE_GLOBAL_RPS", "BACKPRESSURE_LIMITER",
	"BACKPRESSURE_RATE_LIMIT_WINDOW", "INGEST_MAX_BACKLOG",
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
	_, unknown, err := app.Load(env)
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

// prepareFleet does the same as prepareExperiment for a benchmark that runs one fleet with a known
// number of jobs.
func (r *Root) prepareFleet(
	f *bench.FleetOptions, set *variables, jobs int,
) (progress func(done int), done func(), err error) {
	var o bench.Options
	if done, err = r.prepareExperiment(&o, set); err != nil {
		return nil, nil, err
	}
	f.Role, f.Env = o.Role, o.Env
	return func(n int) { o.Progress("jobs", int64(n), int64(jobs)) }, done, nil
}

// checkParts refuses values of --only that are not parts of the benchmark.
func checkParts(only, parts []string) error {
	for _, part := range only {
		if !slices.Contains(parts, part) {
			return usagef("--only %q: must be among %s", part, strings.Join(parts, ","))
		}
	}
	return nil
}

// prepareExperiment fills in the options that all benchmarks have in common: the command that
// starts a role, the values of --set, and a progress bar. The caller must call done at the end.
func (r *Root) prepareExperiment(o *bench.Options, set *variables) (done func(), err error) {
	if o.Env, err = set.env(); err != nil {
		return nil, err
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
