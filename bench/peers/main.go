// Command peers runs this project and others that do the same work side by side: in turn on one
// private redis-server, so that the drift of a machine hits all alike. README.md says what is
// compared, and how.
package main

import (
	"context"
	"encoding/json"
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
	Batch    int      `json:"jobs_per_message"` // ours alone; the others have one
	Latency  int      `json:"latency_jobs"`
	Peers    []string `json:"peers"`
	Settings settings `json:"settings"`
	binary   string
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
	if output == "-" {
		return json.NewEncoder(os.Stdout).Encode(rep)
	}
	if output != "" {
		body, err := json.MarshalIndent(rep, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(output, append(body, '\n'), 0o600); err != nil {
			return err
		}
	}
	return rep.table(os.Stdout)
}

func parse(args []string) (o options, output string, err error) {
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.StringVar(&o.binary, "bulkaction", "bin/bulkaction", "our program")
	f.IntVar(&o.Jobs, "jobs", 100_000, "jobs of a run")
	f.IntVar(&o.Rounds, "rounds", 3, "runs of each")
	f.IntVar(&o.Payload, "payload", 200, "bytes of a payload")
	f.IntVar(&o.Tenants, "tenants", 10, "tenants, ours alone: the others have none")
	f.IntVar(&o.Batch, "batch", 500, "jobs of a message, ours alone: the others have one")
	f.IntVar(&o.Latency, "latency-jobs", 500, "jobs at 100 a second")
	f.IntVar(&o.Settings.Senders, "senders", 0, "goroutines of a peer's producer; 0: as many as make the peer fastest")
	f.IntVar(&o.Settings.Concurrency, "asynq-concurrency", 20, "asynq's Concurrency")
	f.DurationVar(&o.Settings.Check, "asynq-check", defaultCheck, "asynq's TaskCheckInterval where it is tuned")
	peers := f.String("peers", strings.Join(peerNames(), ","), "whom to compare with")
	f.BoolFunc("json", "print JSON instead of the table; --json=FILE writes it beside the table", func(s string) error {
		if output = s; s == "true" {
			output = "-"
		}
		return nil
	})
	if err := f.Parse(args); err != nil {
		return o, "", err
	}
	if f.NArg() > 0 {
		return o, "", fmt.Errorf("%q: all arguments are flags; a file goes to --json=FILE", f.Arg(0))
	}
	o.Peers = strings.Split(*peers, ",")
	for _, name := range o.Peers {
		if !slices.Contains(peerNames(), name) {
			return o, "", fmt.Errorf("--peers %q: there are %s", name, strings.Join(peerNames(), " and "))
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
	if o.Settings.Senders < 0 || o.Settings.Check < 0 {
		return o, "", errors.New("--senders and --asynq-check: must not be negative")
	}
	if o.Payload < numberBytes {
		return o, "", fmt.Errorf("--payload %d: must be at least %d, a job's number is in it", o.Payload, numberBytes)
	}
	return o, output, nil
}
