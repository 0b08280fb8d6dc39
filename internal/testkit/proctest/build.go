package proctest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// EnvBinaries is the environment variable with a folder of binaries to use instead of
// building them.
const EnvBinaries = "BULKACTION_TEST_BIN"

const module = "github.com/bulkaction/bulkaction"

// ldflags name the environment variable CHAOS_LUA to package lua: tests/chaos sets it to a folder of
// changed scripts. Without symbols, linking takes half the time. The Makefile builds the binaries
// with the same flags.
const ldflags = "-ldflags=-s -w -X " + module + "/lua.changed=CHAOS_LUA"

// binaries is the folder of the binaries under test, and for each its function that builds it when
// a test first needs it.
type binaries struct {
	dir  string
	make map[string]func() error // nil: all are built
}

var built *binaries // set by Run

// Run runs the tests of a package that starts processes, for its TestMain, and returns the exit
// code. Each of the commands in packages (which begin with ./ for the module's folder) is built
// when its first process starts, with the race detector if the tests use it, and removed at the
// end. With EnvBinaries, Run builds and removes nothing.
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
		return &binaries{dir: dir}, func() {}, nil
	}
	dir, err := os.MkdirTemp("", "bulkaction-bin-")
	if err != nil {
		return nil, nil, err
	}
	b := &binaries{dir: dir, make: map[string]func() error{}}
	for _, p := range packages {
		b.make[path.Base(p)] = sync.OnceValue(func() error { return build(dir, p) })
	}
	return b, func() { _ = os.RemoveAll(dir) }, nil
}

func build(dir, pkg string) error {
	args := []string{"build", "-buildvcs=false", ldflags, "-o", dir + string(filepath.Separator)}
	if raceEnabled {
		args = append(args, "-race")
	}
	args = append(args, module+strings.TrimPrefix(pkg, "."))
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
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

// path returns the path of a binary, which name may be. It builds the binary first if that was not
// done yet.
func (b *binaries) path(name string) (string, error) {
	if filepath.IsAbs(name) {
		return name, nil
	}
	if b == nil {
		return "", errors.New("TestMain does not call proctest.Run")
	}
	if b.make != nil {
		build, ok := b.make[name]
		if !ok {
			return "", fmt.Errorf("TestMain does not name the binary %s", name)
		}
		if err := build(); err != nil {
			return "", err
		}
	}
	path := filepath.Join(b.dir, name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no such binary: %w", err)
	}
	return path, nil
}
