package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const (
	groupsPage = 50
	maxTicked  = 50 // most groups of one action
)

// statuses are the states of groups by which the list can be filtered.
var statuses = []api.Status{
	api.StatusCreated, api.StatusDispatched, api.StatusRunning, api.StatusAggregating, api.StatusCompleted,
	api.StatusFailed, api.StatusCancelled,
}

// groupPages show groups and their jobs, and control them.
type groupPages struct{ backend httpapi.Backend }

type groupsData struct {
	Groups   []api.Group
	Tenant   string
	Status   string
	Type     string
	Prefix   string
	Paused   string // true or false; "": both
	Failed   string // true: groups with failed jobs, false: those without; "": both
	Since    string // a day
	Tags     []string
	Statuses []api.Status
	Scanned  int
	Next     string // path of the next page
	First    bool   // this is the first page
	Filtered bool
	Tenants  bool // the reader sees groups of several tenants
	All      allMatching
}

// openList returns the function that reads the live data of a list of groups. The function reads
// the unfiltered first page at each call, and any other page at most once per listInterval, because
// that may look at thousands of groups.
func (p groupPages) openList(ctx context.Context, arg string) (func(context.Context) (any, error), error) {
	interval := listInterval
	if arg == "" {
		interval = 0
	}
	return listOf(p.readList).live(interval)(ctx, arg)
}

// list shows the list of groups. A query that can't be used is shown again, with the problem.
func (p groupPages) list(r *http.Request) (view, error) {
	q := r.URL.Query()
	return listOf(p.readList).orRefused("groups", "Groups", "groups", func(tenants bool) any {
		return groupsData{
			Tenant: q.Get("tenant"), Status: strings.ToUpper(q.Get("status")), Statuses: statuses, Type: q.Get("type"),
			Prefix: q.Get("prefix"), Paused: q.Get("paused"), Failed: q.Get("failed_jobs"), Since: q.Get("since"),
			Tags: withoutBlank(q["tag"]), First: true, Filtered: true, Tenants: tenants,
		}
	})(r)
}

// withoutBlank leaves out blank texts.
func withoutBlank(texts []string) []string {
	return slices.DeleteFunc(slices.Clone(texts), func(text string) bool { return strings.TrimSpace(text) == "" })
}

// readList parses the query of the list of groups. It returns a function that reads this page of
// the list, and the valid parameters of the query, which are part of the name of the page's live
// topic.
func (p groupPages) readList(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	query := messages.ListQuery{Status: api.Status(strings.ToUpper(q.Get("status"))), Limit: groupsPage}
	for name, to := range map[string]*string{"tenant": &query.Tenant, "type": &query.Type, "prefix": &query.Prefix} {
		if *to, err = idOf(q, name); err != nil {
			return nil, nil, err
		}
	}
	paused, failed, since := q.Get("paused"), q.Get("failed_jobs"), q.Get("since")
	if query.Paused, err = choiceOf(q, "paused"); err != nil {
		return nil, nil, err
	}
	if query.FailedJobs, err = choiceOf(q, "failed_jobs"); err != nil {
		return nil, nil, err
	}
	if query.Since, err = dayOf(q, "since"); err != nil {
		return nil, nil, err
	}
	tags := withoutBlank(q["tag"])
	if query.Tags, err = api.ParseTags(tags); err != nil {
		return nil, nil, invalid("tag", "%s", err.Error())
	}
	if query.Cursor, err = cursorOf(q); err != nil {
		return nil, nil, err
	}
	if query.Status != "" && !slices.Contains(statuses, query.Status) {
		return nil, nil, notOneOf("status", statuses)
	}
	filter = chosen(map[string]string{
		"tenant": query.Tenant, "status": string(query.Status), "cursor": query.Cursor, "type": query.Type,
		"prefix": query.Prefix, "paused": paused, "failed_jobs": failed, "since": since,
	})
	if len(tags) > 0 {
		filter["tag"] = tags
	}
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.Groups(ctx, query)
		if err != nil {
			return nil, err
		}
		who, _ := auth.From(ctx)
		return groupsData{
			Groups: l.Groups, Tenant: query.Tenant, Status: string(query.Status), Statuses: statuses,
			Type: query.Type, Prefix: query.Prefix, Paused: paused, Failed: failed, Since: since, Tags: tags,
			Scanned: l.Scanned, Next: nextPage(root+"/groups", filter, l.Cursor), First: query.Cursor == "",
			Filtered: query.Tenant+string(query.Status)+query.Type+query.Prefix+paused+failed+since+strings.Join(tags, "") != "",
			Tenants:  who.Tenant == "" || who.Tenant == auth.AllTenants,
			All:      allMatching{filterJSON(operationFilter(query)), api.OperationKinds[:4]},
		}, nil
	}, filter, nil
}

// operationFilter returns the filter of an operation on all groups that a query selects.
func operationFilter(q messages.ListQuery) api.OperationFilter {
	f := api.OperationFilter{
		Tenant: q.Tenant, Status: q.Status, Type: q.Type, Prefix: q.Prefix, Paused: q.Paused, FailedJobs: q.FailedJobs, Tags: q.Tags,
	}
	if !q.Since.IsZero() {
		f.Since = &q.Since
	}
	return f
}

// command is a function that carries out a command on a group, such as Pause.
type command func(ctx context.Context, id string) (api.Accepted, error)

