// Command role is a fake of the project's binaries for the tests of package proctest. It behaves
// like one as far as that package can tell.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "env" {
		fmt.Println(strings.Join(os.Environ(), "\n"))
		fmt.Fprintln(os.Stderr, "not data")
		os.Exit(3)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	fmt.Fprintln(os.Stderr, os.Getenv("SAY"))

	var asked atomic.Int32
	http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			http.Error(w, "redis is away", http.StatusServiceUnavailable)
		}
	})
	for _, server := range []string{"admin", "api"} {
		l, err := net.Listen("tcp", os.Getenv("BULKACTION_"+strings.ToUpper(server)+"_ADDR"))
		if err != nil {
			panic(err)
		}
		slog.Info("listening", "server", server, "addr", l.Addr().String())
		go func() { _ = http.Serve(l, nil) }()
	}
	<-ctx.Done()
	slog.Info("drained")
}
