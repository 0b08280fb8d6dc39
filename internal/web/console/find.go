package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	foundOfAKind = 10  // most hits of one kind
	keyGroups    = 100 // newest groups among whose jobs a key is looked for
	keyFailures  = 5000
)

// findPage finds what its readers type into the search field: groups, jobs, tenants, tags and
// processes. It reads what the API would, so it finds only what the reader may see.
type findPage struct{ backend httpapi.Backend }

type findData struct {
	Text   string
	Hits   []hit
	Looked string // how far the search went, if not everywhere
}

// hit is something that was found.
type hit struct {
	Kind, Name, Note, Path string
	Status                 api.Status // of a group
}

// scopeOf returns the group or the tenant whose page a request is for: a search from there looks for
// keys of its jobs. "" for other pages.
func scopeOf(r *http.Request) string {
	if r.URL.Path == root+"/find" {
		return r.URL.Query().Get("in")
	}
	rest, below := strings.CutPrefix(r.URL.Path, root+"/")
	kind, id, _ := strings.Cut(rest, "/")
	id, _, _ = strings.Cut(id, "/")
	if !below || kind != "groups" && kind != "tenants" || !api.ValidID(id) {
		return ""
	}
	return strings.TrimSuffix(kind, "s") + ":" + id
}

// view finds the text of the parameter q. If there is one hit, the browser goes there, unless the
// parameter typed says that the text may not be complete. Then keys are looked for in a group only,
// as that costs little.
func (p findPage) view(r *http.Request) (view, error) {
	q := r.URL.Query()
	d := findData{Text: strings.TrimSpace(q.Get("q"))}
	if len(d.Text) > 256 {
		return view{}, invalid("The text", "must be at most 256 bytes")
	}
	typed := q.Has("typed")
	if d.Text != "" {
		if err := p.find(r.Context(), &d, q.Get("in"), typed); err != nil {
			return view{}, err
		}
	}
	if len(d.Hits) == 1 && !typed {
		return view{}, redirectError(d.Hits[0].Path)
	}
	return view{name: "find", title: "Find", data: d}, nil
}

func (p findPage) find(ctx context.Context, d *findData, in string, typed bool) error {
	text := d.Text
	kind, scope, _ := strings.Cut(in, ":")
	if !api.ValidID(scope) {
		kind = ""
	}
	byKey := func(context.Context) ([]hit, error) { return nil, nil }
	switch {
	case kind == "group":
		byKey = func(ctx context.Context) ([]hit, error) { return p.keyInGroup(ctx, scope, text, typed) }
	case kind == "tenant" && !typed:
		byKey = func(ctx context.Context) ([]hit, error) { return p.keyOfTenant(ctx, scope, text) }
		d.Looked = fmt.Sprintf("A key is looked for in those of the %d newest groups of %s that have unique keys.", keyGroups, scope)
	}
	lookups := []func(context.Context) ([]hit, error){
		byKey,
		func(ctx context.Context) ([]hit, error) { return p.job(ctx, text) },
		func(ctx context.Context) ([]hit, error) { return p.tenants(ctx, text) },
		func(ctx context.Context) ([]hit, error) { return p.processes(ctx, text) },
	}
	add := func(q messages.ListQuery, note string) {
		q.Limit = foundOfAKind
		lookups = append(lookups, func(ctx context.Context) ([]hit, error) { return p.groups(ctx, q, note) })
	}
	if tags, err := api.ParseTags([]string{text}); err == nil {
		add(messages.ListQuery{Tags: tags}, "tag "+text)
	}
	if api.ValidID(text) {
		add(messages.ListQuery{Prefix: text, Brief: typed}, "")
	}
	add(messages.ListQuery{Name: text, Brief: typed}, "")
	found := make([][]hit, len(lookups))
	calls, ctx := errgroup.WithContext(ctx)
	for i, look := range lookups {
		calls.Go(func() (err error) {
			found[i], err = look(ctx)
			if cantHave(err) {
				return nil
			}
			return err
		})
	}
	if err := calls.Wait(); err != nil {
		return err
	}
	known := map[string]bool{}
	for _, h := range slices.Concat(found...) {
		if !known[h.Path] {
			known[h.Path] = true
			d.Hits = append(d.Hits, h)
		}
	}
	return nil
}

// cantHave reports whether an error says that there is nothing to find for the reader.
func cantHave(err error) bool {
	problem, _, known := httpapi.ProblemOf(err)
	return known && (problem.Status == http.StatusNotFound || problem.Status == http.StatusForbidden ||
		problem.Status == http.StatusUnprocessableEntity)
}

// groups finds groups by a query of the list. The one whose id is the query's prefix comes first.
func (p findPage) groups(ctx context.Context, q messages.ListQuery, note string) (hits []hit, err error) {
	if q.Prefix != "" {
		if g, _, err := p.backend.GroupSummary(ctx, q.Prefix, 0); err == nil {
			hits = append(hits, groupHit(g, note))
		}
	}
	l, err := p.backend.Groups(ctx, q)
	for _, g := range l.Groups {
		hits = append(hits, groupHit(g, note))
	}
	return hits, err
}

