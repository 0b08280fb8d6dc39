package cli

import (
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

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
			format := "text"
			if r.JSON {
				format = "json"
			}
			environ := append([]string{"BULKACTION_LOG_FORMAT=" + format}, os.Environ()...)
			environ = append(environ, "BULKACTION_KEY_PREFIX="+redis.prefix)
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
			code := app.Run(cmd.Context(), app.Options{
				Role: "console", Processors: new(builtin.Config), Environ: environ, Stderr: r.Err,
			}, role)
			switch code {
			case app.ExitOK:
			case app.ExitUsage:
				return usagef("some settings are wrong: the lines above say which")
			default:
				return errDev
			}
			return nil // a signal is the normal way to stop this command
		},
	}
	redis.add(cmd.Flags())
	cmd.Flags().StringVar(&addr, "addr", "", "address of the console and the API (default 127.0.0.1:8080)")
	return cmd
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
