package k8s

import (
	"fmt"
	"maps"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	keda "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	security "k8s.io/pod-security-admission/api"
	standards "k8s.io/pod-security-admission/policy"
	strictjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const root = "../.."

// object is any object of Kubernetes.
type object interface {
	runtime.Object
	meta.Object
}

// release is a rendered chart: its objects by kind and name.
type release map[string]object

// kinds makes an empty object of each kind that the chart may have.
var kinds = map[string]func() object{
	"Deployment":            func() object { return &apps.Deployment{} },
	"PodDisruptionBudget":   func() object { return &policy.PodDisruptionBudget{} },
	"NetworkPolicy":         func() object { return &networking.NetworkPolicy{} },
	"Ingress":               func() object { return &networking.Ingress{} },
	"Service":               func() object { return &core.Service{} },
	"ConfigMap":             func() object { return &core.ConfigMap{} },
	"ScaledObject":          func() object { return &keda.ScaledObject{} },
	"TriggerAuthentication": func() object { return &keda.TriggerAuthentication{} },
	"ServiceMonitor":        func() object { return &monitoring.ServiceMonitor{} },
	"PrometheusRule":        func() object { return &monitoring.PrometheusRule{} },
}

var groups = []string{"apps/v1", "policy/v1", "networking.k8s.io/v1", "v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1"}

// decode renders values and decodes each manifest, whose fields must all exist in the type.
func decode(t *testing.T, values []byte) (release, string) {
	t.Helper()
	manifests, notes, err := Render(filepath.Join(root, chartDir), values)
	require.NoError(t, err)
	r := release{}
	for _, manifest := range manifests {
		var head meta.TypeMeta
		require.NoError(t, yaml.Unmarshal([]byte(manifest), &head), manifest)
		require.Contains(t, kinds, head.Kind)
		require.Contains(t, groups, head.APIVersion)
		o := kinds[head.Kind]()
		data, err := yaml.YAMLToJSONStrict([]byte(manifest))
		require.NoError(t, err, manifest)
		unknown, err := strictjson.UnmarshalStrict(data, o)
		require.NoError(t, err, manifest)
		require.Empty(t, unknown, manifest)
		id := head.Kind + " " + o.GetName()
		require.NotContains(t, r, id, "two objects have one name")
		require.Empty(t, validation.IsDNS1123Label(o.GetName()), id)
		for key, value := range o.GetLabels() {
			require.Empty(t, slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)), id)
		}
		r[id] = o
	}
	return r, notes
}

// all returns the objects of one kind, in the order of their names.
func all[T object](r release) []T {
	var found []T
	for _, id := range slices.Sorted(maps.Keys(r)) {
		if o, ok := r[id].(T); ok {
			found = append(found, o)
		}
	}
	return found
}

// selected returns the names of the Deployments whose pods a selector matches.
func (r release) selected(t *testing.T, selector *meta.LabelSelector) []string {
	t.Helper()
	s, err := meta.LabelSelectorAsSelector(selector)
	require.NoError(t, err)
	var names []string
	for _, d := range all[*apps.Deployment](r) {
		if s.Matches(labels.Set(d.Spec.Template.Labels)) {
			names = append(names, d.Name)
		}
	}
	return names
}

// environment returns the variables of a Deployment's container.
func environment(d *apps.Deployment) map[string]string {
	env := map[string]string{}
	for _, v := range d.Spec.Template.Spec.Containers[0].Env {
		env[v.Name] = v.Value
	}
	return env
}

func role(d *apps.Deployment) string { return d.Labels["app.kubernetes.io/component"] }

func valueFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("values/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 6)
	return files
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return content
}

