// Package cli is the command line of bulkaction. Each file has one command or a few related ones.
// The package hides flags, tables, progress bars, and how an error becomes a hint and an exit code.
package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
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
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/bulkaction/bulkaction/api"
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
	newRetry, newDelete, newWhy, newTenant, newType, newLimit,
	newWorker, newGuard, newRoom, newOperation, newCallback, newDeadLetters, newRejected, newActivity, newStats, newHistory, newAudit, newMigrate, newKey,
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
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd.Flags()); err != nil {
				return err
			}
			r.started = true
			return nil
		},
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

// refuseEmpty returns an error if a flag is given without a value, as an unset variable of a shell
// does: without the value the command would do something else, and for other data.
func refuseEmpty(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		empty := f.Value.Type() == "string" && f.Value.String() == ""
		if _, isTime := f.Value.(*sinceValue); isTime {
			empty = false // its Set refuses ""
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = slices.Contains(list.GetSlice(), "")
		}
		if empty && err == nil && !isGlobal(f.Name) { // an empty global flag overrides an environment variable
			err = usagef("--%s is empty: give a value, or leave the flag out (is a variable of the shell not set?)",
				f.Name)
		}
	})
	return err
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

func parentCommand(name, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usagef("%s needs a subcommand: %s", name, namesOf(subcommands))
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

const keyVariable = "BULKACTION_API_KEY"

// apiKey returns the API key for calls of the API, or "" if none is set, and the variable or file
// that it is from. A key in both is an error. Errors do not contain the key.
func (r *Root) apiKey() (key, from string, err error) {
	key, from = os.Getenv(keyVariable), keyVariable
	if r.keyFile != "" {
		if key != "" {
			return "", "", usagef("there are two API keys: in %s and in the file %s; unset one of them",
				keyVariable, r.keyFile)
		}
		text, err := os.ReadFile(r.keyFile)
		if err != nil {
			return "", "", withHint(fmt.Errorf("read the API key: %w", err),
				"Give the file with --api-key-file or BULKACTION_API_KEY_FILE.")
		}
		key, from = strings.TrimSpace(string(text)), "the file "+r.keyFile
		if key == "" {
			return "", "", usagef("%s is empty: it must have an API key", from)
		}
	}
	if strings.ContainsFunc(key, func(c rune) bool { return c > unicode.MaxASCII || c <= ' ' || c == 0x7f }) {
		return "", "", usagef("%s has no API key: a key has no spaces, line ends or other such characters", from)
	}
	return key, from, nil
}

// tlsFlags are the global flags for an API that speaks https.
type tlsFlags struct{ caFile, certFile, keyFile string }

func (f *tlsFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.caFile, "ca-file", os.Getenv("BULKACTION_CA_FILE"),
		"PEM file with the authorities that may sign the API's certificate (default: those of the system);\n"+
			"BULKACTION_CA_FILE sets the default")
	flags.StringVar(&f.certFile, "cert-file", os.Getenv("BULKACTION_CERT_FILE"),
		"PEM file with a certificate, if the API demands one; BULKACTION_CERT_FILE sets the default")
	flags.StringVar(&f.keyFile, "key-file", os.Getenv("BULKACTION_KEY_FILE"),
		"key of --cert-file; BULKACTION_KEY_FILE sets the default")
}

// config returns the TLS configuration from the flags; an error unless the scheme of the API's
// address is https.
func (f *tlsFlags) config(scheme string) (*tls.Config, error) {
	if scheme != "https" {
		return nil, usagef("--ca-file, --cert-file and --key-file need an --api that begins with https://")
	}
	if (f.certFile == "") != (f.keyFile == "") {
		return nil, usagef("give --cert-file and --key-file together")
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.caFile != "" {
		pem, err := os.ReadFile(f.caFile)
		if err != nil {
			return nil, usagef("--ca-file: %v", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usagef("--ca-file %s: has no certificate in PEM", f.caFile)
		}
	}
	if f.certFile != "" {
		pair, err := tls.LoadX509KeyPair(f.certFile, f.keyFile)
		if err != nil {
			return nil, usagef("--cert-file: %v", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// tlsAdvice returns a hint what to do about a failed TLS handshake; "" for other errors.
func tlsAdvice(err error) string {
	_, unknownAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	_, wrongName := errors.AsType[x509.HostnameError](err)
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	says := func(text string) bool { return strings.Contains(err.Error(), text) } // errors without a type
	switch {
	case unknownAuthority:
		return "Give the authority that signed the API's certificate with --ca-file or BULKACTION_CA_FILE."
	case wrongName:
		return "Give --api a name that the API's certificate has."
	case isInvalid && invalid.Reason == x509.Expired:
		return "The API needs a certificate that is valid now; or a clock is wrong."
	case says("server gave HTTP response to HTTPS client"):
		return "The API does not speak TLS: give --api with http://."
	case says("HTTP request to an HTTPS server"):
		return "The API speaks TLS: give --api with https://."
	case says("remote error: tls: "), says("http2: client conn could not be established"):
		return "The API demands a certificate that it trusts: give it with --cert-file and --key-file."
	}
	return ""
}

// patientAPI returns a client that attempts a call up to 12 times, so that a busy server delays a
// command instead of ending it. The client prints why a call waits (noteRetry).
func (r *Root) patientAPI() (*client.API, error) {
	return r.API(client.WithRetry(12, time.Minute), client.WithRetryNotice(r.noteRetry))
}

// noteRetry prints to Err that a call has failed and is attempted again.
func (r *Root) noteRetry(err error, wait time.Duration, left int) {
	what := fmt.Sprintf("The API does not answer now (%s).", err)
	if e, ok := errors.AsType[*client.Error](err); ok {
		reason := strings.TrimPrefix(e.Problem.Detail, api.ErrBackpressure.Error()+": ")
		if reason == "" {
			reason = e.Problem.Title
		}
		what = fmt.Sprintf("The API refuses the jobs now (%d: %s).", e.Status, reason)
	}
	line := printable(fmt.Sprintf("%s Trying again in %d s, at most %d more times; Ctrl-C ends this.",
		what, (wait+time.Second-1)/time.Second, left))
	if !r.shown.printAbove(line) {
		r.Notef("%s", line)
	}
}

// lastRefusal returns the error of the last attempt of a call whose next attempt was interrupted;
// nil if err is not the error of such a call.
func lastRefusal(err error) error {
	if both, ok := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); ok && !errors.Is(both.Unwrap()[0], context.Canceled) {
		return both.Unwrap()[0]
	}
	return nil
}
