package console

import (
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// TestConsoleUnderAPrefix: behind a proxy that shows the console below /bulk, whether or not it
// removes /bulk from requests, no link, form, redirect, cookie, script or stream leaves /bulk.
func TestConsoleUnderAPrefix(t *testing.T) {
	for name, strips := range map[string]bool{"proxy removes it": true, "proxy leaves it": false} {
		t.Run(name, func(t *testing.T) {
			w := as(t, admin)
			o := w.options()
			o.Prefix = "/bulk"
			o.UI = func(s httpapi.Shared) http.Handler { return New(s, Options{Sessions: w.sessions}) }
			server := httptest.NewServer(httpapi.New(o))
			defer server.Close()
			target, err := url.Parse(server.URL)
			require.NoError(t, err)
			var proxy http.Handler = httputil.NewSingleHostReverseProxy(target)
			if strips {
				proxy = http.StripPrefix("/bulk", proxy)
			}
			front := http.NewServeMux() // any other path is not found
			front.Handle("/bulk/", proxy)
			public := httptest.NewServer(front)
			defer public.Close()

			jar, err := cookiejar.New(nil)
			require.NoError(t, err)
			browser := &http.Client{Jar: jar}
			// call loads a page, or with a form posts it.
			call := func(path string, form url.Values) string {
				method, body := http.MethodGet, io.Reader(http.NoBody)
				if form != nil {
					method, body = http.MethodPost, strings.NewReader(form.Encode())
				}
				r, err := http.NewRequestWithContext(t.Context(), method, public.URL+path, body)
				require.NoError(t, err)
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				answer, err := browser.Do(r)
				require.NoError(t, err)
				defer answer.Body.Close()
				text, err := io.ReadAll(answer.Body)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, answer.StatusCode, answer.Request.URL.String()+string(text))
				require.True(t, strings.HasPrefix(answer.Request.URL.Path, "/bulk/ui/"), answer.Request.URL)
				return string(text)
			}
			text := call("/bulk/ui/groups/failed-1", nil)
			require.Contains(t, text, `action="/bulk/ui/login"`, "it asks for a login")
			text = call("/bulk/ui/login", url.Values{"key": {"admin"}, "next": {"/ui/groups/failed-1"}})
			require.Contains(t, text, `action="/bulk/ui/groups/failed-1/retry"`)
			text = call("/bulk/ui/groups/failed-1/retry", url.Values{})
			call("/bulk/ui", nil)

			links := regexp.MustCompile(` (?:href|action|src)="(/[^"]*)"`).FindAllStringSubmatch(text, -1)
			require.Greater(t, len(links), 20)
			seen := map[string]bool{}
			for _, link := range links {
				require.True(t, strings.HasPrefix(link[1], "/bulk/"), link[1])
				if strings.Contains(link[1], "/assets/") && !seen[link[1]] {
					seen[link[1]] = true
					call(link[1], nil)
				}
			}
			require.Len(t, seen, 4, "scripts, style and icon")
			at, err := url.Parse(public.URL + "/")
			require.NoError(t, err)
			require.Empty(t, jar.Cookies(at), "the session's cookie is for paths below /bulk only")
			require.Contains(t, string(assets["app.js"].text), `new URL("../../events", document.currentScript.src)`)
		})
	}
}
