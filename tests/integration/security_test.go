package integration

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// collector is a server that receives all traces and metrics which processes export, and stores
// them as the bytes of OTLP, which contain texts unencoded.
type collector struct {
	mu    sync.Mutex
	bytes bytes.Buffer
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = unzipped
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = c.bytes.ReadFrom(body)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *collector) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes.String()
}

// canaries has secret texts that must not occur in any output, by a description of each text.
type canaries map[string]string

// plant makes a random secret text, stores it under its description, and returns it.
func (c canaries) plant(what string) string {
	c[what] = "canary-" + rand.Text()
	return c[what]
}

// in returns which of the secrets occur in an output, as they are or in base64.
func (c canaries) in(output string) (found []string) {
	for what, text := range c {
		for _, form := range []string{text, base64.StdEncoding.EncodeToString([]byte(text))} {
			if strings.Contains(output, form) {
				found = append(found, what)
			}
		}
	}
	return found
}

// TestSecretsStayInside requires that no output of a full run contains a secret setting, an API
// key, an entry token, a payload, or the data of a result. Outputs are logs, traces, metrics,
// errors, help texts and entries of the activity log.
func TestSecretsStayInside(t *testing.T) {
	t.Parallel()
	secrets := canaries{"password of Redis": proctest.Password}
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	adminToken := secrets.plant("token of the admin address")
	header := secrets.plant("credential of the HTTP processor")
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusBadRequest) // the error of the job repeats what it got
		fmt.Fprintf(w, `{"you sent":%q}`, r.Header.Get("Authorization"))
	}))
	t.Cleanup(echo.Close)
	telemetry := &collector{}
	receiver := httptest.NewServer(telemetry)
	t.Cleanup(receiver.Close)
	file("credential", "Bearer "+header)
	s := start(t,
		env("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.URL), env("OTEL_EXPORTER_OTLP_HEADERS", "x-token="+secrets.plant("header of OTLP")),
		env("OTEL_BSP_SCHEDULE_DELAY", "50"), env("OTEL_METRIC_EXPORT_INTERVAL", "500"), env("LOG_LEVEL", "debug"),
		env("AUTH", "keys"), env("AUTH_PEPPER_FILE", file("pepper", secrets.plant("pepper")+strings.Repeat("x", 32))),
		env("ADMIN_TOKEN_FILE", file("admin", adminToken)), env("SMTP_PASSWORD", secrets.plant("password of SMTP")), env("SMTP_USERNAME", "shop"),
		env("SMTP_HOST", "127.0.0.1"), env("SMTP_PORT", "1"), env("SMTP_TLS", "none"), env("MAX_RETRY_COUNT", "0"),
		env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"), env("HTTP_PROCESSOR_CREDENTIALS_FILE", file("credentials.yaml", fmt.Sprintf(
			"credentials:\n  - {id: one, hosts: [%q], header: Authorization, value_file: credential}\n", echo.Listener.Addr()))),
		binary("worker", "testworker"), env("WORKER_TYPES", ""), env("BROKER_TOKEN_KEYS_FILE", tokenKeys(t)))
	delete(s.bins, "worker") // the next one has the built-in processors
	others := s.launch("worker", map[string]string{"BULKACTION_WORKER_TYPES": "SEND_EMAIL,HTTP"})
	others.WaitReady()

	cli := func(args ...string) *proctest.Process {
		p := proctest.Start(t, "bulkaction", s.env, args...)
		p.Wait(patience)
		return p
	}
	key := func(what string, flags ...string) string {
		p := cli(append([]string{"key", "create", "--name", what, "--redis-url", proctest.AsUser("cli", s.redis.URL())}, flags...)...)
		secrets[what] = strings.TrimSpace(p.Stdout())
		require.Len(t, secrets[what], 40, p.Log())
		return secrets[what]
	}
	admin, shop := key("key of an admin", "--role", "admin"), key("key of a producer", "--role", "producer", "--tenant", "acme")
	outputs := map[string]string{}
	s.api = client.NewAPI(s.url(0), client.WithAPIKey(shop))
	s.await("ingest to know the keys", func() bool {
		return do("GET", s.url(0)+"/v1/groups", "", "Authorization", "Bearer "+shop).status == http.StatusOK
	})
	payload, result := secrets.plant("payload"), secrets.plant("data of a result")
	text := func(s string) json.RawMessage { b, _ := json.Marshal(s); return b }
	all := []client.Submission{
		{ID: "noop", Type: "NOOP", Jobs: append(jobs(20, `{"note":"`+payload+`","result":{"data":"`+result+`"}}`),
			jobs(5, `{"note":"`+payload+`","fail":"permanent"}`)...)},
		{ID: "invalid", Type: "NOOP", Jobs: jobs(2, `{"fail":"`+payload+`"}`)},
		{ID: "panic", Type: "PANIC", Jobs: []client.NewJob{{Payload: text(payload)}}},
		{ID: "mail", Type: "SEND_EMAIL", Jobs: []client.NewJob{{Payload: map[string]string{"to": payload + "@example.com", "text": payload}}}},
		{ID: "http", Type: "HTTP", Jobs: []client.NewJob{{Payload: map[string]any{"url": echo.URL + "/?q=" + payload, "body": payload}}}},
		{ID: "large", Type: "NOOP", Jobs: jobs(2, `{"note":"`+strings.Repeat(payload, 400)+`"}`)},
	}
	for _, g := range all {
		g.Tenant, g.Seal = "acme", true
		s.submit(g)
		s.wait(g.ID)
	}
	// Messages and requests that are refused.
	for _, data := range []string{payload, `{"type":"NOOP","jobs":[{"payload":"` + payload, `{"type":"NOOP","jobs":[{"payload":1,"` + payload + `":1}]}`} {
		require.NoError(t, s.rdb.XAdd(s.ctx(), &redis.XAddArgs{Stream: s.space.Ingest(), Values: []any{"type", groupSubmit, "data", data}}).Err())
	}
	s.await("the refused messages", func() bool { return s.rdb.XLen(s.ctx(), s.space.Rejected()).Val() == 3 })
	call := func(method, path, body, token string) {
		t.Helper()
		r := do(method, s.url(0)+path, body, "Authorization", "Bearer "+token)
		require.NoError(t, r.err)
		require.GreaterOrEqual(t, r.status, 400)
		outputs["answer to "+method+" "+path] += string(r.body)
	}
	call("POST", "/v1/groups", `{"type":"NOOP","jobs":[{"payload":"`+payload, shop)
	call("POST", "/v1/groups", `{"id":"noop","type":"NOOP","jobs":[{"payload":"`+payload+`"}]}`, shop)
	call("POST", "/v1/groups", `{"tenant":"other","type":"NOOP","jobs":[{"payload":"`+payload+`"}]}`, shop)
	call("POST", "/v1/groups", `{"type":"NOOP","jobs":[{"payload":{},"priority":"`+payload+`"}]}`, shop)
	call("GET", "/v1/stats", "", shop[:39]+"x")
	call("GET", "/v1/stats", "", secrets.plant("text that is no key"))
	call("GET", "/v1/activity", "", shop)
	call("POST", "/v1/entry-tokens/verify", `{"token":"`+secrets.plant("entry token")+`"}`, admin)
	for _, command := range []string{"pause", "cancel", "retry"} {
		do("POST", s.url(0)+"/v1/groups/noop/"+command, "", "Authorization", "Bearer "+shop)
	}
	activity := do("GET", s.url(0)+"/v1/activity", "", "Authorization", "Bearer "+admin)
	require.Contains(t, string(activity.body), "group.retry")
	outputs["activity log"] = string(activity.body)
	group := do("GET", s.url(0)+"/v1/groups/noop", "", "Authorization", "Bearer "+shop)
	outputs["a group"] = string(group.body)

	for role, procs := range s.procs {
		for _, path := range []string{"/metrics", "/pool", "/readyz", "/healthz"} {
			for _, token := range []string{adminToken, "wrong"} {
				r := do("GET", "http://"+procs[0].AdminAddr()+path, "", "Authorization", "Bearer "+token)
				require.NoError(t, r.err)
				outputs[role+path] += string(r.body)
			}
		}
	}
	require.Contains(t, outputs["worker/metrics"], "worker_job_failed_total")
	for i, name := range append([]string{"broker"}, roles...) {
		wrong := withPassword(s.redis.URL(), secrets.plant("wrong password of "+name))
		urls := []string{wrong, wrong + "x/y", "redis://u:" + secrets.plant("password of "+name) + "@127.0.0.1:x"}
		more := map[string]string{"BULKACTION_REDIS_URL": urls[i%3], "BULKACTION_SMTP_PASSWORD": secrets["password of SMTP"]}
		outputs["-help of "+name] = outputOf(t, more, name, "-help")
		outputs["failed start of "+name] = outputOf(t, more, name)
	}
	outputs["CLI with a wrong key"] = cli("stats", "--api", s.url(0), "--api-key-file", file("wrong", secrets.plant("wrong key of the CLI"))).Output()
	outputs["CLI with a wrong URL"] = cli("audit", "--redis-url", withPassword(s.redis.URL(), secrets.plant("wrong password of the CLI"))).Output()
	outputs["CLI, list of keys"] = cli("key", "ls", "--redis-url", proctest.AsUser("cli", s.redis.URL())).Output()
	outputs["CLI, activity"] = cli("activity", "--api", s.url(0), "--api-key-file", file("admin.key", admin)).Output()
	require.Contains(t, outputs["CLI, activity"], "group.retry")

	others.Signal(syscall.SIGQUIT) // prints all stacks
	others.Wait(patience)
	outputs["worker that got SIGQUIT"] = others.Output()
	require.Contains(t, others.Output(), "goroutine ")
	for role, procs := range s.procs {
		for _, p := range procs {
			if p != others {
				s.stop(p)
			}
			outputs["log of "+role] += p.Output()
		}
	}
	outputs["traces and metrics"] = telemetry.String()
	for what, output := range outputs {
		require.Empty(t, secrets.in(output), what)
	}
	// Negative control: the outputs contain what the run must have written, and the search finds a
	// text that is there.
	for _, marker := range []string{"noop", "process NOOP", "worker_job_failed_total"} {
		require.Contains(t, outputs["traces and metrics"], marker)
	}
	require.Contains(t, outputs["log of worker"], "panic")
	require.Contains(t, outputs["log of ingest"], "group.cancel")
	require.Equal(t, []string{"payload"}, secrets.in("…"+payload+"…"))
	require.Equal(t, []string{"payload"}, secrets.in(base64.StdEncoding.EncodeToString([]byte(payload))))
}

