package api_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// TestProblemsAreDocumented: the table of docs/problems.md has the codes, statuses and meanings of
// this package, in the order of ProblemCodes.
func TestProblemsAreDocumented(t *testing.T) {
	document, err := os.ReadFile("../docs/problems.md")
	require.NoError(t, err)
	var rows []string
	for line := range strings.Lines(string(document)) {
		if strings.HasPrefix(line, `| <a id="`) {
			rows = append(rows, strings.TrimSpace(line))
		}
	}
	var want []string
	for _, code := range api.ProblemCodes() {
		require.GreaterOrEqual(t, code.Status(), 400, code)
		want = append(want, fmt.Sprintf(`| <a id="%[1]s"></a>%[1]s | %[2]d | %[3]s |`, code, code.Status(), code.Meaning()))
	}
	require.Equal(t, want, rows, "the rows should be:\n%s", strings.Join(want, "\n"))
}

func TestUnknownProblemCode(t *testing.T) {
	require.Zero(t, api.ProblemCode("later").Status())
	require.Empty(t, api.ProblemCode("later").Meaning())
}