// TestGenerated: the copies in the chart, and deployments/kubernetes, are those of the sources.
func TestGenerated(t *testing.T) {
	t.Parallel()
	stale, err := Stale(root)
	require.NoError(t, err)
	require.Empty(t, stale, "run `make chart` and commit what it writes")
	files, _, err := Generated(root)
	require.NoError(t, err)
	require.Contains(t, files, chartDir+"/files/rules.yaml")
	require.Contains(t, files, chartDir+"/files/dashboards/overview.json")
}

func TestObjects(t *testing.T) {
	t.Parallel()
	for _, file := range valueFiles(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			r, notes := decode(t, read(t, file))
			require.Contains(t, notes, "key create --role admin")
			require.NotContains(t, notes, "%!")
			want := []string{"aggregator", "dispatcher", "fetcher", "ingest", "watcher", "worker"}
			if strings.Contains(file, "full") {
				want = append(want, "broker")
			}
			got := map[string]bool{}
			for _, d := range all[*apps.Deployment](r) {
				got[role(d)] = true
				checkPod(t, r, d)
			}
			require.ElementsMatch(t, want, slices.Collect(maps.Keys(got)))
			checkNetwork(t, r, strings.Contains(file, "minimal"))
			checkScaling(t, r)
			checkMonitoring(t, r)
		})
	}
}

func checkPod(t *testing.T, r release, d *apps.Deployment) {
	t.Helper()
	pod := d.Spec.Template.Spec
	c := pod.Containers[0]
	require.Equal(t, []string{d.Name}, r.selected(t, d.Spec.Selector), "a selector matches the pods of its Deployment alone")

	evaluator, err := standards.NewEvaluator(standards.DefaultChecks(), nil)
	require.NoError(t, err)
	restricted := security.LevelVersion{Level: security.LevelRestricted, Version: security.LatestVersion()}
	verdict := standards.AggregateCheckResults(evaluator.EvaluatePod(restricted, &d.Spec.Template.ObjectMeta, &pod))
	require.True(t, verdict.Allowed, "%s: %s", d.Name, verdict.ForbiddenDetail())
	require.False(t, *pod.AutomountServiceAccountToken)
	require.False(t, *pod.EnableServiceLinks, "BULKACTION_INGEST_PORT and the like would be unknown settings")
	require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem)
	require.Equal(t, int64(65532), *pod.SecurityContext.RunAsUser)
	require.Len(t, pod.TopologySpreadConstraints, 2)

	for _, amounts := range []core.ResourceList{c.Resources.Requests, c.Resources.Limits} {
		require.Contains(t, amounts, core.ResourceCPU, d.Name)
		require.Contains(t, amounts, core.ResourceMemory, d.Name)
	}
	env := environment(d)
	require.Equal(t, fmt.Sprintf("%.0f", math.Floor(0.9*float64(c.Resources.Limits.Memory().Value()))), env["GOMEMLIMIT"])
	require.NotContains(t, fmt.Sprint(env), "e+", "a number is not written as 1e+06")
	require.Equal(t, "0.0.0.0:9090", env["BULKACTION_ADMIN_ADDR"])

	grace, err := time.ParseDuration(env["BULKACTION_SHUTDOWN_GRACE_PERIOD"])
	require.NoError(t, err)
	drain, _ := time.ParseDuration(env["BULKACTION_API_DRAIN_DELAY"])
	wait := grace + max(15*time.Second, drain+10*time.Second)
	require.Equal(t, int64(wait.Seconds()), *pod.TerminationGracePeriodSeconds, d.Name)

	// A file that a variable names comes from a Secret, and each file of a Secret has its variable.
	var mounted, named []string
	for _, volume := range pod.Volumes {
		if volume.Projected != nil {
			require.Zero(t, *volume.Projected.DefaultMode&0o007, "others may not read secrets")
			for _, source := range volume.Projected.Sources {
				mounted = append(mounted, "/run/secrets/bulkaction/"+source.Secret.Items[0].Path)
			}
		}
	}
	for _, value := range env {
		if strings.HasPrefix(value, "/run/") {
			named = append(named, value)
		}
	}
	require.ElementsMatch(t, mounted, named, d.Name)

	budgets := 0
	for _, budget := range all[*policy.PodDisruptionBudget](r) {
		if slices.Equal(r.selected(t, budget.Spec.Selector), []string{d.Name}) {
			budgets++
			require.Nil(t, budget.Spec.MinAvailable)
			require.NotNil(t, budget.Spec.MaxUnavailable)
		}
	}
	require.Equal(t, 1, budgets, "%s has one PodDisruptionBudget", d.Name)
}

