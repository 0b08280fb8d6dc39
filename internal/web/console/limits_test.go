package console

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// TestLimitsOfKey: the requests of a session, and the bodies that it sends, count towards the
// limits of its API key.
func TestLimitsOfKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := as(t, acme)
		o := w.options()
		o.KeyRPS = 2
		o.UI = func(s httpapi.Shared) http.Handler { return New(s, w.console.Options) }
		api := httpapi.New(o)
		send := func(method, path string, body io.Reader, header ...string) *httptest.ResponseRecorder {
			r := httptest.NewRequestWithContext(t.Context(), method, path, body)
			for i := 0; i < len(header); i += 2 {
				r.Header.Set(header[i], header[i+1])
			}
			answer := httptest.NewRecorder()
			api.ServeHTTP(answer, r)
			return answer
		}
		session := []string{"Cookie", "bulkaction=" + w.cookie}
		key := []string{"Authorization", "Bearer acme"}
		login := func(key string) int {
			return send(http.MethodPost, "/ui/login", strings.NewReader(url.Values{"key": {key}}.Encode()),
				"Content-Type", "application/x-www-form-urlencoded").Code
		}
		require.Equal(t, http.StatusOK, send(http.MethodGet, "/ui/groups", nil, session...).Code)
		require.Equal(t, http.StatusOK, send(http.MethodGet, "/v1/groups/running-1", nil, key...).Code)
		for _, path := range []string{"/ui/groups", "/ui/events?topics=overview"} {
			answer := send(http.MethodGet, path, nil, session...)
			require.Equal(t, http.StatusTooManyRequests, answer.Code, path)
			require.Equal(t, "1", answer.Header().Get("Retry-After"))
			require.Contains(t, answer.Body.String(), "2 requests a second")
		}
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodPost, "/ui/groups/running-1/cancel", nil, session...).Code)
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodGet, "/v1/groups/running-1", nil, key...).Code)
		require.Equal(t, http.StatusTooManyRequests, login("acme"))
		require.Empty(t, w.backend.calls)
		require.Len(t, w.sessions.all, 1, "a refused login makes no session")
		require.Equal(t, http.StatusSeeOther, login("globex"))

		const bodies = 64
		answers := make(chan int, bodies)
		var open []*io.PipeWriter
		form := append([]string{"Content-Type", "multipart/form-data; boundary=x"}, session...)
		for range bodies {
			time.Sleep(time.Second)
			body, end := io.Pipe()
			open = append(open, end)
			go func() { answers <- send(http.MethodPost, "/ui/submit", body, form...).Code }()
		}
		synctest.Wait()
		require.Empty(t, answers)
		time.Sleep(time.Second)
		answer := send(http.MethodPost, "/ui/submit", strings.NewReader("--x--"), form...)
		require.Equal(t, http.StatusTooManyRequests, answer.Code)
		require.Contains(t, answer.Body.String(), "64 bodies of jobs")
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodPost, "/v1/groups/running-1/jobs",
			strings.NewReader("{}"), append([]string{"Content-Type", "application/x-ndjson"}, key...)...).Code)
		for _, end := range open {
			require.NoError(t, end.Close())
			require.Equal(t, http.StatusUnprocessableEntity, <-answers)
		}
		time.Sleep(time.Second)
		answer = send(http.MethodPost, "/ui/submit", strings.NewReader("--x--"), form...)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	})
}
