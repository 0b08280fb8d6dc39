package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/dev"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// unreachableMailServer returns the address of the mail server, as configured or 127.0.0.1:25, if
// it accepts no connections and the built-in SEND_EMAIL processor would use it; otherwise "".
func unreachableMailServer(ctx context.Context) string {
	if os.Getenv("BULKACTION_SMTP_ACCOUNTS_FILE") != "" {
		return "" // each account has a server of its own
	}
	if types := os.Getenv("BULKACTION_WORKER_TYPES"); types != "" && !strings.Contains(types, "SEND_EMAIL") {
		return ""
	}
	address := net.JoinHostPort(cmp.Or(os.Getenv("BULKACTION_SMTP_HOST"), "127.0.0.1"),
		cmp.Or(os.Getenv("BULKACTION_SMTP_PORT"), "25"))
	return unreachable(ctx, address)
}

// opened reports whether one of the environment variables is set that an API needs to be open to
// other hosts. If so, checkAddr leaves the check of the API's protection to the role that serves
// it.
func opened() bool {
	return slices.ContainsFunc([]string{"ALLOW_UNAUTHENTICATED", "ALLOW_PLAINTEXT", "TLS_CERT_FILE"},
		func(name string) bool { return os.Getenv("BULKACTION_API_"+name) != "" })
}

// checkDev refuses wrong flag values, and an API address that another process listens on.
func checkDev(ctx context.Context, redisURL, addr string) error {
	if err := checkRedisURL(redisURL); err != nil {
		return err
	}
	return checkAddr(ctx, addr)
}

// checkRedisURL refuses a wrong value of --redis-url. Its error does not quote a value that may
// have a password.
func checkRedisURL(redis string) error {
	if redis == "" {
		return nil
	}
	_, err := redisx.ParseURL(redis)
	switch {
	case err == nil:
		return nil
	case !strings.ContainsAny(redis, "@?") && !strings.Contains(redis, "://"):
		host, _, _ := strings.Cut(redis, "/")
		return usagef("--redis-url %q: begin it with redis://, as in redis://%s/0", redis, host)
	}
	return usagef("--redis-url: %v", err)
}

// checkAddr refuses a value of --addr that is malformed or, unless the API is opened, has no host.
// It also refuses the API's address if another process listens on it, even if it is not from
// --addr.
func checkAddr(ctx context.Context, addr string) error {
	if addr != "" {
		host, port, err := net.SplitHostPort(addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return usagef("--addr %q: must be host:port with a port from 0 to 65535, such as 127.0.0.1:8081", addr)
		}
		if host == "" && !opened() {
			return usagef("--addr %q: give the host, too, such as 127.0.0.1:%s; docs/security.md says what "+
				"an API needs that other hosts can reach", addr, port)
		}
	}
	address := cmp.Or(addr, os.Getenv("BULKACTION_API_ADDR"), "127.0.0.1:8080")
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return withHint(fmt.Errorf("the API can't listen at %s: the port is taken", address),
			"Another process listens there, perhaps another `bulkaction dev`: stop it, or give another address, such "+
				"as --addr 127.0.0.1:8081.")
	}
	if err == nil {
		_ = listener.Close() // nobody has connected
	}
	return nil // any other error is logged by the role that listens
}

// unreachableRedis returns the first address of the URL if it accepts no connections; otherwise "".
// It returns "" for a wrong URL, and for an empty one, which means the embedded Redis.
func unreachableRedis(ctx context.Context, url string) string {
	if url == "" {
		return ""
	}
	o, err := redisx.ParseURL(url)
	if err != nil || len(o.Addrs) == 0 {
		return ""
	}
	return unreachable(ctx, o.Addrs[0])
}

// noteUnreachable prints that a command waits for the Redis of --redis-url, if that Redis accepts
// no connections.
func (r *Root) noteUnreachable(ctx context.Context, command, url string) {
	if address := unreachableRedis(ctx, url); address != "" {
		r.Notef("Redis does not answer at %s yet: waiting for it. Start it, or give its address with "+
			"--redis-url; without --redis-url, %s runs an embedded Redis.", address, command)
	}
}

// unreachable returns address if it accepts no connection within a second, otherwise "".
func unreachable(ctx context.Context, address string) string {
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return address
	}
	_ = conn.Close() // it accepts connections: nothing else is checked
	return ""
}

// defaultRedis is the address at which programs look for Redis unless they are told another one.
const defaultRedis = "127.0.0.1:6379"

// otherRedis returns a note on what to do if the embedded Redis is not at the default address;
// otherwise "". Programs without its URL would use the Redis that has this address.
func otherRedis(url string) string {
	if strings.Contains(url, defaultRedis+"/") {
		return ""
	}
	return fmt.Sprintf("Another process has the address %s. For commands and programs that use this Redis: "+
		"export BULKACTION_REDIS_URL=%s", defaultRedis, url)
}

