package cli

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newWorker(r *Root) *cobra.Command {
	return asRole(parentCommand("worker", "Run the role worker, or resize a running one; `stats` lists them",
		&cobra.Command{
			Use:   "resize WORKER SLOTS",
			Short: "Set how many jobs a worker process runs at once",
			Long: "Set how many jobs a worker process runs at once, within a second. With 0 it starts no job;\n" +
				"running jobs finish. A process that starts again begins with BULKACTION_WORKER_COUNT.",
			Example: "  bulkaction worker resize worker-host-1-0a1b2c3d 20",
			Args: func(_ *cobra.Command, args []string) error {
				if len(args) != 2 {
					return usagef("resize needs the id of a worker and a number of slots, got %s", argumentsText(args))
				}
				if _, err := slots(args[1]); err != nil {
					return err
				}
				return checkID("worker", args[0])
			},
			RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.PoolSize, error) {
				n, err := slots(args[1])
				if err != nil {
					return api.PoolSize{}, err
				}
				size, err := a.ResizeWorker(ctx, args[0], n)
				if isUnknownID(err) {
					err = withHint(err, "`bulkaction stats` lists the worker processes that are alive.")
				}
				return size, err
			}, func(t table, p api.PoolSize) { t.row(p.ID, p.Workers) }),
		}))
}

// slots reads the number of slots of a worker process.
func slots(arg string) (int, error) {
	n, err := strconv.Atoi(arg)
	if err != nil || n < 0 || n > api.MaxWorkers {
		return 0, usagef("slots %q: must be 0 to %d", arg, api.MaxWorkers)
	}
	return n, nil
}
