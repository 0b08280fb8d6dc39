package compose_test

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

var roles = []string{"ingest", "fetcher", "dispatcher", "worker", "watcher", "aggregator", "broker"}

type service struct {
	Image           string
	Command         any // a list, or a command line that Compose splits
	Ports           []string
	Environment     map[string]string
	Restart         string
	StopGracePeriod string `yaml:"stop_grace_period"`
	Healthcheck     struct{ Test []string }
	Deploy          struct{ Replicas int }
	DependsOn       any `yaml:"depends_on"`
	Build           struct{ Context, Dockerfile string }
	Volumes         []any // a string, or a mapping
	Secrets         []secret
	Entrypoint      []string
	Profiles        []string
	User            string
	MemLimit        string `yaml:"mem_limit"`
	CPUs            float64
	Logging         struct{ Options map[string]string }
}

type secret struct{ Source, Target string }

const dockerfile = "../docker/Dockerfile"

func services(t *testing.T) map[string]service {
	t.Helper()
	var file struct{ Services map[string]service }
	read(t, "compose.yaml", &file)
	return file.Services
}

func read(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, into), name)
}

// TestEveryRoleRuns: in compose.yaml, each role has a service, a binary and a health check with the
// name of the role.
func TestEveryRoleRuns(t *testing.T) {
	all := services(t)
	for _, role := range roles {
		t.Run(role, func(t *testing.T) {
			s, ok := all[role]
			require.True(t, ok, "no such service")
			binary := "/usr/local/bin/" + role
			require.Equal(t, []any{binary}, s.Command)
			require.Equal(t, []string{"CMD", binary, "-healthcheck"}, s.Healthcheck.Test)
			require.DirExists(t, filepath.Join("../../cmd", role))

			require.Equal(t, "unless-stopped", s.Restart)
			needs := map[string]any{"redis": map[string]any{"condition": "service_healthy"}}
			for variable, maker := range map[string]string{keysVariable: "token-keys", callbackVariable: "callback-key"} {
				if s.Environment[variable] != "" {
					needs[maker] = map[string]any{"condition": "service_completed_successfully"}
				}
			}
			require.Equal(t, needs, s.DependsOn)
			require.FileExists(t, filepath.Join(s.Build.Context, s.Build.Dockerfile))
			grace, err := time.ParseDuration(s.StopGracePeriod)
			require.NoError(t, err)
			require.Greater(t, grace, 30*time.Second, "shorter than SHUTDOWN_GRACE_PERIOD")
			require.Equal(t, "512m 400MiB", s.MemLimit+" "+s.Environment["GOMEMLIMIT"])
			require.NotZero(t, s.CPUs)
		})
	}
}

const (
	keysVariable     = "BULKACTION_BROKER_TOKEN_KEYS_FILE"
	callbackVariable = "BULKACTION_CALLBACK_MASTER_KEY_FILE"
)

// TestOldCompose: compose.yaml has nothing that Compose 1.29 refuses.
func TestOldCompose(t *testing.T) {
	var file map[string]any
	read(t, "compose.yaml", &file)
	require.NotContains(t, file, "name")
	text, err := os.ReadFile("compose.yaml")
	require.NoError(t, err)
	require.NotContains(t, string(text), "create_host_path:")
}

// TestLogsRotate: no service fills the disk with its log, and all are part of the system or of the
// profile observability.
func TestLogsRotate(t *testing.T) {
	for name, s := range services(t) {
		if name != "callback-key" { // prints nothing
			require.NotEmpty(t, s.Logging.Options["max-size"], name)
		}
		require.Subset(t, []string{"cli", "observability"}, s.Profiles, name)
		for variable, value := range s.Environment {
			require.NotContains(t, value, "://otel-collector", "%s of %s needs the profile observability", variable, name)
		}
	}
}

// TestCallbackKey: ingest and watcher, and no other role, get the master key of callbacks that setup
// has made, as a file that only they can read.
func TestCallbackKey(t *testing.T) {
	all := services(t)
	maker := all["callback-key"]
	require.Equal(t, []secret{{Source: "callback-master-key", Target: "callback-master-key"}}, maker.Secrets)
	require.Equal(t, []any{"callback-key:/tmp"}, maker.Volumes)
	require.Equal(t, "65532:65532", maker.User, "the user of the image, who reads the file")
	for _, role := range roles {
		if role == "ingest" || role == "watcher" {
			require.Equal(t, "/callback/master.key", all[role].Environment[callbackVariable], role)
			require.Contains(t, all[role].Volumes, "callback-key:/callback:ro", role)
		} else {
			require.Empty(t, all[role].Environment[callbackVariable], role)
			require.NotContains(t, fmt.Sprint(all[role].Volumes), "callback", role)
		}
	}
}

