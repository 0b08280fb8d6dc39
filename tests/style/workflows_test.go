package style_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWorkflows requires that the workflows of GitHub name each action by its commit, with the tag
// beside it, use the Go version of go.mod, and state the default permissions of their jobs.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	root := moduleRoot(t)
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))
	require.Len(t, version, 2)
	files, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		uses := regexp.MustCompile(`(?m)uses: (.*)$`).FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, uses, file)
		for _, use := range uses {
			require.Regexp(t, `^[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`, use[1], file)
		}
		for _, v := range regexp.MustCompile(`(?m)go-version.*$`).FindAllString(string(text), -1) {
			require.Equal(t, `go-version: "`+version[1]+`"`, v, file)
		}
		require.Regexp(t, `(?m)^permissions:( \{\})?$`, string(text), "%s: what a job may do by default", file)
	}
}
