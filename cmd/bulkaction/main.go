// Command bulkaction is the command line: it submits bulk actions, follows them and shows their
// results; it also runs the roles, one or all, the demo and the audit. Under the name of a role, as
// the links in the image call it, it runs this role.
package main

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/bulkaction/bulkaction/internal/cli"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	// SIGPIPE is caught here, so that a write to a closed output returns an error. Otherwise a
	// reader that closes our output early, such as head, would kill the process.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	args := os.Args[1:]
	if name := filepath.Base(os.Args[0]); slices.Contains(roles.WithBroker, name) {
		args = append([]string{name}, args...)
	}
	os.Exit(cli.Main(ctx, args, cli.Std()))
}
