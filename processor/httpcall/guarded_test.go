package httpcall_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
	"github.com/bulkaction/bulkaction/processor/httpcall"
)

// token is the secret of all credentials, without its scheme.
const token = "s3cret/t0ken+="

// folder is the path of a folder with a credentials file and its secrets.
type folder string

func newFolder(t testing.TB) folder {
	f := folder(t.TempDir())
	f.write(t, "token", "Bearer "+token+"\r\n")
	return f
}

func (f folder) write(t testing.TB, name, content string) {
	require.NoError(t, os.WriteFile(filepath.Join(string(f), name), []byte(content), 0o600))
}

func (f folder) config(t testing.TB, content string) httpcall.Config {
	f.write(t, "credentials.yaml", content)
	return parse(t, map[string]string{
		"HTTP_PROCESSOR_ALLOWED_CIDRS":    "127.0.0.0/8",
		"HTTP_PROCESSOR_CREDENTIALS_FILE": filepath.Join(string(f), "credentials.yaml"),
	})
}

// line returns a line of the credentials file: the credential id for these hosts. Its secret is the
// content of the file that has the name token; see newFolder.
func line(id string, hosts ...string) string {
	return fmt.Sprintf("  - {id: %s, hosts: [%s], header: authorization, value_file: token}\n", id, `"`+strings.Join(hosts, `", "`)+`"`)
}

func file(lines ...string) string { return "credentials:\n" + strings.Join(lines, "") }