func checkNetwork(t *testing.T, r release, without bool) {
	t.Helper()
	var everything []string
	for _, d := range all[*apps.Deployment](r) {
		everything = append(everything, d.Name)
	}
	// targets requires that all selected pods have a port of this name.
	targets := func(names []string, port intstr.IntOrString) {
		require.NotEmpty(t, names)
		for _, name := range names {
			ports := r["Deployment "+name].(*apps.Deployment).Spec.Template.Spec.Containers[0].Ports
			require.True(t, slices.ContainsFunc(ports, func(p core.ContainerPort) bool { return p.Name == port.StrVal }), "%s: port %s", name, port.StrVal)
		}
	}
	for _, s := range all[*core.Service](r) {
		targets(r.selected(t, &meta.LabelSelector{MatchLabels: s.Spec.Selector}), s.Spec.Ports[0].TargetPort)
	}
	for _, i := range all[*networking.Ingress](r) {
		backend := i.Spec.Rules[0].HTTP.Paths[0].Backend.Service
		service, ok := r["Service "+backend.Name].(*core.Service)
		require.True(t, ok, backend.Name)
		require.Equal(t, service.Spec.Ports[0].Name, backend.Port.Name)
	}
	policies := all[*networking.NetworkPolicy](r)
	require.Equal(t, without, len(policies) == 0)
	denied := without
	for _, p := range policies {
		selected := r.selected(t, &p.Spec.PodSelector)
		require.NotEmpty(t, selected, p.Name)
		require.Len(t, p.Spec.PolicyTypes, 2)
		denied = denied || len(p.Spec.Ingress)+len(p.Spec.Egress) == 0 && slices.Equal(selected, everything)
		for _, rule := range p.Spec.Ingress {
			require.NotEmpty(t, rule.Ports, "%s: no rule opens all ports", p.Name)
			targets(selected, *rule.Ports[0].Port)
		}
		for _, rule := range p.Spec.Egress {
			require.True(t, len(rule.To) > 0 || len(rule.Ports) > 0, "%s: no rule allows everything", p.Name)
			for _, to := range rule.To {
				if to.IPBlock != nil && to.IPBlock.CIDR == "0.0.0.0/0" {
					require.Contains(t, []string{"worker", "watcher"}, role(r["Deployment "+selected[0]].(*apps.Deployment)))
					require.ElementsMatch(t, privateNetworks(t), to.IPBlock.Except, "the networks to which processes don't connect either")
				}
			}
		}
	}
	require.True(t, denied, "one policy denies everything to all pods")
}

// privateNetworks reads the networks of IPv4 that package egress refuses.
func privateNetworks(t *testing.T) []string {
	t.Helper()
	source := string(read(t, filepath.Join(root, "internal/calls/egress/client.go")))
	return regexp.MustCompile(`\d+\.\d+\.\d+\.\d+/\d+`).FindAllString(source[strings.Index(source, `"0.0.0.0/8"`):], -1)
}

