package cli

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDeadLettersFilters: the command sends its filters to the server, and lists all seven dead
// letters. A server's answer has only a part of them, so the command calls until there is no
// cursor.
func TestDeadLettersFilters(t *testing.T) {
	f := newFakeAPI(t)
	f.deadLetterCount = 7
	for args, want := range map[string]url.Values{
		"":                    {},
		"--code SMTP_550":     {"code": {"SMTP_550"}},
		"--group g --limit 0": {"group": {"g"}},
		"--tenant acme --type T --since 2026-01-02T15:04:05Z": {
			"tenant": {"acme"}, "type": {"T"}, "since": {"2026-01-02T15:04:05Z"},
		},
	} {
		f.queries = nil
		got := f.exec(t.Context(), console{}, append([]string{"dead-letters", "--json"}, strings.Fields(args)...)...)
		require.Equal(t, exitOK, got.code, args)
		require.Equal(t, 7, strings.Count(got.out, "\n"), args)
		sent, err := url.ParseQuery(f.queries[0])
		require.NoError(t, err)
		sent.Del("limit")
		require.Equal(t, want, sent, args)
	}
	got := f.exec(t.Context(), console{}, "dead-letters", "--since", "x")
	require.Equal(t, exitUsage, got.code, got.err)
}
