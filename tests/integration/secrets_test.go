package integration

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
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
