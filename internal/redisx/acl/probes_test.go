package acl

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestProbesAreComplete: each probe has as many arguments as its command needs.
func TestProbesAreComplete(t *testing.T) {
	t.Parallel()
	c := redistest.Server(t).Client()
	for _, name := range append(Roles(), All) {
		u, err := Of(name, "bulk-action:")
		require.NoError(t, err)
		for _, p := range u.probes() {
			words := strings.Fields(p.command)
			full := words[0]
			if slices.Contains(u.Commands, words[0]+"|"+words[min(1, len(words)-1)]) {
				full += "|" + words[1]
			}
			info, err := c.Do(t.Context(), "command", "info", full).Slice()
			require.NoError(t, err)
			arity := info[0].([]any)[1].(int64) // negative: at least so many words
			require.True(t, int64(len(words)) == arity || arity < 0 && int64(len(words)) >= -arity, "%s: %d words", p.command, arity)
		}
	}
}
