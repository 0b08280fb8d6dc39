package console

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// Read returns two fixed entries, which no action of the test has made, and a cursor. With a cursor
// or the tenant none, or if l.empty is set, it returns no entry.
func (l *fakeLog) Read(_ context.Context, q activity.Query) (api.ActivityList, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queries = append(l.queries, q)
	list := api.ActivityList{Scanned: 10_000}
	if l.empty || q.Cursor != "" {
		return list, nil
	}
	if list.Cursor = "5-1"; q.Tenant == "none" {
		return list, nil
	}
	list.Activity = []api.Activity{
		{
			ID: "9-1", At: created, Actor: "key_a", Role: "operator", Via: api.ViaUI, IP: "192.0.2.1", RequestID: "req-1", Action: "tenant.set",
			Object: "acme", Before: json.RawMessage(`{"weight":1}`), After: json.RawMessage(`{"weight":"` + strings.Repeat("x", 2*maxPayloadText) + `"}`),
		},
		{ID: "8-1", Actor: hostile, Role: "producer", Tenant: "acme", Via: api.ViaCLI, Action: hostile, Object: hostile, After: json.RawMessage(`"<b>"`), Outcome: "it " + hostile},
	}
	return list, nil
}

func TestActivity(t *testing.T) {
	t.Parallel()
	w := as(t, admin)
	d := w.page("/ui/activity?actor=key_a&tenant=acme&since=2026-01-02")
	for _, want := range []string{
		"tenant.set acme key_a operator 2026-01-02 03:04:05 UTC", `{"weight":1} → {"weight":"xxx`, "x… ui 192.0.2.1 req-1 –",
		hostile + " " + hostile + " " + hostile + " producer of acme – – → \"<b>\" cli failed it " + hostile,
	} {
		require.Contains(t, d.text, want)
	}
	day := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	require.Equal(t, []activity.Query{{Actor: "key_a", Tenant: "acme", Since: day, Limit: 50}}, w.log.queries)
	require.Equal(t, "/ui/activity?actor=key_a&cursor=5-1&since=2026-01-02&tenant=acme", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "No further entry fits the filters.")
	require.Equal(t, activity.Query{Actor: "key_a", Tenant: "acme", Since: day, Cursor: "5-1", Limit: 50}, w.log.queries[1])
	require.Contains(t, w.page("/ui/activity?tenant=none").text, "None of the 10,000 entries that were looked at fits the filters.")
	for _, query := range []string{"cursor=x", "cursor=" + strings.Repeat("1", 600), "tenant=a%20b", "since=today", "actor=" + strings.Repeat("x", 300)} {
		require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/activity?"+query).Code, query)
	}
	for _, who := range []auth.Principal{operator, reader, acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/activity").Code, who.Role)
	}
	w.log.empty = true
	require.Contains(t, w.page("/ui/activity").text, "Nobody has changed anything yet.")
	w.with(func(o *httpapi.Options) { o.Activity = nil })
	require.Contains(t, w.page("/ui/activity").text, "This console has no activity log.")
}