func groupHit(g api.Group, note string) hit {
	id := g.ID
	if g.Name == "" {
		id = "" // it is the title
	}
	return hit{"group", titleOf(g), joined(id, g.Tenant, note), root + "/groups/" + g.ID, g.Status}
}

func joined(parts ...string) string { return strings.Join(withoutBlank(parts), " · ") }

// job finds a job by GROUP.ORDINAL.
func (p findPage) job(ctx context.Context, text string) ([]hit, error) {
	at := strings.LastIndexByte(text, '.')
	if at < 0 || !api.ValidID(text[:at]) {
		return nil, nil
	}
	ordinal, err := ordinalOf(text[:at], text[at+1:])
	if err != nil {
		return nil, nil //nolint:nilerr // another text with a dot
	}
	j, err := p.backend.Job(ctx, text[:at], ordinal)
	if err != nil {
		return nil, err
	}
	return []hit{jobHit(j, "")}, nil
}

func jobHit(j api.Job, note string) hit {
	name := cmp.Or(j.Key, fmt.Sprintf("%s.%d", j.Group, j.Ordinal))
	return hit{"job", name, joined(words(j.State), note), pathOfJob(j.Group, j.Ordinal), ""}
}

// keyInGroup finds the job of a group that has a key. Without unique keys there is no index: then it
// looks at the first keyFailures failed jobs, unless the key may not be complete.
func (p findPage) keyInGroup(ctx context.Context, group, key string, typed bool) (hits []hit, err error) {
	l, err := p.backend.Jobs(ctx, group, messages.JobQuery{Key: key, Limit: 1})
	for _, j := range l.Jobs {
		hits = append(hits, jobHit(j, "job "+fmt.Sprint(j.Ordinal)+" of "+group))
	}
	if err == nil || typed || !cantHave(err) {
		return hits, err
	}
	q := messages.FailureQuery{Limit: 1000}
	for range keyFailures / q.Limit {
		q.Cursor, err = p.backend.Failures(ctx, group, q, func(f api.Failure) error {
			if f.Key == key && len(hits) < foundOfAKind {
				hits = append(hits, jobHit(api.Job{Group: group, Ordinal: f.Ordinal, Key: f.Key, State: "failed"}, f.Code))
			}
			return nil
		})
		if err != nil || q.Cursor == "" {
			break
		}
	}
	return hits, err
}

// keyOfTenant finds jobs with a key in the newest groups of a tenant that have unique keys.
func (p findPage) keyOfTenant(ctx context.Context, tenant, key string) ([]hit, error) {
	l, err := p.backend.Groups(ctx, messages.ListQuery{Tenant: tenant, Limit: keyGroups})
	if err != nil {
		return nil, err
	}
	found := make([][]hit, len(l.Groups))
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(8)
	for i, g := range l.Groups {
		if !g.UniqueKeys {
			continue // it has no index of keys
		}
		calls.Go(func() error {
			jobs, err := p.backend.Jobs(ctx, g.ID, messages.JobQuery{Key: key, Limit: 1})
			if cantHave(err) {
				return nil
			}
			for _, j := range jobs.Jobs {
				found[i] = append(found[i], jobHit(j, groupHit(g, "").Name))
			}
			return err
		})
	}
	err = calls.Wait()
	return slices.Concat(found...), err
}

// tenants finds tenants by the beginning of their ids.
func (p findPage) tenants(ctx context.Context, text string) (hits []hit, err error) {
	if !api.ValidID(text) {
		return nil, nil
	}
	add := func(t api.Tenant) {
		note := ""
		if t.Unfinished > 0 {
			note = plural(t.Unfinished, "unfinished job", "unfinished jobs")
		}
		hits = append(hits, hit{"tenant", t.ID, note, root + "/tenants/" + url.PathEscape(t.ID), ""})
	}
	if t, err := p.backend.Tenant(ctx, text); err == nil {
		add(t)
	}
	l, err := p.backend.Tenants(ctx, text, foundOfAKind, false) // ids are in their order, and a cursor is an id
	for _, t := range l.Tenants {
		if strings.HasPrefix(t.ID, text) {
			add(t)
		}
	}
	return hits, err
}

// processes finds live processes by the beginning of their ids.
func (p findPage) processes(ctx context.Context, text string) (hits []hit, err error) {
	who, _ := auth.From(ctx)
	if !who.May(auth.ReadMetrics) {
		return nil, nil
	}
	s, err := p.backend.Stats(ctx)
	add := func(id, role string) {
		if strings.HasPrefix(id, text) && len(hits) < foundOfAKind {
			hits = append(hits, hit{"process", id, role, root + "/workers#" + url.PathEscape(id), ""})
		}
	}
	for _, w := range s.Workers {
		add(w.ID, "worker")
	}
	for _, stage := range s.Stages {
		add(stage.ID, stage.Role)
	}
	return hits, err
}
