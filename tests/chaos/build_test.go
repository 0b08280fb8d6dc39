package chaos

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// binaries has the paths of two built programs: bulkaction, which runs as each other role and as
// the audit, and the worker of these tests.
type binaries struct{ bulkaction, worker string }

// folder is the path of a temporary folder with all built binaries. It exists until the tests have
// ended.
var folder string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if folder, err = os.MkdirTemp("", "bulkaction-chaos-"); err != nil {
		fmt.Fprintln(os.Stderr, "make a folder for binaries:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(folder) }() // a forgotten file is in the folder for temporary files
	return m.Run()
}

var (
	plainBuild  = sync.OnceValues(func() (binaries, error) { return build("plain", "") })
	taggedBuild = sync.OnceValues(func() (binaries, error) { return build("tagged", "chaoscontrol") })
)

// build builds both binaries with these build tags. With the tag chaoscontrol, a run can switch off
// safeguards of the code, to prove that the tests notice it.
func build(name, tags string) (binaries, error) {
	b := binaries{filepath.Join(folder, name, "bulkaction"), filepath.Join(folder, name, "worker")}
	for path, pkg := range map[string]string{b.bulkaction: "./cmd/bulkaction", b.worker: "./tests/chaos/worker"} {
		cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-tags", tags, "-o", path, pkg)
		cmd.Dir = filepath.Join("..", "..")
		if out, err := cmd.CombinedOutput(); err != nil {
			return b, fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
		}
	}
	return b, nil
}

func built(t testing.TB, get func() (binaries, error)) binaries {
	t.Helper()
	b, err := get()
	require.NoError(t, err)
	return b
}
