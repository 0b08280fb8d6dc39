package k8s

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	keda "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const patience = 60 * time.Second

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getenv(proctest.EnvBinaries) == "" { // with the modules of the project, not with those of this one
			dir, err := os.MkdirTemp("", "k8s-bin-")
			if err != nil {
				panic(err)
			}
			defer func() { _ = os.RemoveAll(dir) }()
			build := exec.Command("go", "build", "-C", root, "-buildvcs=false", "-o", dir+"/", "./cmd/bulkaction")
			if out, err := build.CombinedOutput(); err != nil {
				panic(string(out))
			}
			_ = os.Setenv(proctest.EnvBinaries, dir)
		}
		return proctest.Run(m)
	}())
}

// TestVariables: each variable of a container exists for its role.
func TestVariables(t *testing.T) {
	t.Parallel()
	name := regexp.MustCompile(`\b(BULKACTION|OTEL)_[A-Z0-9_]+`)
	documented := name.FindAllString(string(read(t, filepath.Join(root, "docs/configuration.md"))), -1)
	known := map[string][]string{}
	for _, file := range valueFiles(t) {
		r, _ := decode(t, read(t, file))
		for _, d := range all[*apps.Deployment](r) {
			if known[role(d)] == nil {
				help := proctest.Start(t, "bulkaction", nil, role(d), "-help")
				require.Zero(t, help.Wait(patience))
				known[role(d)] = append(name.FindAllString(help.Output(), -1), "GOMEMLIMIT")
			}
			for variable := range environment(d) {
				if strings.HasPrefix(variable, "OTEL_") {
					require.Contains(t, documented, variable)
				} else {
					require.Contains(t, known[role(d)], variable, d.Name)
				}
			}
		}
	}
}

// cluster stands in for Kubernetes: it runs the containers of a release as processes on loopback.
type cluster struct {
	t         *testing.T
	release   release
	files     map[string]string // the file of a Secret, by its variable
	env       map[string]string // replaced variables
	authority *redistest.Authority
	processes map[string]*proctest.Process // by the names of their Deployments
}

func newCluster(t *testing.T, values []byte) *cluster {
	t.Helper()
	r, _ := decode(t, values)
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o440))
		return path
	}
	made := func(args ...string) string {
		path := filepath.Join(dir, args[0])
		require.Zero(t, proctest.Start(t, "bulkaction", nil, append(args, path)...).Wait(patience))
		require.NoError(t, os.Chmod(path, 0o440))
		return path
	}
	redis := redistest.Server(t, proctest.Users(t))
	authority := redistest.NewAuthority(t)
	pair := authority.Issue()
	collector := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(collector.Close)
	return &cluster{
		t: t, release: r, authority: authority, processes: map[string]*proctest.Process{},
		files: map[string]string{
			"BULKACTION_REDIS_URL_FILE":           file("url", redis.URL()+"\n"),
			"BULKACTION_REDIS_PASSWORD_FILE":      file("password", proctest.Password+"\n"),
			"BULKACTION_AUTH_PEPPER_FILE":         file("pepper", rand.Text()+rand.Text()),
			"BULKACTION_AUTH_KEYS_FILE":           file("keys", "# none\n"),
			"BULKACTION_ADMIN_TOKEN_FILE":         file("token", rand.Text()),
			"BULKACTION_SMTP_PASSWORD_FILE":       file("smtp", "secret"),
			"BULKACTION_CALLBACK_MASTER_KEY_FILE": made("callback", "new-key"),
			"BULKACTION_BROKER_TOKEN_KEYS_FILE":   made("room", "new-key"),
			"BULKACTION_API_TLS_CERT_FILE":        pair.CertFile, "BULKACTION_API_TLS_KEY_FILE": pair.KeyFile,
			"BULKACTION_BROKER_TLS_CERT_FILE": pair.CertFile, "BULKACTION_BROKER_TLS_KEY_FILE": pair.KeyFile,
		},
		env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": collector.URL},
	}
}

// here returns the environment of a container with the files and addresses of this host.
func (c *cluster) here(d *apps.Deployment) map[string]string {
	env := environment(d)
	for variable, value := range env {
		switch replaced, ok := c.env[variable]; {
		case ok:
			env[variable] = replaced
		case strings.HasPrefix(value, "/run/secrets/"):
			require.Contains(c.t, c.files, variable)
			env[variable] = c.files[variable]
		case strings.HasPrefix(value, "0.0.0.0:"):
			env[variable] = "127.0.0.1:0"
		}
	}
	return env
}

func (c *cluster) deployment(name string) *apps.Deployment {
	return c.release["Deployment "+name].(*apps.Deployment)
}

