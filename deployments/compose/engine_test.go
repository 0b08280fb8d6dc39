//go:build engine

package compose_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// patience is how long a test waits for an event: more than a lease of 30 s, on a busy machine.
const patience = 3 * time.Minute

// engine runs compose.yaml on a Docker engine, as a project of its own.
type engine struct {
	t       *testing.T
	project string
	compose []string // docker compose, or docker-compose, with its flags
	environ []string
	port    map[string]string // by variable
	secrets string
}

const testImage = "bulkaction:compose-test"

func newEngine(t *testing.T) *engine {
	dir := t.TempDir()
	e := &engine{
		t: t, project: "bulkaction-test-" + strconv.Itoa(os.Getpid()), compose: []string{"docker", "compose"},
		port: map[string]string{}, secrets: filepath.Join(dir, "secrets"),
		environ: append(os.Environ(), "BULKACTION_IMAGE="+testImage, "VERSION=v0.0.0-test", "REVISION=abc"),
	}
	if exec.Command("docker", "compose", "version").Run() != nil {
		e.compose = []string{"docker-compose"}
	}
	e.compose = append(e.compose, "--project-name", e.project)
	for _, name := range []string{"API_PORT", "ROOM_PORT", "REDIS_PORT", "JAEGER_PORT", "OTLP_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"} {
		_, e.port[name], _ = strings.Cut(childproc.FreeAddr(), ":")
		e.environ = append(e.environ, name+"="+e.port[name])
	}
	// Not the .env of this folder, which is the user's.
	e.compose = append(e.compose, "--env-file", filepath.Join(dir, ".env"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".env"), nil, 0o600))
	out, err := e.command("", e.composed("config")...).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "Run ./setup first")

	setup, err := os.ReadFile("setup")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "setup"), setup, 0o700))
	out, err = exec.Command(filepath.Join(dir, "setup")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	e.environ = append(e.environ, "SECRETS_DIR="+e.secrets)
	return e
}

func (e *engine) command(profiles string, args ...string) *exec.Cmd {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(slices.Clone(e.environ), "COMPOSE_PROFILES="+profiles)
	return cmd
}

// run runs a command that must succeed, and returns its standard output.
func (e *engine) run(args ...string) string {
	e.t.Helper()
	return e.with("", args...)
}

func (e *engine) with(profiles string, args ...string) string {
	e.t.Helper()
	cmd := e.command(profiles, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	require.NoError(e.t, err, "%v\n%s%s", args, out, errs.String())
	return strings.TrimSpace(string(out))
}

func (e *engine) up(args ...string) {
	e.t.Helper()
	e.run(e.composed("up", append([]string{"-d"}, args...)...)...)
}

func (e *engine) composed(command string, args ...string) []string {
	return slices.Concat(e.compose, []string{command}, args)
}

func (e *engine) cli(args ...string) string {
	e.t.Helper()
	return e.run(e.composed("run", append([]string{"--rm", "-T", "cli"}, args...)...)...)
}

// containers returns the ids of a service's containers.
func (e *engine) containers(service string) []string {
	e.t.Helper()
	return strings.Fields(e.run(e.composed("ps", "-q", service)...))
}

func (e *engine) inspect(id, format string) string {
	e.t.Helper()
	return e.run("docker", "inspect", "--format", format, id)
}

func (e *engine) password(user string) string {
	text, err := os.ReadFile(filepath.Join(e.secrets, "users", user))
	require.NoError(e.t, err)
	return strings.TrimSpace(string(text))
}

func (e *engine) await(what string, happened func() bool) {
	e.t.Helper()
	require.Eventually(e.t, happened, patience, 200*time.Millisecond, what)
	e.t.Logf("%s %s", time.Now().Format(time.TimeOnly), what)
}

// ready reports whether the container of a role is ready now. The engine asks only every 5 s.
func (e *engine) ready(role, id string) bool {
	return exec.Command("docker", "exec", id, "/usr/local/bin/"+role, "-healthcheck").Run() == nil
}

func (e *engine) awaitReady(role string) {
	e.t.Helper()
	e.await(role+" is ready", func() bool {
		return !slices.ContainsFunc(e.containers(role), func(id string) bool { return !e.ready(role, id) })
	})
}

// kill kills the container's process as the kernel would. `docker kill` would count as a stop by
// hand, after which the engine does not restart the container.
func (e *engine) kill(role string) {
	e.t.Helper()
	id := e.containers(role)[0]
	e.run("docker", "run", "--rm", "--pid=host", "--user=0", "--entrypoint=sh", services(e.t)["redis"].Image,
		"-c", "kill -9 "+e.inspect(id, "{{.State.Pid}}"))
	e.await(role+" was restarted by the engine", func() bool { return e.inspect(id, "{{.RestartCount}}") != "0" })
}

// status returns the status of a request to the API, or 0 without an answer.
func (e *engine) status(key string) int {
	request, err := http.NewRequest(http.MethodGet, "http://127.0.0.1:"+e.port["API_PORT"]+"/v1/groups", nil)
	require.NoError(e.t, err)
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0
	}
	_ = response.Body.Close()
	return response.StatusCode
}

