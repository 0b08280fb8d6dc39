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
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

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
