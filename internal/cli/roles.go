package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

// processHelp is a part of the help of the commands that run one role, or all roles, as a process.
const processHelp = " as a process, until SIGTERM. Environment variables configure it; -help lists them,\n" +
	"-healthcheck asks whether a running process is ready."

// roleCommands returns functions that create the command that runs all roles, and one for each role
// except worker, whose command also has subcommands: newWorker creates it.
func roleCommands() []Command {
	all := []Command{newAll}
	for _, name := range roles.WithBroker {
		if name != "worker" {
			all = append(all, func(*Root) *cobra.Command { return asRole(&cobra.Command{Use: name}) })
		}
	}
	return all
}

// asRole lets a command run the role of its name.
func asRole(cmd *cobra.Command) *cobra.Command {
	name := cmd.Name()
	if cmd.Short == "" {
		cmd.Short = "Run the role " + name + " as a process"
	}
	cmd.Long = "Run the role " + name + processHelp
	return asProcess(cmd, own.Named()[name])
}

// own is what this program adds to the roles.
var own = roles.Own{BuiltIn: builtin.Create}

func newAll(*Root) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "all",
		Short: "Run all roles in one process, for small installations",
		Long: "Run all six roles" + processHelp + "\n" +
			"With BULKACTION_BROKER_TOKEN_KEYS_FILE it runs a broker of the waiting room, too. Several\n" +
			"processes, with all roles or with one, may share a Redis.",
	}
	return asProcess(cmd, func(ctx context.Context, p *app.Process, b roles.Base) error {
		named := own.Jobs()
		if p.Config.Broker.TokenKeysFile != "" {
			named["broker"] = own.Broker
		}
		return roles.Together(ctx, p, b, named)
	})
}

// asProcess makes cmd run a role in this process, which app.Main then ends. Package app, not cobra,
// parses the flags.
func asProcess(cmd *cobra.Command, role roles.Role) *cobra.Command {
	cmd.DisableFlagParsing = true
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
			return unknown(cmd, args[0])
		}
		if slices.ContainsFunc(args, isHelp) {
			describe(cmd, cmd.ErrOrStderr())
		}
		os.Args = append([]string{cmd.CommandPath()}, args...) // app.Main parses them
		app.Main(cmd.Name(), new(builtin.Config), roles.Alone(role))
		return nil
	}
	return cmd
}

func isHelp(arg string) bool { return slices.Contains([]string{"-h", "-help", "--help"}, arg) }

// describe prints the part of the help that package app can't print: what the command does, and its
// subcommands.
func describe(cmd *cobra.Command, w io.Writer) {
	_, _ = fmt.Fprintf(w, "%s\n\n", cmd.Long) // as the help that follows, it can't be handled if it fails
	for _, c := range cmd.Commands() {
		_, _ = fmt.Fprintf(w, "Subcommand: %s\n  %s\n\n", c.UseLine(), c.Short)
	}
}

// newRole returns the hidden command that runs one role. Benchmarks start the processes that they
// measure with it, so that they need no other binary.
func newRole(*Root) *cobra.Command {
	var dir, profile string
	cmd := &cobra.Command{
		Use:       "role NAME",
		Short:     "Run one role as a process, as its own binary does",
		Hidden:    true,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: roles.WithBroker,
		RunE: func(_ *cobra.Command, args []string) error {
			os.Args = args // app.Main parses the arguments after the program's name
			run := roles.Alone(own.Named()[args[0]])
			app.Main(args[0], new(builtin.Config), withProfile(profile, withJournal(dir, run)))
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "journal", "", "folder to which permits and starts are logged, for experiments")
	cmd.Flags().StringVar(&profile, "cpuprofile", "", "file to which a CPU profile of the whole run is written")
	return cmd
}

type process = func(context.Context, *app.Process) error

// withJournal wraps a role so that it writes each permit and each start of a job to a journal in
// the folder dir, which benchmarks read. "": it returns the role unchanged.
func withJournal(dir string, run process) process {
	if dir == "" {
		return run
	}
	return func(ctx context.Context, p *app.Process) error {
		j, err := openJournal(dir, p.Instance)
		if err != nil {
			return err
		}
		p.OnStop("journal", func(context.Context) error { return j.close() })
		return run(roles.WithHooks(ctx, roles.Hooks{
			Admitted: j.admitted, Promoted: j.promoted, Started: j.started,
		}), p)
	}
}

// withProfile wraps a role so that it writes a CPU profile to a file; "": it returns the role
// unchanged.
func withProfile(name string, run process) process {
	if name == "" {
		return run
	}
	return func(ctx context.Context, p *app.Process) error {
		file, err := os.Create(name)
		if err != nil {
			return fmt.Errorf("write CPU profile: %w", err)
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return errors.Join(fmt.Errorf("write CPU profile: %w", err), file.Close())
		}
		p.OnStop("CPU profile", func(context.Context) error {
			pprof.StopCPUProfile()
			return file.Close()
		})
		return run(ctx, p)
	}
}

func newConsole(r *Root) *cobra.Command {
	var redis redisFlags
	var addr string
	cmd := &cobra.Command{
		Use:   "console",
		Short: "Serve the API and the web console, without consuming the ingest stream",
		Long: "Serve the API and the web console of an installation, until interrupted. It leaves the ingest stream\n" +
			"and all jobs to the roles. All other settings come from the environment, as those of the role ingest.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := redis.check(); err != nil {
				return err
			}
			if err := checkAddr(cmd.Context(), addr); err != nil {
				return err
			}
			environ := append(r.environ(), "BULKACTION_KEY_PREFIX="+redis.prefix)
			if redis.url != "" {
				environ = app.WithRedisURL(environ, redis.url)
			}
			if addr != "" {
				environ = append(environ, "BULKACTION_API_ADDR="+addr)
			}
			role := roles.Alone(roles.Console(func(addr string) {
				at := scheme() + addr
				if r.JSON {
					_ = r.Print(map[string]string{"api": at, "console": at + consolePath}) // it is served all the same
					return
				}
				r.Notef("Console at %s%s", at, consolePath)
			}))
			return ended(app.Run(cmd.Context(), app.Options{
				Role: "console", Processors: new(builtin.Config), Environ: environ, Stderr: r.Err,
			}, role))
		},
	}
	redis.add(cmd.Flags())
	cmd.Flags().StringVar(&addr, "addr", "", "address of the console and the API (default 127.0.0.1:8080)")
	return cmd
}

