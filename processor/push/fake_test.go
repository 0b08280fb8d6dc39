package push

import (
	"context"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

func TestMain(m *testing.M) {
	if os.Getenv(serviceVariable) != "" {
		runService()
		return
	}
	goleak.VerifyTestMain(m)
}

// service is a fake of a push service: a TLS server on loopback.
type service struct {
	*httptest.Server
	mu          sync.Mutex
	connections int
	requests    []request
	answer      answerFunc
	concurrent  http.HandlerFunc // if not nil, it answers instead of answer, many requests at a time
}

// request is a request that a fake has got.
type request struct {
	*http.Request
	body []byte
}

// answerFunc answers a request. call is its number since the last call of set, from 1.
type answerFunc func(call int, w http.ResponseWriter, r request)

// serve starts a fake of a push service. It calls answer for one request at a time.
func serve(t testing.TB, answer answerFunc) *service {
	return serveStreams(t, 0, &service{answer: answer})
}

// serveStreams starts a fake of a push service that allows limit streams on a connection; 0: as
// many as net/http by default.
func serveStreams(t testing.TB, limit int, s *service) *service {
	s.Server = httptest.NewUnstartedServer(s)
	s.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: limit}
	s.EnableHTTP2 = true
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // some handshakes fail on purpose
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.connections++
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if s.concurrent != nil {
		s.concurrent(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, request{r, body})
	s.answer(len(s.requests), w, request{r, body})
}

// counts returns how many connections there were, and how many calls since the last call of set.
// Calls that concurrent has answered do not count.
func (s *service) counts() (connections, calls int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connections, len(s.requests)
}

// got returns the requests since the last call of set.
func (s *service) got() []request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

func (s *service) last(t testing.TB) request {
	all := s.got()
	require.NotEmpty(t, all)
	return all[len(all)-1]
}

// set changes the answer and forgets the requests.
func (s *service) set(answer answerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer, s.requests = answer, nil
}

// status returns an answerFunc that answers each request with this status and body.
func status(code int, body string) answerFunc {
	return func(_ int, w http.ResponseWriter, _ request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// These are the keys of all fakes.
var (
	apnsKey    = newKey()
	vapidKey   = newKey()
	otherKey   = newKey()
	serviceKey = func() *rsa.PrivateKey {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		must(err)
		return key
	}()
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	return key
}

func keyPEM(key any) string {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	must(err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

func ecdhOf(key *ecdsa.PrivateKey) *ecdh.PrivateKey {
	private, err := key.ECDH()
	must(err)
	return private
}

// folder is the path of a folder with an accounts file and secrets.
type folder string

func newFolder(t testing.TB) folder { return folder(t.TempDir()) }

// write writes a file that others may not read.
func (f folder) write(t testing.TB, name, content string) {
	path := filepath.Join(string(f), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	require.NoError(t, os.Chmod(path, 0o600))
}

func (f folder) fcmKey(t testing.TB, name, project, tokenURL string) {
	content, err := json.Marshal(map[string]string{
		"type": "service_account", "project_id": project, "private_key_id": "kid-1", "private_key": keyPEM(serviceKey),
		"client_email": "push@" + project + ".example", "token_uri": tokenURL,
	})
	require.NoError(t, err)
	f.write(t, name, string(content))
}

func fcmYAML(url string) string {
	return fmt.Sprintf("fcm:\n  - {id: fcm-1, credentials_file: fcm.json, url: %q}\n", url)
}

func apnsYAML(url string) string {
	return fmt.Sprintf("apns:\n  - {id: apns-1, key_file: apns.p8, key_id: KEY1, team_id: TEAM1, topic: org.example.app, url: %q}\n", url)
}

const webPushYAML = "webpush:\n  - {id: web-1, key_file: vapid, subject: \"mailto:push@example.org\"}\n"

// outcomes is a fake source of accounts. It lends them in turn, and records the outcomes of the
// loans.
type outcomes struct {
	mu   sync.Mutex
	next credential.Source
	all  []credential.Outcome
	ids  []string
	err  error
}

type watchedLoan struct {
	credential.Loan
	of *outcomes
}

func (o *outcomes) Borrow(ctx context.Context) (credential.Loan, error) {
	if o.err != nil {
		return nil, o.err
	}
	loan, err := o.next.Borrow(ctx)
	return watchedLoan{loan, o}, err
}

func (l watchedLoan) Return(o credential.Outcome) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	l.of.all = append(l.of.all, o)
	l.of.ids = append(l.of.ids, l.ID())
}

func (o *outcomes) choice(platform string, accounts []credential.Account) (credential.Source, error) {
	var err error
	o.next, err = credential.TakeTurns(platform, accounts)
	return o, err
}

func (o *outcomes) last(t testing.TB) credential.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	require.NotEmpty(t, o.all)
	return o.all[len(o.all)-1]
}

func account(p *Processor, platform string) sender {
	for _, m := range (*p.accounts.Load())[platform].members {
		return m.sender
	}
	return nil
}

// clock is a time that a test sets. With its option, a Processor takes it for the present time.
type clock struct{ at time.Time }

func (c *clock) option(p *Processor) { p.parts.now = func() time.Time { return c.at } }

// config returns a configuration with these accounts. It trusts the certificates of the fakes, and
// allows endpoints of Web Push on loopback.
func config(t testing.TB, f folder, accounts string) Config {
	authority := httptest.NewUnstartedServer(http.NotFoundHandler())
	authority.StartTLS()
	defer authority.Close()
	block := &pem.Block{Type: "CERTIFICATE", Bytes: authority.Certificate().Raw} // all fakes have the same
	f.write(t, "ca.pem", string(pem.EncodeToMemory(block)))
	f.write(t, "accounts.yaml", accounts)
	f.write(t, "apns.p8", keyPEM(apnsKey))
	f.write(t, "vapid", encodeBase64(ecdhOf(vapidKey).Bytes())+"\n")
	return Config{
		AccountsFile: filepath.Join(string(f), "accounts.yaml"), TLSCAFile: filepath.Join(string(f), "ca.pem"),
		Timeout: 30 * time.Second, AllowedCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
	}
}

func start(t testing.TB, c Config, options ...Option) *Processor {
	p, err := New(c, options...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func job(ordinal int64, payload string) processor.Job {
	return processor.Job{Tenant: "acme", Group: "sale", Ordinal: ordinal, Type: Type, Attempt: 1, Payload: json.RawMessage(payload)}
}

// row is a test case: the reply of the fake service, and what must follow for the job and the
// account.
type row struct {
	status     int
	header     string // Retry-After
	body       string
	kind       processor.Kind
	code       string
	after      time.Duration
	outcome    credential.Kind
	moreCalls  int    // calls of the service after the first one
	mayContain string // that the error has in its text
}

// check sends one push, to which the fake service replies as the row says, and checks what follows
// for the job and the account.
func (tt row) check(t *testing.T, s *service, p *Processor, o *outcomes, payload string, secrets ...string) {
	t.Helper()
	s.set(func(_ int, w http.ResponseWriter, _ request) {
		if tt.header != "" {
			w.Header().Set("Retry-After", tt.header)
		}
		w.WriteHeader(tt.status)
		// A service may repeat what it was sent.
		_, _ = fmt.Fprint(w, strings.ReplaceAll(tt.body, "SECRET", strings.Join(secrets, " ")))
	})
	result, err := processor.Run(t.Context(), p, job(7, payload))
	v := processor.Classify(err)
	require.Equal(t, tt.kind, v.Kind, "%v", err)
	require.Equal(t, tt.code, v.Code)
	require.Equal(t, tt.after, v.After)
	require.Contains(t, v.Message, tt.mayContain)
	want := credential.Outcome{Kind: tt.outcome}
	if tt.outcome == credential.Throttled {
		want.After = tt.after
	}
	require.Equal(t, want, o.last(t))
	_, calls := s.counts()
	require.Equal(t, 1+tt.moreCalls, calls)
	for _, secret := range secrets {
		require.NotContains(t, v.Message, secret)
		require.NotContains(t, fmt.Sprint(result), secret)
	}
	if tt.kind == processor.Done {
		m := result.(Result)
		require.Equal(t, tt.status, m.Code)
	}
}
