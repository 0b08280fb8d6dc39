// Package release tests what a release promises: `go install` of a version works, and the API is
// compatible with that of the last release.
package release

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// TestGoInstall serves the committed files as version 0.1.0 from a folder with the layout of a
// module proxy, and installs the command from it as users do.
func TestGoInstall(t *testing.T) {
	t.Parallel()
	version := module.Version{Path: "github.com/bulkaction/bulkaction", Version: "v0.1.0"}
	proxy := t.TempDir()
	folder := filepath.Join(proxy, version.Path, "@v")
	require.NoError(t, os.MkdirAll(folder, 0o755))
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(content), 0o644))
	}
	write("list", version.Version+"\n")
	write("v0.1.0.info", fmt.Sprintf(`{"Version":%q,"Time":"2026-01-01T00:00:00Z"}`, version.Version))
	write("v0.1.0.mod", git(t, "show", "HEAD:go.mod"))
	archive, err := os.Create(filepath.Join(folder, "v0.1.0.zip"))
	require.NoError(t, err)
	repo := t.TempDir() // package zip knows no worktree
	git(t, "clone", "--quiet", "--shared", "--no-checkout", ".", repo)
	require.NoError(t, zip.CreateFromVCS(archive, version, repo, "HEAD", ""))
	require.NoError(t, archive.Close())

	env := func(name string) string {
		out, err := exec.Command("go", "env", name).Output()
		require.NoError(t, err)
		return strings.TrimSpace(string(out))
	}
	bin := t.TempDir()
	cmd := exec.Command("go", "install", version.Path+"/cmd/bulkaction@"+version.Version)
	cmd.Dir = bin // outside of any module
	cmd.Env = append(os.Environ(),
		"GOBIN="+bin, "CGO_ENABLED=0", "GOWORK=off",
		"GOMODCACHE="+t.TempDir(), "GOFLAGS=-trimpath -modcacherw", // the user's cache must not get this version
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(env("GOMODCACHE"), "cache", "download")+","+env("GOPROXY"),
		"GOSUMDB=off", // it can't know this version; go.sum has the sums of the others
	)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)

	shown, err := exec.Command(filepath.Join(bin, "bulkaction"), "--version").CombinedOutput()
	require.NoError(t, err, "%s", shown)
	require.Equal(t, "v0.1.0\n", string(shown))
}
