package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/process/journal"
	"github.com/bulkaction/bulkaction/processor/email"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

// GuardPipeline has the figures of the part pipeline: mails sent by accounts with a rate.
type GuardPipeline struct {
	Pipeline Pipeline `json:"pipeline"`
}

// Pipeline shows how well workers use the accounts of SMTP_ACCOUNTS_FILE: 40 accounts with 80 mails
// per 6 s each, 20,000 mails of 5 tenants, 4 worker processes. (Quick: per 2 s, 7,000 mails.) It
// also shows what happens to an account whose server closes each connection at once.
type Pipeline struct {
	Mails int `json:"mails"`
	// MakespanRatio is the time from the first mail to the last one, by the mail server's clock,
	// divided by the time that the accounts' rates need.
	MakespanRatio   float64 `json:"makespan_ratio"`
	MakespanSeconds float64 `json:"makespan_seconds"`
	DefersPerJob    float64 `json:"defers_per_job"`
	// OverRate is the number of mails that exceed an account's rate of 80: of any 81 mails in a
	// row, the last one came within a window of the first.
	OverRate int `json:"over_rate"`
	// ShareError is the largest relative deviation of a tenant's share from a fifth, while all five
	// tenants had mails to send.
	ShareError float64 `json:"share_error"`
	// ProbesOver is the number of connections to the server that closes them, beyond three for each
	// of the Openings. Probes is the number of all connections to it, Openings how often the
	// breaker can have opened in the time of the run.
	ProbesOver int `json:"probes_over"`
	Probes     int `json:"probes"`
	Openings   int `json:"openings"`

	overrides map[string]string // settings of the fleet that measures the rates
}

const (
	pipelineAccounts = 40
	pipelineRate     = 80
	pipelineTenants  = 5
	pipelineWorkers  = 4
)

// pipelineSize is how large the experiment is.
type pipelineSize struct {
	mails  int
	window time.Duration
}

// ideal returns the time that all mails take at the rate of all accounts together. A real run may
// be up to a window shorter, because each account begins with all of its permits.
func (s pipelineSize) ideal() time.Duration {
	return time.Duration(float64(s.mails) / (pipelineAccounts * pipelineRate) * float64(s.window))
}

// mailServer is an SMTP server inside this process that stores the times at which each account has
// sent.
type mailServer struct {
	*smtpsink.Sink
	mu   sync.Mutex
	sent map[string][]time.Time // by the sender's address
}

func startMailServer() (*mailServer, error) {
	s := &mailServer{sent: map[string][]time.Time{}}
	var err error
	s.Sink, err = smtpsink.Start("127.0.0.1:0", smtpsink.Options{OnMail: func(m smtpsink.Mail) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sent[m.From] = append(s.sent[m.From], time.Now())
	}})
	return s, err
}

// makespan returns the time from the first mail that the server received to the last one.
func (s *mailServer) makespan() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first, last time.Time
	for _, times := range s.sent {
		if first.IsZero() || times[0].Before(first) {
			first = times[0]
		}
		if times[len(times)-1].After(last) {
			last = times[len(times)-1]
		}
	}
	return last.Sub(first)
}

// overRate returns how many mails exceeded the rate of an account: the account had sent `rate`
// mails less than a window before.
func (s *mailServer) overRate(rate int, window time.Duration) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, times := range s.sent {
		slices.SortFunc(times, time.Time.Compare)
		for i := rate; i < len(times); i++ {
			if times[i].Sub(times[i-rate]) < window {
				n++
			}
		}
	}
	return n
}

// deadServer accepts connections and closes them at once.
type deadServer struct {
	net.Listener
	accepted atomic.Int64
}

func startDeadServer(ctx context.Context) (*deadServer, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start a server that answers nothing: %w", err)
	}
	s := &deadServer{Listener: l}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.accepted.Add(1)
			_ = c.Close()
		}
	}()
	return s, nil
}

// accountsFile writes a file of SMTP accounts into a folder, and returns its name. It has n
// accounts of the server at addr, each with its own sender address, and the text more at its end.
func accountsFile(folder string, n int, addr, more string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("accounts:\n")
	for i := range n {
		fmt.Fprintf(&b, "  - {id: account-%d, host: %s, port: %s, from: account-%d@example.com}\n", i, host, port, i)
	}
	b.WriteString(more)
	name := filepath.Join(folder, "accounts.yaml")
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		return "", fmt.Errorf("write the accounts: %w", err)
	}
	return name, nil
}

// mailBench runs the roles, and mail servers in this process.
type mailBench struct{ Options }

// mailGroups returns a group of mails for each tenant.
func mailGroups(name string, mails int) []group {
	groups := divideJobs(name, mails, pipelineTenants, 1, func(i int) []byte {
		return fmt.Appendf(nil, `{"payload":{"to":"user-%d@example.com","subject":"Sale","body":"All half price"}}`, i)
	})
	for i := range groups {
		groups[i].fields = map[string]any{"type": email.Type}
	}
	return groups
}

