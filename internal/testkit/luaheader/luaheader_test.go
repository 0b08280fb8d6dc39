package luaheader

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSignatures: Of reads the keys, the fixed and the repeated arguments of a header. Takes
// accepts a call with two fixed and two repeated arguments. localsOf finds the two locals that hold
// one argument each.
func TestSignatures(t *testing.T) {
	t.Parallel()
	s := Of(t, strings.Join([]string{
		"-- x: a purpose", "-- KEYS", "--   1  base    the prefix", "-- ARGV", "--   1  group  -   an id,",
		"--                 which goes on", "--   2  lease  ms  its length", "--   then for each job:",
		"--   +1  ordinal  n  its number", "--   +2  code     -  its error", "-- Twice: the same",
	}, "\n"))
	require.Equal(t, Signature{
		Keys:     []string{"base"},
		Fixed:    []Argument{{"group", "-"}, {"lease", "ms"}},
		Repeated: [][]Argument{{{"ordinal", "n"}, {"code", "-"}}},
	}, s)
	s.Takes(t, "x", []any{"g", 5, 1, "E"})
	require.Equal(t, map[int]string{1: "group", 2: "lease"},
		localsOf("local group, LEASE, n = ARGV[1], tonumber(ARGV[2]), f(ARGV[3], 4)\n"))
}
