package roles

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// All files of accounts that can't be read are reported at once, each with its variable.
func TestMissingAccountFilesAreReportedTogether(t *testing.T) {
	t.Parallel()
	cfg, _, err := app.Load([]string{
		"BULKACTION_SMTP_ACCOUNTS_FILE=/nope/smtp.yaml", "BULKACTION_HTTP_CREDENTIALS_FILE=/nope/http.yaml",
		"BULKACTION_PUSH_ACCOUNTS_FILE=/nope/push.yaml",
	})
	require.NoError(t, err)
	set := processors{process: &app.Process{Role: "worker", Config: cfg, Tel: telemetry.Nop()}}
	err = set.create(t.Context())
	require.ErrorIs(t, err, app.ErrConfig)
	for _, variable := range []string{"SMTP_ACCOUNTS_FILE", "HTTP_CREDENTIALS_FILE", "PUSH_ACCOUNTS_FILE"} {
		require.ErrorContains(t, err, "\nBULKACTION_"+variable+": ")
	}
}

// With the type noop, the worker knows NOOP and can say that it is meant.
func TestNoopInLowerCase(t *testing.T) {
	t.Parallel()
	cfg, _, err := app.Load([]string{"BULKACTION_WORKER_TYPES=noop"})
	require.NoError(t, err)
	set := processors{process: &app.Process{Role: "worker", Config: cfg, Tel: telemetry.Nop()}}
	require.NoError(t, set.create(t.Context()))
	require.Equal(t, "NOOP", set.list[len(set.list)-1].Type())
}
