package ingest

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
)

func TestUnknownGuardIsSaidOnce(t *testing.T) {
	err := guardError(fmt.Errorf("guard nope: %w", guard.ErrUnknownGuard))
	require.ErrorIs(t, err, api.ErrNotFound)
	require.EqualError(t, err, "guard nope: no such guard")
}
