package integration

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func TestSmoke(t *testing.T) {
	t.Parallel()
	s := start(t)
	id := s.submit(client.Group{Type: "NOOP", Jobs: jobs(100, `{}`), Seal: true})
	g := s.wait(id)
	require.Equal(t, api.StatusCompleted, g.Status)
	require.EqualValues(t, 100, g.Counts.Done)
}