// withPassword returns the Redis URL url with the user worker and this password.
func withPassword(url, password string) string {
	return strings.Replace(url, "://", "://worker:"+password+"@", 1)
}

// outputOf runs bulkaction until it ends, and returns what it prints.
func outputOf(t *testing.T, env map[string]string, args ...string) string {
	p := proctest.Start(t, "bulkaction", env, args...)
	p.Wait(patience)
	return p.Output()
}

// requireNoDenial requires that Redis has not refused any command for a lack of rights.
func (s *system) requireNoDenial() {
	s.t.Helper()
	conn := connect(s.t, s.env["BULKACTION_REDIS_URL"])
	require.NoError(s.t, conn.Shards(s.ctx(), func(_ context.Context, shard redis.UniversalClient) error {
		proctest.RequireNoDenial(s.t, shard)
		return nil
	}))
}

// TestDenialsAreFound: a command that a Redis user has no right to run is refused with NOPERM, and
// is in ACL LOG, where requireNoDenial would find it.
func TestDenialsAreFound(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, proctest.Users(t))
	conn := connect(t, proctest.AsUser("producer", server.URL()))
	require.ErrorContains(t, conn.Cmd.Del(t.Context(), "bulk-action:ingest").Err(), "NOPERM")
	denied, err := server.Client().Do(t.Context(), "acl", "log").Slice()
	require.NoError(t, err)
	require.Len(t, denied, 1)
}