// TestTokenKeys: in compose.yaml, one service writes the key that signs entry tokens into a volume.
// The roles that need the key can only read it.
func TestTokenKeys(t *testing.T) {
	all := services(t)
	const file = "/keys/token-keys.pem"
	maker := all["token-keys"]
	require.Equal(t, []any{"/usr/local/bin/bulkaction", "room", "new-key", file}, maker.Command)
	require.Equal(t, "no", maker.Restart, "a service that waits for it would wait for ever")
	require.Equal(t, []any{"token-keys:/keys"}, maker.Volumes)
	for _, role := range []string{"broker", "ingest"} {
		require.Equal(t, file, all[role].Environment[keysVariable], role)
		require.Contains(t, all[role].Volumes, "token-keys:/keys:ro", role)
	}
	docker, err := os.ReadFile(dockerfile)
	require.NoError(t, err)
	require.Contains(t, string(docker), "--chown=65532:65532 /keys /keys", "a new volume gets this owner")
	for name, s := range all {
		if url, ok := s.Environment["BULKACTION_BROKER_PUBLIC_URL"]; ok {
			require.Contains(t, s.Ports, strings.TrimPrefix(url, "http://")+":8090", name)
		}
	}
}

func TestPortsAreOnLoopback(t *testing.T) {
	for name, s := range services(t) {
		for _, port := range s.Ports {
			require.Regexp(t, `^127\.0\.0\.1:\d+:\d+$`, resolved(port), name)
		}
		if len(s.Ports) > 0 {
			require.LessOrEqual(t, s.Deploy.Replicas, 1, "%s: replicas can't share a published port", name)
		}
	}
}

var variable = regexp.MustCompile(`\$\{\w+:-([^}]*)\}`)

func resolved(text string) string { return variable.ReplaceAllString(text, "$1") }

// ofCommandLine has the variables of the command line in compose.yaml. docs/configuration.md does
// not list them, because processes of roles do not read them.
var ofCommandLine = []string{"BULKACTION_API", "BULKACTION_API_KEY"}

func TestVariablesAreDocumented(t *testing.T) {
	docs, err := os.ReadFile("../../docs/configuration.md")
	require.NoError(t, err)
	known := regexp.MustCompile("`(BULKACTION_[A-Z_]+)`").FindAllString(string(docs), -1)
	require.NotEmpty(t, known)
	for name, s := range services(t) {
		for _, v := range slices.Sorted(maps.Keys(s.Environment)) {
			if strings.HasPrefix(v, "BULKACTION_") && !slices.Contains(ofCommandLine, v) {
				require.Contains(t, known, "`"+v+"`", name)
			}
		}
	}
}

func TestRedisLosesNothing(t *testing.T) {
	redis := services(t)["redis"]
	for _, want := range []string{"--appendonly yes", "--maxmemory-policy noeviction"} {
		require.Contains(t, redis.Command, want)
	}
	require.NotEmpty(t, redis.Healthcheck.Test)
	require.Equal(t, []any{"redis-data:/data", "redis-users:/users:ro"}, redis.Volumes)
}