func checkScaling(t *testing.T, r release) {
	t.Helper()
	scaled := map[string]*keda.ScaledObject{}
	for _, s := range all[*keda.ScaledObject](r) {
		scaled[s.Spec.ScaleTargetRef.Name] = s
		require.Contains(t, r, "Deployment "+s.Spec.ScaleTargetRef.Name)
		require.LessOrEqual(t, *s.Spec.MinReplicaCount, *s.Spec.MaxReplicaCount)
		require.Equal(t, keda.FallbackBehaviorCurrentReplicasIfHigher, s.Spec.Fallback.Behavior)
		down := s.Spec.Advanced.HorizontalPodAutoscalerConfig.Behavior.ScaleDown
		require.Equal(t, int32(300), *down.StabilizationWindowSeconds)
		require.Equal(t, int32(25), down.Policies[0].Value)

		require.Len(t, s.Spec.Triggers, 1, "of several triggers, the highest would count and not the sum")
		trigger := s.Spec.Triggers[0]
		env := environment(r["Deployment "+s.Spec.ScaleTargetRef.Name].(*apps.Deployment))
		require.Equal(t, "slots_wanted", trigger.Metadata["valueLocation"])
		require.Equal(t, env["BULKACTION_WORKER_COUNT"], trigger.Metadata["targetValue"])
		u, err := url.Parse(trigger.Metadata["url"])
		require.NoError(t, err)
		require.Equal(t, env["BULKACTION_WORKER_TYPES"], u.Query().Get("type"))
		require.Equal(t, "/v1/scale", u.Path)
		service, ok := r["Service "+strings.Split(u.Hostname(), ".")[0]].(*core.Service)
		require.True(t, ok, u.Host)
		require.Equal(t, fmt.Sprint(service.Spec.Ports[0].Port), u.Port())
		_, tls := environment(r["Deployment "+service.Name].(*apps.Deployment))["BULKACTION_API_TLS_CERT_FILE"]
		require.Equal(t, tls, u.Scheme == "https")
		authentication, ok := r["TriggerAuthentication "+trigger.AuthenticationRef.Name].(*keda.TriggerAuthentication)
		require.True(t, ok)
		require.Equal(t, "token", authentication.Spec.SecretTargetRef[0].Parameter)
	}
	for _, d := range all[*apps.Deployment](r) {
		require.Equal(t, scaled[d.Name] == nil, d.Spec.Replicas != nil, "%s has either replicas or scaling", d.Name)
	}
}

func checkMonitoring(t *testing.T, r release) {
	t.Helper()
	for _, m := range all[*monitoring.ServiceMonitor](r) {
		selector, err := meta.LabelSelectorAsSelector(&m.Spec.Selector)
		require.NoError(t, err)
		services := slices.DeleteFunc(all[*core.Service](r), func(s *core.Service) bool { return !selector.Matches(labels.Set(s.Labels)) })
		require.Len(t, services, 1)
		require.Equal(t, services[0].Spec.Ports[0].Name, m.Spec.Endpoints[0].Port)
		require.Len(t, r.selected(t, &meta.LabelSelector{MatchLabels: services[0].Spec.Selector}), len(all[*apps.Deployment](r)))
	}
	for _, rules := range all[*monitoring.PrometheusRule](r) {
		require.NotEmpty(t, rules.Spec.Groups)
	}
	for _, dashboard := range all[*core.ConfigMap](r) {
		require.Len(t, dashboard.Data, 1)
		require.Contains(t, dashboard.Labels, "grafana_dashboard")
	}
}

// TestFull: what can be switched on is there, and by default nothing that needs custom resources.
func TestFull(t *testing.T) {
	t.Parallel()
	full, _ := decode(t, read(t, "values/full.yaml"))
	for kind := range kinds {
		require.True(t, slices.ContainsFunc(slices.Collect(maps.Keys(full)), func(id string) bool { return strings.HasPrefix(id, kind+" ") }), kind)
	}
	plain, _ := decode(t, nil)
	for id := range plain {
		require.Regexp(t, "^(Deployment|PodDisruptionBudget|NetworkPolicy|Service) ", id)
	}
	for _, d := range all[*apps.Deployment](plain) {
		require.Equal(t, int32(2), *d.Spec.Replicas)
		budget := plain["PodDisruptionBudget "+d.Name].(*policy.PodDisruptionBudget)
		require.Equal(t, map[bool]string{true: "25%", false: "1"}[role(d) == "worker"], budget.Spec.MaxUnavailable.String())
	}
}

