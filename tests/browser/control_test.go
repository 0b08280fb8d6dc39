//go:build browser

package browser

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMistakesAreFound: a tab records the problems of a bad page, such as an error in the browser's
// console or a position that rises, and the script faults finds six faults of it.
func TestMistakesAreFound(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	serve := func(path, contentType, body string) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			w.Header().Set("Content-Security-Policy", "default-src 'self'; connect-src *; style-src 'unsafe-inline'")
			_, _ = io.WriteString(w, body)
		})
	}
	serve("/{$}", "text/html", `<!doctype html><script src="/page.js"></script><script>inline()</script>
		<p style="color: #999; background: #fff">pale</p><a>nameless</a><a href="/"></a>`)
	serve("/page.js", "text/javascript", `
		console.error("a bad thing");
		fetch("http://localhost:" + location.port + "/elsewhere", { mode: "no-cors" });
		new EventSource("/stream").addEventListener("position", (e) => {
			if (e.data.includes("9")) throw new Error("thrown");
		});`)
	serve("/elsewhere", "text/plain", "")
	serve("/stream", "text/event-stream", "retry: 100000\nevent: position\ndata: {\"position\":3,\"total\":9}\n\n"+
		"event: position\ndata: {\"position\":4,\"total\":9}\n\nevent: position\ndata: {\"position\":5,\"total\":4}\n\n")
	site := httptest.NewServer(mux)
	t.Cleanup(site.Close)

	r := &room{t: t, broker: site.URL, shop: site.URL}
	b := r.visitor()
	b.visit(site.URL)
	for _, problem := range []string{
		"console: error", "a bad thing", "exception: ", "Error: thrown", "log: security", "ContentSecurityPolicyIssue",
		"request to another host: http://localhost:", "position rose from 3 to 4", `position: {"position":5,"total":4}`,
		"/favicon.ico",
	} {
		b.await(problem, func() bool { return strings.Contains(strings.Join(b.found(), "\n"), problem) })
	}
	all := strings.Join(eval[[]string](b, faults), "\n")
	for _, fault := range []string{"1.4.3: contrast 2.85: pale", "4.1.2: no name", "2.1.1: a link to nowhere", "2.4.2", "3.1.1", "1.4.4"} {
		require.Contains(t, all, fault)
	}
	b.expect("") // all of this is wanted here
}
