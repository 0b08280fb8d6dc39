package accountsfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/calls/accountsfile"
)

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
