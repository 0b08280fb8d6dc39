package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/app"
)

func newBench(r *Root) *cobra.Command {
	set := new(variables)
	cmd := family("bench", "Measure the system: real processes on a private redis-server",
		newBenchThroughput(r, set), newBenchCongestion(r, set), newBenchLimits(r, set), newBenchFairness(r, set))
	cmd.Long = "Measure the system: real processes on a private redis-server, with the defaults of a fresh installation. What differs is in the\n" +
		"JSON's overrides; BULKACTION_ variables of the environment are not passed on, --set is."
	cmd.PersistentFlags().StringArrayVar((*[]string)(set), "set", nil, "a variable of the processes, NAME=VALUE without BULKACTION_; may be repeated")
	return cmd
}

// variables are those of the processes that are to differ from the defaults.
type variables []string

// measured are the variables that a bench sets itself.
var measured = []string{
	"REDIS_URL", "KEY_PREFIX", "PARTITIONS", "API_ADDR", "WORKER_TYPES", "BACKPRESSURE_GLOBAL_RPS", "BACKPRESSURE_LIMITER",
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
		case slices.Contains(measured, name):
			return nil, usagef("--set %s: the bench sets this itself; see its flags", kv)
		}
		env[i] = "BULKACTION_" + strings.TrimPrefix(kv, "BULKACTION_")
	}
	_, unknown, err := app.Load(env)
	if len(unknown) > 0 {
		instead := "docs/configuration.md lists them"
		if near := unknown[0].DidYouMean; near != "" {
			instead = "did you mean " + near + "?"
		}
		return nil, usagef("--set %s: there is no such variable; %s", unknown[0].Name, instead)
	}
	if err != nil {
		return nil, usagef("--set: %v", err)
	}
	return env, nil
}

// experiment tells an experiment what this program is, and shows how far it is until done is called.
func (r *Root) experiment(o *bench.Options, set *variables) (done func(), err error) {
	if o.Env, err = set.env(); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	o.Role = []string{self, "role"}
	bar := r.newBar("bench", 1)
	var mu sync.Mutex // runs may go on side by side
	o.Progress = func(part string, done, total int64) {
		mu.Lock()
		defer mu.Unlock()
		bar.say(part, "")
		bar.set(done, max(total, 1))
	}
	return bar.stop, nil
}

func newBenchThroughput(r *Root, set *variables) *cobra.Command {
	var o bench.ThroughputOptions
	cmd := &cobra.Command{
		Use:   "throughput",
		Short: "No-op jobs through all six roles, produced and processed at once",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for name, n := range map[string]int{"--jobs": o.Jobs, "--tenants": o.Tenants, "--batch": o.Batch} {
				if n < 1 {
					return usagef("%s %d: must be at least 1", name, n)
				}
			}
			env, err := set.env()
			if err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			o.Env = env
			o.Role = []string{self, "role"}
			bar := r.newBar("jobs", int64(o.Jobs))
			result, err := bench.RunThroughput(cmd.Context(), o, func(done int) { bar.set(int64(done), int64(o.Jobs)) })
			bar.stop()
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(result)
			}
			t := newTable(r.Out)
			t.row("jobs", thousands(int64(result.Jobs)))
			t.row("jobs a second", thousands(int64(result.JobsPerSecond)))
			t.row("Redis CPU", fmt.Sprintf("%.1f µs a job", result.RedisCPUPerJob))
			t.row("process CPU", fmt.Sprintf("%.1f µs a job, the producer included", result.ProcessCPUPerJob))
			t.row("Redis commands", fmt.Sprintf("%.2f a job", result.CommandsPerJob))
			t.row("Redis memory", fmt.Sprintf("%.0f bytes a queued job of %d bytes", result.BytesPerQueuedJob, result.PayloadBytes))
			t.row("accepted to started", fmt.Sprintf("p50 %.0f ms, p99 %.0f ms, one job at a time", result.P50MS, result.P99MS))
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 100_000, "jobs in all")
	f.IntVar(&o.Tenants, "tenants", 10, "tenants, a group each")
	f.IntVar(&o.Batch, "batch", 500, "jobs a message")
	f.IntVar(&o.Payload, "payload", 200, "bytes of a payload")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	f.BoolVar(&o.AOF, "aof", false, "let the private redis-server append to a file, synced every second")
	return cmd
}
