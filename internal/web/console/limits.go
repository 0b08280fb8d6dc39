package console

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// limitsPage shows the limits of all jobs together and of types, and changes them.
type limitsPage struct{ backend httpapi.Backend }

// limitsData is the data of the page of limits.
type limitsData struct {
	api.Limits
	Rows   []limitRow
	Type   string            // whose limits can be changed; "": none is chosen
	Fields map[string]string // values of the fields in its form
}

// limitRow is a global setting.
type limitRow struct{ Field, Name, Configured, Effective, Source string }

// Set returns the value that the API has set; "" if that of the environment holds.
func (r limitRow) Set() string {
	if r.Source == api.SourceAPI {
		return r.Effective
	}
	return ""
}

// Show returns a value of the setting as people read it.
func (r limitRow) Show(value string) string {
	if value == "0" {
		return "no limit"
	}
	if r.Field == "rps" {
		return count(value) + "/s"
	}
	if d, err := time.ParseDuration(value); err == nil {
		return duration(d.Seconds())
	}
	return value
}

// Shares are the values of the setting share.
func (limitsData) Shares() []string { return []string{"static", "elastic"} }

// Changed reports whether the API has set a global limit.
func (d limitsData) Changed() bool {
	return slices.ContainsFunc(d.Rows, func(r limitRow) bool { return r.Source == api.SourceAPI })
}

func (p limitsPage) view(r *http.Request) (view, error) {
	typ, err := idOf(r.URL.Query(), "type")
	if err != nil {
		return view{}, err
	}
	d, err := p.read(r.Context())
	if err != nil {
		return view{}, err
	}
	d.Type = cmp.Or(typ, r.PathValue("type")) // the latter if the form was refused
	t := d.Types[d.Type]
	d.Fields = map[string]string{"rps": numberText(t.RPS), "in_flight": numberText(t.InFlight)}
	return view{name: "limits", title: "Limits", data: d, topic: "limits"}, nil
}

func (p limitsPage) open(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	if arg != "" {
		return nil, api.ErrNotFound
	}
	return func(ctx context.Context) (any, error) { return p.read(ctx) }, nil
}

func (p limitsPage) read(ctx context.Context) (limitsData, error) {
	l, err := p.backend.Limits(ctx)
	g, number := l.Global, func(n int64) string { return strconv.FormatInt(n, 10) }
	return limitsData{Limits: l, Rows: []limitRow{
		{"rps", "Permits per second", number(g.RPS.Configured), number(g.RPS.Effective), g.RPS.Source},
		{"share", "Share", g.Share.Configured, g.Share.Effective, g.Share.Source},
		{"default_backoff", "Default backoff", g.DefaultBackoff.Configured, g.DefaultBackoff.Effective, g.DefaultBackoff.Source},
		{"max_backoff", "Max backoff", g.MaxBackoff.Configured, g.MaxBackoff.Effective, g.MaxBackoff.Source},
	}}, err
}

// numberText returns the value of a form's field for a number; "" for none.
func numberText(n *int64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatInt(*n, 10)
}

// fieldsOf returns the fields of a form that were changed, by these names, which have the prefix before
// them in the form: a form that is older than another's change must not undo it. The field was_NAME has
// the value that the form began with.
func fieldsOf(form url.Values, prefix string, names ...string) map[string]string {
	fields := map[string]string{}
	for _, name := range names {
		if was := "was_" + prefix + name; form.Has(prefix+name) && (!form.Has(was) || form.Get(was) != form.Get(prefix+name)) {
			fields[name] = form.Get(prefix + name)
		}
	}
	return fields
}

// changeGlobal changes global limits. An empty field means the value of the environment.
func (p limitsPage) changeGlobal(ctx context.Context, r *http.Request) (string, error) {
	patch, err := httpapi.LimitsPatchOf(fieldsOf(r.PostForm, "", "rps", "share", "default_backoff", "max_backoff"))
	if err != nil {
		return "", err
	}
	l, err := p.backend.PatchLimits(ctx, patch)
	return afterLimits(l), err
}

// changeType changes limits of the type in the path. An empty field means no limit.
func (p limitsPage) changeType(ctx context.Context, r *http.Request) (string, error) {
	typ, err := pathID(r, "type")
	if err != nil {
		return "", err
	}
	patch, err := httpapi.TypePatchOf(fieldsOf(r.PostForm, "type_", "rps", "in_flight"))
	if err != nil {
		return "", err
	}
	l, err := p.backend.PatchType(ctx, typ, patch)
	return afterLimits(l), err
}

// afterLimits returns the path of the page after a change. If the change is not in effect
// everywhere, the page says so itself.
func afterLimits(l api.Limits) string {
	if len(l.PendingPartitions) > 0 {
		return root + "/limits"
	}
	return root + "/limits?done=limits-changed"
}