// TestEngine builds the image and runs compose.yaml on a Docker engine: 20,000 jobs, submitted over
// HTTP and by XADD, are done exactly although processes are killed and restarted and Redis can't be
// reached for a while. Run it by `make compose-test`.
func TestEngine(t *testing.T) {
	e := newEngine(t)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := e.command("observability", e.composed("logs", "--no-color", "--tail=20")...).CombinedOutput()
			for line := range strings.Lines(string(out)) {
				if !strings.Contains(line, `"level":"INFO"`) {
					t.Log(line)
				}
			}
		}
		_ = e.command("observability,cli", e.composed("down", "--volumes", "--timeout=5")...).Run()
		_ = exec.Command("docker", "image", "rm", testImage).Run()
	})

	e.run(e.composed("build", "ingest")...)
	size, err := strconv.Atoi(e.inspect(testImage, "{{.Size}}"))
	require.NoError(t, err)
	require.Less(t, size, 60_000_000, "bytes of the image")
	t.Logf("%s the image is built: %d MB", time.Now().Format(time.TimeOnly), size/1_000_000)
	require.Equal(t, "65532:65532 SIGTERM abc Apache-2.0", e.inspect(testImage, `{{.Config.User}} {{.Config.StopSignal}} `+
		`{{index .Config.Labels "org.opencontainers.image.revision"}} {{index .Config.Labels "org.opencontainers.image.licenses"}}`))
	for _, role := range roles {
		require.Contains(t, e.run("docker", "run", "--rm", testImage, role, "-version"), "bulkaction-"+role+" v0.0.0-test")
	}

	e.up()
	for _, role := range roles {
		e.awaitReady(role)
	}
	for _, role := range roles {
		for _, id := range e.containers(role) {
			require.NotContains(t, e.run("docker", "logs", id), `"level":"ERROR"`, role) // such as: no collector
		}
	}
	key := e.cli("key", "create", "--role", "admin", "--name", "first")
	e.await("the key is known", func() bool { return e.status(key) == http.StatusOK })

	ctx := t.Context()
	calls := client.NewAPI("http://127.0.0.1:"+e.port["API_PORT"], client.WithAPIKey(key))
	adds, err := producer.New(ctx, fmt.Sprintf("redis://producer:%s@127.0.0.1:%s/0", e.password("producer"), e.port["REDIS_PORT"]))
	require.NoError(t, err)
	defer func() { _ = adds.Close() }()
	const groups, jobs = 20, 1000
	list := make([]client.NewJob, jobs)
	for i := range list {
		list[i].Payload = map[string]int{"sleep_ms": 100}
	}
	for i := range groups {
		g := client.Submission{ID: fmt.Sprint("group", i), Tenant: fmt.Sprint("tenant", i%4), Type: "NOOP", Seal: true, Jobs: list}
		if i%2 == 0 {
			_, err = calls.Submit(ctx, g)
		} else {
			_, err = adds.Submit(ctx, g)
		}
		require.NoError(t, err)
	}
	t.Logf("%s %d jobs are submitted", time.Now().Format(time.TimeOnly), groups*jobs)

	e.kill("worker")
	e.kill("watcher")
	e.awaitReady("worker")
	e.awaitReady("watcher")
	e.cutRedis(8*time.Second, key)
	e.up("--scale=worker=5")
	require.Len(t, e.containers("worker"), 5)
	e.awaitReady("worker")
	e.restartAll()

	for i := range groups {
		id := fmt.Sprint("group", i)
		e.await(id+" has ended", func() bool {
			g, err := calls.Group(ctx, id)
			return err == nil && g.Status.Ended()
		})
		g, err := calls.Group(ctx, id)
		require.NoError(t, err)
		require.Equal(t, api.StatusCompleted, g.Status, id)
		require.EqualValues(t, jobs, g.Counts.Done, id)
	}
	require.Empty(t, e.run("docker", "exec", "-e", "REDISCLI_AUTH="+e.password("admin"), e.containers("redis")[0],
		"redis-cli", "--user", "admin", "acl", "log"), "ACL LOG")
	e.observe()
	e.unprivileged()

	e.run(e.composed("stop")...)
	for _, service := range append([]string{"redis"}, roles...) {
		for _, id := range strings.Fields(e.run("docker", "ps", "-aq", "--filter", "label=com.docker.compose.service="+service,
			"--filter", "label=com.docker.compose.project="+e.project)) {
			require.Equal(t, "exited 0 false", e.inspect(id, "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"), service)
		}
	}
	e.up("redis") // with the data from before the stop
	e.cli("audit")
}

