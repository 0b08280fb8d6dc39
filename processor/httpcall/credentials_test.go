package httpcall_test

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

func TestPoolsOfCredentials(t *testing.T) {
	long := strings.Repeat("a.", 100) + "example.com"
	got := map[string][]credential.Account{}
	startGuarded(t, newFolder(t).config(t, file(
		line("b1", "b.example.com", "a.example.com:8443"),
		`  - {id: c, hosts: [c.example.com], header: X-Key, value_file: token, rate: 5/1s, concurrency: unbounded}`+"\n",
		line("b2", "A.example.com:8443", "b.example.com", "b.example.com"),
		line("port", "a.example.com:443"), line("long", long))),
		httpcall.WithChoice(func(pool string, accounts []credential.Account) (credential.Source, error) {
			got[pool] = accounts
			return credential.TakeTurns(pool, accounts)
		}))
	require.Equal(t, map[string][]credential.Account{
		"http.a.example.com_8443": {{ID: "b1"}, {ID: "b2"}},
		"http.c.example.com":      {{ID: "c", Rate: &credential.Rate{Permits: 5, Window: time.Second}, Concurrency: credential.Unbounded}},
		"http.a.example.com_443":  {{ID: "port"}},
		("http." + long)[:128]:    {{ID: "long"}},
	}, got)
}

func TestAllMistakesAreReportedTogether(t *testing.T) {
	long, endless := strings.Repeat("a.", 70), strings.Repeat("a", 254)
	f := newFolder(t)
	c := f.config(t, `
credentials:
  - {id: a, hosts: [a.example.com], header: Authorization, value_file: gone, colour: red}
  - {id: a, hosts: [b.example.com], header: Authorization, value_file: token, rate: 0}
  - {hosts: [c.example.com], value_file: open, header: "bad name"}
  - {id: d, hosts: ["*.example.com", "https://d", "d/x", "d:0", "d:99999", "d:", "u@d", "", "d..x y"], header: content-length, value_file: empty}
  - {id: e, header: Transfer-Encoding, value_file: lines, concurrency: 0}
  - {id: f, hosts: [a.example.com, f.example.com], header: Proxy-Authorization, value_file: spaces}
  - {id: g, hosts: ["a.example.com:8443"], header: Host, value_file: large}
  - {id: h, hosts: [x_1.example.com], header: H, value_file: token}
  - {id: i, hosts: ["x:1", "y"], header: H, value_file: token}
  - {id: j, hosts: ["x_1"], header: H, value_file: token}
  - {id: k, hosts: [`+long+`a.example.com], header: idempotency-key, value_file: token}
  - {id: l, hosts: [`+long+`b.example.com], header: H}
  - {id: m, hosts: [`+endless+`], header: H, value_file: token}
hosts: []
`)
	f.write(t, "open", "SECRET")
	require.NoError(t, os.Chmod(filepath.Join(string(f), "open"), 0o644))
	f.write(t, "empty", "\r\n")
	f.write(t, "lines", "SECRET\nSECRET\n")
	f.write(t, "spaces", "SECRET ")
	f.write(t, "large", strings.Repeat("SECRET", 2000))
	_, err := httpcall.NewGuarded(c)
	for _, want := range []string{
		"read HTTP credentials in ", "credentials.yaml:\n",
		"line 3: unknown field colour\n",
		"line 16: unknown field hosts\n",
		"account a: value_file: open ",
		"account a: the id is used twice",
		`account a: rate: "0" is neither`,
		"account 3: id is not",
		"account 3: header is missing or not the name of a header",
		"open: others may read it (mode 0644)",
		`account d: hosts: "*.example.com" is neither`,
		`account d: hosts: "https://d" is neither`,
		`account d: hosts: "d/x" is neither`,
		`account d: hosts: "d:0" is neither`,
		`account d: hosts: "d:99999" is neither`,
		`account d: hosts: "d:" is neither`,
		`account d: hosts: "u@d" is neither`,
		`account d: hosts: "" is neither`,
		`account d: hosts: "d..x y" is neither`,
		"account d: header: Content-Length can't have a secret",
		"account d: value_file: is empty",
		"account e: hosts is missing",
		"account e: header: Transfer-Encoding can't have a secret",
		"account e: value_file: is not one line of printable ASCII",
		`account e: concurrency: "0" is neither`,
		"account f: hosts: a.example.com is also in another list",
		"account f: header: Proxy-Authorization can't have a secret",
		"account f: value_file: is not one line of printable ASCII",
		"account g: hosts: a.example.com:8443 is also in another list",
		"account g: header: Host can't have a secret",
		"account g: value_file: has more than 8192 bytes",
		"account j: hosts: the pools of two lists would have the name http.x_1",
		"account k: header: Idempotency-Key can't have a secret",
		"account l: hosts: the pools of two lists would have the name http.a.a.",
		"account l: value_file is missing",
		`account m: hosts: "` + endless + `" is neither`,
	} {
		require.ErrorContains(t, err, want)
	}
	for _, good := range []string{"account h:", "account i:", "SECRET", "httpcall."} {
		require.NotContains(t, err.Error(), good)
	}
}

