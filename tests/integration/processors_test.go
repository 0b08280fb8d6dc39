package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

// tokenAPI is a fake downstream API that counts the tokens it gets. Its answers contain the token,
// which must not leak. It refuses the first call of job 3 of each group with 401.
type tokenAPI struct {
	mu     sync.Mutex
	tokens map[string]int // calls by the header Authorization
	jobs   map[string]int // calls by job
}

func (a *tokenAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	got, job := r.Header.Get("Authorization"), r.Header.Get("Idempotency-Key")
	a.mu.Lock()
	a.tokens[got]++
	a.jobs[job]++
	first := a.jobs[job] == 1
	a.mu.Unlock()
	if first && strings.HasSuffix(job, ".3") {
		w.WriteHeader(http.StatusUnauthorized)
	}
	fmt.Fprintf(w, `{"got":%q}`, got)
}

func (a *tokenAPI) used() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.tokens)
}

func TestHTTPCredentials(t *testing.T) {
	const jobs = 200
	mine, other := &tokenAPI{tokens: map[string]int{}, jobs: map[string]int{}}, &tokenAPI{tokens: map[string]int{}, jobs: map[string]int{}}
	server, foreign := httptest.NewServer(mine), httptest.NewServer(other)
	t.Cleanup(func() { server.Close(); foreign.Close() })
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	host := server.Listener.Addr().String()
	write("one", "Bearer secret-1\n")
	write("two", "Bearer secret-2\n")
	path := write("credentials.yaml", fmt.Sprintf(`credentials:
  - {id: one, hosts: [%q], header: Authorization, value_file: one}
  - {id: two, hosts: [%q], header: Authorization, value_file: two, concurrency: 4}
`, host, host))
	s := start(t, env("WORKER_TYPES", "HTTP"), env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"), env("HTTP_PROCESSOR_CREDENTIALS_FILE", path),
		env("HTTP_PROCESSOR_ACCOUNT_RATE", "1000/1s"), env("HTTP_PROCESSOR_HOST_RATE", "150/1s"), env("HTTP_PROCESSOR_HOST_BREAKER", "100/1s/1"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"), env("CONGESTION_BASE_BACKOFF", "100ms"))
	run := func(id, url string) {
		t.Helper()
		s.submit(client.Submission{ID: id, Tenant: "acme", Type: "HTTP"})
		payload := client.NewJob{Payload: map[string]any{"url": url}}
		_, err := s.api.Append(s.ctx(), id, slices.Values(slices.Repeat([]client.NewJob{payload}, jobs)))
		require.NoError(t, err)
		_, err = s.api.Seal(s.ctx(), id, nil)
		require.NoError(t, err)
		g := s.wait(id)
		if url == foreign.URL { // without a credential a refusal is the job's fault
			require.Equal(t, api.Counts{Accepted: jobs, Done: jobs - 1, Failed: 1}, g.Counts)
			return
		}
		require.Equal(t, api.Counts{Accepted: jobs, Done: jobs}, g.Counts)
		results := s.results(id)
		require.Len(t, results, jobs)
		for _, r := range results {
			require.NotContains(t, string(r.Data), "secret")
			require.Contains(t, string(r.Data), "***")
		}
	}
	run("mine", server.URL)
	used := mine.used()
	require.Len(t, used, 2)
	require.Equal(t, jobs+1, used["Bearer secret-1"]+used["Bearer secret-2"])
	run("other", foreign.URL)
	require.Equal(t, map[string]int{"": jobs}, other.used())

	pool := "pool/http." + strings.ReplaceAll(host, ":", "_")
	view, err := s.api.Guard(s.ctx(), pool)
	require.NoError(t, err)
	require.Len(t, view.Members, 2)
	keys := 0
	for g, err := range s.api.Guards(s.ctx(), "key") {
		require.NoError(t, err)
		require.Contains(t, g.Name, "key/http-host/")
		keys++
	}
	require.Equal(t, 2, keys, "each host has a guard")

	worker := s.proc("worker", 0)
	write("one", "Bearer secret-3\n")
	worker.Signal(syscall.SIGHUP)
	s.await("the worker has read the credentials", func() bool { return strings.Contains(worker.Log(), "accounts changed") })
	run("rotated", server.URL)
	require.NotZero(t, mine.used()["Bearer secret-3"])
	for role, procs := range s.procs {
		for _, p := range procs {
			require.NotContains(t, p.Log(), "secret", role)
		}
	}

	t.Run("a bad file", func(t *testing.T) {
		env := maps.Clone(s.env)
		env["BULKACTION_HTTP_PROCESSOR_CREDENTIALS_FILE"] = write("bad.yaml", "credentials: [{id: one, colour: red}]")
		bad := proctest.Start(t, "bulkaction", env, "worker")
		require.Equal(t, 2, bad.Wait(time.Minute))
		require.Contains(t, bad.Log(), "unknown field colour")
		require.Contains(t, bad.Log(), "account one: value_file is missing")
	})
}

// unreliableAPI is a fake downstream API whose answer depends on the job's ordinal. It counts the
// calls of each job.
type unreliableAPI struct {
	mu    sync.Mutex
	calls map[string]int // by job
	ok    map[string]int // calls answered with 200, by job
	hung  sync.WaitGroup
	end   chan struct{}
}

// ServeHTTP answers most jobs at once with 200. Of 1000 jobs, one gets 429 with Retry-After at its
// first call, one 429 without, one an error 500, and one 404 at every call. The first call of job 5
// of each group gets no answer.
func (p *unreliableAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	job := r.Header.Get("Idempotency-Key")
	ordinal, err := strconv.Atoi(job[strings.LastIndexByte(job, '.')+1:])
	if err != nil {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	p.mu.Lock()
	p.calls[job]++
	first := p.calls[job] == 1
	p.mu.Unlock()
	switch kind := ordinal % 1000; {
	case kind == 1 && first:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	case kind == 2 && first:
		w.WriteHeader(http.StatusTooManyRequests)
		return
	case kind == 3 && first:
		w.WriteHeader(http.StatusInternalServerError)
		return
	case kind == 4:
		w.WriteHeader(http.StatusNotFound)
		return
	case ordinal == 5 && first:
		p.hung.Add(1)
		defer p.hung.Done()
		select {
		case <-r.Context().Done():
		case <-p.end:
		}
		return
	}
	p.mu.Lock()
	p.ok[job]++
	p.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"cost":%d}`, ordinal%7)
}

func TestHTTPJobs(t *testing.T) {
	const tenants, total = 10, 10_000
	p := &unreliableAPI{calls: map[string]int{}, ok: map[string]int{}, end: make(chan struct{})}
	server := httptest.NewServer(p)
	t.Cleanup(func() { close(p.end); server.Close() })
	s := start(t, env("WORKER_TYPES", "HTTP"), env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"), env("HTTP_PROCESSOR_MAX_IDLE_CONNS_PER_HOST", "200"),
		env("WORKER_COUNT", "100"), env("BACKPRESSURE_GLOBAL_RPS", "0"), env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"),
		env("CONGESTION_BASE_BACKOFF", "100ms"))

	each := total / tenants
	groups := make([]string, tenants)
	for i := range groups {
		groups[i] = s.submit(client.Submission{
			ID: fmt.Sprintf("http-%d", i), Tenant: fmt.Sprintf("tenant-%d", i), Type: "HTTP", JobTimeout: 15 * time.Second,
			Aggregate: []client.Aggregate{{As: "cost", Op: "sum", Field: "data.body.cost"}, {As: "n", Op: "count"}},
		})
		job := client.NewJob{Payload: map[string]any{"url": server.URL, "body": map[string]int{"tenant": i}}}
		appended, err := s.api.Append(s.ctx(), groups[i], slices.Values(slices.Repeat([]client.NewJob{job}, each)))
		require.NoError(t, err)
		require.EqualValues(t, each, appended.Accepted)
		_, err = s.api.Seal(s.ctx(), groups[i], nil)
		require.NoError(t, err)
	}

	for _, id := range groups {
		var g api.Group
		require.Eventually(t, func() bool { g = s.group(id); return g.Status.Ended() }, 5*time.Minute, 50*time.Millisecond, "%s ends", id)
		refused, cost, done := 0, 0, 0
		p.mu.Lock() // not held while the test may fail: the server's end would wait for it
		calls, ok := maps.Clone(p.calls), maps.Clone(p.ok)
		p.mu.Unlock()
		for ordinal := range each {
			job := fmt.Sprintf("%s.%d", id, ordinal)
			if ordinal%1000 == 4 {
				refused++
				require.Equal(t, 1, calls[job], "a permanent error of %s is not retried", job)
				continue
			}
			done++
			cost += ordinal % 7
			require.Equal(t, 1, ok[job], "the downstream API executed %s once", job)
		}
		require.Equal(t, api.StatusCompleted, g.Status)
		require.Equal(t, api.Counts{Accepted: int64(each), Done: int64(done), Failed: int64(refused)}, g.Counts)
		require.Equal(t, map[string]int64{"HTTP_404": int64(refused)}, g.FailuresByCode)
		require.JSONEq(t, strconv.Itoa(cost), string(g.Aggregate["cost"]))
		require.JSONEq(t, strconv.Itoa(done), string(g.Aggregate["n"]))
	}
}

// pushService is a fake APNs server. Its answer depends on the job's ordinal, which is the number
// at the end of the device token.
type pushService struct {
	mu          sync.Mutex
	calls       map[int]int
	accepted    map[int]int
	ids         map[int]map[string]bool // the header apns-id of all calls
	connections int
}

const deviceToken = "5ec2e7-"

// ServeHTTP answers most calls with 200. Of 100 jobs, one gets 429 with Retry-After at its first
// call, one 500, one 503, and one 410 at every call.
func (s *pushService) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ordinal, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/3/device/"+deviceToken))
	if err != nil {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[ordinal]++
	if s.ids[ordinal] == nil {
		s.ids[ordinal] = map[string]bool{}
	}
	s.ids[ordinal][r.Header.Get("Apns-Id")] = true
	first := s.calls[ordinal] == 1
	switch kind := ordinal % 100; {
	case kind == 1 && first:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		if ordinal > 1 { // about this device; else about the account
			fmt.Fprint(w, `{"reason":"TooManyRequests"}`)
		}
	case kind == 2 && first:
		w.WriteHeader(http.StatusInternalServerError)
	case kind == 3 && first:
		w.WriteHeader(http.StatusServiceUnavailable)
	case kind == 4:
		w.WriteHeader(http.StatusGone)
		fmt.Fprint(w, `{"reason":"Unregistered"}`)
	default:
		s.accepted[ordinal]++
	}
}

// pushAccounts writes an accounts file with one APNs account that sends to the server, and the
// server's certificate. It returns the paths of both.
func pushAccounts(t *testing.T, server *httptest.Server) (file, authority string) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	write("key.p8", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	authority = write("ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	return write("accounts.yaml", fmt.Appendf(nil,
		"apns: [{id: shop, key_file: key.p8, key_id: K, team_id: T, topic: org.example.app, url: %q, rate: none, concurrency: unbounded}]", server.URL)), authority
}

func TestPushJobs(t *testing.T) {
	const total = 2000
	service := &pushService{calls: map[int]int{}, accepted: map[int]int{}, ids: map[int]map[string]bool{}}
	server := httptest.NewUnstartedServer(service)
	server.EnableHTTP2 = true
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			service.mu.Lock()
			defer service.mu.Unlock()
			service.connections++
		}
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	file, authority := pushAccounts(t, server)
	s := start(t, env("WORKER_TYPES", "PUSH_NOTIFICATION"), env("PUSH_ACCOUNTS_FILE", file), env("PUSH_TLS_CA_FILE", authority), env("PUSH_ACCOUNT_BREAKER", "10/1s/1"),
		env("WORKER_COUNT", "100"), env("BACKPRESSURE_GLOBAL_RPS", "0"), env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"),
		env("CONGESTION_BASE_BACKOFF", "100ms"))

	s.submit(client.Submission{ID: "sale", Tenant: "acme", Type: "PUSH_NOTIFICATION"})
	pushes := make([]client.NewJob, total)
	for i := range pushes {
		pushes[i] = client.NewJob{Payload: map[string]any{"to": map[string]string{"apns": deviceToken + strconv.Itoa(i)}, "title": "Sale"}}
	}
	appended, err := s.api.Append(s.ctx(), "sale", slices.Values(pushes))
	require.NoError(t, err)
	require.EqualValues(t, total, appended.Accepted)
	_, err = s.api.Seal(s.ctx(), "sale", nil)
	require.NoError(t, err)
	g := s.wait("sale")

	gone := int64(total / 100)
	require.Equal(t, api.Counts{Accepted: total, Done: total - gone, Failed: gone}, g.Counts)
	require.Equal(t, map[string]int64{"PUSH_UNREGISTERED": gone}, g.FailuresByCode)
	service.mu.Lock() // not held while the test may fail: the server's end would wait for it
	calls, accepted, ids, connections := maps.Clone(service.calls), maps.Clone(service.accepted), maps.Clone(service.ids), service.connections
	service.mu.Unlock()
	for ordinal := range total {
		if ordinal%100 == 4 {
			require.Equal(t, 1, calls[ordinal], "a permanent error is not retried")
			continue
		}
		require.Equal(t, 1, accepted[ordinal], "job %d", ordinal)
		require.Len(t, ids[ordinal], 1, "all calls of a job have the same apns-id")
	}
	require.Equal(t, len(s.of("worker")), connections, "a worker process has one connection to APNs")
	for role, procs := range s.procs {
		for _, p := range procs {
			require.NotContains(t, p.Log(), deviceToken, "%s logs no device token", role)
		}
	}

	t.Run("a bad accounts file", func(t *testing.T) {
		env := maps.Clone(s.env)
		env["BULKACTION_PUSH_ACCOUNTS_FILE"] = filepath.Join(t.TempDir(), "accounts.yaml")
		require.NoError(t, os.WriteFile(env["BULKACTION_PUSH_ACCOUNTS_FILE"], []byte("apns: [{id: shop, colour: red}]"), 0o600))
		worker := proctest.Start(t, "bulkaction", env, "worker")
		require.Equal(t, 2, worker.Wait(time.Minute))
		require.Contains(t, worker.Log(), "unknown field colour")
		require.Contains(t, worker.Log(), "apns account shop: key_file is missing")
	})
}

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
