package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// guardsCommand is the first argument with which this program compares package guard with its
// peers.
const guardsCommand = "guards"

// guardOptions say how thorough the comparison is.
type guardOptions struct {
	Rounds  int     `json:"rounds"`
	Seconds float64 `json:"seconds"` // of each measurement
}

// guardFigure is one figure of ours and of a peer.
type guardFigure struct {
	Name  string  `json:"name"`
	Peer  string  `json:"peer"`
	Unit  string  `json:"unit"`
	Ours  float64 `json:"ours"`   // median of the rounds
	Peers float64 `json:"theirs"` // median of the rounds
	// ours / theirs, measured in turn; median of the rounds
	Ratio   float64   `json:"ratio"`
	Ratios  []float64 `json:"ratios"`
	Goal    float64   `json:"goal"` // of Ratio
	AtMost  bool      `json:"goal_is_at_most"`
	Reached bool      `json:"reached"`
}

// guardComparison has the figures of all peers.
type guardComparison struct {
	guardOptions
	CPUs     int               `json:"cpus"`
	Versions map[string]string `json:"versions"`
	Figures  []guardFigure     `json:"figures"`
	// FailuresCounted is, for our breaker and each peer's, how many of 8 calls that failed at the
	// same time the breaker has counted.
	FailuresCounted map[string]float64 `json:"failures_counted_of_8"`
	Missing         map[string]string  `json:"missing"` // peers that were not measured, with the reason
}

// guardPeer compares package guard with one other library. ours and theirs measure the same figure
// in the same unit.
type guardPeer struct {
	guardFigure
	module       string
	ours, theirs func(ctx context.Context, g *guardRun) (float64, error)
}

var guardPeers = []guardPeer{
	{
		guardFigure{Name: "take", Peer: "redis_rate", Unit: "calls/s", Goal: 0.9},
		"github.com/go-redis/redis_rate/v10", ourTakes, redisRateTakes,
	},
	{
		guardFigure{Name: "lock and unlock", Peer: "redsync", Unit: "pairs/s", Goal: 0.7},
		"github.com/go-redsync/redsync/v4", ourLocks, redsyncLocks,
	},
	{
		guardFigure{Name: "contended lock, p99 of the wait", Peer: "redsync", Unit: "ms", Goal: 0.1, AtMost: true},
		"github.com/go-redsync/redsync/v4", ourWaits, redsyncWaits,
	},
	{
		guardFigure{Name: "breaker", Peer: "gobreaker", Unit: "calls/s", Goal: 20},
		"github.com/sony/gobreaker/v2", ourBreaker, gobreakerCalls,
	},
}

// guardsMissing has the peers that are not compared, and why.
var guardsMissing = map[string]string{
	"limiters": "the checksum database has no entry of github.com/mennanov/limiters, so the module is not verified",
}

// runGuards compares package guard with its peers.
func runGuards(ctx context.Context, args []string) error {
	var o guardOptions
	output := ""
	f := flag.NewFlagSet("peers guards", flag.ContinueOnError)
	f.IntVar(&o.Rounds, "rounds", 5, "measurements of each project, in turn; medians are shown")
	f.Float64Var(&o.Seconds, "seconds", 2, "duration of each measurement")
	jsonFlag(f, &output)
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 || o.Rounds < 1 || o.Seconds < 0.1 {
		return errors.New("usage: peers guards [--rounds N] [--seconds S] [--json[=FILE]], at least 1 round and 0.1 s")
	}
	c, err := compareGuards(ctx, o, func(text string) { fmt.Fprintln(os.Stderr, text) })
	if err != nil {
		return err
	}
	return write(c, output)
}

// report is a result that can be shown as a table.
type report interface{ writeTable(w io.Writer) error }

// write writes a report. If output is "-", it prints JSON. Otherwise it prints a table and, unless
// output is "", writes JSON to the file output.
func write(r report, output string) error {
	if output == "-" {
		return json.NewEncoder(os.Stdout).Encode(r)
	}
	if output != "" {
		body, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(output, append(body, '\n'), 0o600); err != nil {
			return err
		}
	}
	return r.writeTable(os.Stdout)
}