// commands returns the commands on groups by the names that they have in paths.
func (p groupPages) commands() map[string]command {
	return map[string]command{
		"pause":  p.backend.Pause,
		"resume": p.backend.Resume,
		"cancel": p.backend.Cancel,
		"retry": func(ctx context.Context, id string) (api.Accepted, error) {
			return p.backend.Retry(ctx, id, api.RetryChoice{})
		},
		"seal": func(ctx context.Context, id string) (api.Accepted, error) {
			return p.backend.Seal(ctx, id, nil)
		},
	}
}

// controlSome carries out a command on the groups that were ticked in the list. If a group does not
// exist, or its state does not allow the command, the other groups still get it. After any other
// error, the remaining groups do not get it.
func (p groupPages) controlSome(ctx context.Context, r *http.Request) (string, error) {
	name, ids := r.PostForm.Get("command"), r.PostForm["id"]
	do := p.commands()[name]
	switch {
	case do == nil || name == "seal":
		return "", invalid("command", "must be pause, resume, cancel or retry")
	case len(ids) == 0:
		return "", invalid("The command", "needs groups: tick some in the list first")
	case len(ids) > maxTicked:
		return "", invalid("The command", "takes at most %d groups at once", maxTicked)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	for _, id := range ids {
		if !api.ValidID(id) {
			return "", invalid("id", "must %s", api.IDRule)
		}
	}
	done, failed := 0, 0
	for _, id := range ids {
		_, err := do(ctx, id)
		switch {
		case err == nil:
			done++
		case errors.Is(err, api.ErrConflict), errors.Is(err, api.ErrNotFound), errors.Is(err, api.ErrSealed):
			failed++
		default:
			return "", fmt.Errorf("%s: after %d groups: %w", name, done, err)
		}
	}
	to, err := url.Parse(safeNext(r.PostForm.Get("next")))
	if err != nil || to.Path != root+"/groups" {
		to = &url.URL{Path: root + "/groups"}
	}
	q := to.Query()
	q.Set("done", "groups")
	q.Set("n", fmt.Sprint(done))
	q.Set("failed", fmt.Sprint(failed))
	to.RawQuery = q.Encode()
	return to.String(), nil
}

// control returns an action that carries out a command on the group in the path. A retry whose form
// has an error code retries only the jobs that failed with this code.
func (p groupPages) control(name string) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		id, err := pathID(r, "id")
		if err != nil {
			return "", err
		}
		code, err := codeOf(r.PostForm)
		if err != nil {
			return "", err
		}
		if name == "retry" && code != "" {
			_, err = p.backend.Retry(ctx, id, api.RetryChoice{Codes: []string{code}})
		} else {
			_, err = p.commands()[name](ctx, id)
		}
		return root + "/groups/" + id + "?done=" + name, err
	}
}

// listOf is a function that parses the query of a list. It returns a function that reads this page
// of the list, and the valid parameters of the query, which are part of the name of the page's live
// topic.
type listOf func(q url.Values) (read func(context.Context) (any, error), filter url.Values, err error)

// page returns the view of a list. The parameters of a request's query that are valid become part
// of the topic.
func (l listOf) page(name, title, topic string) func(r *http.Request) (view, error) {
	return func(r *http.Request) (view, error) {
		read, filter, err := l(r.URL.Query())
		if err != nil {
			return view{}, err
		}
		data, err := read(r.Context())
		return view{name: name, title: title, data: data, topic: topic + ":" + filter.Encode()}, err
	}
}

// orRefused returns the view of a list like page. For a query that can't be used, it shows the data that
// typed returns, whose argument says whether the reader sees several tenants.
func (l listOf) orRefused(name, title, topic string, typed func(tenants bool) any) func(r *http.Request) (view, error) {
	return func(r *http.Request) (view, error) {
		v, err := l.page(name, title, topic)(r)
		if _, ok := errors.AsType[*inputError](err); !ok {
			return v, err
		}
		who, _ := auth.From(r.Context())
		data := typed(who.Tenant == "" || who.Tenant == auth.AllTenants)
		return view{name: name, title: title, data: data, refused: &refusal{cause: err}}, nil
	}
}

// live returns the open of a list's topic, whose argument is the parameters of the list. The data is
// read at most once per interval.
func (l listOf) live(interval time.Duration) func(context.Context, string) (func(context.Context) (any, error), error) {
	return func(_ context.Context, arg string) (func(context.Context) (any, error), error) {
		q, err := url.ParseQuery(arg)
		if err != nil {
			return nil, invalid("topics", "is malformed")
		}
		read, _, err := l(q)
		return every(interval, read), err
	}
}

// every returns a function that calls read at most once per interval, and otherwise returns the
// data of the last call. After an error, the next call reads again. Only one goroutine may use the
// function.
func every[T any](
	interval time.Duration, read func(context.Context) (T, error),
) func(context.Context) (T, error) {
	var last T
	var readAt time.Time
	return func(ctx context.Context) (T, error) {
		if !readAt.IsZero() && time.Since(readAt) < interval {
			return last, nil
		}
		data, err := read(ctx)
		if err == nil {
			last, readAt = data, time.Now()
		}
		return data, err
	}
}

// chosen returns a query of the values that are not empty.
func chosen(values map[string]string) url.Values {
	q := url.Values{}
	for name, value := range values {
		if value != "" {
			q.Set(name, value)
		}
	}
	return q
}
