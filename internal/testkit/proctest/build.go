package proctest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// EnvBinaries names the variable that gives a folder of binaries to use, instead of building them.
const EnvBinaries = "BULKACTION_TEST_BIN"

// binaries is where the binaries under test are, or will be.
type binaries struct {
	dir  string
	make func() error // builds them, once
}

var built *binaries // set by Main

// Main is to be called by TestMain of every package that starts processes. It runs the tests, has
// ./cmd/... built when the first process is started, with the race detector where the tests have
// it, removes what was built, and exits.
func Main(m *testing.M) { os.Exit(run(m, "./cmd/...")) }

func run(m *testing.M, packages string) int {
	b, remove, err := prepare(packages)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare binaries:", err)
		return 1
	}
	defer remove()
	built = b
	return m.Run()
}

func prepare(packages string) (*binaries, func(), error) {
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

func build(dir, packages string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	args := []string{"build", "-buildvcs=false", "-o", dir + string(filepath.Separator)}
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, packages)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", packages, err, out)
	}
	return nil
}

// moduleRoot goes up from the package under test, where the tests are run.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("find module root: no go.mod above the tests")
		}
		dir = parent
	}
}

// path returns a binary's path, after it was built.
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
