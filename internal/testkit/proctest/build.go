package proctest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// EnvBinaries is the environment variable with a folder of binaries to use instead of
// building them.
const EnvBinaries = "BULKACTION_TEST_BIN"

const module = "github.com/bulkaction/bulkaction"

// binaries is the folder of the binaries under test, and the function that builds them when a test
// first needs one.
type binaries struct {
	dir  string
	make func() error // builds the binaries once
}

var built *binaries // set by Main

// Main runs the tests of a package that starts processes; its TestMain must call it or Run.
// ./cmd/... and the commands in packages (patterns that begin with ./ for the module's folder) are
// built when the first process starts, with the race detector if the tests use it. Main removes the
// binaries and exits. With EnvBinaries it builds and removes nothing.
func Main(m *testing.M, packages ...string) { os.Exit(Run(m, append(packages, "./cmd/...")...)) }

// Run is like Main, but builds only the commands in packages, and returns the exit code.
func Run(m *testing.M, packages ...string) int {
	b, remove, err := prepare(packages)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare binaries:", err)
		return 1
	}
	defer remove()
	built = b
	return m.Run()
}

func prepare(packages []string) (*binaries, func(), error) {
	if dir := os.Getenv(EnvBinaries); dir != "" {
		return &binaries{dir: dir, make: func() error { return nil }}, func() {}, nil
	}
	dir, err := os.MkdirTemp("", "bulkaction-bin-")
	if err != nil {
		return nil, nil, err
	}
	b := &binaries{dir: dir, make: sync.OnceValue(func() error { return build(dir, packages) })}
	return b, func() { _ = os.RemoveAll(dir) }, nil
}

func build(dir string, packages []string) error {
	// Without symbols for debuggers, linking takes half the time.
	args := []string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	if raceEnabled {
		args = append(args, "-race")
	}
	for _, p := range packages {
		args = append(args, module+strings.TrimPrefix(p, "."))
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", strings.Join(packages, " "), err, out)
	}
	return nil
}

// Path returns the path of a binary under test, for a test that starts it in a way of its own.
func Path(t testing.TB, name string) string {
	t.Helper()
	path, err := built.path(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// path returns the path of a binary. It builds the binaries first if that was not done yet.
func (b *binaries) path(name string) (string, error) {
	if b == nil {
		return "", errors.New("TestMain does not call proctest.Main")
	}
	if err := b.make(); err != nil {
		return "", err
	}
	path := filepath.Join(b.dir, name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no such binary: %w", err)
	}
	return path, nil
}