func newDev(r *Root) *cobra.Command {
	o := dev.Options{RedisAddr: defaultRedis} // the default of BULKACTION_REDIS_URL
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run all roles in one process, on an embedded Redis or on --redis-url",
		Long: "Run all roles in one process, for development, and a broker of the waiting room. Without --redis-url\n" +
			"they use an embedded Redis, which keeps nothing: its data is lost at the end. It listens at\n" +
			"127.0.0.1:6379, the broker at 127.0.0.1:8090; each takes a free port if its own is taken. All other\n" +
			"settings come from the environment. It logs as text, or with --json as JSON.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkDev(cmd.Context(), o.RedisURL, o.Addr); err != nil {
				return err
			}
			o.Environ, o.Log = r.environ(), r.Err
			r.noteUnreachable(cmd.Context(), "dev", o.RedisURL)
			// The README sets it to the address that the embedded Redis has, if that is free.
			if set := os.Getenv("BULKACTION_REDIS_URL"); o.RedisURL == "" && set != "" && set != "redis://127.0.0.1:6379/0" {
				r.Notef("dev does not use BULKACTION_REDIS_URL: it runs an embedded Redis unless --redis-url names " +
					"another.")
			}
			embedded, mail := o.RedisURL == "", unreachableMailServer(cmd.Context())
			withKeys := asksForKeys(o.Environ, o.Addr)
			o.Started = func(addresses dev.Addresses) {
				redis := withoutPassword(addresses.Redis)
				at := scheme() + addresses.API
				if r.JSON {
					address := map[string]string{"api": at, "redis": redis, "room": addresses.Room}
					if servesConsole() {
						address["console"] = at + consolePath
					}
					_ = r.Print(address) // the roles run all the same
					return
				}
				if servesConsole() {
					r.Notef("Console at %s%s", at, consolePath)
				}
				if embedded {
					r.Notef(
						"The embedded Redis keeps nothing: its data is lost when this process ends. Use " +
							"--redis-url to keep data.",
					)
				}
				r.Notef("API at %s, Redis at %s. %s", at, redis, whatToTry(at, redis, withKeys))
				if note := otherRedis(redis); embedded && note != "" {
					r.Notef("%s", note)
				}
				r.Notef("%s", roomNote(addresses.Room, o.Rooms))
				if mail != "" {
					r.Notef("No mail server accepts connections at %s, so jobs of the type SEND_EMAIL will fail. "+
						"Set BULKACTION_SMTP_HOST and BULKACTION_SMTP_PORT, or use `bulkaction demo`, which starts "+
						"a mail sink.", mail)
				}
			}
			return ended(dev.Run(cmd.Context(), o))
		},
	}
	cmd.Flags().StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of the embedded one")
	cmd.Flags().BoolVar(&o.Rooms, "rooms", false, "create the event demo of the waiting room, for examples/protected-shop")
	cmd.Flags().StringVar(&o.Addr, "addr", "", "address of the API (default 127.0.0.1:8080)")
	return cmd
}

// roomNote says where the waiting room is, and what to do there first.
func roomNote(url string, demo bool) string {
	page, todo := url+"/events/EVENT/wait", "Create an event: bulkaction room set EVENT --capacity 3"
	if demo {
		page, todo = url+"/events/"+dev.DemoEvent+"/wait", "The shop that it protects: go run ./examples/protected-shop"
	}
	note := fmt.Sprintf("Waiting room at %s. %s", page, todo)
	const usual = "127.0.0.1:8090"
	chosen := os.Getenv("BULKACTION_BROKER_ADDR")+os.Getenv("BULKACTION_BROKER_PUBLIC_URL") != ""
	if !chosen && !strings.HasSuffix(url, usual) {
		note += fmt.Sprintf("\nAnother process has the address %s. For the shop: export SHOP_BROKER_URL=%s", usual, url)
	}
	return note
}

// asksForKeys reports whether an API with this environment and this --addr asks for API keys.
func asksForKeys(environ []string, addr string) bool {
	if addr != "" {
		environ = append(slices.Clone(environ), "BULKACTION_API_ADDR="+addr)
	}
	cfg, _, err := app.Load(environ, nil)
	return err == nil && cfg.AuthMode() == app.AuthKeys // the roles report err
}

// whatToTry returns the first commands for an API at this URL.
func whatToTry(at, redis string, withKeys bool) string {
	const submit = "submit --type NOOP --payload '{}' --wait"
	if !withKeys {
		return fmt.Sprintf("Try: bulkaction --api %s %s", at, submit)
	}
	return fmt.Sprintf("The API asks for keys. Create one: bulkaction key create --role admin --redis-url %s > "+
		"admin.key\nThen try: bulkaction --api %s --api-key-file admin.key %s", redis, at, submit)
}

