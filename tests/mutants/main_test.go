package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMutantsFitTheCode: each mutant still finds the text that it changes, and the test that it
// names exists.
func TestMutantsFitTheCode(t *testing.T) {
	t.Chdir("../..")
	for _, m := range mutants {
		_, err := m.write(t.TempDir())
		require.NoError(t, err, m.name)
		files, err := filepath.Glob(m.pkg + "/*_test.go")
		require.NoError(t, err, m.name)
		found := false
		for _, file := range files {
			src, err := os.ReadFile(file)
			require.NoError(t, err, m.name)
			found = found || bytes.Contains(src, []byte("\nfunc "+m.test+"("))
		}
		require.True(t, found, "mutant %s: %s is not in %s", m.name, m.test, m.pkg)
	}
}
