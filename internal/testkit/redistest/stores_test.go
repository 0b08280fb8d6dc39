package redistest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStoresOf: a binary is named by the version that it prints. One that is not there, prints
// something else, or is there twice is an error: nothing is skipped.
func TestStoresOf(t *testing.T) {
	dir := t.TempDir()
	binary := func(name, prints string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\necho '"+prints+"'\n"), 0o700))
		return path
	}
	valkey, other := binary("valkey", "Valkey server v=9.1.2 sha=0"), binary("other", "1.0")
	list := func(paths ...string) string { return strings.Join(paths, string(filepath.ListSeparator)) }
	got, err := storesOf(valkey)
	require.NoError(t, err)
	require.Equal(t, []store{
		{"redis", "", 1}, {"cluster", "", 2}, {"valkey-9.1.2", valkey, 1}, {"valkey-9.1.2-cluster", valkey, 2},
	}, got)
	for _, wrong := range []string{list(valkey, valkey), list(valkey, other), filepath.Join(dir, "absent")} {
		_, err := storesOf(wrong)
		require.ErrorContains(t, err, EnvBinaries)
	}
}
