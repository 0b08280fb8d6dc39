package ledger

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// results lists the reply codes that are no errors, for each script. A new code must be added here
// or to the table refusals.
var results = map[string][]string{
	"admit":           {"FULL", "PAUSED"},
	"advance":         {"OK"},
	"append":          {"OK", "DUP"},
	"cancel":          {"OK"},
	"create":          {"OK"},
	"expire":          {"OK", "OPEN"},
	"pause":           {"OK"},
	"quota":           {"OK", "FENCED"},
	"reduce":          {"OK", "BAD", "GONE", "VERSION"},
	"reopen":          {"OK"},
	"reduce_failures": {"OK"},
	"repair":          {"OK", "GONE", "VERSION"},
	"requeue":         {"DONE", "MORE"},
	"seal":            {"OK", "PENDING"},
	"setting":         {"OK"},
	"sweep":           {"DONE", "MORE"},
	"why":             {"OK"},
}

// TestEachReplyCodeIsARefusalOrAResult: each reply code that a script returns as a literal is
// either an error of the table refusals or a result, and no other code is listed. The scripts in
// the folders activity, auth, guard and room are left out.
func TestEachReplyCodeIsARefusalOrAResult(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../lua/*/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	found := map[[2]string]bool{}
	for _, file := range files {
		if of := filepath.Base(filepath.Dir(file)); slices.Contains([]string{"activity", "auth", "guard", "room"}, of) {
			continue // of the packages activity, apikey, guard and waitingroom
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		name := strings.TrimSuffix(filepath.Base(file), ".lua")
		for _, match := range regexp.MustCompile(`return \{ '([A-Z]+)'`).FindAllStringSubmatch(string(text), -1) {
			code := match[1]
			found[[2]string{name, code}] = true
			_, ofScript := refusals[[2]string{name, code}]
			_, ofAll := refusals[[2]string{"", code}]
			isResult := slices.Contains(results[name], code)
			require.True(t, ofScript || ofAll || isResult, "%s answers %s, which is neither a refusal nor a result", name, code)
			require.False(t, ofScript && isResult, "%s of %s is both a refusal and a result", code, name)
		}
	}
	for name, codes := range results {
		for _, code := range codes {
			require.True(t, found[[2]string{name, code}], "%s does not answer %s", name, code)
		}
	}
	for key := range refusals {
		require.True(t, key[0] == "" || found[key], "%s does not answer %s", key[0], key[1])
	}
}