func startGuarded(t testing.TB, c httpcall.Config, options ...httpcall.Option) *httpcall.Guarded {
	p, err := httpcall.NewGuarded(c, options...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// lender is a fake source of credentials: it lends its ids in turn, and records the outcomes.
type lender struct {
	ids      []string
	err      error // of Borrow
	mu       sync.Mutex
	lent     int
	outcomes []credential.Outcome
}

func (l *lender) Borrow(context.Context) (credential.Loan, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	l.lent++
	return &loan{l, l.ids[(l.lent-1)%len(l.ids)]}, nil
}

type loan struct {
	of *lender
	id string
}

func (l *loan) ID() string { return l.id }

func (l *loan) Return(o credential.Outcome) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	l.of.outcomes = append(l.of.outcomes, o)
}

// took returns the outcomes that this fake source has got since the last call of took. It checks
// that all loans were returned.
func (l *lender) took(t testing.TB) []credential.Outcome {
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Len(t, l.outcomes, l.lent, "each loan is returned once")
	o := l.outcomes
	l.lent, l.outcomes = 0, nil
	return o
}

// lenders are the fake sources of pools and of hosts, by name.
type lenders map[string]*lender

func (l lenders) choose(pool string, accounts []credential.Account) (credential.Source, error) {
	l[pool] = &lender{}
	for _, a := range accounts {
		l[pool].ids = append(l[pool].ids, a.ID)
	}
	return l[pool], nil
}

func (l lenders) host(host string) credential.Source {
	if l[host] == nil {
		l[host] = &lender{ids: []string{"1"}}
	}
	return l[host]
}

func hostOf(server *httptest.Server) string { return server.Listener.Addr().String() }

func call(url string) processor.Job { return job(`{"url":"` + url + `"}`) }

func TestPlainProcessorIsNotGated(t *testing.T) {
	_, gated := any(start(t, nil)).(processor.Gated)
	require.False(t, gated)
	var p any = startGuarded(t, parse(t, nil))
	require.Implements(t, (*processor.Gated)(nil), p)
	require.Equal(t, processor.Availability{Free: -1, PerSecond: math.Inf(1)}, p.(processor.Limited).Availability())
	pass, err := p.(processor.Gated).Admit(t.Context(), call("http://127.0.0.1/"))
	require.NoError(t, err)
	require.Nil(t, pass, "without settings a job needs no permission")
	changed, err := p.(*httpcall.Guarded).Reload()
	require.NoError(t, err)
	require.False(t, changed)
}

func TestHostsOfCredentials(t *testing.T) {
	calls := lenders{}
	p := startGuarded(t, newFolder(t).config(t, file(
		line("any-port", "api.Example.com"), line("one-port", "b.example.com:8443"), line("default", "c.example.com:443", "d.example.com."),
		line("ip", "127.0.0.9", "[::1]:80"), line("idn", "bücher.example"))), httpcall.WithChoice(calls.choose))
	for address, want := range map[string]string{
		"https://api.example.com/x":     "http.api.example.com",
		"https://API.EXAMPLE.com.:9/":   "http.api.example.com",
		"https://ａpi.example。com/":      "http.api.example.com",
		"https://www.api.example.com/":  "",
		"https://example.com/":          "",
		"https://api.example.com.de/":   "",
		"https://b.example.com:8443/":   "http.b.example.com_8443",
		"https://b.example.com:08443/":  "http.b.example.com_8443",
		"https://b.example.com/":        "",
		"https://c.example.com/":        "http.c.example.com_443",
		"https://c.example.com:443/":    "http.c.example.com_443",
		"https://c.example.com:444/":    "",
		"http://c.example.com:80/":      "",
		"https://d.example.com/":        "http.c.example.com_443",
		"http://127.0.0.9:81/":          "http.127.0.0.9",
		"http://[::ffff:127.0.0.9]/":    "http.127.0.0.9",
		"http://[0:0::1]/":              "http.127.0.0.9",
		"http://127.0.0.8/":             "",
		"https://xn--bcher-kva.example": "http.xn--bcher-kva.example",
	} {
		pass, err := p.Admit(t.Context(), call(address))
		require.NoError(t, err)
		got := ""
		for name, l := range calls {
			if l.lent > 0 {
				got, l.lent = name, 0
			}
		}
		require.Equal(t, want, got, address)
		require.Equal(t, want != "", pass != nil, address)
	}
}

func TestKeysOfHosts(t *testing.T) {
	p := startGuarded(t, parse(t, nil), httpcall.WithHosts(func(host string) credential.Source {
		return &lender{err: errors.New("host " + host)}
	}))
	for address, want := range map[string]string{
		"http://EXAMPLE.com/a":     "example.com",
		"https://example.com.:443": "example.com",
		"http://example.com:":      "example.com",
		"https://example.com:80":   "example.com:80",
		"http://example.com:0080/": "example.com",
		"http://[0::1]:8080/":      "[::1]:8080",
		"http://[::1]/":            "::1",
	} {
		_, err := p.Admit(t.Context(), call(address))
		require.ErrorContains(t, err, "host "+want, address)
		require.True(t, strings.HasSuffix(err.Error(), "host "+want), address)
	}
}

func TestAnswersBecomeOutcomes(t *testing.T) {
	outcome := func(k credential.Kind) credential.Outcome { return credential.Outcome{Kind: k} }
	throttled := func(after time.Duration) credential.Outcome {
		return credential.Outcome{Kind: credential.Throttled, After: after}
	}
	success, neutral, failure := outcome(credential.Success), outcome(credential.Neutral), outcome(credential.Failure)
	unused := outcome(credential.Unused)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gone := closed.Addr().String()
	require.NoError(t, closed.Close())
	answer := func(status int, retryAfter string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if retryAfter != "" {
				w.Header().Set("Retry-After", retryAfter)
			}
			w.WriteHeader(status)
		}
	}
	cut := func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "9") }
	tests := map[string]struct {
		answer        http.HandlerFunc
		url           string // instead of the server's
		kind          processor.Kind
		code          string
		alone         processor.Kind // without a credential
		account, host credential.Outcome
	}{
		"200":             {answer(200, ""), "", processor.Done, "", processor.Done, success, success},
		"302":             {answer(302, ""), "", processor.Fail, "HTTP_302", processor.Fail, neutral, success},
		"400":             {answer(400, ""), "", processor.Fail, "HTTP_400", processor.Fail, neutral, success},
		"401":             {answer(401, ""), "", processor.RetryLater, "HTTP_401", processor.Fail, failure, neutral},
		"403":             {answer(403, ""), "", processor.Fail, "HTTP_403", processor.Fail, neutral, success},
		"404":             {answer(404, "7"), "", processor.Fail, "HTTP_404", processor.Fail, neutral, success},
		"429":             {answer(429, ""), "", processor.Throttle, "API_THROTTLED", processor.Throttle, throttled(0), throttled(0)},
		"429 Retry-After": {answer(429, "7"), "", processor.Throttle, "API_THROTTLED", processor.Throttle, throttled(7 * time.Second), throttled(7 * time.Second)},
		"500":             {answer(500, "7"), "", processor.RetryLater, "HTTP_500", processor.RetryLater, neutral, failure},
		"503":             {answer(503, ""), "", processor.RetryLater, "HTTP_503", processor.RetryLater, neutral, failure},
		"503 Retry-After": {answer(503, "7"), "", processor.Throttle, "API_THROTTLED", processor.Throttle, neutral, throttled(7 * time.Second)},
		"nobody listens":  {nil, "http://" + gone, processor.RetryLater, httpcall.CodeUnreachable, processor.RetryLater, neutral, failure},
		"cut short":       {cut, "", processor.RetryLater, httpcall.CodeUnreachable, processor.RetryLater, neutral, failure},
		"address refused": {nil, "http://10.0.0.1", processor.Fail, httpcall.CodeAddressRefused, processor.Fail, unused, unused},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			target := tt.url
			if target == "" {
				target = serve(t, tt.answer).URL
			}
			u, err := url.Parse(target)
			require.NoError(t, err)
			for _, credentials := range []bool{true, false} {
				all, host := lenders{}, "other.example.com"
				if credentials {
					host = u.Host
				}
				p := startGuarded(t, newFolder(t).config(t, file(line("a", host))),
					httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
				_, err = processor.Run(t.Context(), p, call(target))
				v := processor.Classify(err)
				require.Equal(t, tt.code, v.Code, "%v", err)
				require.Equal(t, []credential.Outcome{tt.host}, all[u.Host].took(t), "host")
				pool := all["http."+strings.ReplaceAll(host, ":", "_")]
				if !credentials {
					require.Equal(t, tt.alone, v.Kind)
					require.Empty(t, pool.took(t))
					continue
				}
				require.Equal(t, tt.kind, v.Kind)
				require.Equal(t, []credential.Outcome{tt.account}, pool.took(t), "credential")
			}
		})
	}
}