// TestRedisUsers: in compose.yaml, each role connects as its own Redis user, and gets the password
// of only this user, as a file. The script setup makes the passwords, and a service writes the
// users' file before Redis starts.
func TestRedisUsers(t *testing.T) {
	dir := t.TempDir()
	script, err := os.ReadFile("setup")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "setup"), script, 0o700))
	passwords := map[string]string{} // by user
	for range 2 {                    // the second run changes nothing
		out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "setup")).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "docker compose up")
		require.NotRegexp(t, "[0-9a-f]{64}", string(out))
		found := map[string]string{}
		files, err := os.ReadDir(filepath.Join(dir, "secrets/users"))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(dir, "secrets/users", file.Name()))
			require.NoError(t, err)
			require.Regexp(t, "^[0-9a-f]{64}\n$", string(text), file.Name())
			require.NotContains(t, slices.Collect(maps.Values(found)), string(text), file.Name())
			info, err := file.Info()
			require.NoError(t, err)
			require.Equal(t, fs.FileMode(0o644), info.Mode().Perm(), "the containers' users read it")
			found[file.Name()] = string(text)
		}
		if len(passwords) > 0 {
			require.Equal(t, passwords, found)
		}
		passwords = found
	}
	settings, err := os.ReadFile(filepath.Join(dir, ".env"))
	require.NoError(t, err)
	require.Equal(t, "COMPOSE_PROJECT_NAME=bulkaction\nSECRETS_DIR=./secrets\n", string(settings))
	for _, name := range []string{"callback/master.key", "grafana/admin"} {
		text, err := os.ReadFile(filepath.Join(dir, "secrets", name))
		require.NoError(t, err)
		require.Regexp(t, "^[0-9a-f]{64}\n$", string(text), name)
	}
	info, err := os.Stat(filepath.Join(dir, "secrets"))
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o700), info.Mode().Perm(), "nobody else reads the passwords")

	var file struct {
		Secrets map[string]struct{ File string }
	}
	read(t, "compose.yaml", &file)
	all := services(t)
	for _, user := range append(slices.Clone(roles), "cli") {
		require.Contains(t, passwords, user)
		require.Equal(t, "${SECRETS_DIR}/users/"+user, file.Secrets["redis-"+user].File)
		s := all[user]
		require.Equal(t, []secret{{Source: "redis-" + user, Target: "redis-password"}}, s.Secrets, user)
		require.Equal(t, "redis://redis:6379/0", s.Environment["BULKACTION_REDIS_URL"], user)
		require.Equal(t, user, s.Environment["BULKACTION_REDIS_USERNAME"])
		require.Equal(t, "/run/secrets/redis-password", s.Environment["BULKACTION_REDIS_PASSWORD_FILE"], user)
	}
	require.Equal(t, "${SECRETS_DIR}/callback/master.key", file.Secrets["callback-master-key"].File)
	require.Equal(t, "${SECRETS_DIR}/grafana/admin", file.Secrets["grafana-admin"].File)
	require.Len(t, file.Secrets, len(roles)+3)

	maker := all["redis-users"]
	require.Equal(t, []any{
		"/usr/local/bin/bulkaction", "acl", "--format=aclfile", "--passwords=/passwords", "--output=/users/users.acl",
	}, maker.Command)
	require.Equal(t, []any{
		"${SECRETS_DIR:?is not set. Run ./setup first, it makes the passwords}/users:/passwords:ro", "redis-users:/users",
	}, maker.Volumes)
	require.Equal(t, "999:1000", maker.User, "the user of Redis's image, which reads the file")
	docker, err := os.ReadFile(dockerfile)
	require.NoError(t, err)
	require.Contains(t, string(docker), "--chown=999:1000 /keys /users")
	require.Contains(t, all["redis"].Command, "--aclfile /users/users.acl")
	require.Equal(t, map[string]any{"redis-users": map[string]any{"condition": "service_completed_successfully"}},
		all["redis"].DependsOn)
}

// TestAPIAsksForKeys: in compose.yaml, the API requires API keys. The service of the command line
// gets the key that is in a variable of the caller's shell.
func TestAPIAsksForKeys(t *testing.T) {
	all := services(t)
	require.Equal(t, "keys", all["ingest"].Environment["BULKACTION_AUTH"])
	for name, s := range all {
		require.NotContains(t, s.Environment, "BULKACTION_API_ALLOW_UNAUTHENTICATED", name)
	}
	cli := all["cli"]
	require.Equal(t, []string{"cli"}, cli.Profiles, "`up` does not start it")
	require.Equal(t, []string{"/usr/local/bin/bulkaction"}, cli.Entrypoint)
	require.Equal(t, "http://ingest:8080", cli.Environment["BULKACTION_API"])
	require.Equal(t, "${BULKACTION_API_KEY:-}", cli.Environment["BULKACTION_API_KEY"])
}

// TestObservability: Prometheus scrapes each role, and the collector's pipelines are complete.
func TestObservability(t *testing.T) {
	var scraped struct {
		ScrapeConfigs []struct {
			DNS []struct {
				Names []string
				Port  int
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	read(t, "prometheus.yaml", &scraped)
	require.Equal(t, roles, scraped.ScrapeConfigs[0].DNS[0].Names)
	require.Equal(t, 9090, scraped.ScrapeConfigs[0].DNS[0].Port)

	var config struct {
		Exporters map[string]struct{ Endpoint string }
		Service   struct {
			Pipelines map[string]struct{ Receivers, Processors, Exporters []string }
		}
	}
	read(t, "otel-collector.yaml", &config)
	var parts map[string]map[string]any
	read(t, "otel-collector.yaml", &parts)
	for name, pipeline := range config.Service.Pipelines {
		for kind, used := range map[string][]string{
			"receivers": pipeline.Receivers, "processors": pipeline.Processors, "exporters": pipeline.Exporters,
		} {
			require.NotEmpty(t, used, name)
			require.Subset(t, slices.Collect(maps.Keys(parts[kind])), used, fmt.Sprint(name, " ", kind))
		}
	}
	host, _, _ := strings.Cut(config.Exporters["otlp_grpc/jaeger"].Endpoint, ":")
	require.Contains(t, services(t), host)
}

// TestDockerfileFollowsGoMod: the image is built with the Go version of go.mod.
func TestDockerfileFollowsGoMod(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))
	require.Len(t, version, 2)
	docker, err := os.ReadFile(dockerfile)
	require.NoError(t, err)
	require.Contains(t, string(docker), "ARG GO_IMAGE=golang:"+version[1]+"-")
}
