package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

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
	for _, name := range append(slices.Clone(roles.Names), "broker") {
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
	return asProcess(cmd, roleOf(name))
}

// roleOf returns the role with this name, with the built-in processors and reducers.
func roleOf(name string) roles.Role {
	if name == "broker" {
		return own.Broker
	}
	return own.Jobs()[name]
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
