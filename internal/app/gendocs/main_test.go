package main

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReferenceIsFresh(t *testing.T) {
	root, err := moduleRoot()
	require.NoError(t, err)
	want, err := render(root)
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(root, output))
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "%s is stale: run go generate ./internal/app", output)
}

func TestFieldsWithoutAWordAreRefused(t *testing.T) {
	root, err := moduleRoot()
	require.NoError(t, err)
	_, err = comment(root, reflect.TypeFor[reflect.StructField](), "Absent")
	require.ErrorContains(t, err, "document reflect.StructField.Absent: give the field a desc tag or a comment")
}
