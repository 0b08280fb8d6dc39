// Command peers compares this project with other projects for the same work. They take turns on one
// private redis-server, so that a machine that gets faster or slower affects all in the same way.
// README.md describes the figures and settings.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == childCommand {
		exit(runChild(os.Args[2]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 && os.Args[1] == guardsCommand {
		exit(runGuards(ctx, os.Args[2:]))
	}
	exit(run(ctx, os.Args[1:]))
}

func exit(err error) {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

type options struct {
	Jobs     int      `json:"jobs"`
	Rounds   int      `json:"rounds"`
	Payload  int      `json:"payload_bytes"`
	Tenants  int      `json:"tenants"`
	Batch    int      `json:"jobs_per_message"` // only of this project; the others send one
	Latency  int      `json:"latency_jobs"`
	Peers    []string `json:"peers"`
	Settings settings `json:"settings"`
	program  string
}

func run(ctx context.Context, args []string) error {
	o, output, err := parse(args)
	if err != nil {
		return err
	}
	rep, err := compare(ctx, o, func(text string) { fmt.Fprintln(os.Stderr, text) })
	if err != nil {
		return err
	}
	return write(rep, output)
}

func parse(args []string) (o options, output string, err error) {
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.StringVar(&o.program, "bulkaction", "bin/bulkaction", "path of our program")
	f.IntVar(&o.Jobs, "jobs", 100_000, "jobs of each run")
	f.IntVar(&o.Rounds, "rounds", 3, "measurements of each project")
	f.IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	f.IntVar(&o.Tenants, "tenants", 10, "number of tenants; only ours has tenants")
	f.IntVar(&o.Batch, "batch", 500, "jobs of each message; only ours, the others send one")
	f.IntVar(&o.Latency, "latency-jobs", 500, "jobs for the measurement of latency, at 100 a second")
	f.IntVar(&o.Settings.Senders, "senders", 0,
		"goroutines of a peer's producer; 0: the number with which it is fastest")
	f.IntVar(&o.Settings.Concurrency, "asynq-concurrency", 20, "asynq's Concurrency")
	f.DurationVar(&o.Settings.CheckInterval, "asynq-check", defaultCheckInterval,
		"asynq's TaskCheckInterval for the tuned figures")
	peers := f.String("peers", strings.Join(peerNames(), ","), "projects to compare with")
	jsonFlag(f, &output)
	if err := f.Parse(args); err != nil {
		return o, "", err
	}
	if f.NArg() > 0 {
		return o, "", fmt.Errorf("unexpected argument %q: to write a file, use --json=FILE", f.Arg(0))
	}
	o.Peers = strings.Split(*peers, ",")
	for _, name := range o.Peers {
		if !slices.Contains(peerNames(), name) {
			return o, "", fmt.Errorf("--peers %q: known peers are %s", name, strings.Join(peerNames(), " and "))
		}
	}
	for name, n := range map[string]int{
		"jobs": o.Jobs, "rounds": o.Rounds, "tenants": o.Tenants, "batch": o.Batch, "latency-jobs": o.Latency,
		"asynq-concurrency": o.Settings.Concurrency,
	} {
		if n < 1 {
			return o, "", fmt.Errorf("--%s %d: must be at least 1", name, n)
		}
	}
	if o.Settings.Senders < 0 || o.Settings.CheckInterval < 0 {
		return o, "", errors.New("--senders and --asynq-check: must not be negative")
	}
	if o.Payload < numberDigits {
		return o, "", fmt.Errorf("--payload %d: must be at least %d, because it contains the job's number",
			o.Payload, numberDigits)
	}
	return o, output, nil
}