// TestKubeVersion: the versions that clouds report are accepted, and older ones than the chart needs are not.
func TestKubeVersion(t *testing.T) {
	t.Parallel()
	c, err := loader.LoadDir(filepath.Join(root, chartDir))
	require.NoError(t, err)
	for version, want := range map[string]bool{"v1.26.9": false, "v1.27.0": true, "v1.31.4-gke.100": true, "v1.34.1-eks-1a2b3c": true} {
		require.Equal(t, want, chartutil.IsCompatibleRange(c.Metadata.KubeVersion, version), version)
	}
}

// TestOverrides: values that are empty, 0 or false replace others, and numbers stay numbers.
func TestOverrides(t *testing.T) {
	t.Parallel()
	r, _ := decode(t, []byte(`
env: {BULKACTION_REQUIRE_TENANT: true, BULKACTION_BACKPRESSURE_GLOBAL_RPS: 2000000, BULKACTION_FAIR_QUEUE_ALPHA: 0.5}
defaults: {resources: {limits: {memory: 1.5G}}}
fetcher: {replicas: 0, maxUnavailable: 0, env: {BULKACTION_REQUIRE_TENANT: false, BULKACTION_FAIR_QUEUE_ALPHA: 0}}
workers: [{name: one, image: {repository: mine}}, {name: two, image: {repository: mine}, command: [/bin/two]}]`))
	d := r["Deployment bulkaction-fetcher"].(*apps.Deployment)
	require.Zero(t, *d.Spec.Replicas)
	require.Zero(t, r["PodDisruptionBudget bulkaction-fetcher"].(*policy.PodDisruptionBudget).Spec.MaxUnavailable.IntVal)
	env := environment(d)
	require.Equal(t, []string{"false", "2000000", "0", "1350000000"}, []string{
		env["BULKACTION_REQUIRE_TENANT"], env["BULKACTION_BACKPRESSURE_GLOBAL_RPS"], env["BULKACTION_FAIR_QUEUE_ALPHA"], env["GOMEMLIMIT"],
	})
	env = environment(r["Deployment bulkaction-watcher"].(*apps.Deployment))
	require.Equal(t, []string{"true", "0.5"}, []string{env["BULKACTION_REQUIRE_TENANT"], env["BULKACTION_FAIR_QUEUE_ALPHA"]})
	one := r["Deployment bulkaction-worker-one"].(*apps.Deployment).Spec.Template.Spec.Containers[0]
	require.Empty(t, one.Command, "an image of one's own has its own entry point")
	require.Equal(t, "mine:0.1.0", one.Image)
	require.Equal(t, []string{"/bin/two"}, r["Deployment bulkaction-worker-two"].(*apps.Deployment).Spec.Template.Spec.Containers[0].Command)
}

// TestNames: a name that YAML would read as a number or a boolean stays a name, and a host may have a wildcard.
func TestNames(t *testing.T) {
	t.Parallel()
	r, _ := decode(t, []byte(`
fullnameOverride: "1"
nameOverride: "yes"
imagePullSecrets: ["1"]
redis: {url: "redis://[::1]:6380,redis:6379/0?a=b", usersSecret: "yes", passwordSecret: {name: ""}}
auth: {adminTokenSecret: {name: "2"}}
defaults: {serviceAccountName: "3", priorityClassName: "no"}
ingest: {ingress: {enabled: true, className: "4", host: "*.example.com", tlsSecret: "5"}}
workers: [{name: "6", types: [HTTP], scaling: {enabled: true}}]
scaling: {keySecret: {name: "7"}}
networkPolicy: {redis: {ports: [6379, 6380]}}
monitoring: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}}`))
	require.Equal(t, "*.example.com", r["Ingress 1-ingest"].(*networking.Ingress).Spec.Rules[0].Host)
	require.Equal(t, "6", r["Deployment 1-worker-6"].(*apps.Deployment).Labels["bulkaction.io/worker"])
}

