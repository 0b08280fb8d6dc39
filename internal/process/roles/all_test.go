package roles

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/telemetry"
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
	err := Together(t.Context(), p, Base{}, map[string]BasedRole{"ingest": starting, "worker": fails})
	require.ErrorIs(t, err, broken)
	require.NotErrorIs(t, err, context.Canceled)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, Together(ctx, p, Base{}, map[string]BasedRole{"ingest": starting, "worker": starting}))
	require.ErrorIs(t, Together(ctx, p, Base{}, map[string]BasedRole{"ingest": starting, "worker": fails}), broken)
}