// withoutPassword returns a Redis URL without user and password.
func withoutPassword(redis string) string {
	scheme, rest, _ := strings.Cut(redis, "://")
	return scheme + "://" + rest[strings.LastIndex(rest, "@")+1:]
}

func newDemo(r *Root) *cobra.Command {
	var o dev.DemoOptions
	var stay bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Send e-mails of some tenants to a local sink, through all roles in this process",
		Long: "Run all roles in this process and send e-mails through them, one group for each tenant. The mail\n" +
			"server is a sink on this machine, so no e-mail leaves it. At the end the data is audited.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.Tenants < 1:
				return usagef("--tenants %d: must be at least 1", o.Tenants)
			case o.Jobs < 1:
				return usagef("--jobs %d: must be at least 1", o.Jobs)
			case o.Jobs < o.Tenants:
				return usagef("--jobs %d --tenants %d: each tenant needs at least one job; give --tenants %[1]d",
					o.Jobs, o.Tenants)
			}
			if err := checkDev(cmd.Context(), o.RedisURL, o.Addr); err != nil {
				return err
			}
			r.noteUnreachable(cmd.Context(), "demo", o.RedisURL)
			o.Environ, o.Log = append([]string{"BULKACTION_LOG_LEVEL=warn", "BULKACTION_LOG_FORMAT=text"},
				os.Environ()...), r.Err
			if !r.JSON {
				redis := "an embedded Redis, whose data is lost at the end"
				if o.RedisURL != "" {
					redis = "the given Redis"
				}
				r.Notef("Sending %s of %s by SMTP to a sink on this machine, on %s.",
					counted(int64(o.Jobs), "e-mail"), counted(int64(o.Tenants), "tenant"), redis)
				if !r.IsTerminal {
					r.Notef("Progress is shown only on a terminal; the result follows at the end.")
				}
			}
			bars := r.newProgress()
			o.Progress = func(groups []api.Group) {
				for _, g := range groups {
					bars.showGroup(g.Tenant, g)
				}
			}
			shown := false
			if stay {
				o.Stay = func(result dev.DemoResult, address string) {
					bars.stop()
					shown = true
					_ = r.showDemo(result)
					r.Notef("The roles keep running at %s until interrupted. Try: bulkaction --api %s status %s",
						address, address, result.Groups[0].ID)
					if servesConsole() {
						r.Notef("Console at %s%s", address, consolePath)
					}
					<-cmd.Context().Done()
				}
			}
			result, err := dev.Demo(cmd.Context(), o)
			bars.stop()
			if err != nil {
				return err
			}
			if !shown {
				if err := r.showDemo(result); err != nil {
					return err
				}
			}
			switch {
			case !result.Audit.OK:
				return fmt.Errorf("the audit found %d violations: run the demo with --redis-url and then "+
					"`bulkaction audit`",
					len(result.Audit.Violations))
			case result.Failed > 0:
				return &failedJobsError{failed: result.Failed}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 10_000, "number of e-mails")
	f.IntVar(&o.Tenants, "tenants", 3, "number of tenants, each with one group")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of the embedded one")
	f.StringVar(&o.Addr, "addr", "127.0.0.1:0", "address of the API; port 0 is a free one")
	f.BoolVar(&stay, "stay", false, "keep the roles running afterwards until interrupted")
	return cmd
}

// showDemo prints the result.
func (r *Root) showDemo(d dev.DemoResult) error {
	if r.JSON {
		return r.Print(d)
	}
	t := newTable(r.Out)
	t.row("TENANT", "GROUP", "STATUS", "DONE", "FAILED")
	for _, g := range d.Groups {
		t.row(g.Tenant, g.ID, g.Status, thousands(g.Done), thousands(g.Failed))
	}
	if err := t.flush(); err != nil {
		return err
	}
	audit := "clean"
	if !d.Audit.OK {
		audit = fmt.Sprintf("%d violations", len(d.Audit.Violations))
	}
	throttles := ""
	if d.ThrottlesPerJob > 0 {
		throttles = fmt.Sprintf(" %.2f throttles a job,", d.ThrottlesPerJob)
	}
	_, err := fmt.Fprintf(r.Out,
		"\n%s of %s e-mails done in %.1f s (%s a second), %s received by the sink,%s audit %s\n",
		thousands(d.Done), thousands(d.Jobs), d.ElapsedSeconds, thousands(int64(d.JobsPerSecond)),
		thousands(d.SinkReceived), throttles, audit)
	return err
}
