package k8s

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	keda "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

const (
	jobs   = 200_000
	runMS  = 50
	faster = 20 // all times of the autoscaler are divided by this
	// drainSeconds of the values: faster × the time in which the jobs should be done here.
	scalingValues = `
workers: [{name: noop, types: [NOOP], slots: 20, scaling: {enabled: true, max: 20}}]
scaling: {drainSeconds: 1200}`
)

// autoscaler scales one Deployment as KEDA and the HorizontalPodAutoscaler that it makes do with a
// ScaledObject: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/.
// The algorithm is that of pkg/controller/podautoscaler/horizontal.go with one metric of the kind
// AverageValue. Instead of pods it starts and stops processes.
type autoscaler struct {
	c       *cluster
	spec    keda.ScaledObjectSpec
	url     string
	key     string
	pods    []*proctest.Process
	stopped []*proctest.Process
	wanted  []recommendation
	changes []change
}

type recommendation struct {
	at   time.Time
	pods int
}

type change struct {
	at time.Time
	by int
}

const syncPeriod = 15 * time.Second / faster

func newAutoscaler(c *cluster, base, key string) *autoscaler {
	spec := all[*keda.ScaledObject](c.release)[0].Spec
	drain := fmt.Sprintf("drain=%ds", 1200/faster)
	_, path, _ := strings.Cut(spec.Triggers[0].Metadata["url"], ".svc:8080")
	return &autoscaler{c: c, spec: spec, key: key, url: base + strings.Replace(path, "drain=1200s", drain, 1)}
}

// scale starts or stops processes until there are n.
func (a *autoscaler) scale(n int) {
	if by := n - len(a.pods); by != 0 {
		a.changes = append(a.changes, change{time.Now(), by})
		a.c.t.Logf("%d → %d workers", len(a.pods), n)
	}
	for len(a.pods) < n {
		a.pods = append(a.pods, a.c.run(a.c.deployment(a.spec.ScaleTargetRef.Name)))
	}
	for len(a.pods) > n {
		last := a.pods[len(a.pods)-1]
		last.Signal(syscall.SIGTERM)
		a.stopped, a.pods = append(a.stopped, last), a.pods[:len(a.pods)-1]
	}
}

// changed returns by how much the number of pods rose, or fell, in the last period.
func (a *autoscaler) changed(period time.Duration, sign int) int {
	sum := 0
	for _, c := range a.changes {
		if time.Since(c.at) < period && c.by*sign > 0 {
			sum += c.by * sign
		}
	}
	return sum
}

// step is one round of the controller.
func (a *autoscaler) step() api.Scale {
	var answer api.Scale
	require.NoError(a.c.t, json.Unmarshal(a.c.get(a.url, a.key), &answer))
	target, err := strconv.ParseFloat(a.spec.Triggers[0].Metadata["targetValue"], 64)
	require.NoError(a.c.t, err)
	current := len(a.pods)
	desired := current
	if ratio := float64(answer.SlotsWanted) / (target * float64(current)); math.Abs(1-ratio) > 0.1 {
		desired = int(math.Ceil(float64(answer.SlotsWanted) / target))
	}
	a.wanted = append(a.wanted, recommendation{time.Now(), desired})
	down := a.spec.Advanced.HorizontalPodAutoscalerConfig.Behavior.ScaleDown
	window := time.Duration(*down.StabilizationWindowSeconds) * time.Second / faster
	if desired < current {
		for _, r := range a.wanted {
			if time.Since(r.at) < window {
				desired = max(desired, min(r.pods, current))
			}
		}
		period := time.Duration(down.Policies[0].PeriodSeconds) * time.Second / faster
		before := float64(current + a.changed(period, -1))
		desired = max(desired, int(before*(1-float64(down.Policies[0].Value)/100)))
	} else {
		before := current - a.changed(15*time.Second/faster, 1) // the default policies: 4 pods or 100% in 15 s
		desired = min(desired, max(before+4, 2*before))
	}
	a.scale(min(max(desired, int(*a.spec.MinReplicaCount)), int(*a.spec.MaxReplicaCount)))
	return answer
}

// until runs rounds until done, and fails if that takes too long.
func (a *autoscaler) until(what string, done func(api.Scale) bool) {
	a.c.t.Helper()
	tick := time.NewTicker(syncPeriod)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Minute); !done(a.step()); <-tick.C {
		require.True(a.c.t, time.Now().Before(deadline), what)
	}
}

// turns counts how often the number of pods changed its direction.
func (a *autoscaler) turns() (turns int) {
	for i := 1; i < len(a.changes); i++ {
		if (a.changes[i].by > 0) != (a.changes[i-1].by > 0) {
			turns++
		}
	}
	return turns
}

// operator calls the command line as an operator.
type operator struct {
	c   *cluster
	env map[string]string
}

