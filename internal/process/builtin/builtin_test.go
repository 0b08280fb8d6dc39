package builtin

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/process/app"
)

// createProcessors is a helper: it creates the built-in processors in an embedded worker process
// with these settings, and returns their types and the error.
func createProcessors(t *testing.T, settings map[string]string) (types []string, err error) {
	t.Helper()
	host := app.Host{Role: "worker", Processors: new(Config), Settings: settings, Log: slog.New(slog.DiscardHandler)}
	err = app.RunEmbedded(t.Context(), host, func(ctx context.Context, p *app.Process) error {
		set := processors{process: p, config: p.Config.Processors.(*Config)}
		err := set.create(ctx)
		for _, created := range set.list {
			types = append(types, created.Type())
		}
		return err
	})
	return types, err
}

// TestMissingAccountFilesAreReportedTogether: all files of accounts that can't be read are reported
// at once, each with its variable.
func TestMissingAccountFilesAreReportedTogether(t *testing.T) {
	t.Parallel()
	_, err := createProcessors(t, map[string]string{
		"SMTP_ACCOUNTS_FILE": "/nope/smtp.yaml", "HTTP_PROCESSOR_CREDENTIALS_FILE": "/nope/http.yaml",
		"PUSH_ACCOUNTS_FILE": "/nope/push.yaml",
	})
	require.ErrorIs(t, err, app.ErrConfig)
	for _, variable := range []string{"SMTP_ACCOUNTS_FILE", "HTTP_PROCESSOR_CREDENTIALS_FILE", "PUSH_ACCOUNTS_FILE"} {
		require.ErrorContains(t, err, "\nBULKACTION_"+variable+": ")
	}
}

// TestNoopInLowerCase: with noop in WORKER_TYPES, the worker has the processor NOOP. Without
// WORKER_TYPES, it does not have it.
func TestNoopInLowerCase(t *testing.T) {
	t.Parallel()
	types, err := createProcessors(t, map[string]string{"WORKER_TYPES": "noop"})
	require.NoError(t, err)
	require.Contains(t, types, "NOOP")
	types, err = createProcessors(t, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"SEND_EMAIL", "HTTP", "HTTP_BATCH"}, types)
}
