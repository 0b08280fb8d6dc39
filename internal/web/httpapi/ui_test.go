package httpapi

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

// fakeUI makes a console for tests. It calls what the API offers to the console, answers with "page "
// and the request's body, and panics at /ui/panic.
func fakeUI(api Shared) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ui/panic" {
			panic("a fault")
		}
		who := auth.Principal{KeyID: "key_1"}
		_ = api.CountRequest(r, who)
		end, err := api.BeginAppend(r, who)
		if err != nil {
			panic(err)
		}
		defer end()
		w.Header().Set("Cache-Control", "public")
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(append([]byte("page "), body...))
	})
}

func ask(h http.Handler, method, path, accept string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader("x")) //nolint:noctx // a test of the answer alone
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestUI: the console's own Cache-Control is kept, and a request id is added. A panic leads to 500,
// a request from another site to 403, and another host's name to 421.
func TestUI(t *testing.T) {
	t.Parallel()
	h := New(Options{Backend: newFakeBackend(), UI: fakeUI})
	answer := ask(h, http.MethodPost, "/ui/x", "")
	require.Equal(t, "page x", answer.Body.String())
	require.Equal(t, "public", answer.Header().Get("Cache-Control"))
	require.NotEmpty(t, answer.Header().Get("X-Request-Id"))
	require.Equal(t, http.StatusInternalServerError, ask(h, http.MethodGet, "/ui/panic", "").Code)

	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/ui/x", nil)
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusForbidden, w.Code)

	local := NewServer("127.0.0.1:1", Options{Backend: newFakeBackend(), UI: fakeUI})
	t.Cleanup(func() { local.Stop(0) })
	require.Equal(t, http.StatusMisdirectedRequest, ask(local.Handler, http.MethodGet, "/ui/x", "").Code)
}

// TestRoot: GET / leads a browser to the console with 303, and gives a program the index, and a
// browser if there is no console.
func TestRoot(t *testing.T) {
	t.Parallel()
	const browser = "text/html,application/xhtml+xml,*/*;q=0.8"
	for name, c := range map[string]struct {
		opt              Options
		accept           string
		root, groups, ui int
	}{
		"browser":     {Options{UI: fakeUI}, browser, 303, 200, 200},
		"program":     {Options{UI: fakeUI}, "*/*", 200, 200, 200},
		"only the UI": {Options{UI: fakeUI, OnlyUI: true}, browser, 303, 404, 200},
		"no UI":       {Options{}, browser, 200, 200, 404},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.opt.Backend = newFakeBackend()
			h := New(c.opt)
			answer := ask(h, http.MethodGet, "/", c.accept)
			require.Equal(t, c.root, answer.Code)
			if c.root == 303 {
				require.Equal(t, "/ui/", answer.Header().Get("Location"))
			}
			require.Equal(t, c.groups, ask(h, http.MethodGet, "/v1/groups", "").Code)
			require.Equal(t, c.ui, ask(h, http.MethodGet, "/ui/", "").Code)
		})
	}
}

// TestAppendAll: AppendAll stores 600 rows of CSV in two batches, and rejects line 602, which has
// two fields. For an unknown group or without the key's column it returns an error.
func TestAppendAll(t *testing.T) {
	t.Parallel()
	b := newFakeBackend().withGroup("g")
	text := "to\n" + strings.Repeat("a\n", 600) + "b,c\n"
	answer, err := AppendAll(context.Background(), b, messages.Decoder{}, Load{Group: "g", CSV: true, Text: strings.NewReader(text)})
	require.NoError(t, err)
	require.EqualValues(t, 600, answer.Accepted)
	require.EqualValues(t, 602, answer.Rejected[0].Line)
	require.Len(t, b.appends, 2)
	require.Len(t, b.payloads("g"), 600)
	_, err = AppendAll(context.Background(), b, messages.Decoder{}, Load{Group: "unknown", Text: strings.NewReader(`{"payload":1}`)})
	require.ErrorContains(t, err, "not found")
	_, err = AppendAll(context.Background(), b, messages.Decoder{}, Load{Group: "g", CSV: true, Table: records.TableOptions{Key: "id"}, Text: strings.NewReader("to\n")})
	require.Error(t, err)
}
