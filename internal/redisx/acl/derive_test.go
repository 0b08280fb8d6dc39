//go:build !race

package acl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/redisx/acl/derive"
)

// TestTheTableIsThatOfTheCode: the generated table of each role's needs (roles_gen.go) is the same
// as package derive finds now in the code. This takes about 40 s of CPU time, so the test does not
// run under the race detector.
func TestTheTableIsThatOfTheCode(t *testing.T) {
	t.Parallel()
	needs, err := derive.Of("../../..", derive.Commands{
		OfMethod: acl.CommandsOfMethod, OfScript: acl.CommandsOf, IsCommand: acl.IsCommand,
	})
	require.NoError(t, err)
	for name, n := range needs {
		scripts, commands, keys, channels := acl.NeedOf(name)
		require.Equal(t, n, derive.Need{Scripts: scripts, Commands: commands, Keys: keys, Channels: channels},
			"%s: run `go generate ./internal/redisx/acl`", name)
	}
	require.Len(t, needs, len(derive.Users))
}
