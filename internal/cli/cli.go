// Package cli is the command line of bulkaction, with one file for each command. It hides flags,
// tables, progress bars, and how an error becomes a hint and an exit code.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/client"
)

// Exit codes of the process; they are a contract.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitFailedJobs  = 3
	exitInterrupted = 130
)

// IO has the streams of a command. It writes data to Out, and everything else to Err.
type IO struct {
	In            io.Reader
	Out, Err      io.Writer
	IsTerminal    bool // Err is a terminal: progress bars are shown
	OutIsTerminal bool // Out is a terminal: lists are printed as tables
}

// Std returns the streams of this process.
func Std() IO {
	return IO{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		IsTerminal:    term.IsTerminal(int(os.Stderr.Fd())),
		OutIsTerminal: term.IsTerminal(int(os.Stdout.Fd())),
	}
}

// Root has what all commands share: their streams and the global flags.
type Root struct {
	IO
	JSON    bool // --json
	address string
	started bool // the command runs, so its flags and arguments are valid
	area    *barArea
}

// Command creates a command. RunE of the command returns errors and does not print them.
type Command func(*Root) *cobra.Command

// commands are the commands of this package.
var commands = []Command{
	newSubmit, newStatus, newWatch, newResults, newFailures, newCancel, newPause, newResume, newRetry, newWhy,
	newTenant, newType, newDeadLetters, newStats, newAudit, newDev, newDemo, newBench, newRole,
}

// Main runs the command line args and returns its exit code. more adds commands to those of this
// package.
func Main(ctx context.Context, args []string, stdio IO, more ...Command) int {
	r := &Root{IO: stdio}
	cmd := r.command(append(append([]Command{}, commands...), more...))
	cmd.SetArgs(args)
	return r.exitCode(ctx, cmd.ExecuteContext(ctx))
}

const defaultAddress = "http://127.0.0.1:8080"

func (r *Root) command(all []Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "bulkaction",
		Short:         "Run bulk actions: submit groups of jobs, follow them, see their results",
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Long: "Run bulk actions: submit groups of jobs, follow them, see their results.\n\n" +
			"Data goes to standard output, progress to standard error and only on a terminal.\n" +
			"Exit codes: 0 fine, 1 error, 2 wrong usage, 3 the group ended with failed jobs, 130 interrupted.",
	}
	root.SetIn(r.In)
	root.SetOut(r.Out)
	root.SetErr(r.Err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.SetVersionTemplate("{{.Version}}\n")
	address := os.Getenv("BULKACTION_API")
	if address == "" {
		address = defaultAddress
	}
	flags := root.PersistentFlags()
	flags.StringVar(&r.address, "api", address, "address of the API; BULKACTION_API sets the default")
	flags.BoolVar(&r.JSON, "json", false, "print JSON: one object, or one line for each item")
	for _, c := range all {
		cmd := c(r)
		r.recordStart(cmd)
		root.AddCommand(cmd)
	}
	return root
}

// recordStart sets r.started when the command or one of its subcommands runs. An error before that
// is a mistake in flags or arguments.
func (r *Root) recordStart(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		r.recordStart(sub)
	}
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			r.started = true
			return run(cmd, args)
		}
	}
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// API returns a client for the address of --api.
func (r *Root) API(opts ...client.Option) (*client.API, error) {
	address := r.address
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, usagef("--api %q: write it as %s", r.address, defaultAddress)
	}
	return client.NewAPI(address, opts...), nil
}

// Print writes v to Out as one line of JSON.
func (r *Root) Print(v any) error {
	e := json.NewEncoder(r.Out)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Notef writes a line to Err.
func (r *Root) Notef(format string, args ...any) { _, _ = fmt.Fprintf(r.Err, format+"\n", args...) }

// exitCode prints err with a hint on Err, and returns the exit code for it. If the reader of Out
// has closed it, that is no error.
func (r *Root) exitCode(ctx context.Context, err error) int {
	var failed *failedJobsError
	var usage *usageError
	switch {
	case err == nil, errors.Is(err, syscall.EPIPE):
		return exitOK // the reader of Out has closed it and needs no more
	case ctx.Err() != nil:
		r.Notef("bulkaction: interrupted")
		r.printAdvice(err)
		return exitInterrupted
	case errors.As(err, &failed):
		r.printError(err)
		return exitFailedJobs
	case errors.As(err, &usage) || !r.started:
		r.printError(err)
		r.Notef("See `bulkaction --help`, or `bulkaction COMMAND --help`.")
		return exitUsage
	}
	r.printError(err)
	return exitError
}
