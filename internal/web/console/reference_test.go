package console

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// TestReference: the page shows each call and each error code of the API, and each of its links
// that begin with # leads to an element of the page. Compressed, it has at most 40 KB.
func TestReference(t *testing.T) {
	t.Parallel()
	w := as(t, admin)
	answer := w.get("/ui/api")
	require.Equal(t, http.StatusOK, answer.Code)
	d := parse(t, answer.Body.String())
	doc, err := theReference()
	require.NoError(t, err)
	calls := 0
	for _, tag := range doc.Tags {
		require.NotEmpty(t, tag.Calls, tag.Name)
		calls += len(tag.Calls)
		for _, c := range tag.Calls {
			require.Contains(t, d.text, c.Method+" "+c.Path+" "+c.Summary)
			require.NotEmpty(t, c.Answers, c.ID)
			require.NotContains(t, c.sample, "{", c.ID)
			if c.Scope != "" {
				require.Contains(t, c.Roles, auth.Admin)
			}
			if c.Method == http.MethodPost && c.Body != nil {
				require.NotEmpty(t, c.Body.Sample)
			}
		}
	}
	require.Greater(t, calls, 50)
	require.GreaterOrEqual(t, calls, len(httpapi.Scopes()))
	for _, code := range api.ProblemCodes() {
		require.Contains(t, d.text, string(code))
	}
	ids := map[string]bool{}
	for _, n := range d.all("") {
		ids[attribute(n, "id")] = true
	}
	links := 0
	for _, a := range d.all("a") {
		if id, ok := strings.CutPrefix(attribute(a, "href"), "#"); ok {
			require.True(t, ids[id], id)
			links++
		}
	}
	require.Greater(t, links, 100)
	for _, want := range []string{
		"scope submit : the roles admin, producer", "needs no key", "integer, from 1 to 1000, default 50", "list of Key",
		`curl -X POST -H "Authorization: Bearer $BULKACTION_API_KEY" -H 'Content-Type: application/json' -d '{"role":"admin"}' 'http://localhost/v1/keys'`,
		`curl 'http://localhost/'`, `'http://localhost/v1/groups/ID/jobs/ORDINAL'`,
	} {
		require.Contains(t, d.text, want)
	}

	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err = z.Write(answer.Body.Bytes())
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.LessOrEqual(t, packed.Len(), 40<<10)
	t.Logf("%d calls, %d bytes, %d packed", calls, answer.Body.Len(), packed.Len())
}

// TestReferenceAddress: the curl lines use the address under which the browser reaches the console.
func TestReferenceAddress(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	address := func(name string) string {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/api", nil)
		r.Host = name
		return parse(t, w.do(r).Body.String()).text
	}
	text := address("ops.example.com:8443")
	require.Contains(t, text, "curl 'http://ops.example.com:8443/v1/stats'")
	require.NotContains(t, text, "BULKACTION_API_KEY")
	require.Contains(t, address("[::1]:80"), "curl 'http://[::1]:80/v1/stats'")
	require.Contains(t, address("a'; rm"), "curl 'http://ADDRESS/v1/stats'")
	w.console.Secure = true
	require.Contains(t, address("ops.example.com"), "curl 'https://ops.example.com/v1/stats'")
	require.NotContains(t, text, "console alone")
	w.with(func(o *Options) { o.NoAPI = true })
	require.Contains(t, address("ops.example.com"), "This address serves the console alone")
}

// TestCommandLinesNameTheAPI: command lines of bulkaction have --api unless the API has the default
// address, also in live regions.
func TestCommandLinesNameTheAPI(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	w.backend.groups = nil
	commandsOn := func(host string) (texts []string) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/ui/groups", nil)
		for _, code := range parse(t, w.do(r).Body.String()).all("code") {
			texts = append(texts, code.FirstChild.Data)
		}
		return texts
	}
	plain := "bulkaction submit --type NOOP --payload '{}' --wait"
	for host, want := range map[string]string{
		"localhost:8080": plain, "127.0.0.1:8080": plain, "localhost:9090": plain + " --api http://localhost:9090",
		"jobs.example.com": plain + " --api http://jobs.example.com", "a'b": plain + " --api http://ADDRESS",
	} {
		require.Equal(t, []string{want}, commandsOn(host), host)
	}
	server := w.server()
	_, data, _ := w.follow(server, "groups:", "").next()
	require.Contains(t, data["rows"], "--api "+server)
	w.console.Secure = true
	require.Equal(t, []string{plain + " --api https://localhost:8080"}, commandsOn("localhost:8080"))
	w.console.NoAPI = true
	require.Equal(t, []string{plain + " --api URL"}, commandsOn("localhost:8080"))
	require.Contains(t, w.get("/ui/audit").Body.String(), "audit --redis-url URL<", "this command asks Redis")
}
