//go:build alerts

package integration

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

var prometheusFile = flag.String("prometheus", "../../.bin/prometheus/prometheus", "the program prometheus, which .ci/prometheus fetches")

// notCaused are the alerts that this test can't cause, with the reason.
var notCaused = map[string]string{
	"BulkactionRoomClockOff": "a process can't have another clock than its host",
}

type rule struct {
	Alert, Record, Expr, For string
	Labels, Annotations      map[string]string
}

// watched is a system that a Prometheus scrapes.
type watched struct {
	*system
	url     string
	began   time.Time
	targets string          // the file of targets
	own     []string        // targets that are no processes of system
	open    map[string]bool // alerts that have not fired yet
	life    context.Context //nolint:containedctx // of the whole test: streams end with it
}

// hasten returns the rules with short times: all windows are 30 s, and an alert fires after 1 s.
func hasten(text string) string {
	text = regexp.MustCompile(`\[\d+[mh]\]`).ReplaceAllString(text, "[30s]")
	text = regexp.MustCompile(`for: \d+[mh]`).ReplaceAllString(text, "for: 1s")
	text = strings.Replace(text, "callback_oldest_ms) > 3600000", "callback_oldest_ms) > 2000", 1)
	return strings.Replace(text, "outbox_size) > 1000", "outbox_size) > 10", 1)
}

func (w *watched) target() {
	w.t.Helper()
	all := slices.Clone(w.own)
	for _, procs := range w.procs {
		for _, p := range procs {
			all = append(all, p.AdminAddr())
		}
	}
	text, err := json.Marshal([]map[string]any{{"targets": all}})
	require.NoError(w.t, err)
	require.NoError(w.t, os.WriteFile(w.targets+".new", text, 0o600))
	require.NoError(w.t, os.Rename(w.targets+".new", w.targets))
}

func (w *watched) start(rules string) {
	dir := w.t.TempDir()
	w.targets = filepath.Join(dir, "targets.json")
	w.target()
	require.NoError(w.t, os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte(hasten(rules)), 0o600))
	require.NoError(w.t, os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(`
global: {scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: bulkaction
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
`), 0o600))
	addr := childproc.FreeAddr()
	cmd := exec.Command(*prometheusFile, "--config.file="+filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr)
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(w.t, err)
	cmd.Stdout, cmd.Stderr = log, log
	p, err := childproc.Start(cmd)
	require.NoError(w.t, err, "run .ci/prometheus")
	w.t.Cleanup(p.Kill)
	w.url, w.began = "http://"+addr, time.Now()
	w.await("prometheus", func() bool { return do(http.MethodGet, w.url+"/-/ready", "").status == http.StatusOK })
}

// series returns the series of a query: now, or those of the time since the beginning.
func (w *watched) series(query string, all bool) []map[string]string {
	w.t.Helper()
	path := "/api/v1/query?query=" + url.QueryEscape(query)
	if all {
		path = fmt.Sprintf("/api/v1/query_range?step=2&start=%d&end=%d&query=%s", w.began.Unix(), time.Now().Unix(), url.QueryEscape(query))
	}
	status, body := w.call(http.MethodGet, w.url+path, "")
	require.Equal(w.t, http.StatusOK, status, "%s: %s", query, body)
	var answer struct {
		Data struct {
			Result []struct{ Metric map[string]string }
		}
	}
	require.NoError(w.t, json.Unmarshal(body, &answer))
	var found []map[string]string
	for _, r := range answer.Data.Result {
		found = append(found, r.Metric)
	}
	return found
}

func (w *watched) firing() map[string]bool {
	all := map[string]bool{}
	for _, s := range w.series(`ALERTS{alertstate="firing"}`, false) {
		all[s["alertname"]] = true
	}
	return all
}

