package cli

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/dev"
)

var errDev = errors.New("the roles could not be run: the lines above say why")

func newDev(r *Root) *cobra.Command {
	var o dev.Options
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run all roles in one process, on an embedded Redis or on --redis-url",
		Long: "Run all roles in one process. Without --redis-url they share an embedded Redis, which keeps nothing:\n" +
			"for trying things out. Everything else is configured by the environment, as the roles themselves are.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Environ, o.Log = os.Environ(), r.Err
			embedded := o.RedisURL == ""
			o.Started = func(api, redis string) {
				if embedded {
					r.Notef("The embedded Redis keeps nothing: when this process ends, all is gone. Give --redis-url to keep it.")
				}
				r.Notef("API at http://%s, Redis at %s. Try: bulkaction --api http://%s submit --type NOOP --payload '{}' --wait", api, redis, api)
			}
			if code := dev.Run(cmd.Context(), o); code != exitFine {
				return errDev
			}
			return nil // stopping it by a signal is how it is meant to end
		},
	}
	cmd.Flags().StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of the embedded one")
	cmd.Flags().StringVar(&o.Addr, "addr", "", "address of the API (default 127.0.0.1:8080)")
	return cmd
}
