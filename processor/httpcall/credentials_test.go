package httpcall_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
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

func TestSecretGoesToItsHostsOnly(t *testing.T) {
	var mu sync.Mutex
	got := map[string][]string{}
	record := func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.Host] = append(got[r.Host], r.Header.Get("Authorization")+r.Header.Get("X-Key"))
	}
	mine, key, other := serve(t, record), serve(t, record), serve(t, record)
	secure := httptest.NewTLSServer(http.HandlerFunc(record))
	t.Cleanup(secure.Close)
	redirecting := serve(t, func(w http.ResponseWriter, r *http.Request) {
		record(w, r)
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	})
	f := newFolder(t)
	f.write(t, "key", "abc")
	p := startGuarded(t, f.config(t, file(
		line("a", hostOf(mine), hostOf(redirecting)), line("b", hostOf(secure)),
		`  - {id: c, hosts: ["`+hostOf(key)+`"], header: x-key, value_file: key}`+"\n")))
	p.Trust(secure.Certificate())
	for _, server := range []*httptest.Server{mine, key, other, secure} {
		_, err := processor.Run(t.Context(), p, call(server.URL))
		require.NoError(t, err)
	}
	_, err := processor.Run(t.Context(), p, call(redirecting.URL))
	require.Equal(t, "HTTP_307", processor.Classify(err).Code)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, map[string][]string{
		hostOf(mine): {"Bearer " + token}, hostOf(redirecting): {"Bearer " + token}, hostOf(secure): {"Bearer " + token},
		hostOf(key): {"abc"}, hostOf(other): {""},
	}, got)
}

// TestSecretWithoutTLS: without TLS, a job with a secret fails for 8.8.8.8, and succeeds for a
// server on loopback, whether jobs may call all private addresses or only listed networks.
func TestSecretWithoutTLS(t *testing.T) {
	for name, change := range map[string]func(*httpcall.Config){
		"private":  func(c *httpcall.Config) { c.AllowPrivate, c.AllowedCIDRs = true, nil },
		"networks": func(*httpcall.Config) {},
	} {
		server := serve(t, func(http.ResponseWriter, *http.Request) {})
		all := lenders{}
		c := newFolder(t).config(t, file(line("a", "8.8.8.8", hostOf(server))))
		change(&c)
		p := startGuarded(t, c, httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
		_, err := processor.Run(t.Context(), p, call("http://8.8.8.8/"))
		v := processor.Classify(err)
		require.Equal(t, processor.Fail, v.Kind, name)
		require.Equal(t, processor.CodeInvalidPayload, v.Code, name)
		require.Contains(t, v.Message, "url is not https", name)
		unused := []credential.Outcome{{Kind: credential.Unused}}
		require.Equal(t, unused, all["8.8.8.8"].took(t), name)
		_, err = processor.Run(t.Context(), p, call(server.URL))
		require.NoError(t, err, name)
	}
}

func TestSecretIsHiddenInResults(t *testing.T) {
	escaped := strings.NewReplacer("/", `\/`, "+", `\u002B`, "=", `\u003d`).Replace(token)
	stars := func(s string) string { return strings.Repeat("*", len(s)) }
	for name, tt := range map[string]struct {
		body string
		max  int
		want string
	}{
		"whole":          {`{"got":"Bearer ` + token + `"}`, 100, `{"status":200,"body":{"got":"` + stars("Bearer "+token) + `"}}`},
		"token":          {`["` + token + `","` + token + `"]`, 100, `{"status":200,"body":["` + stars(token) + `","` + stars(token) + `"]}`},
		"JSON escapes":   {`{"got":"` + escaped + `"}`, 100, `{"status":200,"body":{"got":"` + stars(escaped) + `"}}`},
		"URL escapes":    {"t=" + url.QueryEscape(token), 100, `{"status":200,"body":"t=` + stars(url.QueryEscape(token)) + `"}`},
		"at the cut":     {"abc" + token + "d", 10, `{"status":200,"body":"abc*******","truncated":true}`},
		"behind the cut": {"abcdefghij" + token, 10, `{"status":200,"body":"abcdefghij","truncated":true}`},
		"twice, at the cut": {token + token, len(token) + 5,
			`{"status":200,"body":"` + stars(token) + `*****","truncated":true}`},
		"half an escape": {token[:6] + `\u00`, 100, `{"status":200,"body":"` + token[:6] + `\\u00"}`},
		"a part alone":   {token[:4], 100, `{"status":200,"body":"` + token[:4] + `"}`},
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, tt.body) })
			c := newFolder(t).config(t, file(line("a", hostOf(server))))
			c.MaxResponseBytes = tt.max
			result, err := processor.Run(t.Context(), startGuarded(t, c), call(server.URL))
			require.NoError(t, err)
			require.Equal(t, tt.want, string(result.(json.RawMessage)))
		})
	}
}

// answerRaw starts a TCP server that answers the first bytes of each connection with text. It
// returns its host and port.
func answerRaw(t *testing.T, text string) (host string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4096))
			_, _ = io.WriteString(c, text)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		<-done
	})
	return listener.Addr().String()
}

func TestSecretIsHiddenInErrors(t *testing.T) {
	hosts := map[string]string{
		"not HTTP":      answerRaw(t, "Bearer "+token+"\r\n\r\n"),
		"status":        answerRaw(t, "HTTP/1.1 "+token+" Bearer\r\n\r\n"),
		"header":        answerRaw(t, "HTTP/1.1 200 OK\r\nBearer "+token+"\r\n\r\n"),
		"length":        answerRaw(t, "HTTP/1.1 200 OK\r\nContent-Length: "+token+"\r\n\r\n"),
		"reason":        answerRaw(t, "HTTP/1.1 404 Bearer "+token+"\r\nContent-Length: 0\r\n\r\n"),
		"nothing":       answerRaw(t, ""),
		"transfer code": answerRaw(t, "HTTP/1.1 200 OK\r\nTransfer-Encoding: "+token+"\r\n\r\n"),
	}
	insecure := httptest.NewUnstartedServer(http.NotFoundHandler())
	insecure.Config.ErrorLog = log.New(io.Discard, "", 0) // the handshake fails on purpose
	insecure.StartTLS()
	t.Cleanup(insecure.Close)
	hosts["unknown authority"] = hostOf(insecure)
	for name, host := range hosts {
		t.Run(name, func(t *testing.T) {
			p := startGuarded(t, newFolder(t).config(t, file(line("a", host))))
			scheme := "http://"
			if name == "unknown authority" {
				scheme = "https://"
			}
			_, err := processor.Run(t.Context(), p, call(scheme+host))
			require.Error(t, err)
			for e := err; e != nil; e = errors.Unwrap(e) {
				require.NotContains(t, e.Error(), "s3cret")
				require.NotContains(t, fmt.Sprintf("%+v", e), "s3cret")
			}
		})
	}
}