// TestRolesRefuseToStartWithoutARight: each of the seven roles, whose Redis user lacks the right to
// one command here, ends with an error that names the command and `bulkaction acl`. Afterwards a
// group of 200 jobs has its expected outcome in the running system.
func TestRolesRefuseToStartWithoutARight(t *testing.T) {
	t.Parallel()
	s := start(t)
	keys := tokenKeys(t)
	for role, command := range map[string]string{
		"ingest": "xadd", "fetcher": "hset", "dispatcher": "zrem", "worker": "xack", "aggregator": "xdel", "watcher": "srem",
		"broker": "zadd",
	} {
		url := proctest.AddUser(t, s.redis.URL(), role, s.space.Prefix(), func(u *acl.User) {
			require.Contains(t, u.Commands, command, role)
			u.Commands = slices.DeleteFunc(u.Commands, func(c string) bool { return c == command })
		})
		p := proctest.Start(t, "bulkaction", map[string]string{
			"BULKACTION_REDIS_URL": url, "BULKACTION_WORKER_TYPES": "NOOP", "BULKACTION_BROKER_TOKEN_KEYS_FILE": keys,
		}, role)
		require.NotZero(t, p.Wait(patience), role)
		require.Contains(t, p.Log(), "may not run "+command, role)
		require.Contains(t, p.Log(), "bulkaction acl --role "+role)
	}
	id := s.submit(newLoad("acme", 200).group)
	newLoad("acme", 200).check(t, s.wait(id))
}

