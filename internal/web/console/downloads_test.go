package console

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

func (f *fakeBackend) Results(ctx context.Context, id string, yield func([]byte) error) error {
	if _, err := f.group(ctx, id); err != nil {
		return err
	}
	for range 2 {
		line := `{"ordinal":7,"key":"-k","attempts":1,"duration_ms":2.5,"started_ms":1767323045000,"data":{"a":"` + strings.Repeat("x", f.long) + `"}}`
		if err := yield([]byte(line)); err != nil {
			return err
		}
		if f.afterPage != nil {
			f.afterPage()
		}
	}
	return nil
}

// TestDownloads: results and failures come as NDJSON and CSV. Spreadsheets run nothing of CSV.
func TestDownloads(t *testing.T) {
	w := parallelAs(t, operator)
	for file, want := range map[string]struct{ mediaType, first, line string }{
		"results.ndjson": {"application/x-ndjson", `{"ordinal":7,`, `"data":{"a":""}}`},
		"results.csv":    {"text/csv; charset=utf-8", "\ufeffordinal,key,attempts,duration_ms,started,data\n", `7,'-k,1,2.5,2026-01-02T03:04:05Z,"{""a"":""""}"`},
		"failures.csv":   {"text/csv; charset=utf-8", "\ufeffordinal,key,code,error,attempts,at,payload\n", `7,'@k,PERMANENT,'=1+2,2,2026-01-02T03:04:05Z,"{""to"":""ann""}"`},
	} {
		answer := w.get("/ui/groups/failed-1/" + file)
		require.Equal(t, http.StatusOK, answer.Code, file)
		require.Equal(t, want.mediaType, answer.Header().Get("Content-Type"))
		require.Equal(t, `attachment; filename="failed-1-`+file+`"`, answer.Header().Get("Content-Disposition"))
		require.True(t, strings.HasPrefix(answer.Body.String(), want.first), answer.Body.String())
		require.Contains(t, answer.Body.String(), want.line)
		require.Equal(t, http.StatusNotFound, as(t, globex).get("/ui/groups/failed-1/"+file).Code)
	}
	w.backend.long = downloadBuffer
	w.backend.afterPage = func() { w.keys.revoke("operator") }
	require.PanicsWithError(t, http.ErrAbortHandler.Error(), func() { w.get("/ui/groups/failed-1/results.ndjson") })
}

// TestRunAgain: the failed jobs of a group become a new group with its settings.
func TestRunAgain(t *testing.T) {
	w := parallelAs(t, admin)
	d := w.page("/ui/groups/failed-1")
	require.Contains(t, d.actions(), "/ui/groups/failed-1/again")
	require.Contains(t, d.links(), "/ui/groups/failed-1/results.csv")
	require.NotEmpty(t, d.typed()["form_id"])
	answer := w.post("/ui/groups/failed-1/again", url.Values{"jobs": {"failed"}, "form_id": {"f1"}})
	require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
	id, _, _ := strings.Cut(strings.TrimPrefix(answer.Header().Get("Location"), "/ui/groups/"), "?")
	require.Equal(t, []string{
		"submit " + id + " acme SEND_EMAIL", "pause " + id, "append " + id + " 1", "seal " + id, "resume " + id,
	}, w.backend.calls[len(w.backend.calls)-5:])
	require.Equal(t, api.Tags{"a": "x& <b>"}, w.backend.tags)
	require.Equal(t, "@k", w.backend.jobs[id][0].Key)
	require.JSONEq(t, `{"to":"ann"}`, string(w.backend.jobs[id][0].Payload))
	for _, path := range []string{"other-1/again?jobs=done", "running-1/again?jobs=failed", "other-1/again?jobs=failed"} {
		to, form, _ := strings.Cut(path, "?")
		values, _ := url.ParseQuery(form)
		require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/groups/"+to, values).Code, path)
	}
	blind := as(t, auth.Principal{KeyID: "blind", Role: auth.Admin})
	blind.keys.keys["blind"] = auth.Principal{KeyID: "blind", Role: auth.Admin}
	require.Equal(t, http.StatusForbidden, blind.post("/ui/groups/failed-1/again", url.Values{"jobs": {"failed"}}).Code)

	d = w.page("/ui/groups/other-1")
	require.NotContains(t, d.actions(), "/ui/groups/other-1/again")
	require.Contains(t, d.text, "The payloads of done jobs are not kept")
	typed := w.page("/ui/submit?tenant=globex&type=ODD&tags=a%3Db").typed()
	require.Equal(t, []string{"globex", "ODD", "a=b"}, []string{typed["tenant"], typed["type"], typed["tags"]})
}
