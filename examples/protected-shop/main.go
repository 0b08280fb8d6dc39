// Command protected-shop is a shop behind the waiting room: its pages are free, but only users whom
// the waiting room has admitted can buy. A user who has bought, or leaves, makes place for the
// next.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	env := func(name, otherwise string) string { return cmp.Or(os.Getenv(name), otherwise) }
	var c config
	addr := flag.String("addr", env("SHOP_ADDR", "127.0.0.1:8081"), "address to listen on (SHOP_ADDR)")
	flag.StringVar(&c.broker, "broker", env("SHOP_BROKER_URL", "http://127.0.0.1:8090"),
		"BULKACTION_BROKER_PUBLIC_URL of the waiting room (SHOP_BROKER_URL)")
	flag.StringVar(&c.api, "api", env("SHOP_API_URL", "http://127.0.0.1:8080"),
		"address of the API (SHOP_API_URL)")
	flag.StringVar(&c.keyFile, "api-key-file", env("SHOP_API_KEY_FILE", ""),
		"file with an API key of the role service, if the API asks for keys (SHOP_API_KEY_FILE)")
	flag.StringVar(&c.event, "event", env("SHOP_EVENT", "demo"), "the event that users wait for (SHOP_EVENT)")
	flag.StringVar(&c.audience, "audience", env("SHOP_AUDIENCE", ""),
		"BULKACTION_BROKER_TOKEN_AUDIENCE of the waiting room, if it is set (SHOP_AUDIENCE)")
	flag.BoolVar(&c.online, "online", env("SHOP_ONLINE", "") == "true",
		"ask the API at each request whether the token was given back (SHOP_ONLINE=true)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *addr, c); err != nil {
		log.Fatal(err)
	}
}

// run serves the shop until ctx ends.
func run(ctx context.Context, addr string, c config) error {
	s, err := newShop(ctx, c)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("%w: set -addr or SHOP_ADDR to another address", err)
	}
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 20 * time.Second, IdleTimeout: time.Minute,
	}
	fmt.Printf("the shop is at http://%s/, its waiting room at %s\n", listener.Addr(), s.verifier.WaitURL())
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = server.Shutdown(end)
	if served := <-served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
