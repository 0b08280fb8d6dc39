package integration

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	wiring "github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// TestRoleByName: `bulkaction ROLE` and a link with the name of the role, as in the image, run the
// role as a process.
func TestRoleByName(t *testing.T) {
	t.Parallel()
	for _, role := range wiring.WithBroker {
		link := filepath.Join(t.TempDir(), role)
		require.NoError(t, os.Symlink(proctest.Path(t, "bulkaction"), link))
		for program, args := range map[string][]string{"bulkaction": {role, "-version"}, link: {"-version"}} {
			p := proctest.Start(t, program, nil, args...)
			require.Zero(t, p.Wait(patience), p.Log())
			require.Contains(t, p.Stdout(), "bulkaction-"+role+" ")
		}
	}
}
