// Package dev runs the six roles of jobs and a broker of the waiting room in one process, on an
// embedded or a real Redis. It hides how the roles share the process.
package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
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
	// Started is called once, when the servers listen. It may be nil.
	Started func(Addresses)
	// Rooms creates the event [DemoEvent] of the waiting room unless it exists. Unless Environ names
	// a file of token keys, the broker has a new token key that is deleted at the end. If another
	// process has its address, it listens at a free port.
	Rooms bool

	withoutBroker bool
}

// Addresses are where the parts of Run can be reached.
type Addresses struct {
	API   string // host:port
	Redis string // URL
	Room  string // public URL of the broker
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
	if !o.withoutBroker {
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
	types, accounts := "SEND_EMAIL,HTTP,HTTP_BATCH,NOOP", ""
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
	var mu sync.Mutex
	at := Addresses{Redis: o.RedisURL}
	listens := func(part *string) func(string) {
		return func(addr string) {
			mu.Lock()
			defer mu.Unlock()
			*part = addr
			if o.Started != nil && at.API != "" && (at.Room != "" || o.withoutBroker) {
				o.Started(at)
			}
		}
	}
	own := roles.Own{
		BuiltIn: builtin.Create, Listening: listens(&at.API), RoomListening: listens(&at.Room), RoomAnyPort: true,
	}
	named := own.Jobs()
	if o.Rooms {
		if err := declareDemo(ctx, p, b); err != nil {
			return err
		}
	}
	if !o.withoutBroker {
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
	rooms := waitingroom.New(b.Conn, b.Space, nil)
	if _, err := rooms.Declare(ctx, DemoEvent, s, waitingroom.DeclareOptions{IfAbsent: true}); err != nil {
		return fmt.Errorf("create event %s: %w", DemoEvent, err)
	}
	return nil
}

// DemoOptions say how many e-mails the demo sends, and which Redis it uses.
type DemoOptions struct {
	Jobs, Tenants int
	RedisURL      string // "": an embedded Redis
	Addr          string // address of the API; "": a free port on loopback
	Environ       []string
	Log           io.Writer
	// Progress is called about ten times a second with all groups of the demo; it may be nil.
	Progress func([]api.Group)
	// Stay, if it is not nil, is called with the result and the URL of the API before the roles are
	// stopped; they run until it returns.
	Stay func(DemoResult, string)
}

// DemoGroup is the final state of one tenant's group.
type DemoGroup struct {
	ID     string     `json:"id"`
	Tenant string     `json:"tenant"`
	Status api.Status `json:"status"`
	Done   int64      `json:"done"`
	Failed int64      `json:"failed"`
}

// DemoResult is the summary of a demo.
type DemoResult struct {
	Jobs            int64       `json:"jobs"`
	Done            int64       `json:"done"`
	Failed          int64       `json:"failed"`
	ElapsedSeconds  float64     `json:"elapsed_seconds"`
	JobsPerSecond   float64     `json:"jobs_per_second"`
	ThrottlesPerJob float64     `json:"throttles_per_job"`
	Groups          []DemoGroup `json:"groups"`
	SinkReceived    int64       `json:"sink_received"`
	Audit           DemoAudit   `json:"audit"`
}

// DemoAudit is the result of the audit.
type DemoAudit struct {
	OK         bool              `json:"ok"`
	Violations []audit.Violation `json:"violations"`
}

// tenants has the names of the demo's first tenants; all others get numbers as names.
var tenants = []string{"acme", "globex", "initech"}

func tenant(i int) string {
	if i < len(tenants) {
		return tenants[i]
	}
	return "tenant-" + strconv.Itoa(i+1)
}

// Demo shows the system at work: it sends e-mails of several tenants, by SMTP to a mail sink on this
// machine, through all roles, waits until all groups have ended, and audits the data. It returns an
// error if the demo could not run; failed jobs and violations are part of the result.
func Demo(ctx context.Context, o DemoOptions) (DemoResult, error) {
	if o.Addr == "" {
		o.Addr = "127.0.0.1:0"
	}
	if o.RedisURL == "" {
		o.Environ = ForEmbedded(o.Environ)
	}
	sink, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{})
	if err != nil {
		return DemoResult{}, fmt.Errorf("start the mail sink: %w", err)
	}
	defer sink.Close() //nolint:errcheck // the sink has no data to save
	host, port, _ := strings.Cut(sink.Addr(), ":")

	devCtx, stop := context.WithCancel(ctx)
	started, ended := make(chan Addresses, 1), make(chan int, 1)
	go func() {
		ended <- Run(devCtx, Options{
			RedisURL: o.RedisURL, Addr: o.Addr, Log: o.Log, Environ: append(slices.Clone(o.Environ),
				"BULKACTION_SMTP_HOST="+host, "BULKACTION_SMTP_PORT="+port, "BULKACTION_SMTP_TLS=none",
				"BULKACTION_SMTP_AUTH=none", "BULKACTION_SMTP_ACCOUNTS_FILE=", // no mail leaves this host
				"BULKACTION_WORKER_TYPES=SEND_EMAIL,HTTP,NOOP"),
			Started: func(at Addresses) { started <- at }, withoutBroker: true,
		})
	}()
	defer func() { stop(); <-ended }()
	var at Addresses
	select {
	case at = <-started:
	case code := <-ended:
		ended <- code
		return DemoResult{}, errors.New("the roles did not start: the lines above say why")
	case <-ctx.Done():
		return DemoResult{}, ctx.Err()
	}

	r, err := send(ctx, client.NewAPI("http://"+at.API), o)
	if err != nil {
		return r, err
	}
	if r.Audit, err = check(ctx, at.Redis, o.Environ); err != nil {
		return r, err
	}
	r.SinkReceived = sink.Received()
	if o.Stay != nil {
		o.Stay(r, "http://"+at.API)
	}
	return r, nil
}

// send submits one group of e-mails for each tenant, and waits until all groups have ended.
func send(ctx context.Context, c *client.API, o DemoOptions) (DemoResult, error) {
	began := time.Now()
	run := strconv.FormatInt(began.UnixMilli(), 36)
	ids := make([]string, o.Tenants)
	for i := range ids {
		jobs := o.Jobs*(i+1)/o.Tenants - o.Jobs*i/o.Tenants
		id := fmt.Sprintf("demo-%s-%s", run, tenant(i))
		ids[i] = id
		_, err := c.Submit(ctx, client.Submission{
			ID: id, Tenant: tenant(i), Name: "Demo promotion of " + tenant(i), Type: "SEND_EMAIL",
			Aggregate: []client.Aggregate{
				{As: "sent", Op: "count"},
				{As: "duration_ms", Op: "distribution", Field: "duration_ms"},
			},
		})
		if err != nil {
			return DemoResult{}, fmt.Errorf("submit group %s: %w", id, err)
		}
		if _, err := c.Append(ctx, id, mails(tenant(i), jobs), client.WithIdempotencyKey(id)); err != nil {
			return DemoResult{}, fmt.Errorf("append to group %s: %w", id, err)
		}
		if _, err := c.Seal(ctx, id, nil); err != nil {
			return DemoResult{}, fmt.Errorf("seal group %s: %w", id, err)
		}
	}
	groups, err := follow(ctx, c, ids, o.Progress)
	if err != nil {
		return DemoResult{}, err
	}
	return summarise(groups, time.Since(began)), nil
}

// mails returns n jobs for a tenant. Their payloads are as a file of recipients would give them.
func mails(tenant string, n int) iter.Seq[client.NewJob] {
	return func(yield func(client.NewJob) bool) {
		for i := range n {
			job := client.NewJob{Payload: map[string]string{
				"to": fmt.Sprintf("customer-%d@%s.example.com", i+1, tenant), "subject": "News from " + tenant,
				"body": fmt.Sprintf("Dear customer %d,\n\nthis promotion is for you.\n", i+1),
			}}
			if !yield(job) {
				return
			}
		}
	}
}

// follow reads the groups about ten times a second until all have ended, and returns them. It fails
// if a read fails.
func follow(ctx context.Context, c *client.API, ids []string, progress func([]api.Group)) ([]api.Group, error) {
	for {
		groups := make([]api.Group, len(ids))
		ended := true
		for i, id := range ids {
			g, err := c.Group(ctx, id)
			if err != nil {
				return nil, fmt.Errorf("follow group %s: %w", id, err)
			}
			groups[i] = g
			ended = ended && g.Status.Ended()
		}
		if progress != nil {
			progress(groups)
		}
		if ended {
			return groups, nil
		}
		if err := redisx.Sleep(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func summarise(groups []api.Group, elapsed time.Duration) DemoResult {
	r := DemoResult{Groups: []DemoGroup{}}
	var throttles int64
	for _, g := range groups {
		r.Jobs += g.Counts.Accepted
		r.Done += g.Counts.Done
		r.Failed += g.Counts.Failed
		throttles += g.Throttles
		r.Groups = append(r.Groups, DemoGroup{
			ID:     g.ID,
			Tenant: g.Tenant,
			Status: g.Status,
			Done:   g.Counts.Done,
			Failed: g.Counts.Failed,
		})
	}
	r.ElapsedSeconds = math.Round(elapsed.Seconds()*100) / 100
	r.JobsPerSecond = math.Round(float64(r.Done+r.Failed) / elapsed.Seconds())
	if r.Jobs > 0 {
		r.ThrottlesPerJob = math.Round(float64(throttles)/float64(r.Jobs)*1e4) / 1e4
	}
	return r
}

// check runs a full audit of the data in Redis.
func check(ctx context.Context, redisURL string, environ []string) (DemoAudit, error) {
	cfg, err := app.LoadRedis(environ, redisURL)
	if err != nil {
		return DemoAudit{}, err
	}
	conn, err := redisx.Connect(ctx, cfg.Connection())
	if err != nil {
		return DemoAudit{}, err
	}
	defer conn.Close() //nolint:errcheck // the connection was used only for reading
	space, err := keyspace.New(cfg.KeyPrefix, cfg.Partitions)
	if err != nil {
		return DemoAudit{}, err
	}
	report, err := audit.Run(ctx, conn, space, audit.Options{})
	if err != nil {
		return DemoAudit{}, fmt.Errorf("audit: %w", err)
	}
	return DemoAudit{OK: report.OK, Violations: report.Violations}, nil
}
