package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	tenantsPage    = 50
	tenantsBusy    = 100 // most tenants of the list by load
	tenantGroups   = 10
	tenantFailures = 5
	tenantMinutes  = 60 // of the history
	// listInterval is how often an open page reads a list in which each row needs reads of its own.
	listInterval = 5 * time.Second
)

// sortByLoad is the value of the parameter sort that orders tenants by their unfinished jobs, as in
// the API.
const sortByLoad = "backlog"

// tenantPages show tenants, and change their settings.
type tenantPages struct{ backend httpapi.Backend }

type tenantsData struct {
	Tenants []tenantLoad
	ByLoad  bool
	AsOf    *time.Time // of a list by load; nil: no watcher has looked yet
	Next    string     // path of the next page
	First   bool       // this is the first page
}

// list serves the list of tenants, ordered by id or by load. If the query has an id, it redirects
// the browser to the page of this tenant.
func (p tenantPages) list(r *http.Request) (view, error) {
	id, err := idOf(r.URL.Query(), "id")
	if err != nil {
		return view{}, err
	}
	if id != "" {
		return view{}, redirectError(root + "/tenants/" + id)
	}
	return listOf(p.readList).page("tenants", "Tenants", "tenants")(r)
}

// readList parses the query of the list of tenants. It returns a function that reads this page of
// the list, and the valid parameters of the query, which are part of the name of the page's live
// topic.
func (p tenantPages) readList(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	cursor, err := cursorOf(q)
	if err != nil {
		return nil, nil, err
	}
	switch sort := q.Get("sort"); {
	case sort == sortByLoad && cursor == "":
		return func(ctx context.Context) (any, error) {
			l, err := p.backend.BusiestTenants(ctx, tenantsBusy)
			return tenantsData{Tenants: loadsOf(l.Tenants), ByLoad: true, AsOf: l.AsOf, First: true}, err
		}, url.Values{"sort": {sort}}, nil
	case sort != "":
		return nil, nil, invalid("sort", "must be %s, without a cursor, or absent", sortByLoad)
	}
	filter = chosen(map[string]string{"cursor": cursor})
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.Tenants(ctx, cursor, tenantsPage, false)
		next := nextPage(root+"/tenants", nil, l.Cursor)
		return tenantsData{Tenants: loadsOf(l.Tenants), Next: next, First: cursor == ""}, err
	}, filter, nil
}

type tenantData struct {
	api.Tenant
	tenantRest
	Fields   map[string]string // values of the form with the settings
	Preview  string            // what the settings in the query would change, in words; "": none are
	Statuses []api.Status      // of whose events the callback endpoint can be told
}

// tenantRest is what an open page reads less often.
type tenantRest struct {
	Groups   []api.Group        // the newest
	Callback api.TenantCallback // with the URL "": the tenant has no endpoint
	// Rates and Jobs are charts of the last hour; nil: the tenant was not among the busiest.
	Rates, Jobs *lineChart
	Failures    []api.DeadLetter // the newest
	Oldest      string           // of its newest running groups, the oldest; "": none runs
	Why         api.Why          // of Oldest
}

// tenantRates and tenantJobs list the lines of the charts of a tenant.
var (
	tenantRates = []line{{"jobs per second", "done", func(p api.HistoryPoint) float64 { return p.Done }}}
	tenantJobs  = []line{
		{"non-ready", "non-ready", func(p api.HistoryPoint) float64 { return float64(p.NonReady) }},
		{"other unfinished", "edge", func(p api.HistoryPoint) float64 { return float64(p.Waiting) }},
	}
)

// addHistory fills in the charts.
func (r *tenantRest) addHistory(h api.TenantHistory) {
	if len(h.Points) < 2 {
		return
	}
	points := make([]api.HistoryPoint, len(h.Points))
	for i, p := range h.Points {
		points[i] = api.HistoryPoint{T: p.T, Done: p.JobsPerSecond}
		points[i].NonReady, points[i].Waiting = p.NonReady, max(0, p.Unfinished-p.NonReady)
	}
	newest := points[len(points)-1]
	step := time.Duration(h.StepSeconds) * time.Second
	columns := columnsOf(points, points[0].T.Add(-time.Second), step)
	stale := time.Since(newest.T) > 3*step
	if stale { // the tenant is not among the busiest any more: a gap up to now
		columns = append(columns, column{at: time.Now()})
	}
	r.Rates, r.Jobs = newHistoryChart(tenantRates, columns, newest, decimal), newHistoryChart(tenantJobs, columns, newest, decimal)
	for _, c := range []*lineChart{r.Rates, r.Jobs} {
		for i := 0; stale && c != nil && i < len(c.Lines); i++ {
			c.Lines[i].Last = "–"
		}
	}
}

// settings are the names of the fields in the form with a tenant's settings.
var settings = []string{"rps", "weight", "base_priority", "in_flight"}