func (o operator) do(args ...string) string {
	o.c.t.Helper()
	p := proctest.Start(o.c.t, "bulkaction", o.env, args...)
	require.Zero(o.c.t, p.Wait(5*time.Minute), p.Log())
	return p.Stdout()
}

// submit stores a group of equal jobs while their type is paused, and lets them run.
func (o operator) submit(group string, n, milliseconds int) {
	o.c.t.Helper()
	path := filepath.Join(o.c.t.TempDir(), group+".ndjson")
	line := fmt.Sprintf("{\"payload\":{\"sleep_ms\":%d}}\n", milliseconds)
	require.NoError(o.c.t, os.WriteFile(path, []byte(strings.Repeat(line, n)), 0o600))
	o.do("type", "pause", "NOOP")
	o.do("submit", "--type", "NOOP", "--tenant", "acme", "--id", group, "--file", path)
	o.do("type", "resume", "NOOP")
}

// done reports whether all n jobs of a group are done.
func (o operator) done(group string, n int) bool {
	o.c.t.Helper()
	var g api.Group
	require.NoError(o.c.t, json.Unmarshal(o.c.get(o.env["BULKACTION_API"]+"/v1/groups/"+group, o.env["BULKACTION_API_KEY"]), &g))
	require.Zero(o.c.t, g.Counts.Failed)
	return g.Counts.Done == int64(n) && g.Status == api.StatusCompleted
}

// TestScaling: with the ScaledObject of the chart, workers are started and stopped so that a backlog
// is done about as fast as with the right number of workers from the start, without swinging, and
// without more workers where a rate limit is what jobs wait for.
func TestScaling(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some minutes: left out with -short")
	}
	c := newCluster(t, []byte(scalingValues))
	c.start("worker")
	base := "http://" + c.processes["bulkaction-ingest"].APIAddr()
	c.processes["bulkaction-ingest"].WaitReady()
	o := operator{c, map[string]string{"BULKACTION_API": base, "BULKACTION_API_KEY": c.key("admin")}}
	a := newAutoscaler(c, base, c.key("metrics"))
	require.NotNil(t, c.deployment(a.spec.ScaleTargetRef.Name))
	require.Nil(t, c.release["Deployment "+a.spec.ScaleTargetRef.Name].(*apps.Deployment).Spec.Replicas)

	const right = jobs * runMS / 1000 * faster / 1200 / 20 // slots a worker
	a.scale(right + 1)
	for _, pod := range a.pods {
		pod.WaitReady()
	}
	o.submit("fixed", jobs, runMS)
	start := time.Now()
	require.Eventually(t, func() bool { return o.done("fixed", jobs) }, 10*time.Minute, syncPeriod)
	fixed := time.Since(start)

	a.scale(1)
	a.changes, a.wanted = nil, nil
	o.submit("scaled", jobs, runMS)
	start = time.Now()
	a.until("the jobs are done", func(api.Scale) bool { return o.done("scaled", jobs) })
	scaled := time.Since(start)
	t.Logf("fixed: %s with %d workers; scaled: %s, %.2f × as long", fixed, right+1, scaled, scaled.Seconds()/fixed.Seconds())
	require.Less(t, scaled.Seconds(), 1.3*fixed.Seconds())
	a.until("one worker is left", func(api.Scale) bool { return len(a.pods) == 1 })
	require.LessOrEqual(t, a.turns(), 1, "%v", a.changes)

	// A backlog behind 5 jobs a second of 100 ms needs one slot.
	a.changes = nil
	o.do("type", "set", "NOOP", "--rps", "5")
	o.submit("slow", 5000, 100)
	rounds := 0
	a.until("the limit holds jobs back", func(s api.Scale) bool {
		if s.RateBound {
			rounds++
		}
		return rounds == 20
	})
	require.Empty(t, a.changes)
	o.do("cancel", "slow")

	// One behind 50 a second of 2 s needs 100 slots: five workers. The mean run time is learned.
	o.do("type", "set", "NOOP", "--rps", "50")
	o.submit("long", 20000, 2000)
	rounds = 0
	a.until("five workers are enough", func(api.Scale) bool {
		require.LessOrEqual(t, len(a.pods), 6)
		rounds = map[bool]int{true: rounds + 1}[len(a.pods) == 5]
		return rounds == 20
	})
	o.do("cancel", "long")

	for _, pod := range a.pods {
		pod.Signal(syscall.SIGTERM)
	}
	for _, pod := range slices.Concat(a.stopped, a.pods) {
		require.Zero(t, pod.Wait(patience))
	}
	require.True(t, o.done("fixed", jobs) && o.done("scaled", jobs))
	audit := proctest.Start(t, "bulkaction", c.here(c.deployment("bulkaction-watcher")), "audit")
	require.Zero(t, audit.Wait(patience), audit.Log())
}
