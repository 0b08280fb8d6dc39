// Command mutants shows that the tests notice a broken promise. Each mutant changes one file of the
// code; a named test must fail because of it. The files themselves are not changed: the go command
// reads the changed copies through an overlay.
//
//	go run ./tests/mutants [-runs n] [name…]
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// mutant is a change of one file that breaks a promise, and the test that must fail because of it.
type mutant struct {
	name    string
	promise string // how the changed code breaks the promise
	file    string
	edits   []edit
	pkg     string
	test    string
}

// edit replaces a text that the file contains once.
type edit struct{ old, instead string }

func main() {
	runs := flag.Int("runs", 1, "how often each mutant's test runs; it must fail each time")
	flag.Parse()
	failed, unknown := 0, flag.Args()
	for _, m := range mutants {
		if flag.NArg() > 0 && !slices.Contains(flag.Args(), m.name) {
			continue
		}
		unknown = slices.DeleteFunc(unknown, func(name string) bool { return name == m.name })
		began := time.Now()
		verdict := "killed by " + m.test
		for range *runs {
			if err := kill(m); err != nil {
				verdict, failed = "NOT KILLED: "+err.Error(), failed+1
				break
			}
		}
		fmt.Printf("%-16s %3.0f s  %s\n", m.name, time.Since(began).Seconds(), verdict)
	}
	if len(unknown) > 0 {
		fmt.Fprintln(os.Stderr, "no such mutant:", strings.Join(unknown, " "))
	}
	if failed > 0 || len(unknown) > 0 {
		os.Exit(1)
	}
}

// kill runs the mutant's test on the changed code. It returns nil only if the test fails.
func kill(m mutant) error {
	dir, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, err := m.write(dir)
	if err != nil {
		return err
	}
	flags, err := exec.Command("go", "env", "GOFLAGS").Output()
	if err != nil {
		return fmt.Errorf("read GOFLAGS: %w", err)
	}
	cmd := exec.Command("go", "test", "-count=1", "-timeout=5m", "-run", "^"+m.test+"$", m.pkg)
	// The overlay is passed in the environment variable GOFLAGS, because a test that starts
	// binaries must build them with the overlay too, and not take those of BULKACTION_TEST_BIN.
	cmd.Env = append(os.Environ(), "BULKACTION_TEST_BIN=",
		"GOFLAGS="+strings.TrimSpace(string(flags))+" -overlay="+overlay)
	out, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return fmt.Errorf("%s passes, but %s", m.test, m.promise)
	case !strings.Contains(string(out), "--- FAIL: "+m.test):
		return fmt.Errorf("%s was not run to its end: %w\n%s", m.test, err, out)
	}
	return nil
}

// write writes two files into dir: the changed copy of the mutant's file, and an overlay that tells
// the go command to use the copy. It returns the path of the overlay.
func (m mutant) write(dir string) (overlay string, err error) {
	src, err := os.ReadFile(m.file)
	if err != nil {
		return "", err
	}
	text := string(src)
	for _, e := range m.edits {
		if n := strings.Count(text, e.old); n != 1 {
			return "", fmt.Errorf("%s contains %q %d times, not once: let the mutant follow the code", m.file, e.old, n)
		}
		text = strings.Replace(text, e.old, e.instead, 1)
	}
	original, err := filepath.Abs(m.file)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(dir, "changed"+filepath.Ext(m.file))
	overlay = filepath.Join(dir, "overlay.json")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	return overlay, errors.Join(err, os.WriteFile(changed, []byte(text), 0o600), os.WriteFile(overlay, list, 0o600))
}
