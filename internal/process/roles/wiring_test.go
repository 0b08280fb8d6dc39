package roles

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestTogether: Together returns the error of a role, and nil if a stop interrupts the start of
// roles.
func TestTogether(t *testing.T) {
	t.Parallel()
	p := &app.Process{Role: "all", Tel: telemetry.Nop()}
	starting := func(ctx context.Context, _ *app.Process, _ Base) error {
		<-ctx.Done()
		return ctx.Err()
	}
	broken := errors.New("broken")
	fails := func(ctx context.Context, _ *app.Process, _ Base) error { return errors.Join(broken, ctx.Err()) }
	err := Together(t.Context(), p, Base{}, map[string]Role{"ingest": starting, "worker": fails})
	require.ErrorIs(t, err, broken)
	require.NotErrorIs(t, err, context.Canceled)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, Together(ctx, p, Base{}, map[string]Role{"ingest": starting, "worker": starting}))
	require.ErrorIs(t, Together(ctx, p, Base{}, map[string]Role{"ingest": starting, "worker": fails}), broken)
}

// TestRightsTakenAway: a process whose Redis user loses a right while it runs logs that once, and
// is not ready until the right is back.
func TestRightsTakenAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	p := &app.Process{Role: "worker", Tel: telemetry.Nop()}
	p.Config.Redis.KeyPrefix = "bulk-action:"
	r, err := newRights(p)
	require.NoError(t, err)
	require.Equal(t, "worker", r.user.Name)
	admin := server.Client()
	set := func(rules string) {
		t.Helper()
		args := []any{"acl", "setuser", "worker"}
		for rule := range strings.FieldsSeq(rules) {
			args = append(args, rule)
		}
		require.NoError(t, admin.Do(t.Context(), args...).Err())
	}
	set(r.user.Rules(acl.Hash("sesame")))
	r.conn, err = redisx.Connect(t.Context(), redisx.Config{URL: "redis://worker:sesame@" + server.Addr()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.conn.Close() })
	var said bytes.Buffer
	r.log = slog.New(slog.NewTextHandler(&said, nil))

	r.step(t.Context())
	require.NoError(t, r.ready(t.Context()))
	require.Empty(t, said.String())

	set("-xack")
	r.step(t.Context())
	require.ErrorContains(t, r.ready(t.Context()), "may not run xack")
	r.step(t.Context())
	require.Equal(t, 1, strings.Count(said.String(), "the redis user has lost rights"))

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.step(ended) // an error that says nothing about rights changes nothing
	require.Error(t, r.ready(t.Context()))

	set("+xack")
	r.step(t.Context())
	require.NoError(t, r.ready(t.Context()))
	require.Equal(t, 1, strings.Count(said.String(), "the redis user has all rights again"))
}

// TestRightsOfSeveralRoles: the commands that the process dev needs include those of each role.
func TestRightsOfSeveralRoles(t *testing.T) {
	t.Parallel()
	p := &app.Process{Role: "dev", Tel: telemetry.Nop()}
	r, err := newRights(p)
	require.NoError(t, err)
	require.Equal(t, acl.All, r.user.Name)
	for _, role := range acl.Roles() {
		u, err := acl.Of(role, "")
		require.NoError(t, err)
		for _, command := range u.Commands {
			require.True(t, slices.Contains(r.user.Commands, command), "%s: %s", role, command)
		}
	}
}

// TestRolesStopInTheOrderOfThePipeline: when roles stop together, the aggregator stops after the
// worker has ended its jobs, and the watcher after the aggregator.
func TestRolesStopInTheOrderOfThePipeline(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var ended []string
	named := map[string]Role{}
	for _, name := range Names {
		named[name] = func(ctx context.Context, _ *app.Process, _ Base) error {
			<-ctx.Done()
			if name == "worker" {
				<-time.After(20 * time.Millisecond) // a job that runs
			}
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, name)
			return ctx.Err()
		}
	}
	p := &app.Process{Config: app.Config{Worker: app.WorkerConfig{ShutdownGracePeriod: time.Minute}}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, Together(ctx, p, Base{}, named))
	require.Equal(t, []string{"aggregator", "watcher"}, ended[4:]) // so the worker ended before

	failure := errors.New("failed")
	named["watcher"] = func(context.Context, *app.Process, Base) error { return failure }
	require.ErrorIs(t, Together(t.Context(), p, Base{}, named), failure)
}