// until waits with patience for what may take as long as a window and more.
func (w *watched) until(ok func() bool) bool {
	for end := time.Now().Add(100 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return false
}

// fires requires that the alerts do not fire, and fire after cause. each, unless nil, is called again
// and again until they do.
func (w *watched) fires(alerts string, cause, each func()) {
	w.t.Helper()
	began, wanted := time.Now(), strings.Fields(alerts)
	left := func(found map[string]bool) []string {
		return slices.DeleteFunc(slices.Clone(wanted), func(a string) bool { return found["Bulkaction"+a] })
	}
	assert.True(w.t, w.until(func() bool { return len(left(w.firing())) == len(wanted) }), "before the cause of %s: %v fire", alerts, w.firing())
	quiet := time.Now()
	cause()
	found := map[string]bool{}
	assert.True(w.t, w.until(func() bool {
		if each != nil {
			each()
		}
		maps.Copy(found, w.firing())
		return len(left(found)) == 0
	}), "not fired: %v", left(found))
	for _, a := range wanted {
		delete(w.open, "Bulkaction"+a)
	}
	w.t.Logf("%s: waited %.0f s, fired after %.0f s", alerts, quiet.Sub(began).Seconds(), time.Since(quiet).Seconds())
}

// stream opens the stream of a new visitor of an event, until the test or the broker ends.
func (w *watched) stream(broker, event string) {
	jar, _ := cookiejar.New(nil)
	req, err := http.NewRequestWithContext(w.life, http.MethodGet, "http://"+broker+"/events/"+event+"/tickets/waiting", nil)
	require.NoError(w.t, err)
	go func() {
		if answer, err := (&http.Client{Jar: jar}).Do(req); err == nil {
			defer answer.Body.Close()
			for some := make([]byte, 4096); err == nil; {
				_, err = answer.Body.Read(some)
			}
		}
	}()
}

func (w *watched) event(name, settings string) {
	w.t.Helper()
	status, body := w.call(http.MethodPut, w.system.url(0)+"/v1/events/"+name, settings)
	require.Less(w.t, status, 300, "%s", body)
}

// TestAlerts: in a running system each alert fires by its cause, and each query of a dashboard or a rule
// has an answer.
func TestAlerts(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(repository, "deployments", "prometheus", "rules.yaml"))
	require.NoError(t, err)
	var rules struct{ Groups []struct{ Rules []rule } }
	require.NoError(t, yaml.Unmarshal(text, &rules))

	dir := t.TempDir()
	secret := func(name string) string {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(strings.Repeat("k", 32)), 0o600))
		return filepath.Join(dir, name)
	}
	w := &watched{open: map[string]bool{}, life: t.Context()}
	w.system = start(t, apart, replicas("watcher", 2), env("LEASE", "2s"), env("AUDIT_INTERVAL", "1s"), env("WORKER_COUNT", "20"),
		env("BACKPRESSURE_READY_QUEUE_MAX_SIZE", "20"), env("REDIS_COMMAND_TIMEOUT", "500ms"), env("INGEST_MAX_MEMORY_RATIO", "0.8"),
		env("CALLBACK_MASTER_KEY_FILE", secret("callbacks")), env("CALLBACK_ALLOW_HTTP", "true"), env("CALLBACK_ALLOWED_CIDRS", "127.0.0.0/8"),
		env("BROKER_TOKEN_KEYS_FILE", tokenKeys(t)), env("BROKER_ADDR", "127.0.0.1:0"), env("BROKER_PUBLIC_URL", "http://127.0.0.1:1"))
	set := func(name, value string) { require.NoError(t, w.rdb.ConfigSet(w.ctx(), name, value).Err()) }
	set("maxmemory", "1gb")
	keyed := w.launch("ingest", map[string]string{"BULKACTION_AUTH": "keys", "BULKACTION_AUTH_PEPPER_FILE": secret("pepper")})
	brokers := []*proctest.Process{w.launch("broker", nil), w.launch("broker", nil)}
	broker := func(i int) string { return brokers[i].BrokerAddr() }

	// This process is one that uses guards, too.
	tel, err := telemetry.Given(slog.New(slog.DiscardHandler), nil, nil)
	require.NoError(t, err)
	metrics := httptest.NewServer(tel.MetricsHandler())
	t.Cleanup(metrics.Close)
	w.own = []string{strings.TrimPrefix(metrics.URL, "http://")}
	guards := func(t *testing.T) (*guard.Client, *redis.Client) {
		rdb := redis.NewClient(&redis.Options{Addr: w.redis.Addr(), PoolSize: 2, PoolTimeout: 100 * time.Millisecond, MaxRetries: -1, ReadTimeout: 500 * time.Millisecond})
		t.Cleanup(func() { _ = rdb.Close() })
		return guard.New(rdb, guard.Prefix("bulk-action:"), guard.Meter(tel.Meter), guard.MetricPrefix(telemetry.NamePrefix)), rdb
	}
	telemetry.ShowBuild(tel.Meter, "test", "guards")
	mine, _ := guards(t)
	accounts, err := mine.Pool(w.ctx(), "accounts", guard.Spec{
		Members: []guard.Member{{ID: "a"}, {ID: "b"}}, Breaker: guard.BreakerPolicy{Failures: 1, OpenFor: 40 * time.Second, Successes: 1},
	})
	require.NoError(t, err)

	var answer atomic.Int64
	answer.Store(200)
	hook := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(int(answer.Load())) }))
	t.Cleanup(hook.Close)
	_, err = w.api.SetCallback(w.ctx(), "called", api.CallbackSettings{URL: hook.URL})
	require.NoError(t, err)

	n := 0
	submit := func(tenant, typ string, jobs int, payload string) string {
		n++
		id := fmt.Sprint("g", n)
		return w.submit(client.Submission{ID: id, Tenant: tenant, Type: typ, Seal: true,
			Jobs: slices.Repeat([]client.NewJob{{Payload: json.RawMessage(payload)}}, jobs)})
	}
	cancel := func(group string) {
		_, err := w.api.Cancel(w.ctx(), group)
		require.NoError(t, err)
	}
	pauseTenant := func(tenant string) {
		_, err := w.api.PauseTenant(w.ctx(), tenant)
		require.NoError(t, err)
	}
	for _, p := range append(brokers, keyed) {
		p.WaitReady()
	}
	w.start(string(text))
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert != "" && notCaused[r.Alert] == "" {
				w.open[r.Alert] = true
			}
		}
	}
	outer := w.system.t
	phase := func(name string, run func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			w.system.t = t
			defer func() { w.system.t = outer }()
			run(t)
		})
	}
	phase("healthy", func(t *testing.T) {
		w.event("calm", `{"capacity":5}`)
		w.stream(broker(0), "calm")
		for range 5 {
			submit("called", "NOOP", 20, `{}`)
		}
		require.True(t, w.until(func() bool { return len(w.firing()) == 0 && len(w.series("up == 1", false)) == len(w.own)+10 }), "%v", w.firing())
	})
	pauseTenant("late") // its jobs start more than 30 s late, further below
	late := submit("late", "NOOP", 50, `{}`)
	paused := time.Now()

	phase("jobs of an unserved type, that vanish", func(t *testing.T) {
		w.fires("UnservedType", func() { submit("t", "NOBODY", 5, `{}`) }, nil)
		w.fires("JobsLost AuditViolation", func() {
			ready := w.space.All()[0].Ready("NOBODY")
			entries, err := w.rdb.XRange(w.ctx(), ready, "-", "+").Result()
			require.NoError(t, err)
			require.NotEmpty(t, entries)
			for _, e := range entries {
				require.NoError(t, w.rdb.XDel(w.ctx(), ready, e.ID).Err())
			}
		}, nil)
	})
	phase("a failing downstream API", func(t *testing.T) {
		var groups []string
		w.fires("DownstreamFails NonReadyGrows DeadLettersRise", func() {
			groups = append(groups, submit("t", "NOOP", 2000, `{"fail":"retry"}`), submit("t", "NOOP", 200, `{"fail":"permanent"}`))
		}, nil)
		cancel(groups[0])
	})
	phase("busy accounts", func(t *testing.T) {
		var group string
		w.fires("AccountsBusy", func() { group = submit("t", "NOOP", 20, `{"fail":"defer"}`) }, nil)
		cancel(group)
	})
	phase("a late start", func(t *testing.T) {
		require.True(t, w.until(func() bool { return time.Since(paused) > 32*time.Second }))
		w.fires("StartsSlowFast StartsSlow", func() {
			_, err := w.api.ResumeTenant(w.ctx(), "late")
			require.NoError(t, err)
			w.wait(late)
		}, nil)
	})
	phase("limits", func(t *testing.T) {
		var groups []string
		w.fires("RateLimited OneTenant", func() {
			_, err := w.api.PatchLimits(w.ctx(), api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo[int64](100)}})
			require.NoError(t, err)
			_, err = w.api.PatchTenant(w.ctx(), "small", api.TenantPatch{RPS: api.SetTo(1.0)})
			require.NoError(t, err)
			groups = append(groups, submit("small", "NOOP", 100, `{}`), submit("large", "NOOP", 20000, `{}`))
		}, nil)
		for _, g := range groups {
			cancel(g)
		}
		_, err := w.api.PatchLimits(w.ctx(), api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo[int64](0)}})
		require.NoError(t, err)
	})
	phase("a worker that stands still", func(t *testing.T) {
		p := w.proc("worker", 0)
		w.fires("ReadyFull NothingStarts ProcessDown JobsReclaimed", func() {
			busy := submit("t", "NOOP", 20, `{"sleep_ms":4000}`)
			w.awaitCounts(busy, "running", func(c api.Counts) bool { return c.InFlight == 20 })
			p.Suspend()
			at := time.Now().Add(2 * time.Second)
			w.submit(client.Submission{ID: "scheduled", Tenant: "t", Type: "NOOP", Seal: true,
				Jobs: slices.Repeat([]client.NewJob{{Payload: json.RawMessage(`{}`), RunAt: &at}}, 100)})
		}, nil)
		p.Signal(syscall.SIGCONT)
	})
	phase("a role without a process", func(t *testing.T) {
		w.fires("RoleMissing", func() { w.proc("fetcher", 0).Kill() }, nil)
		w.procs["fetcher"] = nil
		w.system.t = outer // the new process lives on
		w.add("fetcher")
		w.target()
	})
	phase("a leader that stands still", func(t *testing.T) {
		var leader *proctest.Process
		w.fires("NoLeader", func() {
			at := w.series("bulk_action_leader == 1", false)
			require.Len(t, at, 1)
			for _, p := range w.of("watcher") {
				if p.AdminAddr() == at[0]["instance"] {
					leader = p
				}
			}
			leader.Suspend()
		}, nil)
		leader.Signal(syscall.SIGCONT)
	})
	phase("an unreadable message", func(*testing.T) {
		w.fires("EntriesUnreadable", func() { w.xadd(w.space.Ingest(), "x", "y") }, nil)
	})
	phase("callers without keys", func(*testing.T) {
		w.fires("AuthFailures", func() {
			for range 60 {
				do(http.MethodGet, "http://"+keyed.APIAddr()+"/v1/groups", "", "Authorization", "Bearer bkp_wrong")
			}
		}, nil)
	})
	phase("callbacks", func(*testing.T) {
		w.fires("CallbacksLate", func() { answer.Store(500); submit("called", "NOOP", 1, `{}`) }, nil)
		w.fires("CallbacksDie EndpointDisabled", func() { answer.Store(410); submit("called", "NOOP", 1, `{}`) }, nil)
	})
	phase("guards", func(t *testing.T) {
		w.fires("GuardMembersCooling GuardUnknownMember", func() {
			l, err := accounts.TryAcquire(w.ctx())
			require.NoError(t, err)
			require.NoError(t, l.ReleaseUnknown(w.ctx()))
			for range 2 {
				l, err := accounts.TryAcquire(w.ctx())
				require.NoError(t, err)
				require.NoError(t, l.Release(w.ctx(), guard.Failure))
			}
			_, err = accounts.TryAcquire(w.ctx())
			require.Error(t, err)
		}, nil)
		dead, connection := guards(t)
		p, err := dead.Pool(w.ctx(), "left", guard.Spec{Members: []guard.Member{{ID: "a"}}, Lease: time.Second})
		require.NoError(t, err)
		require.True(t, w.until(func() bool {
			return len(w.series(`bulk_action_guard_leases_ended_total{guard=~"(pool/)?left",how="lost"} == 0`, false)) > 0
		}))
		w.fires("GuardLeasesLost", func() {
			_, err = p.TryAcquire(w.ctx())
			require.NoError(t, err)
			require.NoError(t, connection.Close()) // as if the process had died
		}, func() {
			if p, err := mine.Pool(w.ctx(), "left", guard.Spec{Members: []guard.Member{{ID: "a"}}, Lease: time.Second}); err == nil {
				if l, err := p.TryAcquire(w.ctx()); err == nil {
					_ = l.Release(w.ctx(), guard.Success)
				}
			}
		})
	})
	phase("rooms", func(t *testing.T) {
		w.fires("RoomServiceFull", func() { w.event("small", `{"capacity":1}`) }, func() { w.stream(broker(0), "small") })
		w.fires("RoomSlotsIdle", func() { w.event("idle", `{"capacity":100,"ready":"1s","no_show":"release"}`) }, func() {
			do(http.MethodPost, "http://"+broker(0)+"/events/idle/ticket", "")
		})
		w.fires("RoomRefused", func() {}, func() {
			for range 60 {
				do(http.MethodPost, "http://"+broker(0)+"/events/calm/ticket", "")
			}
		})
		slow := func(metric string) func() bool {
			return func() bool { return len(w.series("bulk_action_room_"+metric+`{event="slow"} == 1`, false)) > 0 }
		}
		w.fires("RoomTokensLate", func() {
			w.event("slow", `{"capacity":0}`) // a visitor who finds a free slot is not told of it later
			w.stream(broker(1), "slow")
			w.await("a visitor", slow("waiting"))
			w.event("slow", `{"capacity":1}`)
			w.await("a token in time", slow("promote_to_notify_ms_count"))
			w.stream(broker(1), "slow")
			w.await("a visitor", slow("waiting"))
			brokers[1].Suspend()
			w.event("slow", `{"capacity":5}`)
			time.Sleep(3 * time.Second)
			brokers[1].Signal(syscall.SIGCONT)
		}, nil)
		broke := func(rule string) {
			require.NoError(t, w.rdb.Do(w.ctx(), "ACL", "SETUSER", "broker", rule).Err())
		}
		w.fires("RoomNotPromoting", func() {
			w.event("stuck", `{"capacity":0}`)
			w.stream(broker(0), "stuck")
			w.await("a visitor", func() bool { return len(w.series(`bulk_action_room_waiting{event="stuck"} == 1`, false)) > 0 })
			broke("-zadd") // brokers lose a right
			w.event("stuck", `{"capacity":5}`)
		}, nil)
		broke("+zadd")
		require.NoError(t, w.rdb.Do(w.ctx(), "ACL", "LOG", "RESET").Err())
		w.fires("RoomResyncs", func() {}, func() {
			w.rdb.Del(w.ctx(), w.space.All()[0].Moves())
			w.stream(broker(0), "stuck")
		})
		w.fires("RoomBrokersDie", func() {
			w.event("orphans", `{"capacity":0}`)
			for i := range brokers {
				w.stream(broker(i), "orphans")
			}
			w.await("visitors", func() bool { return len(w.series(`bulk_action_room_connections{event="orphans"} == 1`, false)) == 2 })
			brokers[1].Kill()
		}, nil)
	})
	phase("full memory", func(t *testing.T) {
		pauseTenant("many")
		var groups []string
		for range 40 {
			groups = append(groups, submit("many", "NOOP", 1, `{}`))
		}
		info, err := w.rdb.Info(w.ctx(), "memory").Result()
		require.NoError(t, err)
		used, err := strconv.Atoi(regexp.MustCompile(`used_memory:(\d+)`).FindStringSubmatch(info)[1])
		require.NoError(t, err)
		w.fires("MemoryFull SubmissionsRefused", func() { set("maxmemory", strconv.Itoa(used*100/93)) }, func() {
			do(http.MethodPost, w.system.url(0)+"/v1/groups", `{"tenant":"t","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`)
		})
		w.fires("EventsWait", func() {
			set("maxmemory", "1mb")
			for _, g := range groups {
				cancel(g)
			}
		}, nil)
		set("maxmemory", "1gb")
	})
	phase("a slow Redis", func(t *testing.T) {
		w.fires("RedisSlow", func() {}, func() {
			w.rdb.Eval(w.ctx(), `local function now() local t = redis.call('TIME'); return t[1] * 1000 + t[2] / 1000 end
				local e = now() + 350; while now() < e do end`, nil)
		})
	})
	phase("no Redis", func(t *testing.T) {
		w.fires("RedisAway GuardOutage RedisPoolExhausted APIErrors RoomPositionsLate", func() {
			w.stream(broker(0), "calm")
			w.redis.Suspend()
		}, func() {
			for range 4 {
				go func() {
					ctx, end := context.WithTimeout(w.ctx(), time.Second)
					defer end()
					_, _ = accounts.TryAcquire(ctx)
				}()
			}
			do(http.MethodGet, w.system.url(0)+"/v1/groups", "")
		})
		w.redis.Resume()
	})
	assert.Empty(t, w.open, "alerts that did not fire")
	phase("queries", func(t *testing.T) {
		windows := strings.NewReplacer("$__rate_interval", "30s")
		for _, g := range rules.Groups {
			for _, r := range g.Rules {
				expr, _, _ := strings.Cut(r.Expr, "unless")
				expr = regexp.MustCompile(`\s(>|==|<) [\d.]+( \* [\d.]+)?|absent`).ReplaceAllString(expr, "")
				assert.NotEmpty(t, w.series(hasten(expr), true), "%s%s: %s", r.Alert, r.Record, expr)
			}
		}
		files, err := filepath.Glob(filepath.Join(repository, "deployments", "grafana", "*.json"))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var d struct {
				Panels []struct {
					Title   string
					Targets []struct{ Expr string }
				}
			}
			require.NoError(t, json.Unmarshal(text, &d))
			for _, p := range d.Panels {
				for _, q := range p.Targets {
					assert.NotEmpty(t, w.series(windows.Replace(q.Expr), true), "%s: %s: %s", filepath.Base(file), p.Title, q.Expr)
				}
			}
		}
	})
}