// TestEventReader: a program that logs in to Redis as the user event-reader subscribes to the
// stream of events, and gets an event of a group that is submitted afterwards.
func TestEventReader(t *testing.T) {
	t.Parallel()
	s := start(t)
	reader, err := stream.NewSubscriber(t.Context(), proctest.AsUser("event-reader", s.redis.URL()), stream.Config{})
	require.NoError(t, err)
	messages, err := reader.Subscribe(s.ctx(), reader.Events())
	require.NoError(t, err)
	id := s.submit(newLoad("acme", 100).group)
	s.wait(id)
	select {
	case m := <-messages:
		e, err := stream.Event(m)
		require.NoError(t, err)
		require.Equal(t, id, e.Group.ID)
		m.Ack()
	case <-time.After(patience):
		require.Fail(t, "no event")
	}
	require.NoError(t, reader.Close())
}

// TestProducerOfOneTenant: a producer whose Redis user may only write to the ingest stream of its
// tenant submits a group there. A group that it submits there for another tenant is rejected.
func TestProducerOfOneTenant(t *testing.T) {
	t.Parallel()
	s := start(t, env("PARTITIONS", "4"), env("INGEST_STREAMS", "acme=bulk-action:ingest:shop"))
	url := proctest.AddUser(t, s.redis.URL(), "producer", s.space.Prefix(), func(u *acl.User) {
		var err error
		*u, err = acl.ProducerOf("shop", s.space.Prefix())
		require.NoError(t, err)
	})
	p, err := producer.New(t.Context(), url, producer.WithStream("shop"))
	require.NoError(t, err)
	defer p.Close()
	l := newLoad("", 700)
	id, err := p.Submit(t.Context(), l.group)
	require.NoError(t, err)
	g := s.wait(id)
	l.check(t, g)
	require.Equal(t, "acme", g.Tenant)

	stolen, err := p.Submit(t.Context(), client.Submission{ID: "stolen", Tenant: "globex", Type: "NOOP", Seal: true, Jobs: jobs(1, `{}`)})
	require.NoError(t, err)
	s.follow(s.space.Rejected(), "rejected message", func(m redis.XMessage) bool {
		require.Equal(t, "stream bulk-action:ingest:shop: tenant is not yours", m.Values["reason"])
		return true
	})
	_, err = s.api.Group(t.Context(), stolen)
	require.ErrorIs(t, err, client.ErrNotFound)
}

// TestWaitingRoomWithUsers: two visitors go through the waiting room, one after the other because
// the event has one slot, while each role has its own Redis user.
func TestWaitingRoomWithUsers(t *testing.T) {
	t.Parallel()
	keys := tokenKeys(t)
	addr := childproc.FreeAddr()
	s := start(t, apart, env("BROKER_TOKEN_KEYS_FILE", keys), env("BROKER_ADDR", addr), env("BROKER_PUBLIC_URL", "http://"+addr))
	s.launch("broker", nil).WaitReady()

	status, body := s.call(http.MethodPut, s.url(0)+"/v1/events/sale", `{"capacity":1}`)
	require.Less(t, status, 300, "%s", body)
	visitors := []*visitor{newVisitor(t, addr), newVisitor(t, addr)} // the event has one slot
	for i, v := range visitors {
		s.await(fmt.Sprint("token of visitor ", i), func() bool { return v.token() != "" })
		require.Empty(t, visitors[1-i].token(), "both have a token")
		status, body := s.call(http.MethodPost, s.url(0)+"/v1/entry-tokens/complete", `{"token":"`+v.has+`"}`)
		require.Equal(t, http.StatusOK, status, "%s", body)
		v.has = ""
	}
}

func tokenKeys(t testing.TB) (path string) {
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path = filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	return path
}

// visitor is a visitor of the waiting room who polls.
type visitor struct {
	testing.TB
	http.Client
	url string
	has string // the token
}

func newVisitor(t testing.TB, addr string) *visitor {
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	return &visitor{TB: t, Client: http.Client{Jar: jar}, url: "http://" + addr + "/events/sale/ticket"}
}

// token enters the event, which keeps a place that the visitor has, and asks once for the entry
// token. It returns the visitor's token; "": none yet.
func (v *visitor) token() string {
	v.Helper()
	for _, path := range []string{"", "/token"} {
		answer, err := v.Post(v.url+path, "", nil)
		require.NoError(v, err)
		var found api.EntryToken
		_ = json.NewDecoder(answer.Body).Decode(&found) // while there is no token, the answer is another document
		require.NoError(v, answer.Body.Close())
		require.Less(v, answer.StatusCode, 500)
		v.has = cmp.Or(found.Token, v.has)
	}
	return v.has
}