func TestCallThatIsStopped(t *testing.T) {
	called, release := make(chan struct{}, 2), make(chan struct{})
	server := serve(t, func(http.ResponseWriter, *http.Request) {
		called <- struct{}{}
		<-release
	})
	defer close(release)
	all := lenders{}
	c := newFolder(t).config(t, file(line("a", hostOf(server))))
	run := func(ctx context.Context) error {
		_, err := processor.Run(ctx, startGuarded(t, c, httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host)), call(server.URL))
		return err
	}
	pool := "http." + strings.ReplaceAll(hostOf(server), ":", "_")

	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-called
		cancel()
	}()
	require.ErrorIs(t, run(ctx), context.Canceled)
	require.Equal(t, []credential.Outcome{{}}, all[hostOf(server)].took(t), "a stopped call says nothing about the host")
	require.Equal(t, []credential.Outcome{{}}, all[pool].took(t))

	c.Timeout = 50 * time.Millisecond
	require.Equal(t, processor.CodeTimeout, processor.Classify(run(t.Context())).Code)
	require.Equal(t, []credential.Outcome{{Kind: credential.Failure}}, all[hostOf(server)].took(t), "the host did not answer in time")
	require.Equal(t, []credential.Outcome{{}}, all[pool].took(t))
}

func TestHostIsDenied(t *testing.T) {
	for name, denial := range map[string]error{
		"denied": &credential.DeniedError{Guard: "http-host/h", After: 3 * time.Second, Reason: "rate limit"}, "stopped": context.Canceled,
	} {
		all := lenders{"h.example.com": {err: denial}}
		p := startGuarded(t, newFolder(t).config(t, file(line("a", "h.example.com"))),
			httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
		pass, err := p.Admit(t.Context(), call("https://h.example.com/"))
		require.Nil(t, pass)
		require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, all["http.h.example.com"].took(t), name)
		if name == "stopped" {
			require.ErrorIs(t, err, context.Canceled)
			continue
		}
		v := processor.Classify(err)
		require.Equal(t, processor.Defer, v.Kind)
		require.Equal(t, 3*time.Second, v.After)
	}
}

func TestCredentialIsDenied(t *testing.T) {
	all := lenders{}
	p := startGuarded(t, newFolder(t).config(t, file(line("a", "h.example.com"))),
		httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
	all["http.h.example.com"].err = &credential.DeniedError{Reason: "circuit breaker open", After: time.Minute}
	_, err := p.Admit(t.Context(), call("https://h.example.com/"))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.NotContains(t, all, "h.example.com", "the host is asked after the credential")
}

func TestJobThatIsNotStarted(t *testing.T) {
	all := lenders{}
	p := startGuarded(t, newFolder(t).config(t, file(line("a", "h.example.com"))),
		httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
	pass, err := p.Admit(t.Context(), call("https://h.example.com/"))
	require.NoError(t, err)
	pass.Return(processor.Deferred(0, "the job was not started"))
	for _, name := range []string{"http.h.example.com", "h.example.com"} {
		require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, all[name].took(t))
	}
}

func TestPayloadsThatMakeNoCallNeedNoPermission(t *testing.T) {
	all := lenders{}
	c := newFolder(t).config(t, file(line("a", "h.example.com", "127.0.0.1"), line("b", "[::1]", "8.8.8.8")))
	c.AllowedCIDRs = nil
	p := startGuarded(t, c, httpcall.WithChoice(all.choose), httpcall.WithHosts(all.host))
	for payload, want := range map[string]string{
		`{`: "read HTTP payload", `{"url":"/relative"}`: "not an absolute",
		`{"url":"https://h.example.com","headers":{"authorization":"Basic hunter2"}}`: "headers or url has Authorization",
		`{"url":"https://h.example.com","headers":{"AUTHORIZATION":""}}`:              "headers or url has Authorization",
		`{"url":"https://u:hunter2@h.example.com"}`:                                   "headers or url has Authorization",
		`{"url":"http://h.example.com"}`:                                              "url is not https",
		`{"url":"http://8.8.8.8"}`:                                                    "url is not https",
	} {
		pass, err := p.Admit(t.Context(), job(payload))
		require.NoError(t, err)
		require.Nil(t, pass)
		_, err = p.Process(t.Context(), job(payload))
		v := processor.Classify(err)
		require.Equal(t, processor.Fail, v.Kind, payload)
		require.Equal(t, processor.CodeInvalidPayload, v.Code, payload)
		require.Contains(t, v.Message, want, payload)
		require.NotContains(t, v.Message, "hunter2")
	}
	require.Empty(t, all["http.127.0.0.1"].took(t))

	_, err := processor.Run(t.Context(), p, call("http://127.0.0.1/"))
	require.Equal(t, httpcall.CodeAddressRefused, processor.Classify(err).Code, "loopback needs no TLS, but must be allowed")
	require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, all["http.127.0.0.1"].took(t))
	_, err = processor.Run(t.Context(), p, job(`{"url":"http://u:p@127.0.0.2","headers":{"authorization":"Basic own"}}`))
	require.Equal(t, httpcall.CodeAddressRefused, processor.Classify(err).Code, "other hosts may be called as before")
}

