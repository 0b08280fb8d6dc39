package apivalue_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/groups/apivalue"
)

func TestTimes(t *testing.T) {
	t.Parallel()
	early, late := time.Unix(1, 1_500_000), time.Unix(2, 0)
	require.Equal(t, late, apivalue.Latest(early, late, time.Time{}))
	require.Equal(t, late, apivalue.Latest(late, early))
	require.Nil(t, apivalue.TimeIfAfter(early, early))
	require.Equal(t, time.Unix(1, 1_000_000).UTC(), *apivalue.TimeIfAfter(early, time.Time{}))
}

func TestRound(t *testing.T) {
	t.Parallel()
	require.InDelta(t, 2.3, apivalue.Round(2.26, 10), 1e-12)
}
