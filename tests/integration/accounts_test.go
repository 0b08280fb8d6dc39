package integration

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

// mailServer is an SMTP server that stores the times at which each account has sent, by the
// account's sender address.
type mailServer struct {
	*smtpsink.Sink
	mu   sync.Mutex
	sent map[string][]time.Time
	hold chan struct{} // while it is open, no mail is accepted; nil: all are
}

func startMailServer(t *testing.T, hold chan struct{}) *mailServer {
	t.Helper()
	s := &mailServer{sent: map[string][]time.Time{}, hold: hold}
	var err error
	s.Sink, err = smtpsink.Start("127.0.0.1:0", smtpsink.Options{OnMail: func(m smtpsink.Mail) {
		s.mu.Lock()
		s.sent[m.From] = append(s.sent[m.From], time.Now())
		s.mu.Unlock()
		if s.hold != nil {
			<-s.hold
		}
	}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// accounts returns how many accounts have sent at least n mails so far.
func (s *mailServer) accounts(n int) (count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, times := range s.sent {
		if len(times) >= n {
			count++
		}
	}
	return count
}

// accountsFile writes an accounts file with n accounts that send through this server, and returns
// its path.
func (s *mailServer) accountsFile(t *testing.T, n int) string {
	t.Helper()
	host, port, err := net.SplitHostPort(s.Addr())
	require.NoError(t, err)
	var b strings.Builder
	b.WriteString("accounts:\n")
	for i := range n {
		fmt.Fprintf(&b, "  - {id: a%d, host: %s, port: %s, from: a%d@example.com}\n", i, host, port, i)
	}
	name := filepath.Join(t.TempDir(), "accounts.yaml")
	require.NoError(t, os.WriteFile(name, []byte(b.String()), 0o600))
	return name
}

func mails(group string, n int) client.Submission {
	g := client.Submission{ID: group, Tenant: "acme", Type: "SEND_EMAIL", Seal: true}
	for i := range n {
		g.Jobs = append(g.Jobs, client.NewJob{Payload: map[string]string{"to": fmt.Sprintf("user-%d@example.com", i)}})
	}
	return g
}

// TestRatesHoldWhileRedisStalls: Redis stalls for 2 s while two workers send 400 mails with six
// accounts. No account sends more than 30 mails in any 3 s, each recipient gets a mail, and all
// jobs are done without a retry.
func TestRatesHoldWhileRedisStalls(t *testing.T) {
	t.Parallel()
	const (
		accounts, rate = 6, 30
		window, stall  = 3 * time.Second, 2 * time.Second
		n              = 400
	)
	server := startMailServer(t, nil)
	s := start(t, replicas("worker", 2), env("WORKER_TYPES", "SEND_EMAIL"), env("SMTP_ACCOUNTS_FILE", server.accountsFile(t, accounts)),
		env("SMTP_TLS", "none"), env("SMTP_ACCOUNT_RATE", fmt.Sprintf("%d/%s", rate, window)),
		env("REDIS_COMMAND_TIMEOUT", "1s"), env("WORKER_TIMEOUT", "200ms"))
	s.submit(mails("sale", n))
	s.awaitCounts("sale", "in the middle", func(c api.Counts) bool { return c.Done > 50 })
	s.redis.Suspend()
	<-time.After(stall)
	s.redis.Resume()
	g := s.wait("sale")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.Zero(t, g.Retries, "waiting for an account uses no retry")
	require.GreaterOrEqual(t, server.Received(), int64(n))
	for i := range n {
		require.Positive(t, server.ReceivedByRecipient(fmt.Sprintf("user-%d@example.com", i)))
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	for account, times := range server.sent {
		slices.SortFunc(times, time.Time.Compare)
		for i := rate; i < len(times); i++ {
			require.GreaterOrEqual(t, times[i].Sub(times[i-rate]), window, "%s: mail %d", account, i)
		}
	}
}

// TestAKilledWorkerGivesItsAccountsBack: the only worker is killed while it uses all three
// accounts, and a new one starts. It uses each account again, all 30 jobs are done, and the pool
// counts three lost leases.
func TestAKilledWorkerGivesItsAccountsBack(t *testing.T) {
	t.Parallel()
	const accounts, n = 3, 30
	hold := make(chan struct{})
	server := startMailServer(t, hold)
	s := start(t, apart, env("WORKER_TYPES", "SEND_EMAIL"), env("SMTP_ACCOUNTS_FILE", server.accountsFile(t, accounts)),
		env("SMTP_TLS", "none"), env("LEASE", "2s"), env("GUARD_WAIT", "500ms"))
	s.submit(mails("sale", n))
	s.await("all accounts in use", func() bool { return server.accounts(1) == accounts })
	s.await("a deferred job", func() bool {
		g, err := s.api.Group(s.ctx(), "sale")
		return err == nil && g.Counts.NonReady > 0
	})
	why, err := s.api.Why(s.ctx(), "sale")
	require.NoError(t, err)
	if why.Reason == api.WhyResource {
		require.Contains(t, why.Detail, "no account of guard smtp is free")
	}
	killed := time.Now()
	s.proc("worker", 0).Kill()
	close(hold)
	s.add("worker")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, s.wait("sale").Counts)
	require.Equal(t, accounts, server.accounts(2), "each account was used again")
	t.Logf("all mails were sent %s after the worker was killed; a lease is 30 s", time.Since(killed).Round(time.Second))

	guards := guard.New(s.rdb, guard.Prefix("bulk-action:"))
	defer guards.Close(s.ctx())
	view, err := guards.Inspect(s.ctx(), "smtp")
	require.NoError(t, err)
	require.EqualValues(t, accounts, view.Counters["lost"])
	for _, m := range view.Members {
		require.Zero(t, m.Held)
	}
}
