package apikey

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
)

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func pepperFile(t *testing.T) string {
	return writeFile(t, "pepper", strings.Repeat("pepper", 10)+"\n")
}

func TestKeysOfAFile(t *testing.T) {
	t.Parallel()
	a, p, r := auth.NewToken(auth.Admin), auth.NewToken(auth.Producer), auth.NewToken(auth.Reader)
	path := writeFile(t, "keys", "# keys\n\n root admin - "+string(auth.SHA256(a))+" # break glass\n"+
		"shop\tproducer\tacme  "+string(auth.SHA256(p))+"\r\n"+
		"board reader acme "+string(auth.SHA256(r))) // the last line has no end
	f, err := OpenFile(path)
	require.NoError(t, err)
	for token, want := range map[string]auth.Principal{
		a: {KeyID: "root", Role: auth.Admin, Payloads: true},
		p: {KeyID: "shop", Role: auth.Producer, Tenant: "acme", Payloads: true},
		r: {KeyID: "board", Role: auth.Reader, Tenant: "acme"},
	} {
		got, ok := f.find(auth.SHA256(token))
		require.True(t, ok)
		require.Equal(t, want, got)
		require.True(t, f.has(got))
	}
	_, ok := f.find(auth.SHA256(auth.NewToken(auth.Admin)))
	require.False(t, ok)
	require.False(t, f.has(auth.Principal{}))
	require.False(t, f.has(auth.Principal{KeyID: "board", Role: auth.Admin}))
}

func line(t *testing.T, id string, k NewKey) string {
	t.Helper()
	text, err := FileLine(id, k)
	require.NoError(t, err)
	return text
}

// TestFileLine: the line that a command prints is one that the file takes.
func TestFileLine(t *testing.T) {
	t.Parallel()
	var lines, tokens []string
	for _, r := range []Request{{Role: auth.Service}, {Role: auth.Producer, Tenant: "*"}} {
		k, err := r.New(auth.SHA256, newClock().now())
		require.NoError(t, err)
		lines, tokens = append(lines, line(t, k.ID, k)), append(tokens, k.Token)
	}
	_, err := FileLine("a b", NewKey{})
	require.ErrorContains(t, err, `id "a b": must match`)
	f, err := OpenFile(writeFile(t, "keys", strings.Join(lines, "\n")))
	require.NoError(t, err)
	for _, token := range tokens {
		p, ok := f.find(auth.SHA256(token))
		require.True(t, ok)
		require.Equal(t, auth.SHA256(token).KeyID(), p.KeyID)
	}
}

// TestMistakesOfAFile: ten mistakes in a file of eleven lines are reported together, with their
// lines, and without the token that two of them contain.
func TestMistakesOfAFile(t *testing.T) {
	t.Parallel()
	hash, token := string(auth.SHA256("x")), auth.NewToken(auth.Admin)
	path := writeFile(t, "keys", strings.Join([]string{
		"a admin - " + hash,
		"a/b admin - " + string(auth.SHA256("2")),
		"c root - " + string(auth.SHA256("3")),
		"d producer - " + string(auth.SHA256("4")),
		"e admin acme " + string(auth.SHA256("5")),
		"f admin -",
		"g admin - " + strings.ToUpper(hash),
		"h admin - " + token,
		token + " admin - " + string(auth.SHA256("9")),
		"a admin - " + string(auth.SHA256("10")),
		"k admin - " + hash,
	}, "\n"))
	_, err := OpenFile(path)
	require.Error(t, err)
	text := err.Error()
	require.True(t, strings.HasPrefix(text, "read API keys in "+path+":\n"), text)
	lines := strings.Split(text, "\n")[1:]
	for i, want := range []string{
		"line 2: id: must match ^[A-Za-z0-9._-]{1,128}$",
		`line 3: role "root": must be one of admin, operator`,
		"line 4: tenant: a producer needs one",
		`line 5: tenant "acme": a key of role admin has none`,
		"line 6: has 3 fields; write ID ROLE TENANT SHA256",
		"line 7: sha256: must be 64 hexadecimal digits, in lower case",
		"line 8: has the key itself: write its SHA-256, and revoke this key",
		"line 9: has the key itself",
		"line 10: id a: line 1 has it too",
		"line 11: sha256: line 1 has the same key",
	} {
		require.Contains(t, lines[i], want)
	}
	require.Len(t, lines, 10)
	require.NotContains(t, text, token[4:])

	_, err = OpenFile(path + "x")
	require.ErrorContains(t, err, "no such file")
	path = writeFile(t, "keys", "")
	require.NoError(t, os.Chmod(path, 0o646))
	_, err = OpenFile(path)
	require.ErrorContains(t, err, "others may write it (mode 0646); run chmod o-w on it")
	require.NoError(t, os.Chmod(path, 0o644)) // hashes are no secrets
	_, err = OpenFile(path)
	require.NoError(t, err)
	_, err = OpenFile(writeFile(t, "keys", strings.Repeat("#", 1<<20+1)))
	require.ErrorContains(t, err, "larger than 1048576 bytes")
}
