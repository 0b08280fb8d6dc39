package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

const nameOurs = "bulkaction"

// comparison has the figures of all rounds.
type comparison struct {
	options
	Versions map[string]string    `json:"versions"`
	CPUs     int                  `json:"cpus"`
	Runs     map[string][]figures `json:"runs"`
	Medians  map[string]figures   `json:"medians"`
	Ratios   map[string]figures   `json:"ratios"` // by peer: ours / the peer's, medians of the rounds' ratios
}

// compare measures our program and the peers in turn on one private redis-server, o.Rounds times.
// It calls progress after each run. The first error ends it, and then there are no figures.
func compare(ctx context.Context, o options, progress func(string)) (*comparison, error) {
	binary, err := exec.LookPath(o.program)
	if err != nil {
		return nil, fmt.Errorf("find our program: %w", err)
	}
	o.program = binary
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	server, err := redisproc.Start(ctx, redisproc.Options{Args: []string{"--appendonly", "no"}})
	if err != nil {
		return nil, err
	}
	defer server.Close() //nolint:errcheck // it holds nothing to keep
	r := &runner{
		options:    o,
		executable: self,
		addr:       server.Addr(),
		redis:      redis.NewClient(&redis.Options{Addr: server.Addr()}),
	}
	defer r.redis.Close() //nolint:errcheck // it holds nothing to keep

	out := &comparison{options: o, Versions: versions(o.Peers), CPUs: runtime.NumCPU(), Runs: map[string][]figures{}}
	info, err := r.redis.InfoMap(ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	out.Versions["redis"] = info["Server"]["redis_version"]
	for round := range o.Rounds {
		for _, name := range append([]string{nameOurs}, o.Peers...) {
			if err := r.redis.FlushAll(ctx).Err(); err != nil {
				return nil, err
			}
			var f figures
			if name == nameOurs {
				f, err = r.measureOurs(ctx)
			} else {
				f, err = r.measurePeer(ctx, name)
			}
			if err != nil {
				return nil, fmt.Errorf("run %s: %w", name, err)
			}
			out.Runs[name] = append(out.Runs[name], f)
			progress(fmt.Sprintf("round %d of %d: %s %.0f jobs/s", round+1, o.Rounds, name, f.JobsPerSecond))
		}
	}
	out.summarize()
	return out, nil
}

// versions returns the version of Go, and the versions of the peers that this program was built
// with, by name. Without build information it returns only that of Go.
func versions(names []string) map[string]string {
	out := map[string]string{"go": runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return out
	}
	for _, dep := range info.Deps {
		for _, name := range names {
			if dep.Path == peers[name].module {
				out[name] = dep.Version
			}
		}
	}
	return out
}

func (c *comparison) summarize() {
	c.Medians, c.Ratios = map[string]figures{}, map[string]figures{}
	for name, runs := range c.Runs {
		c.Medians[name] = mediansOf(runs)
	}
	for _, name := range c.Peers {
		ratios := make([]figures, c.Rounds)
		for i := range ratios {
			ratios[i] = ratiosOf(c.Runs[nameOurs][i], c.Runs[name][i])
		}
		c.Ratios[name] = mediansOf(ratios)
	}
}

// fields returns pointers to all figures of f. The first six are the columns of the table.
func (f *figures) fields() []*float64 {
	return []*float64{
		&f.JobsPerSecond, &f.RedisCPU, &f.ProcessCPU, &f.QueuedBytes, &f.P50MS, &f.P99MS, &f.TunedP50MS, &f.TunedP99MS,
	}
}

func mediansOf(runs []figures) (out figures) {
	for i, field := range out.fields() {
		values := make([]float64, len(runs))
		for k := range runs {
			values[k] = *runs[k].fields()[i]
		}
		*field = measure.Round4(measure.Median(values))
	}
	return out
}

// ratiosOf returns our figures / the peer's figures. Our latencies are also divided by the peer's
// tuned latencies.
func ratiosOf(ours, peers figures) (out figures) {
	ours.TunedP50MS, ours.TunedP99MS = ours.P50MS, ours.P99MS
	for i, field := range out.fields() {
		*field = measure.Ratio(*ours.fields()[i], *peers.fields()[i])
	}
	return out
}

func (c *comparison) writeTable(w io.Writer) error {
	fmt.Fprintf(w,
		"%d no-op jobs of %d bytes, produced and processed at once, medians of %d rounds; %d CPUs, Redis %s "+
			"without persistence\n\n",
		c.Jobs, c.Payload, c.Rounds, c.CPUs, c.Versions["redis"])
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tjobs/s\tRedis CPU\tprocess CPU\tmemory\tlatency p50\tp99\t")
	fmt.Fprintln(t, "\t\tµs/job\tµs/job\tbytes/queued job\tms at 100/s\tms\t")
	for _, name := range append([]string{nameOurs}, c.Peers...) {
		f := c.Medians[name]
		fmt.Fprintf(t, "%s\t%.0f\t%.1f\t%.1f\t%.0f\t%.2f\t%.2f\t\n", strings.TrimSpace(name+" "+c.Versions[name]),
			f.JobsPerSecond, f.RedisCPU, f.ProcessCPU, f.QueuedBytes, f.P50MS, f.P99MS)
		if f.TunedP50MS > 0 {
			fmt.Fprintf(t, "tuned\t\t\t\t\t%.2f\t%.2f\t\n", f.TunedP50MS, f.TunedP99MS)
		}
	}
	for _, name := range c.Peers {
		f := c.Ratios[name]
		fmt.Fprintf(t, "ours / %s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", name,
			f.JobsPerSecond, f.RedisCPU, f.ProcessCPU, f.QueuedBytes, f.P50MS, f.P99MS)
		if f.TunedP50MS > 0 {
			fmt.Fprintf(t, "tuned\t\t\t\t\t%.2f\t%.2f\t\n", f.TunedP50MS, f.TunedP99MS)
		}
	}
	return t.Flush()
}
