// Package dev runs all six roles in one process, on an embedded or a real Redis. It hides how the
// roles share the process.
package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/alicebob/miniredis/v2"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// Options configure Run. Environ has the settings of the process; RedisURL and Addr override it.
type Options struct {
	RedisURL string // "": an embedded Redis, whose data is lost at the end
	// RedisAddr is the address of the embedded Redis. If it is taken or "", a free port on loopback
	// is used.
	RedisAddr string
	Addr      string // address of the API; "": the address in Environ
	Environ   []string
	Log       io.Writer
	// Started is called when the API listens, with its address and the URL of Redis. It may be nil.
	Started func(api, redisURL string)
}

// Run runs all roles until ctx ends, and returns the exit code of the process. It logs errors to
// o.Log.
func Run(ctx context.Context, o Options) int {
	environ := append([]string{"BULKACTION_WORKER_TYPES=" + builtInTypes(o.Environ)}, o.Environ...)
	if o.RedisURL == "" {
		server, err := embedded(o.RedisAddr)
		if err != nil {
			fmt.Fprintf(o.Log, "bulkaction: %v\n", err)
			return app.ExitError
		}
		defer server.Close()
		o.RedisURL = "redis://" + server.Addr() + "/0"
	}
	environ = append(environ, "BULKACTION_REDIS_URL="+o.RedisURL)
	if o.Addr != "" {
		environ = append(environ, "BULKACTION_API_ADDR="+o.Addr)
	}
	return app.Run(ctx, app.Options{Role: "dev", Environ: environ, Stderr: o.Log},
		func(ctx context.Context, p *app.Process) error {
			return run(ctx, p, func(addr string) {
				if o.Started != nil {
					o.Started(addr, o.RedisURL)
				}
			})
		})
}

// builtInTypes returns the types that a worker with this environment has processors for, and NOOP.
func builtInTypes(environ []string) string {
	types, accounts := "SEND_EMAIL,HTTP,NOOP", ""
	for _, variable := range environ {
		if value, ok := strings.CutPrefix(variable, "BULKACTION_PUSH_ACCOUNTS_FILE="); ok {
			accounts = value
		}
	}
	if accounts != "" {
		types += ",PUSH_NOTIFICATION"
	}
	return types
}

// embedded starts a Redis inside this process (miniredis), at addr or at a free port. Its data is
// lost when the process ends. Keys expire by the system's clock.
func embedded(addr string) (*miniredis.Miniredis, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if addr != "" && m.StartAddr(addr) == nil {
		return m, nil
	}
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("start embedded redis: %w", err)
	}
	return m, nil
}

// run runs all roles until ctx ends or one of them fails.
func run(ctx context.Context, p *app.Process, started func(addr string)) error {
	b, err := roles.Connect(ctx, p)
	if err != nil || ctx.Err() != nil {
		return err
	}
	var all []func(context.Context) error
	for name, role := range roles.All(started) {
		all = append(all, func(ctx context.Context) error { return role(ctx, p.As(name), b) })
	}
	err = stage.RunAll(ctx, all...)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