func TestWrongValues(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ values, want string }{
		{"redsi: {}", "redsi"},
		{"redis: {url: localhost:6379}", "redis/url"},
		{"redis: {url: 'redis://worker:secret@redis:6379'}", "put the URL into a Secret"},
		{"redis: {urlSecret: {name: ''}}", "redis.url or redis.urlSecret.name must be set"},
		{"redis: {usersSecret: users, username: all}", "leave redis.username"},
		{"redis: {partitions: 0}", "redis/partitions"},
		{"redis: {url: 'redis://one:6379,two:7000/0'}", "add it to networkPolicy.redis.ports"},
		{"redis: {url: 'redis-sentinel://one/main'}\nnetworkPolicy: {redis: {ports: [6379]}}", "does not allow port 26379"},
		{"otlp: {endpoint: 'http://collector:55680'}", "add it to networkPolicy.otlp.ports"},
		{"workers: null", "missing property 'workers'"},
		{"fetcher: null", "missing property 'fetcher'"},
		{"defaults: {resources: null}", "missing property 'resources'"},
		{"fetcher: {podLabels: {app.kubernetes.io/name: mine}}", "podLabels: the chart sets app.kubernetes.io/name itself"},
		{"env: {lower: 1}", "lower"},
		{"env: {BULKACTION_AUTH: [keys]}", "env/BULKACTION_AUTH"},
		{"env: {BULKACTION_WORKER_COUNT: 5}", "set slots of each entry of workers"},
		{"defaults: {env: {A: b}}", "env"},
		{"defaults: {replicas: two}", "defaults/replicas"},
		{"defaults: {resources: {limits: {memory: lots}}}", "limits/memory"},
		{"fetcher: {shutdownGracePeriodSeconds: 30s}", "fetcher/shutdownGracePeriodSeconds"},
		{"watcher: {maxUnavailable: 120%}", "watcher/maxUnavailable"},
		{"secretFiles: [{env: BULKACTION_SMTP_PASSWORD_FILE, secret: smtp}]", "key"},
		{"broker: {enabled: true}", "broker.publicURL and broker.tokenKeysSecret.name"},
		{"broker: {publicURL: 'http://wait.example.com'}", "broker/publicURL"},
		{"ingest: {ingress: {enabled: true}}", "ingest.ingress.host must be set"},
		{"workers: [{types: [HTTP]}]", "name"},
		{"workers: [{name: Mail}]", "workers/0/name"},
		{"workers: [{name: a}, {name: a}]", "two entries have the name a"},
		{"workers: [{name: a, types: ['A,B']}]", "workers/0/types/0"},
		{"workers: [{name: a, slots: 0}]", "workers/0/slots"},
		{"workers: [{name: a, env: {BULKACTION_WORKER_TYPES: A}}]", "set types of each entry of workers"},
		{"workers: [{name: a, scaling: {enabled: true}}]", "must name its types"},
		{"workers: [{name: a, types: [A], scaling: {enabled: true, min: 5, max: 2}}]", "scaling.min is above scaling.max"},
		{
			"workers: [{name: a, types: [A, B], scaling: {enabled: true}}, {name: b, types: [B], scaling: {enabled: true}}]",
			"the type B is in two entries with scaling",
		},
		{"networkPolicy: {internetExcept: [private]}", "networkPolicy/internetExcept/0"},
		{"monitoring: {grafana: {enabled: 'yes'}}", "monitoring/grafana/enabled"},
	} {
		_, _, err := Render(filepath.Join(root, chartDir), []byte(c.values))
		require.ErrorContains(t, err, c.want, c.values)
	}
}
