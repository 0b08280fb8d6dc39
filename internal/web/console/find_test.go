package console

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// searched is a backend that filters groups, knows two tenants, and finds the key ann in groups with
// unique keys, of which other-1 is none.
type searched struct{ *fakeBackend }

func (s searched) Groups(ctx context.Context, q messages.ListQuery) (l api.GroupList, err error) {
	all, err := s.fakeBackend.Groups(ctx, messages.ListQuery{Tenant: q.Tenant})
	for _, g := range all.Groups {
		g.UniqueKeys = g.ID != "other-1"
		if strings.HasPrefix(g.ID, q.Prefix) && (q.Name == "" || q.Name == g.Name) && g.Tags.Include(q.Tags) {
			l.Groups = append(l.Groups, g)
		}
	}
	return l, err
}

func (s searched) Tenant(_ context.Context, id string) (api.Tenant, error) {
	if id != "acme" {
		return api.Tenant{}, api.ErrNotFound
	}
	return api.Tenant{ID: id, Unfinished: 3}, nil
}

func (s searched) Tenants(_ context.Context, cursor string, _ int, _ bool) (l api.TenantList, err error) {
	for _, id := range []string{"acme", "acme-2", "globex"} {
		if id > cursor {
			l.Tenants = append(l.Tenants, api.Tenant{ID: id})
		}
	}
	return l, nil
}

func (s searched) Stats(context.Context) (api.Stats, error) {
	return api.Stats{Workers: []api.WorkerStatus{{ID: "w-1"}}, Stages: []api.StageStatus{{ID: "w-2", Role: "watcher"}}}, nil
}

func (s searched) Jobs(_ context.Context, group string, q messages.JobQuery) (api.JobList, error) {
	switch {
	case group == "other-1":
		return api.JobList{}, &messages.ValidationError{Fields: []messages.FieldError{{Field: "key", Problem: "can't be looked up"}}}
	case q.Key != "ann" || group != "failed-1":
		return api.JobList{}, nil
	}
	return api.JobList{Jobs: []api.Job{{Group: group, Ordinal: 7, Key: q.Key, State: "failed"}}}, nil
}

func (s searched) Failures(_ context.Context, _ string, q messages.FailureQuery, yield func(api.Failure) error) (string, error) {
	if q.Cursor == "" {
		return "more", yield(api.Failure{Ordinal: 1, Key: "bob"})
	}
	return "", yield(api.Failure{Ordinal: 3, Key: "ann", Code: "BOUNCED"})
}

// TestFind: what a text finds, by ids, beginnings of ids, names, tags and keys. A single hit is where
// the browser goes, unless the text is still being typed.
func TestFind(t *testing.T) {
	w := parallelAs(t, admin)
	w.with(func(o *httpapi.Options) { o.Backend = searched{w.backend} })
	find := func(text, in string, more ...string) (paths []string) {
		t.Helper()
		answer := w.get("/ui/find?" + url.Values{"q": {text}, "in": {in}}.Encode() + strings.Join(more, ""))
		if answer.Code == http.StatusSeeOther {
			return []string{answer.Header().Get("Location")}
		}
		require.Equal(t, http.StatusOK, answer.Code, text)
		for _, a := range parse(t, answer.Body.String()).all("a") {
			if strings.Contains(attribute(a.Parent.Parent, "class"), "found") {
				paths = append(paths, attribute(a, "href"))
			}
		}
		return paths
	}
	for _, c := range []struct {
		text, in string
		want     []string
	}{
		{"failed-1", "", []string{"/ui/groups/failed-1"}},
		{"fai", "", []string{"/ui/groups/failed-1"}},
		{hostile, "", []string{"/ui/groups/failed-1"}},
		{"a=x& <b>", "", []string{"/ui/groups/failed-1"}},
		{"failed-1.7", "", []string{"/ui/groups/failed-1/jobs/7"}},
		{"failed-1.8", "", nil},
		{"acme", "", []string{"/ui/tenants/acme", "/ui/tenants/acme-2"}},
		{"w-", "", []string{"/ui/workers#w-1", "/ui/workers#w-2"}},
		{"ann", "", nil},
		{"ann", "group:failed-1", []string{"/ui/groups/failed-1/jobs/7"}},
		{"ann", "group:other-1", []string{"/ui/groups/other-1/jobs/3"}},
		{"ann", "tenant:acme", []string{"/ui/groups/failed-1/jobs/7"}},
		{"ann", "tenant:" + hostile, nil},
		{"", "", nil},
	} {
		require.Equal(t, c.want, find(c.text, c.in), c.text)
	}
	require.Equal(t, []string{"/ui/groups/failed-1"}, find("failed-1", "", "&typed="))
	require.Equal(t, http.StatusOK, w.get("/ui/find?q=failed-1&typed=").Code, "a text that is being typed leads nowhere")
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/find?q="+strings.Repeat("x", 300)).Code)

	w = as(t, globex)
	w.with(func(o *httpapi.Options) { o.Backend = searched{w.backend} })
	require.Contains(t, w.page("/ui/find?q=failed-1").text, "Nothing has this id", "a group of another tenant")
	require.Contains(t, w.get("/ui/groups/other-1").Body.String(), `name="in" value="group:other-1"`)
}