func (p tenantPages) tenant(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	data, err := p.read(r.Context(), id)
	if err != nil {
		return view{}, err
	}
	if data.tenantRest, err = p.rest(r.Context(), id); err != nil {
		return view{}, err
	}
	data.Fields, data.Statuses = formOf(data.Tenant), api.Statuses
	who, _ := auth.From(r.Context())
	if q := r.URL.Query(); q.Has("preview") && who.May(auth.Tenants) {
		patch, fields, err := patchOf(q)
		for name, text := range fields {
			data.Fields[name] = text
		}
		if err != nil {
			return view{name: "tenant", title: "Tenant " + id, data: data, refused: &refusal{cause: err}}, nil
		}
		after, err := p.backend.PreviewTenant(r.Context(), id, patch)
		if err != nil {
			return view{}, err
		}
		data.Preview = previewOf(data.Tenant, after)
	}
	return view{name: "tenant", title: "Tenant " + id, data: data, topic: "tenant:" + id}, nil
}

func (p tenantPages) openTenant(ctx context.Context, id string) (func(context.Context) (any, error), error) {
	if !api.ValidID(id) {
		return nil, api.ErrNotFound
	}
	if _, err := p.read(ctx, id); err != nil && !errors.Is(err, api.ErrUnavailable) {
		return nil, err
	}
	rest := every(listInterval, func(ctx context.Context) (tenantRest, error) { return p.rest(ctx, id) })
	return func(ctx context.Context) (any, error) {
		data, err := p.read(ctx, id)
		if err != nil {
			return nil, err
		}
		data.tenantRest, err = rest(ctx)
		return data, err
	}, nil
}

func (p tenantPages) read(ctx context.Context, id string) (tenantData, error) {
	t, err := p.backend.Tenant(ctx, id)
	return tenantData{Tenant: t}, err
}

func (p tenantPages) rest(ctx context.Context, id string) (rest tenantRest, err error) {
	newest, err1 := p.backend.Groups(ctx, messages.ListQuery{Tenant: id, Limit: tenantGroups})
	running, err2 := p.backend.Groups(ctx, messages.ListQuery{Tenant: id, Status: api.StatusRunning, Limit: tenantGroups})
	letters, err3 := p.backend.DeadLetters(ctx, messages.DeadLetterQuery{Tenant: id, Limit: tenantFailures})
	history, err4 := p.backend.TenantHistory(ctx, id, tenantMinutes)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return rest, err
	}
	rest.Groups, rest.Failures = newest.Groups, letters.DeadLetters
	rest.addHistory(history)
	open := slices.DeleteFunc(slices.Concat(newest.Groups, running.Groups), func(g api.Group) bool { return g.Status.Ended() })
	if n := len(open); n > 0 {
		rest.Oldest = open[n-1].ID
		if rest.Why, err = p.backend.Why(ctx, rest.Oldest); err != nil && !errors.Is(err, api.ErrNotFound) {
			return rest, err
		}
	}
	if rest.Callback, err = p.backend.Callback(ctx, id); errors.Is(err, api.ErrNotFound) {
		rest.Callback, err = api.TenantCallback{Events: api.DefaultCallbackEvents}, nil
	}
	return rest, err
}

// formOf returns the initial values of the form's fields, by name, from a tenant's settings.
func formOf(t api.Tenant) map[string]string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
	fields := map[string]string{
		"rps": "", "weight": number(t.Weight), "base_priority": numberText(t.BasePriority), "in_flight": numberText(t.InFlight),
	}
	if t.RPS != nil {
		fields["rps"] = number(*t.RPS)
	}
	return fields
}

// previewOf says in words what a change of settings does.
func previewOf(before, after api.Tenant) string {
	limit := func(t api.Tenant) (name, number string) {
		switch {
		case t.Window.Limit == 0:
			return "no limit", ""
		case t.RPS != nil:
			return "own limit", " " + count(t.Window.Limit)
		}
		return "share", " " + count(t.Window.Limit)
	}
	name, was := limit(before)
	text := name + was + " → "
	next, is := limit(after)
	if next == name && is != "" {
		text += is[1:]
	} else {
		text += next + is
	}
	if after.Window.GlobalLimit > 0 {
		text += " of " + count(after.Window.GlobalLimit)
	}
	if is != "" {
		text += "/window"
	}
	priority := func(t api.Tenant) int64 {
		if t.BasePriority == nil {
			return 0
		}
		return *t.BasePriority
	}
	if a, b := priority(before), priority(after); a != b {
		text += fmt.Sprintf(", base priority %d → %d", a, b)
	}
	if a, b := numberText(before.InFlight), numberText(after.InFlight); a != b {
		text += fmt.Sprintf(", jobs in flight %s → %s", cmp.Or(a, "no limit"), cmp.Or(b, "no limit"))
	}
	return text
}

// patchOf returns the change of settings in a form, and the values of the form's fields. An empty
// field sets the default.
func patchOf(form url.Values) (patch api.TenantPatch, fields map[string]string, err error) {
	fields = fieldsOf(form, "", settings...)
	patch, err = httpapi.TenantPatchOf(fields)
	return patch, fields, err
}

// change sets the settings in the form.
func (p tenantPages) change(ctx context.Context, r *http.Request) (string, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	patch, _, err := patchOf(r.PostForm)
	if err != nil {
		return "", err
	}
	_, err = p.backend.PatchTenant(ctx, id, patch)
	return root + "/tenants/" + id + "?done=tenant-changed", err
}

// pauseTenant returns an action that pauses a tenant or resumes it.
func pauseTenant(
	do func(context.Context, string) error, done string,
) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		id, err := pathID(r, "id")
		if err != nil {
			return "", err
		}
		return root + "/tenants/" + id + "?done=" + done, do(ctx, id)
	}
}
