// Package cli is the command line of bulkaction. Each file has one command or a few related ones.
// The package hides flags, tables, progress bars, and how an error becomes a hint and an exit code.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
)

// Exit codes of the process; they are a contract.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitFailedJobs  = 3
	exitInterrupted = 130
)

// IO has the streams of a command. Commands write their data to Out, and messages and errors to
// Err.
type IO struct {
	In            io.Reader
	Out, Err      io.Writer
	IsTerminal    bool // Err is a terminal: progress bars are shown
	OutIsTerminal bool // Out is a terminal: lines are shown as they come, and figures in place
}

// Std returns the streams of this process.
func Std() IO {
	return IO{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		IsTerminal:    term.IsTerminal(int(os.Stderr.Fd())),
		OutIsTerminal: term.IsTerminal(int(os.Stdout.Fd())),
	}
}

// Root has what all commands share: the streams and the global flags.
type Root struct {
	IO
	JSON    bool // --json
	address string
	tls     tlsFlags
	keyFile string    // --api-key-file
	keyFrom string    // where the API key that is sent came from; "" without one
	started bool      // the command runs, so its flags and arguments are valid
	shown   *progress // the latest bars of the command; nil: none
}

// Command is a function that creates a command. RunE of the command returns its error and leaves it
// to Main to print it.
type Command func(*Root) *cobra.Command

// commands are the functions that create the commands of this package. groupActions and
// roleCommands return further ones.
var commands = []Command{
	newSubmit, newAppend, newSeal, newGroups, newStatus, newWatch, newResults, newFailures, newMap, newJobs, newJob,
	newRetry, newWhy, newTenant, newType,
	newWorker, newGuard, newRoom, newDeadLetters, newRejected, newActivity, newStats, newHistory, newAudit, newKey,
	newACL,
	newDev, newDemo, newConsole,
	newRole,
}

// Main runs the command line args and returns its exit code. more are commands in addition to those
// of this package.
func Main(ctx context.Context, args []string, stdio IO, more ...Command) int {
	r := &Root{IO: stdio}
	cmd := r.command(slices.Concat(commands, groupActions(), roleCommands(), more))
	cmd.SetArgs(args)
	called, err := cmd.ExecuteContextC(ctx)
	return r.exitCode(ctx, called, explain(called, err))
}

const defaultAddress = "http://127.0.0.1:8080"

func (r *Root) command(all []Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "bulkaction",
		Short:         "Run bulk actions: submit groups of jobs, follow them, see their results",
		Version:       app.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,

		DisableSuggestions: true, // explain suggests
		Long: "Run bulk actions: submit groups of jobs, follow them, see their results.\n\n" +
			"Data goes to standard output, progress to standard error and only on a terminal.\n" +
			"Exit codes: 0 fine, 1 error, 2 wrong usage, 3 the group that the command waited for\n" +
			"ended with failed jobs, 130 interrupted.",
		// Cobra calls this function before RunE, and only if the flags and arguments of the command
		// are valid.
		PersistentPreRun: func(*cobra.Command, []string) { r.started = true },
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
	r.tls.add(flags)
	flags.BoolVar(&r.JSON, "json", false, "print JSON: one object, or one line for each item (default: text)")
	flags.StringVar(&r.keyFile, "api-key-file", os.Getenv("BULKACTION_API_KEY_FILE"),
		"file with the API key; BULKACTION_API_KEY_FILE sets the default, BULKACTION_API_KEY the key itself")
	for _, c := range all {
		root.AddCommand(c(r))
	}
	return root
}

// isGlobal reports whether all commands have the flag with this name.
func isGlobal(name string) bool {
	return slices.Contains([]string{"api", "api-key-file", "ca-file", "cert-file", "json", "key-file"}, name)
}

// API returns a client for the address of --api, with the API key if there is one.
func (r *Root) API(opts ...client.Option) (*client.API, error) {
	address := r.address
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, usagef("--api %q: write it as %s", r.address, defaultAddress)
	}
	if r.tls != (tlsFlags{}) {
		config, err := r.tls.config(u.Scheme)
		if err != nil {
			return nil, err
		}
		opts = append([]client.Option{client.WithTLSConfig(config)}, opts...)
	}
	key, from, err := r.apiKey()
	if err != nil {
		return nil, err
	}
	if key != "" {
		r.keyFrom = from
		opts = append(opts, client.WithAPIKey(key))
	}
	return client.NewAPI(address, opts...), nil
}

// Print writes v to Out as one line of JSON.
func (o IO) Print(v any) error {
	e := json.NewEncoder(o.Out)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// show prints v: with --json as JSON, otherwise as a table, to which rows adds the rows.
func (r *Root) show(v any, rows func(table)) error {
	if r.JSON {
		return r.Print(v)
	}
	t := newTable(r.Out)
	rows(t)
	return t.flush()
}

// ask returns the RunE of a command that prints, by show, the answer that call gets from the API.
// If call fails, it prints nothing.
func ask[T any](
	r *Root, call func(ctx context.Context, a *client.API, args []string) (T, error), rows func(table, T),
) func(*cobra.Command, []string) error {
	return r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
		answer, err := call(ctx, a, args)
		if err != nil {
			return err
		}
		return r.show(answer, func(t table) { rows(t, answer) })
	})
}

// withAPI returns the RunE of a command that uses the API.
func (r *Root) withAPI(
	run func(ctx context.Context, a *client.API, args []string) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a, err := r.API()
		if err != nil {
			return err
		}
		return run(cmd.Context(), a, args)
	}
}

// parentCommand returns a command that only has subcommands.
func parentCommand(name, short string, subcommands ...*cobra.Command) *cobra.Command {
	names := make([]string, len(subcommands))
	for i, m := range subcommands {
		names[i] = m.Name()
	}
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usagef("%s needs a subcommand: %s", name, strings.Join(names, ", "))
		},
	}
	cmd.AddCommand(subcommands...)
	return cmd
}

// Notef writes a line to Err.
func (o IO) Notef(format string, args ...any) { _, _ = fmt.Fprintf(o.Err, format+"\n", args...) }

// exitCode prints the error of the called command to Err, with a hint if there is one, and returns
// the exit code for it. If ctx has ended, it says "interrupted" instead. A broken pipe at Out is no
// error, because the reader has seen enough.
func (r *Root) exitCode(ctx context.Context, called *cobra.Command, err error) int {
	var failed *failedJobsError
	var usage *usageError
	if e, ok := errors.AsType[*client.Error](err); ok && e.Status == http.StatusUnauthorized && r.keyFrom != "" {
		err = withHint(err, "The key came from %s. `bulkaction key ls` shows which keys are valid.", r.keyFrom)
	}
	switch {
	case err == nil, errors.Is(err, syscall.EPIPE):
		return exitOK // the reader of Out has closed it and needs no more
	case ctx.Err() != nil:
		r.Notef("bulkaction: interrupted")
		if last := lastRefusal(err); last != nil {
			r.Notef("The last attempt: %s", printable(last.Error()))
		}
		r.printAdvice(err)
		return exitInterrupted
	case errors.As(err, &failed):
		r.printError(err)
		return exitFailedJobs
	case errors.As(err, &usage) || !r.started:
		r.printError(err)
		if help := "`" + called.CommandPath() + " --help`"; !strings.Contains(err.Error(), help) {
			r.Notef("See %s.", help)
		}
		return exitUsage
	}
	r.printError(err)
	return exitError
}
