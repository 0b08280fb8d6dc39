// Package dev runs the six roles of jobs in one process, and a broker of the waiting room if asked
// to, on an embedded or a real Redis. It hides how the roles share the process.
package dev

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
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
	// Rooms also runs a broker of the waiting room, and creates the event [DemoEvent] unless it
	// exists. Unless Environ names a file of token keys, the broker gets a new token key that is
	// deleted at the end. RoomStarted, if not nil, is called with the broker's public URL.
	Rooms       bool
	RoomStarted func(publicURL string)
}

// DemoEvent is the event that Run creates with Options.Rooms. Its page sends admitted users to the
// address of examples/protected-shop.
const DemoEvent = "demo"

const (
	demoCapacity  = 3
	demoTokenTTL  = time.Minute
	demoReturnURL = "http://127.0.0.1:8081/buy"
)

// Run runs all roles until ctx ends or one of them fails, and returns the exit code for the
// process. It logs errors to o.Log.
func Run(ctx context.Context, o Options) int {
	environ := append([]string{"BULKACTION_WORKER_TYPES=" + builtInTypes(o.Environ)}, o.Environ...)
	if !slices.ContainsFunc(o.Environ, func(v string) bool { return strings.HasPrefix(v, allowPrivate) }) {
		environ = append([]string{loopbackAllowed}, environ...) // handlers of HTTP jobs run on this machine
	}
	if o.RedisURL == "" {
		server, err := embedded(o.RedisAddr)
		if err != nil {
			fmt.Fprintf(o.Log, "bulkaction: %v\n", err)
			return app.ExitError
		}
		defer server.Close()
		o.RedisURL = "redis://" + server.Addr() + "/0"
		environ = ForEmbedded(environ)
	}
	environ = app.WithRedisURL(environ, o.RedisURL)
	if o.Addr != "" {
		environ = append(environ, "BULKACTION_API_ADDR="+o.Addr)
	}
	if o.Rooms {
		keys, remove, err := tokenKeys(o.Environ)
		if err != nil {
			fmt.Fprintf(o.Log, "bulkaction: %v\n", err)
			return app.ExitError
		}
		defer remove()
		environ = append(environ, keysFile+keys)
	}
	return app.Run(ctx, app.Options{Role: "dev", Processors: new(builtin.Config), Environ: environ, Stderr: o.Log},
		func(ctx context.Context, p *app.Process) error { return run(ctx, p, o) })
}

// Jobs may call this machine, unless the environment says which addresses they may call.
const (
	allowPrivate    = "BULKACTION_HTTP_PROCESSOR_ALLOW_PRIVATE="
	loopbackAllowed = "BULKACTION_HTTP_PROCESSOR_ALLOWED_CIDRS=127.0.0.0/8,::1/128"
)

const keysFile = "BULKACTION_BROKER_TOKEN_KEYS_FILE="

// tokenKeys returns the file of token keys that environ names. If it names none, it writes a new
// key to a temporary file; remove deletes this file.
func tokenKeys(environ []string) (path string, remove func(), err error) {
	for _, variable := range environ {
		if value, ok := strings.CutPrefix(variable, keysFile); ok {
			path = value
		}
	}
	if path != "" {
		return path, func() {}, nil
	}
	dir, err := os.MkdirTemp("", "bulkaction-")
	if err != nil {
		return "", nil, fmt.Errorf("store a token key: %w", err)
	}
	remove = func() { _ = os.RemoveAll(dir) } // what stays is a key that nobody uses
	text, err := entrytoken.GenerateKeys(1)
	if err == nil {
		path = filepath.Join(dir, "token-keys.pem")
		err = entrytoken.WriteKeys(path, text)
	}
	if err != nil {
		remove()
		return "", nil, fmt.Errorf("store a token key: %w", err)
	}
	return path, remove, nil
}

// builtInTypes returns the job types, separated by commas, for which a worker with this environment
// has built-in processors.
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

// ForEmbedded returns environ for the embedded Redis: without the access to another Redis, and with
// a longer command timeout, unless environ sets one. The embedded Redis shares its CPU with the
// roles, so on a busy machine it answers late although nothing is broken.
func ForEmbedded(environ []string) []string {
	return app.WithoutRedisAccess(append([]string{"BULKACTION_REDIS_COMMAND_TIMEOUT=30s"}, environ...))
}

// run runs all roles until ctx ends or one of them fails.
func run(ctx context.Context, p *app.Process, o Options) error {
	b, err := roles.Connect(ctx, p)
	if err != nil || ctx.Err() != nil {
		return err
	}
	own := roles.Own{BuiltIn: builtin.Create, RoomListening: o.RoomStarted, Listening: func(addr string) {
		if o.Started != nil {
			o.Started(addr, o.RedisURL)
		}
	}}
	named := own.Jobs()
	if o.Rooms {
		if err := declareDemo(ctx, p, b); err != nil {
			return err
		}
		named["broker"] = own.Broker
	}
	return roles.Together(ctx, p, b, named)
}

// declareDemo creates the event DemoEvent of the waiting room, unless it exists.
func declareDemo(ctx context.Context, p *app.Process, b roles.Base) error {
	capacity, ttl := int64(demoCapacity), api.Duration(demoTokenTTL)
	s := roles.RoomRules(p.Config.Broker).Fill(api.EventSettings{
		Capacity: &capacity, TokenTTL: &ttl, ReturnURL: demoReturnURL, Mode: api.ModeOpen,
	})
	rooms := waitingroom.New(b.Conn, b.Space, func(string, time.Duration, error) {})
	if _, err := rooms.Declare(ctx, DemoEvent, s, waitingroom.DeclareOptions{IfAbsent: true}); err != nil {
		return fmt.Errorf("create event %s: %w", DemoEvent, err)
	}
	return nil
}
