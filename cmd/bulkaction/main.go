// Command bulkaction submits bulk actions, follows them and shows what came of them.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/bulkaction/bulkaction/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	// A reader of our output that leaves, say head, is then an error of the write instead
	// of our death.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	os.Exit(cli.Main(ctx, os.Args[1:], cli.Std()))
}
