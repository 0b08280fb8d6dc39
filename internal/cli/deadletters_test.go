package cli

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDeadLettersFilters(t *testing.T) {
	f := newFakeAPI(t)
	f.deadLetterCount = 7
	for args, lines := range map[string]int{
		"--code SMTP_550": 7, "--code LOST": 0, "--group g": 7, "--group other": 0, "--group g --code SMTP_550 --limit 5": 5, "--group g --code LOST": 0,
	} {
		got := f.exec(t.Context(), console{}, append([]string{"dead-letters", "--json"}, strings.Fields(args)...)...)
		require.Equal(t, exitOK, got.code, args)
		require.Equal(t, lines, strings.Count(got.out, "\n"), args)
		require.Equal(t, lines == 5, got.err != "", args)
	}
}