func TestUnknownCredentials(t *testing.T) {
	server := serve(t, func(http.ResponseWriter, *http.Request) {})
	f := newFolder(t)
	all := lenders{}
	c := f.config(t, file(line("a", hostOf(server))))
	p := startGuarded(t, c, httpcall.WithChoice(all.choose))
	pool := all["http."+strings.ReplaceAll(hostOf(server), ":", "_")]
	pool.ids = []string{"new"}
	_, err := p.Admit(t.Context(), call(server.URL))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.Equal(t, slices.Repeat([]credential.Outcome{{Kind: credential.Unknown}}, 3), pool.took(t))

	f.write(t, "credentials.yaml", file(line("new", hostOf(server))))
	pass, err := p.Admit(t.Context(), call(server.URL))
	require.NoError(t, err, "the file is read again for a credential that is not known")
	changed, err := p.Reload()
	require.NoError(t, err)
	require.True(t, changed, "who watches the file learns it")
	ctx := pass.Into(t.Context())
	_, err = p.Process(ctx, call(server.URL))
	require.NoError(t, err)

	// Between Admit and Process the file may change.
	f.write(t, "credentials.yaml", file(line("newer", hostOf(server))))
	_, err = p.Reload()
	require.NoError(t, err)
	_, err = p.Process(ctx, call(server.URL))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind, "removed")
	_, err = p.Process(t.Context(), call(server.URL))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind, "added")
	f.write(t, "credentials.yaml", file(line("new", "other.example.com")))
	_, err = p.Reload()
	require.NoError(t, err)
	_, err = p.Process(ctx, call(server.URL))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind, "the host has none any more")
}

// TestMistakeThatAJobFinds: a mistake in the credentials file that Admit of a job has found is
// returned once by Reload, so that it is logged.
func TestMistakeThatAJobFinds(t *testing.T) {
	all, f := lenders{}, newFolder(t)
	p := startGuarded(t, f.config(t, file(line("a", "h.example.com"))), httpcall.WithChoice(all.choose))
	all["http.h.example.com"].ids = []string{"new"}
	f.write(t, "credentials.yaml", "credentials: [")
	_, err := p.Admit(t.Context(), call("https://h.example.com/"))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	changed, err := p.Reload()
	require.ErrorContains(t, err, "yaml: ")
	require.False(t, changed)
	_, err = p.Reload()
	require.NoError(t, err, "it is returned once")
}

// revoked is a loan that ended early.
type revoked struct{ loan }

func (revoked) Revoked() *credential.DeniedError {
	return &credential.DeniedError{Reason: "circuit breaker open", After: time.Minute}
}

func TestRevokedCredential(t *testing.T) {
	source := &lender{ids: []string{"a"}}
	p := startGuarded(t, newFolder(t).config(t, file(line("a", "127.0.0.1"))),
		httpcall.WithChoice(func(string, []credential.Account) (credential.Source, error) {
			return borrowFunc(func() (credential.Loan, error) {
				source.lent++
				return &revoked{loan{source, "a"}}, nil
			}), nil
		}))
	_, err := processor.Run(t.Context(), p, call("http://127.0.0.1:1/"))
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.Equal(t, []credential.Outcome{{Kind: credential.Unused}}, source.took(t))
}

type borrowFunc func() (credential.Loan, error)

func (f borrowFunc) Borrow(context.Context) (credential.Loan, error) { return f() }