// jsonFlag adds the flag --json, for write.
func jsonFlag(f *flag.FlagSet, output *string) {
	f.BoolFunc("json", "print JSON instead of the table; --json=FILE prints the table and writes JSON to FILE",
		func(s string) error {
			if *output = s; s == "true" {
				*output = "-"
			}
			return nil
		})
}

// compareGuards measures package guard and each of its peers in turn on one private redis-server.
func compareGuards(ctx context.Context, o guardOptions, progress func(string)) (*guardComparison, error) {
	server, err := redisproc.Start(ctx, redisproc.Options{Args: []string{"--appendonly", "no"}})
	if err != nil {
		return nil, err
	}
	defer server.Close() //nolint:errcheck // it holds nothing to keep
	c := &guardComparison{
		guardOptions: o, CPUs: runtime.NumCPU(),
		Versions: map[string]string{"go": runtime.Version()}, Missing: guardsMissing,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			for _, p := range guardPeers {
				if dep.Path == p.module {
					c.Versions[p.Peer] = dep.Version
				}
			}
		}
	}
	once := func(measure func(context.Context, *guardRun) (float64, error)) (float64, error) {
		rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), PoolSize: guardCallers})
		g := &guardRun{guardOptions: o, rdb: rdb}
		defer g.rdb.Close()
		if err := g.rdb.FlushAll(ctx).Err(); err != nil {
			return 0, err
		}
		return measure(ctx, g)
	}
	for _, p := range guardPeers {
		var ours, theirs []float64
		for round := range o.Rounds {
			a, err := once(p.ours)
			if err != nil {
				return nil, fmt.Errorf("%s: ours: %w", p.Name, err)
			}
			b, err := once(p.theirs)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", p.Name, p.Peer, err)
			}
			ours, theirs, p.Ratios = append(ours, a), append(theirs, b), append(p.Ratios, measure.Ratio(a, b))
			progress(fmt.Sprintf("round %d of %d: %s: ours %.2f, %s %.2f %s",
				round+1, o.Rounds, p.Name, a, p.Peer, b, p.Unit))
		}
		p.Ours, p.Peers = measure.Round4(measure.Median(ours)), measure.Round4(measure.Median(theirs))
		p.Ratio = measure.Median(p.Ratios)
		p.Reached = p.Ratio >= p.Goal != p.AtMost || p.Ratio == p.Goal
		c.Figures = append(c.Figures, p.guardFigure)
	}
	c.FailuresCounted = map[string]float64{}
	if c.FailuresCounted[nameOurs], err = once(ourFailures); err != nil {
		return nil, err
	}
	if c.FailuresCounted["gobreaker"], err = once(gobreakerFailures); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *guardComparison) writeTable(w io.Writer) error {
	fmt.Fprintf(w, "package guard beside its peers, medians of %d rounds of %v; %d CPUs, one process\n\n",
		c.Rounds, time.Duration(c.Seconds*float64(time.Second)), c.CPUs)
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "what\tpeer\tours\tpeer's\t\tours / peer's\tgoal\treached")
	for _, f := range c.Figures {
		sign := "≥"
		if f.AtMost {
			sign = "≤"
		}
		fmt.Fprintf(t, "%s\t%s %s\t%.2f\t%.2f\t%s\t%.3f\t%s %g\t%t\n",
			f.Name, f.Peer, c.Versions[f.Peer], f.Ours, f.Peers, f.Unit, f.Ratio, sign, f.Goal, f.Reached)
	}
	fmt.Fprintf(t, "failures counted of 8 at once\tgobreaker %s\t%.0f\t%.0f\n",
		c.Versions["gobreaker"], c.FailuresCounted[nameOurs], c.FailuresCounted["gobreaker"])
	for name, why := range c.Missing {
		fmt.Fprintf(t, "not measured\t%s\t%s\n", name, why)
	}
	return t.Flush()
}
