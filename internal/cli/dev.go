package cli

import (
	"cmp"
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/dev"
)

var errDev = errors.New("the roles could not be run: the lines above say why")

// unreachableMailServer returns the address of the configured mail server if it does not accept
// connections and SEND_EMAIL jobs would need it; otherwise "".
func unreachableMailServer(ctx context.Context) string {
	if types := os.Getenv("BULKACTION_WORKER_TYPES"); types != "" && !strings.Contains(types, "SEND_EMAIL") {
		return ""
	}
	address := net.JoinHostPort(cmp.Or(os.Getenv("BULKACTION_SMTP_HOST"), "127.0.0.1"),
		cmp.Or(os.Getenv("BULKACTION_SMTP_PORT"), "25"))
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return address
	}
	_ = conn.Close() // it accepts connections: nothing else is checked
	return ""
}

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
			embedded, mail := o.RedisURL == "", unreachableMailServer(cmd.Context())
			o.Started = func(api, redis string) {
				if embedded {
					r.Notef(
						"The embedded Redis keeps nothing: when this process ends, all is gone. Give " +
							"--redis-url to keep it.",
					)
				}
				r.Notef(
					"API at http://%s, Redis at %s. Try: bulkaction --api http://%s submit --type NOOP "+
						"--payload '{}' --wait",
					api, redis, api,
				)
				if mail != "" {
					r.Notef("No mail server answers at %s, so jobs of the type SEND_EMAIL will be retried in "+
						"vain. Set BULKACTION_SMTP_HOST and "+
						"BULKACTION_SMTP_PORT, or see `bulkaction demo`, which brings a sink.", mail)
				}
			}
			switch dev.Run(cmd.Context(), o) {
			case app.ExitOK:
			case app.ExitUsage:
				return usagef("the settings are wrong: the lines above say which")
			default:
				return errDev
			}
			return nil // a signal is the normal way to stop it
		},
	}
	cmd.Flags().StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of the embedded one")
	cmd.Flags().StringVar(&o.Addr, "addr", "", "address of the API (default 127.0.0.1:8080)")
	return cmd
}