// run starts a process of a Deployment.
func (c *cluster) run(d *apps.Deployment) *proctest.Process {
	command := d.Spec.Template.Spec.Containers[0].Command
	require.Equal(c.t, "/usr/local/bin/bulkaction", command[0])
	return proctest.Start(c.t, "bulkaction", c.here(d), command[1:]...)
}

// start starts one process of each Deployment whose role is not left out.
func (c *cluster) start(without string) {
	for _, d := range all[*apps.Deployment](c.release) {
		if role(d) != without {
			c.processes[d.Name] = c.run(d)
		}
	}
}

// get asks until the answer is 200, and returns its body.
func (c *cluster) get(address, bearer string) []byte {
	c.t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(read(c.t, c.authority.CAFile))
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	var body []byte
	require.Eventually(c.t, func() bool {
		request, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, address, nil)
		require.NoError(c.t, err)
		if bearer != "" {
			request.Header.Set("Authorization", "Bearer "+bearer)
		}
		response, err := client.Do(request)
		if err != nil {
			c.t.Log(address, err)
			return false
		}
		defer response.Body.Close()
		body, err = io.ReadAll(response.Body)
		return err == nil && response.StatusCode == http.StatusOK
	}, patience, 50*time.Millisecond, "%s does not answer 200", address)
	return body
}

// key creates an API key as the notes of the chart say, in a container of ingest.
func (c *cluster) key(role string) string {
	c.t.Helper()
	p := proctest.Start(c.t, "bulkaction", c.here(c.deployment("bulkaction-ingest")), "key", "create", "--role", role, "--name", role)
	require.Zero(c.t, p.Wait(patience), p.Log())
	return strings.TrimSpace(p.Stdout())
}

// TestProcesses runs the containers of two releases: each probe is answered, keys can be made, KEDA's
// trigger and the ServiceMonitor can read what they need, and SIGTERM ends everything in time.
func TestProcesses(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"values/default.yaml", "values/full.yaml"} {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, read(t, file))
			c.start("")
			for name, p := range c.processes {
				c.probes(name, p)
			}
			ingest := c.deployment("bulkaction-ingest")
			scheme := "http"
			if _, ok := environment(ingest)["BULKACTION_API_TLS_CERT_FILE"]; ok {
				scheme = "https"
			}
			api := scheme + "://" + c.processes[ingest.Name].APIAddr()
			c.get(api+"/openapi.yaml", "")
			c.get(api+"/v1/groups", c.key("admin"))
			if broker := c.processes["bulkaction-broker"]; broker != nil {
				broker.BrokerAddr()
			}
			for _, s := range all[*keda.ScaledObject](c.release) {
				trigger, err := url.Parse(s.Spec.Triggers[0].Metadata["url"])
				require.NoError(t, err)
				require.Equal(t, scheme, trigger.Scheme)
				var answer map[string]any
				require.NoError(t, json.Unmarshal(c.get(api+trigger.RequestURI(), c.key("metrics")), &answer))
				require.IsType(t, 0.0, answer[s.Spec.Triggers[0].Metadata["valueLocation"]])
			}
			for name, p := range c.processes {
				token := ""
				if _, ok := environment(c.deployment(name))["BULKACTION_ADMIN_TOKEN_FILE"]; ok {
					token = string(read(t, c.files["BULKACTION_ADMIN_TOKEN_FILE"]))
				}
				require.Contains(t, string(c.get("http://"+p.AdminAddr()+"/metrics", token)), "bulk_action_")
			}
			for _, p := range c.processes {
				p.Signal(syscall.SIGTERM)
			}
			for name, p := range c.processes {
				grace := time.Duration(*c.deployment(name).Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
				require.Zero(t, p.Wait(grace), name)
				require.NotContains(t, p.Output(), "unknown variable", name)
			}
		})
	}
}

// probes asks what the probes of a Deployment ask, at the port that its process really has.
func (c *cluster) probes(name string, p *proctest.Process) {
	container := c.deployment(name).Spec.Template.Spec.Containers[0]
	_, listens, err := net.SplitHostPort(environment(c.deployment(name))["BULKACTION_ADMIN_ADDR"])
	require.NoError(c.t, err)
	for _, probe := range []*core.Probe{container.StartupProbe, container.LivenessProbe, container.ReadinessProbe} {
		var ports []string
		for _, port := range container.Ports {
			if port.Name == probe.HTTPGet.Port.StrVal {
				ports = append(ports, fmt.Sprint(port.ContainerPort))
			}
		}
		require.Equal(c.t, []string{listens}, ports, name)
		c.get("http://"+p.AdminAddr()+probe.HTTPGet.Path, "")
	}
}
