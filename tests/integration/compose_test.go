package integration

import (
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// container is a service of deployments/compose/compose.yaml.
type container struct {
	Command     any // a list, or a command line that Compose splits
	Environment map[string]string
	Secrets     []struct{ Source, Target string }
}

// composition runs the services of compose.yaml as processes of this host, without containers.
type composition struct {
	t          *testing.T
	dir        string // instead of deployments/compose and of the volumes
	containers map[string]container
	secrets    map[string]struct{ File string }
	hosts      []string // pairs of an address in compose.yaml, and the one in its place
}

// defaulted matches a variable with a default in compose.yaml, ${NAME:-default}. Its first group is
// the default.
var defaulted = regexp.MustCompile(`\$\{\w+:-([^}]*)\}`)

// here returns a Replacer that turns paths in a service's container, and addresses in compose.yaml,
// into those on this host. It does not know addresses of services that do not run yet.
func (c *composition) here(name string) *strings.Replacer {
	changes := slices.Clone(c.hosts)
	for _, secret := range c.containers[name].Secrets {
		file := strings.Replace(c.secrets[secret.Source].File, "${SECRETS_DIR}", filepath.Join(c.dir, "secrets"), 1)
		changes = append(changes, "/run/secrets/"+secret.Target, file)
	}
	changes = append(changes, "=/passwords", "="+c.dir+"/passwords")
	for _, folder := range []string{"/users/", "/keys/", "/callback/"} {
		changes = append(changes, folder, c.dir+folder)
	}
	return strings.NewReplacer(changes...)
}

// environment returns the environment variables that Compose would give to a service, with the
// paths and addresses of this host.
func (c *composition) environment(name string) map[string]string {
	set := map[string]string{}
	for variable, value := range c.containers[name].Environment {
		set[variable] = c.here(name).Replace(defaulted.ReplaceAllString(value, "$1"))
	}
	return set
}

// run starts the program of a service. args are added to its command line, and environment to its
// environment variables.
func (c *composition) run(name string, environment map[string]string, args ...string) *proctest.Process {
	c.t.Helper()
	program := "bulkaction"
	if command, ok := c.containers[name].Command.([]any); ok {
		if role := path.Base(command[0].(string)); role != program { // a link in the image
			program = filepath.Join(c.t.TempDir(), role)
			require.NoError(c.t, os.Symlink(proctest.Path(c.t, "bulkaction"), program))
		}
		for _, arg := range command[1:] {
			args = append(args, c.here(name).Replace(arg.(string)))
		}
	}
	set := c.environment(name)
	maps.Copy(set, environment)
	return proctest.Start(c.t, program, set, args...)
}

// finish runs a service that ends by itself, requires that it succeeds, and returns what it has
// printed.
func (c *composition) finish(name string, environment map[string]string, args ...string) string {
	c.t.Helper()
	p := c.run(name, environment, args...)
	require.Zero(c.t, p.Wait(patience), "%s %v:\n%s", name, args, p.Log())
	return p.Stdout()
}

// compose reads compose.yaml, runs the script setup, which makes passwords, and the services
// token-keys and redis-users, which write the files in the volumes. It copies the master key of
// callbacks, as the service callback-key does.
func compose(t *testing.T) *composition {
	t.Helper()
	source := filepath.Join(repository, "deployments", "compose")
	text, err := os.ReadFile(filepath.Join(source, "compose.yaml"))
	require.NoError(t, err)
	var file struct {
		Services map[string]container
		Secrets  map[string]struct{ File string }
	}
	require.NoError(t, yaml.Unmarshal(text, &file))
	c := &composition{t: t, dir: t.TempDir(), containers: file.Services, secrets: file.Secrets}

	script, err := os.ReadFile(filepath.Join(source, "setup"))
	require.NoError(t, err)
	setup := filepath.Join(c.dir, "setup")
	require.NoError(t, os.WriteFile(setup, script, 0o700))
	out, err := exec.CommandContext(t.Context(), setup).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, folder := range []string{"keys", "users", "callback"} {
		require.NoError(t, os.Mkdir(filepath.Join(c.dir, folder), 0o700))
	}
	require.NoError(t, os.Symlink(filepath.Join(c.dir, "secrets", "users"), filepath.Join(c.dir, "passwords")))
	master, err := os.ReadFile(filepath.Join(c.dir, "secrets", "callback", "master.key"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(c.dir, "callback", "master.key"), master, 0o600))
	c.finish("token-keys", nil)
	c.finish("redis-users", nil)
	return c
}

// redis starts a redis-server with the users that the service redis-users has written. At its start
// the server also has a default user with all rights, because redistest.Server connects as this
// user. Then ACL LOAD replaces all users by those of the service, so that the default user is off.
func (c *composition) redis() *redistest.Redis {
	c.t.Helper()
	file := filepath.Join(c.dir, "users", "users.acl")
	users, err := os.ReadFile(file)
	require.NoError(c.t, err)
	const open = "user default on nopass ~* &* +@all"
	off := regexp.MustCompile(`(?m)^user default off.*$`)
	require.Regexp(c.t, off, string(users))
	require.NoError(c.t, os.WriteFile(file, off.ReplaceAll(users, []byte(open)), 0o600))
	server := redistest.Server(c.t, redistest.AOF, redistest.Args("--aclfile", file))
	require.NoError(c.t, os.WriteFile(file, users, 0o600))
	require.NoError(c.t, server.Client().Do(c.t.Context(), "acl", "load").Err())
	require.ErrorContains(c.t, server.Client().Ping(c.t.Context()).Err(), "NOAUTH")
	return server
}

// as connects as a user of the service redis-users.
func (c *composition) as(user string, server *redistest.Redis) redis.UniversalClient {
	c.t.Helper()
	password, err := os.ReadFile(filepath.Join(c.dir, "passwords", user))
	require.NoError(c.t, err)
	url := strings.Replace(server.URL(), "://", "://"+user+":"+strings.TrimSpace(string(password))+"@", 1)
	return connect(c.t, url).Cmd
}

// newKey creates an API key with a role, waits until ingest knows it, which takes about a second,
// and returns its token.
func (c *composition) newKey(api, role string) string {
	c.t.Helper()
	key := strings.TrimSpace(c.finish("cli", nil, "key", "create", "--role", role, "--name", "first"))
	(&system{t: c.t}).await("new key is known", func() bool {
		answer := do(http.MethodGet, "http://"+api+"/v1/groups", "", "Authorization", "Bearer "+key)
		return answer.err == nil && answer.status != http.StatusUnauthorized
	})
	return key
}

// TestCompose runs the system with the commands and the environment of compose.yaml, without
// containers: the processes of this host use other addresses and folders. It submits a group with
// an API key and one by XADD, and requires a clean audit and an empty ACL LOG.
func TestCompose(t *testing.T) {
	t.Parallel()
	c := compose(t)
	for name, s := range c.containers {
		var environ []string
		for variable, value := range c.environment(name) {
			environ = append(environ, variable+"="+value)
		}
		_, unknown, err := app.Load(environ, new(builtin.Config))
		require.NoError(t, err, name)
		if s.Environment["BULKACTION_ADMIN_ADDR"] != "" { // a role
			require.Empty(t, unknown, name)
		}
	}

	server := c.redis()
	room := childproc.FreeAddr()
	c.hosts = []string{
		"redis:6379", server.Addr(), "0.0.0.0:9090", "127.0.0.1:0", "0.0.0.0:8080", "127.0.0.1:0", "0.0.0.0:8090", room, "127.0.0.1:8090", room,
	}
	started := map[string]*proctest.Process{}
	for _, role := range append([]string{"broker"}, roles...) {
		started[role] = c.run(role, nil)
	}
	for _, p := range started {
		p.WaitReady()
	}
	api := started["ingest"].APIAddr()
	c.hosts = append(c.hosts, "ingest:8080", api)

	const group = `{"id":"first","tenant":"acme","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`
	answer := do(http.MethodPost, "http://"+api+"/v1/groups", group)
	require.NoError(t, answer.err)
	require.Equal(t, http.StatusUnauthorized, answer.status, "without a key: %s", answer.body)

	key := map[string]string{"BULKACTION_API_KEY": c.newKey(api, "admin")}
	c.finish("cli", key, "submit", "--type", "NOOP", "--payload", "{}", "--id", "first", "--wait")
	c.finish("cli", key, "callback", "set", "acme", "--url", "https://example.com/hook") // ingest has the master key
	c.finish("cli", key, "room", "set", "demo", "--capacity", "3", "--return-url", "http://127.0.0.1:8081/buy")
	service := c.newKey(api, "service")
	answer = do(http.MethodPost, "http://"+api+"/v1/entry-tokens/verify", `{"token":"x"}`, "Authorization", "Bearer "+service)
	require.NoError(t, answer.err)
	require.NotContains(t, []int{http.StatusUnauthorized, http.StatusForbidden}, answer.status, "%s", answer.body)

	require.NoError(t, c.as("producer", server).XAdd(t.Context(), &redis.XAddArgs{
		Stream: "bulk-action:ingest",
		Values: []string{"type", "group.submit", "data", strings.Replace(group, "first", "second", 1)},
	}).Err())
	events := c.as("event-reader", server)
	for last, ended := "0", 0; ended < 2; {
		found, err := events.XRead(t.Context(), &redis.XReadArgs{Streams: []string{"bulk-action:events", last}, Block: patience}).Result()
		require.NoError(t, err)
		for _, m := range found[0].Messages {
			last = m.ID
			if m.Values["type"] == "group.completed" {
				ended++
			}
		}
	}
	c.finish("cli", nil, "audit")
	denied, err := c.as("admin", server).Do(t.Context(), "acl", "log").Slice()
	require.NoError(t, err)
	require.Empty(t, denied, "ACL LOG")
}