func TestFilesThatAreNoCredentials(t *testing.T) {
	for name, tt := range map[string]struct{ content, want string }{
		"empty":      {"", "lists no account"},
		"empty list": {"credentials: []\n", "lists no account"},
		"not YAML":   {"credentials: [", "yaml: "},
		"list":       {"- id: a\n", "cannot unmarshal !!seq into accounts"},
	} {
		_, err := httpcall.NewGuarded(newFolder(t).config(t, tt.content))
		require.ErrorContains(t, err, tt.want, name)
	}
	c := newFolder(t).config(t, file(line("a", "a.example.com")))
	require.NoError(t, os.Chmod(c.CredentialsFile, 0o604))
	_, err := httpcall.NewGuarded(c)
	require.ErrorContains(t, err, "others may read it (mode 0604)")
	c.Timeout = 0
	_, err = httpcall.NewGuarded(c)
	require.ErrorContains(t, err, "TIMEOUT: ")
}

func TestAChangeOfTheCredentials(t *testing.T) {
	var got atomic.Pointer[string]
	server := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		value := r.Header.Get("Authorization")
		got.Store(&value)
	})
	f := newFolder(t)
	good := file(line("a", hostOf(server)))
	p := startGuarded(t, f.config(t, good))
	sent := func() string {
		_, err := processor.Run(t.Context(), p, call(server.URL))
		require.NoError(t, err)
		return *got.Load()
	}
	reload := func(want bool) {
		t.Helper()
		changed, err := p.Reload()
		require.NoError(t, err)
		require.Equal(t, want, changed)
	}
	require.Equal(t, "Bearer "+token, sent())
	reload(false)

	f.write(t, "token", "Bearer other")
	reload(true)
	require.Equal(t, "Bearer other", sent())

	f.write(t, "credentials.yaml", "credentials: [")
	changed, err := p.Reload()
	require.Error(t, err)
	require.False(t, changed)
	require.Equal(t, "Bearer other", sent(), "the old credentials stay")
	reload(false) // a mistake is returned once

	f.write(t, "credentials.yaml", file(line("a", "other.example.com")))
	reload(true)
	require.Empty(t, sent(), "the host has no credential any more")

	require.NoError(t, os.Remove(filepath.Join(string(f), "token")))
	_, err = p.Reload()
	require.ErrorContains(t, err, "account a: value_file: open ")
}

func TestASourceThatCannotBeMadeKeepsTheOldCredentials(t *testing.T) {
	server := serve(t, func(http.ResponseWriter, *http.Request) {})
	f := newFolder(t)
	var fault error
	c := f.config(t, file(line("a", hostOf(server))))
	p := startGuarded(t, c, httpcall.WithChoice(func(pool string, accounts []credential.Account) (credential.Source, error) {
		if fault != nil {
			return nil, fault
		}
		return credential.TakeTurns(pool, accounts)
	}))
	fault = errors.New("redis is away")
	f.write(t, "credentials.yaml", file(line("b", hostOf(server))))
	_, err := p.Reload()
	require.ErrorIs(t, err, fault)
	_, err = processor.Run(t.Context(), p, call(server.URL))
	require.NoError(t, err)
	_, err = httpcall.NewGuarded(c, httpcall.WithChoice(func(string, []credential.Account) (credential.Source, error) { return nil, fault }))
	require.ErrorIs(t, err, fault)

	fault = nil
	changed, err := p.Reload()
	require.NoError(t, err)
	require.True(t, changed, "it is tried again")
}
