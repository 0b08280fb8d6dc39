package accountsfile_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

// TestMistakesShowNoValues: the errors about seven files, each with the word secret in a wrong
// place, do not contain this word.
func TestMistakesShowNoValues(t *testing.T) {
	for content, want := range map[string]string{
		"accounts:\n  - id: a\n    password: *secret\n":                 "yaml: unknown anchor referenced",
		"accounts:\n  - id: a\n    password: !!int secret-secret\n":     "yaml: cannot decode !!str as a !!int",
		"accounts:\n  - id: a\n    port: secret`secret\n":               "line 3: cannot unmarshal !!str into int",
		"accounts: secret-secret\n":                                     "line 1: cannot unmarshal !!str into",
		"accounts:\n  - secret-secret\n":                                "line 2: cannot unmarshal !!str into",
		"accounts:\n  - id: a\n    password: secret: secret\n":          "yaml: line 3: mapping values are not allowed",
		"accounts:\n  - id: a\n    password: !!binary secret-secret*\n": "yaml: !!binary value contains invalid base64",
	} {
		path := filepath.Join(t.TempDir(), "accounts.yaml")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		var file struct {
			Accounts []struct {
				ID       string
				Port     int
				Password string
			}
		}
		r := accountsfile.NewReader(path, "accounts")
		r.Decode(&file)
		require.ErrorContains(t, r.Err(), want)
		require.NotContains(t, r.Err().Error(), "secret", content)
	}
}
