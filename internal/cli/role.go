package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"slices"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

// newRole returns the hidden command that runs one role. The benchmarks (module bench) start the
// processes that they measure with it.
func newRole(*Root) *cobra.Command {
	var dir, profile string
	cmd := &cobra.Command{
		Use:       "role NAME",
		Short:     "Run one role as a process, as its own binary does",
		Hidden:    true,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: append(slices.Clone(roles.Names), "broker"),
		RunE: func(_ *cobra.Command, args []string) error {
			os.Args = args // app.Main parses the arguments after the program's name
			role := roles.Alone(roleOf(args[0]))
			app.Main(args[0], withProfile(profile, withJournal(dir, role)))
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "journal", "", "folder to which permits and starts are logged, for experiments")
	cmd.Flags().StringVar(&profile, "cpuprofile", "", "file to which a CPU profile of the whole run is written")
	return cmd
}

// withJournal wraps a role so that it writes each permit and each start of a job to a journal in
// the folder dir, which the module bench reads. "": it returns the role unchanged.
func withJournal(dir string, run roles.Role) roles.Role {
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
func withProfile(name string, run roles.Role) roles.Role {
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
