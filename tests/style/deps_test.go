package style_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestClientDependsOnTheStandardLibraryAlone requires that a program that uses package client links
// no other module. As a control, package client/producer must depend on go-redis.
func TestClientDependsOnTheStandardLibraryAlone(t *testing.T) {
	t.Parallel()
	require.Empty(t, modulesOf(t, "client"))
	require.Contains(t, modulesOf(t, "client/producer"), "github.com/redis/go-redis/v9")
}

// modulesOf returns the paths of the other modules on whose packages the package in dir depends.
func modulesOf(t *testing.T, dir string) []string {
	t.Helper()
	const module = "{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}"
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", module, "./"+dir)
	list.Dir = moduleRoot(t)
	out, err := list.Output()
	require.NoError(t, err)
	return strings.Fields(string(out))
}