// cutRedis takes Redis off the network for some time, in which the API must answer that it can't
// answer.
func (e *engine) cutRedis(outage time.Duration, key string) {
	e.t.Helper()
	id := e.containers("redis")[0]
	network := e.inspect(id, "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}")
	e.run("docker", "network", "disconnect", network, id)
	back := time.After(outage)
	e.await("the API answers 503", func() bool { return e.status(key) == http.StatusServiceUnavailable })
	<-back
	e.run("docker", "network", "connect", "--alias", "redis", network, id)
	e.await("the API answers again", func() bool { return e.status(key) == http.StatusOK })
	for _, role := range roles {
		e.awaitReady(role)
	}
}

// restartAll stops one container after the other and starts it again. Each must end by itself, with
// exit code 0.
func (e *engine) restartAll() {
	e.t.Helper()
	for _, role := range roles {
		for _, id := range e.containers(role) {
			e.run("docker", "stop", "-t", "35", id)
			require.Equal(e.t, "exited 0", e.inspect(id, "{{.State.Status}} {{.State.ExitCode}}"), role)
			e.run("docker", "start", id)
			e.await(role+" is ready again", func() bool { return e.ready(role, id) })
		}
	}
}

// unprivileged requires that no process runs as root, and that no role has written anything but the
// mount points that the engine made.
func (e *engine) unprivileged() {
	e.t.Helper()
	for service := range services(e.t) {
		if service == "cli" {
			continue
		}
		for _, id := range e.containers(service) {
			if e.inspect(id, "{{.State.Running}}") != "true" { // one of those that make a file
				continue
			}
			for _, line := range strings.Split(e.run("docker", "top", id, "-eo", "pid,uid"), "\n")[1:] {
				uid := strings.Fields(line)[1]
				require.NotEqual(e.t, "0", uid, service)
				if slices.Contains(roles, service) {
					require.Equal(e.t, "65532", uid, service)
				}
			}
			if !slices.Contains(roles, service) {
				continue
			}
			mounts := e.inspect(id, "{{range .Mounts}}{{.Destination}}\n{{end}}")
			for line := range strings.Lines(e.run("docker", "diff", id)) {
				require.Contains(e.t, mounts, strings.TrimSpace(line[2:]), "%s: docker diff", service)
			}
		}
	}
}

// observe starts the profile observability, and requires that Prometheus scrapes every replica of
// every role, under the name of its role.
func (e *engine) observe() {
	e.t.Helper()
	e.with("observability", e.composed("up", "-d", "--scale=worker=5")...)
	want := map[string]int{"worker": 5}
	for _, role := range roles {
		want[role] = max(want[role], 1)
	}
	e.await("Prometheus scrapes all roles", func() bool {
		response, err := http.Get("http://127.0.0.1:" + e.port["PROMETHEUS_PORT"] + "/api/v1/targets?state=active")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		require.NoError(e.t, err)
		var answer struct {
			Data struct {
				ActiveTargets []struct {
					Health string
					Labels struct{ Role string }
				}
			}
		}
		require.NoError(e.t, json.Unmarshal(body, &answer), "%s", body)
		up := map[string]int{}
		for _, target := range answer.Data.ActiveTargets {
			if target.Health == "up" {
				up[target.Labels.Role]++
			}
		}
		return fmt.Sprint(up) == fmt.Sprint(want)
	})
}
