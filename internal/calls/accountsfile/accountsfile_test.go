package accountsfile_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

// TestMistakesShowNoValues: the errors about seven files, each with the word secret in a wrong
// place, do not contain this word.
func TestMistakesShowNoValues(t *testing.T) {
	for content, want := range map[string]string{
		"accounts:\n  - id: a\n    password: *secret\n":                 "yaml: unknown anchor referenced",
		"accounts:\n  - id: a\n    password: !!int secret-secret\n":     "yaml: cannot decode !!str as a !!int",
		"accounts:\n  - id: a\n    port: secret`secret\n":               "line 3: cannot unmarshal !!str into int",
		"accounts: secret-secret\n":                                     "line 1: cannot unmarshal !!str into",
		"accounts:\n  - secret-secret\n":                                "line 2: cannot unmarshal !!str into",
		"accounts:\n  - id: a\n    password: secret: secret\n":          "yaml: line 3: mapping values are not allowed",
		"accounts:\n  - id: a\n    password: !!binary secret-secret*\n": "yaml: !!binary value contains invalid base64",
	} {
		path := filepath.Join(t.TempDir(), "accounts.yaml")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		var file struct {
			Accounts []struct {
				ID       string
				Port     int
				Password string
			}
		}
		r := accountsfile.NewReader(path, "accounts")
		r.Decode(&file)
		require.ErrorContains(t, r.Err(), want)
		require.NotContains(t, r.Err().Error(), "secret", content)
	}
}

func TestFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "accounts.yaml")
	write := func(text string) { require.NoError(t, os.WriteFile(name, []byte(text), 0o600)) }
	var fault error
	var inUse []string
	f := accountsfile.NewFile(name, "test accounts", func(r *accountsfile.Reader) func() error {
		var file struct {
			Accounts []string `yaml:"accounts"`
		}
		r.Decode(&file)
		return func() error {
			if fault == nil {
				inUse = file.Accounts
			}
			return fault
		}
	})
	reload := func(changed bool, problem string, accounts ...string) {
		t.Helper()
		got, err := f.Reload()
		require.Equal(t, changed, got)
		if problem == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, problem)
		}
		require.Equal(t, accounts, inUse)
	}
	reload(false, "no such file")
	reload(false, "") // a mistake is returned once
	write("accounts: [a]")
	reload(true, "", "a")
	reload(false, "", "a")

	fault = errors.New("redis is away") // is tried again, although the file stays as it is
	write("accounts: [a, b]")
	reload(false, "redis is away", "a")
	reload(false, "redis is away", "a")
	fault = nil
	reload(true, "", "a", "b")

	write("accounts: [c]") // what a job finds is used at once, and returned later
	f.RereadForJob()
	require.Equal(t, []string{"c"}, inUse)
	reload(true, "", "c")
	reload(false, "", "c")
	write("accounts: [")
	f.RereadForJob()
	f.RereadForJob()
	reload(false, "read test accounts in "+name, "c")
	reload(false, "", "c")

	write("accounts: [d]")
	closed := false
	f.Close(func() { closed = true })
	require.True(t, closed)
	reload(false, "", "c")
}

func TestWatchSaysWhatItFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		var changed bool
		var mistake error
		calls, now, ended := 0, make(chan os.Signal), make(chan struct{})
		go func() {
			defer close(ended)
			accountsfile.Watch(ctx, slog.New(slog.NewTextHandler(&text, nil)), "T", now, func() (bool, error) {
				calls++
				return changed, mistake
			})
		}()
		lines := func() string {
			synctest.Wait()
			defer text.Reset()
			return text.String()
		}
		time.Sleep(time.Minute)
		require.Empty(t, lines())
		require.Equal(t, 6, calls)

		mistake = errors.New("bad.yaml: no")
		now <- syscall.SIGHUP
		found := lines()
		require.Equal(t, 7, calls)
		require.Contains(t, found, "level=ERROR")
		require.Contains(t, found, "the old accounts stay in use")
		require.Contains(t, found, "bad.yaml: no")

		mistake, changed = nil, true
		now <- syscall.SIGHUP
		require.Contains(t, lines(), `msg="accounts changed" type=T`)
		cancel()
		<-ended
	})
}
