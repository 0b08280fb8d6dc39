package console

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
	"github.com/bulkaction/bulkaction/internal/httpapi"
)

// DeadLetters has a letter of each of two tenants, and shows payloads as the store does.
func (f *fakeBackend) DeadLetters(ctx context.Context, q httpapi.DeadLetterQuery) (l api.DeadLetterList, err error) {
	err = f.call("dead letters %s %d", q.Cursor, q.Limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	for _, id := range []string{"failed-1", "other-1"} {
		g := f.groups[id]
		if g.ID == "" || !who.Owns(g.Tenant) || q.Cursor != "" {
			continue
		}
		letter := api.DeadLetter{
			Job: id + ".7", Group: id, Ordinal: 7, Tenant: g.Tenant, Key: hostile, Type: "NOOP", Code: hostile, Attempts: 1234, At: created,
		}
		if auth.SeesPayloads(ctx) {
			letter.Error, letter.Payload = "error "+hostile, json.RawMessage(`{"to":"</pre><script>"}`)
		}
		l.DeadLetters = append(l.DeadLetters, letter)
	}
	if len(l.DeadLetters) > 0 {
		l.Cursor = "next&page"
	}
	return l, err
}

func (f *fakeBackend) Rejected(_ context.Context, cursor string, limit int, data bool) (l api.RejectedList, err error) {
	err = f.call("rejected %s %d %v", cursor, limit, data)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.groups) > 0 && cursor == "" {
		m := api.RejectedMessage{ID: "1-0", At: &created, Reason: "reason " + hostile, MessageID: hostile, Type: hostile, Bytes: 4321}
		if data {
			m.Data = "data " + hostile + strings.Repeat("x", 2*maxPayloadText)
		}
		l.Rejected, l.Cursor = []api.RejectedMessage{m, {ID: "0-1", Reason: "none"}}, "next"
	}
	return l, err
}

func nextOf(d document) string {
	for _, a := range d.all("a") {
		if attribute(a, "rel") == "next" {
			return attribute(a, "href")
		}
	}
	return ""
}

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/dead-letters")
	for _, want := range []string{"failed-1.7", "other-1.7", "error " + hostile, "1,234", "</pre><script>", hostile + " 2"} {
		require.Contains(t, d.text, want)
	}
	require.Len(t, d.all("details"), 2, "payloads are behind a click")
	require.Contains(t, d.actions(), "/ui/groups/failed-1/retry")
	require.Equal(t, "/ui/dead-letters?cursor=next%26page", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further dead letters")
	require.Contains(t, w.backend.calls, "dead letters next&page 50")
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/dead-letters?cursor="+strings.Repeat("x", 600)).Code)

	d = as(t, reader).page("/ui/dead-letters")
	require.NotContains(t, d.text, "</pre><script>")
	require.Contains(t, d.text, "Your key does not show payloads")
	require.Empty(t, d.all("details"))
	require.NotContains(t, d.actions(), "/ui/groups/failed-1/retry")
	require.NotContains(t, as(t, acme).page("/ui/dead-letters").text, "other-1")
	require.Equal(t, http.StatusForbidden, as(t, metrics).get("/ui/dead-letters").Code)

	w.backend.groups = nil
	require.Contains(t, w.page("/ui/dead-letters").text, "No job has failed for good.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/dead-letters").Body.String(), "Redis does not answer")
}

func TestRejected(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/rejected")
	for _, want := range []string{"reason " + hostile, "4,321", "0-1 none", "With data"} {
		require.Contains(t, d.text, want)
	}
	require.Empty(t, d.all("details"))
	d = w.page("/ui/rejected?data=true")
	require.Contains(t, d.text, "data "+hostile)
	require.Contains(t, d.text, "x…")
	require.Len(t, d.all("details"), 1, "data is behind a click")
	require.Equal(t, "/ui/rejected?cursor=next&data=true", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further rejected messages")
	require.Equal(t, []string{"rejected  50 false", "rejected  50 true", "rejected next 50 true"}, w.backend.calls)
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/rejected?data=1").Code)

	without := as(t, reader)
	require.NotContains(t, without.page("/ui/rejected?data=true").text, "data "+hostile)
	require.Equal(t, []string{"rejected  50 false"}, without.backend.calls)
	for _, who := range []auth.Principal{acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/rejected").Code)
	}
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/rejected").text, "No message was rejected.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/rejected").Body.String(), "Redis does not answer")
}
