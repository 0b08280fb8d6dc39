package integration

import (
	"context"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestAllRolesInOneProcess: one process has all roles, a second one only a worker. Both are listed
// as workers, a group completes, and both processes exit with 0 after SIGTERM.
func TestAllRolesInOneProcess(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, proctest.Users(t))
	env := func(user string) map[string]string {
		return map[string]string{"BULKACTION_REDIS_URL": proctest.AsUser(user, server.URL()), "BULKACTION_WORKER_TYPES": "NOOP"}
	}
	all := proctest.Start(t, "bulkaction", env("all"), "all")
	worker := proctest.Start(t, "bulkaction", env("worker"), "worker")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := client.NewAPI("http://" + all.APIAddr())
	jobs := make([]client.NewJob, 50)
	for i := range jobs {
		jobs[i] = client.NewJob{Payload: map[string]int{"n": i}}
	}
	_, err := a.Submit(ctx, client.Submission{ID: "g", Type: "NOOP", Jobs: jobs, Seal: true})
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.Equal(t, api.StatusCompleted, g.Status)
	require.Eventually(t, func() bool {
		stats, err := a.Stats(ctx)
		return err == nil && len(stats.Workers) == 2
	}, time.Minute, 20*time.Millisecond, "two worker processes are listed")
	for _, p := range []*proctest.Process{all, worker} {
		p.Signal(syscall.SIGTERM)
		require.Zero(t, p.Wait(time.Minute))
	}
	(&system{t: t, env: map[string]string{"BULKACTION_REDIS_URL": server.URL()}}).requireNoDenial()
}

// TestRoleBinaries: each role runs as its own binary of cmd/, the broker too, and a group of 200
// jobs has its expected outcome.
func TestRoleBinaries(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	build := []string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", folder}
	named := append([]string{"broker"}, roles...)
	for _, role := range named {
		build = append(build, "../../cmd/"+role)
	}
	out, err := exec.Command("go", build...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	opts := []option{env("BROKER_TOKEN_KEYS_FILE", tokenKeys(t)), env("BROKER_ADDR", "127.0.0.1:0")}
	for _, role := range named {
		opts = append(opts, binary(role, filepath.Join(folder, role)))
	}
	s := start(t, opts...)
	s.add("broker")
	l := newLoad("acme", 200)
	s.submit(l.group)
	l.check(t, s.wait(l.group.ID))
}

// TestEmbeddedExample: examples/embedded exits with 0 by itself, and prints that 100 of 100 jobs of
// its group are done.
func TestEmbeddedExample(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stdout, err := exec.CommandContext(ctx, proctest.Path(t, "embedded"), "-redis", redistest.Server(t).URL(), "-addr", "127.0.0.1:0").Output()
	require.NoError(t, err)
	require.Equal(t, "COMPLETED: 100 of 100 invoices charged, 5050 cents\n", string(stdout))
}
