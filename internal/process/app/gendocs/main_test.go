package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

const root = "../../../.."

func TestReferenceIsFresh(t *testing.T) {
	for name, output := range outputs {
		want, err := render(root, name)
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(root, output))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "%s is stale: run go generate ./internal/process/app", output)
	}
}

func TestCommentsOfFields(t *testing.T) {
	dir := t.TempDir()
	source := "package p\n\ntype T struct {\n\t// A is\n\t// the first.\n\tA int\n\tB int // behind\n\tC int\n}\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "p.go"), []byte(source), 0o600))
	got, err := comments(dir)
	require.NoError(t, err)
	require.Equal(t, map[string]string{"T.A": "A is the first.", "T.B": "behind", "T.C": ""}, got)
	require.Equal(t, "The first.", sentence("is the first."))
}