// environ returns the environment of roles in this process: without BULKACTION_LOG_FORMAT they log
// as text, or with --json as JSON.
func (r *Root) environ() []string {
	format := "text"
	if r.JSON {
		format = "json"
	}
	return append([]string{"BULKACTION_LOG_FORMAT=" + format}, os.Environ()...)
}

// ended returns the error for the exit code of roles, which have logged what was wrong. A signal is
// the normal way to stop them.
func ended(code int) error {
	switch code {
	case app.ExitOK:
		return nil
	case app.ExitUsage:
		return usagef("some settings are wrong: the lines above say which")
	}
	return errors.New("the roles could not run: the lines above say why")
}

// consolePath is the path of the web console on the API's address.
const consolePath = "/ui/"

// servesConsole reports whether an API that runs with this process's environment serves the
// console.
func servesConsole() bool {
	serve := os.Getenv("BULKACTION_API_SERVE")
	return serve == "" || slices.Contains(strings.Split(serve, ","), "ui")
}

// scheme returns https:// if an API that runs with this process's environment serves TLS, otherwise
// http://.
func scheme() string {
	if os.Getenv("BULKACTION_API_TLS_CERT_FILE") != "" {
		return "https://"
	}
	return "http://"
}

// journal is the file in which one process of an experiment records the permits that it spends and
// the jobs that it starts, with the time of Redis (µs). The module bench reads it: also that of
// another revision, so the form of its lines may not change. It is safe for concurrent use.
type journal struct {
	file *os.File

	mu     sync.Mutex
	buffer *bufio.Writer // remembers the first write error
}

// openJournal creates the journal file of the process named instance in the folder dir, which must
// exist. It fails if the file exists.
func openJournal(dir, instance string) (*journal, error) {
	name := filepath.Join(dir, instance+".journal.tsv")
	file, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal of %s: %w", instance, err)
	}
	return &journal{file: file, buffer: bufio.NewWriterSize(file, 1<<20)}, nil
}

func (j *journal) admitted(at int64, partition int, typ string, permits []ledger.Permit) {
	j.permits(at, partition, "admit", typ, permits)
}

func (j *journal) promoted(at int64, partition int, permits []ledger.Permit) {
	j.permits(at, partition, "promote", "", permits)
}

func (j *journal) permits(at int64, partition int, by, typ string, permits []ledger.Permit) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range permits {
		line := append(append(j.beginLine('P', at, partition, typ, p.Tenant), by...), '\t')
		_, _ = j.buffer.Write(append(strconv.AppendInt(line, p.N, 10), '\n')) // close returns the error
	}
	_ = j.buffer.Flush() // an experiment may kill the process
}

func (j *journal) started(at int64, partition int, typ, tenant, group string, ordinal int64, attempt int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	line := append(append(j.beginLine('S', at, partition, typ, tenant), group...), '\t')
	line = append(strconv.AppendInt(line, ordinal, 10), '\t')
	_, _ = j.buffer.Write(append(strconv.AppendInt(line, int64(attempt), 10), '\n')) // close returns the error
}

// beginLine returns the first fields of a line, for the caller to complete and write. It uses the
// free space of the buffer, and allocates only if that is too small. The caller holds the lock.
func (j *journal) beginLine(kind byte, at int64, partition int, typ, tenant string) []byte {
	b := append(j.buffer.AvailableBuffer(), kind, '\t')
	b = append(strconv.AppendInt(b, at, 10), '\t')
	b = append(strconv.AppendInt(b, int64(partition), 10), '\t')
	b = append(append(b, typ...), '\t')
	return append(append(b, tenant...), '\t')
}

// close writes the rest and closes the file. It returns the first error of any write.
func (j *journal) close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := errors.Join(j.buffer.Flush(), j.file.Close()); err != nil {
		return fmt.Errorf("write journal %s: %w: the experiment's figures would be wrong", j.file.Name(), err)
	}
	return nil
}
