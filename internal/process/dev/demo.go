package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

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
	type place struct{ api, redis string }
	started, ended := make(chan place, 1), make(chan int, 1)
	go func() {
		ended <- Run(devCtx, Options{
			RedisURL: o.RedisURL, Addr: o.Addr, Log: o.Log, Environ: append(slices.Clone(o.Environ),
				"BULKACTION_SMTP_HOST="+host, "BULKACTION_SMTP_PORT="+port, "BULKACTION_SMTP_TLS=none",
				"BULKACTION_SMTP_AUTH=none", "BULKACTION_SMTP_ACCOUNTS_FILE=", // no mail leaves this host
				"BULKACTION_WORKER_TYPES=SEND_EMAIL,HTTP,NOOP"),
			Started: func(api, redis string) { started <- place{api, redis} },
		})
	}()
	defer func() { stop(); <-ended }()
	var at place
	select {
	case at = <-started:
	case code := <-ended:
		ended <- code
		return DemoResult{}, errors.New("the roles did not start: the lines above say why")
	case <-ctx.Done():
		return DemoResult{}, ctx.Err()
	}

	r, err := send(ctx, client.NewAPI("http://"+at.api), o)
	if err != nil {
		return r, err
	}
	if r.Audit, err = check(ctx, at.redis, o.Environ); err != nil {
		return r, err
	}
	r.SinkReceived = sink.Received()
	if o.Stay != nil {
		o.Stay(r, "http://"+at.api)
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