// mailRun sends mails through all roles, with the accounts of a file, and returns the ended run.
func (b mailBench) mailRun(ctx context.Context, part, accounts string, mails int, env ...string) (*run, error) {
	return b.experiment(ctx, part, func(x *run) error {
		return x.submit(ctx, mailGroups(x.name, mails)...)
	}, append(env, noGlobalLimit, "BULKACTION_WORKER_TYPES="+email.Type,
		"BULKACTION_SMTP_ACCOUNTS_FILE="+accounts, "BULKACTION_SMTP_TLS=none")...)
}

func (o GuardsOptions) pipeline(ctx context.Context) (out GuardPipeline, err error) {
	b, size := mailBench{o.Options}, pipelineSize{20_000, 6 * time.Second}
	b.RedisURL = "" // the roles have a Redis of their own
	b.Replicas = map[string]int{"worker": pipelineWorkers}
	if o.Quick {
		size = pipelineSize{7_000, 2 * time.Second}
	}
	folder, err := os.MkdirTemp("", "bulkaction-accounts-")
	if err != nil {
		return out, fmt.Errorf("make a folder for accounts: %w", err)
	}
	defer func() { _ = os.RemoveAll(folder) }()
	if err := b.rates(ctx, folder, size, &out.Pipeline); err != nil {
		return out, err
	}
	return out, b.failingAccount(ctx, folder, &out.Pipeline)
}

// rates sends mails with accounts that have a rate. It stores in out how close the run comes to the
// ideal time, and how many mails exceeded a rate.
func (b mailBench) rates(ctx context.Context, folder string, size pipelineSize, out *Pipeline) error {
	server, err := startMailServer()
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	file, err := accountsFile(folder, pipelineAccounts, server.Addr(), "")
	if err != nil {
		return err
	}
	x, err := b.mailRun(ctx, "pipeline, mails", file, size.mails,
		fmt.Sprintf("BULKACTION_SMTP_ACCOUNT_RATE=%d/%s", pipelineRate, size.window))
	if err != nil {
		return err
	}
	if n := int(server.Received()); n != size.mails {
		return fmt.Errorf("the mail server has %d mails, %d were submitted", n, size.mails)
	}
	out.Mails, out.overrides = size.mails, x.overrides
	took := server.makespan()
	out.MakespanSeconds = measure.Round4(took.Seconds())
	out.MakespanRatio = measure.Ratio(took.Seconds(), size.ideal().Seconds())
	out.OverRate = server.overRate(pipelineRate, size.window)
	out.DefersPerJob = measure.Round4(float64(extraAttempts(x.log)) / float64(size.mails))
	busy, err := findBusySpan(x.log, x.groups)
	if err != nil {
		return err
	}
	out.ShareError = worstDeviation(busy.counts, slices.Repeat([]float64{1}, pipelineTenants))
	return nil
}

// extraAttempts returns how many attempts the jobs of a journal had beyond one each. In a run
// without errors, these follow deferrals and jobs that a worker gave back.
func extraAttempts(log journal.Log) (n int) {
	type job struct {
		group   string
		ordinal int64
	}
	last := map[job]int{}
	for _, s := range log.Starts {
		j := job{s.Group, s.Ordinal}
		last[j] = max(last[j], s.Attempt)
	}
	for _, attempts := range last {
		n += attempts - 1
	}
	return n
}

// failingAccount sends mails while the server of one account closes each connection at once. It
// stores in out how often that account was tried.
func (b mailBench) failingAccount(ctx context.Context, folder string, out *Pipeline) error {
	const (
		mails   = 1000
		openFor = time.Second
	)
	server, err := startMailServer()
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }()
	dead, err := startDeadServer(ctx)
	if err != nil {
		return err
	}
	defer dead.Close()
	host, port, _ := net.SplitHostPort(dead.Addr().String())
	file, err := accountsFile(folder, 3, server.Addr(),
		fmt.Sprintf("  - {id: failing, host: %s, port: %s, from: failing@example.com}\n", host, port))
	if err != nil {
		return err
	}
	x, err := b.mailRun(ctx, "pipeline, failing account", file, mails,
		"BULKACTION_SMTP_ACCOUNT_RATE=40/600ms", fmt.Sprintf("BULKACTION_SMTP_ACCOUNT_BREAKER=3/%s/3", openFor))
	if err != nil {
		return err
	}
	for _, g := range x.ended {
		if g.Counts.Failed > 0 {
			return errors.New("jobs failed although other accounts work")
		}
	}
	out.Probes = int(dead.accepted.Load())
	out.Openings = 1 + int(makespan(x.ended)/openFor.Seconds())
	out.ProbesOver = max(0, out.Probes-3*out.Openings)
	if out.Probes < 3 {
		return fmt.Errorf("the failing account was tried %d times, which does not open its breaker", out.Probes)
	}
	return nil
}
