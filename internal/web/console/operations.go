package console

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const operationsPage = 50

// operationPages show operations on many groups, and start and control them.
type operationPages struct{ backend httpapi.Backend }

type operationsData struct {
	Operations []api.Operation
	Next       string
	First      bool
}

// readList parses the query of the list of operations, like groupPages.readList.
func (p operationPages) readList(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	cursor, err := cursorOf(q)
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.Operations(ctx, cursor, operationsPage)
		return operationsData{l.Operations, nextPage(root+"/operations", url.Values{}, l.Cursor), cursor == ""}, err
	}, chosen(map[string]string{"cursor": cursor}), nil
}

type operationData struct {
	api.Operation
	Commands []api.OperationCommand // that its state allows
	// For is what the form does that carries out what a dry run has counted; "": there is none. Counted
	// is its filter, which matches nothing that is newer than the dry run.
	For, Counted string
}

func (p operationPages) read(id string) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		o, err := p.backend.Operation(ctx, id)
		d := operationData{Operation: o}
		switch {
		case o.State == api.OperationRunning:
			d.Commands = []api.OperationCommand{api.PauseOperation, api.CancelOperation}
		case o.State == api.OperationPaused:
			d.Commands = []api.OperationCommand{api.ResumeOperation, api.CancelOperation}
		case o.State == api.OperationCompleted && o.DryRun && o.Changed > 0:
			// The dry run has counted what was there in the millisecond of its creation.
			if until := o.CreatedAt.Add(time.Millisecond); o.Filter.Until == nil || until.Before(*o.Filter.Until) {
				o.Filter.Until = &until
			}
			d.For, d.Counted = o.Do, filterJSON(o.Filter)
		}
		return d, err
	}
}

func (p operationPages) open(_ context.Context, id string) (func(context.Context) (any, error), error) {
	if !api.ValidID(id) {
		return nil, api.ErrNotFound
	}
	return p.read(id), nil
}

func (p operationPages) operation(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	data, err := p.read(id)(r.Context())
	return view{name: "operation", title: "Operation " + id, data: data, topic: "operation:" + id}, err
}

// start starts an operation. The form has the filter of the list, or the dry run, on whose page it is.
func (p operationPages) start(ctx context.Context, r *http.Request) (string, error) {
	request := api.OperationRequest{Do: r.PostForm.Get("do"), DryRun: r.PostForm.Get("dry_run") == "true"}
	decoder := json.NewDecoder(bytes.NewReader([]byte(r.PostForm.Get("filter"))))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&request.Filter); err != nil {
		return "", invalid("filter", "can't be read")
	}
	id := httpapi.NewOperationID()
	o, err := p.backend.StartOperation(ctx, id, request)
	return root + "/operations/" + o.ID + "?done=operation-started", err
}

// control returns an action that pauses, resumes or cancels the operation in the path.
func (p operationPages) control(do api.OperationCommand) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		id, err := pathID(r, "id")
		if err != nil {
			return "", err
		}
		_, err = p.backend.ControlOperation(ctx, id, do)
		return root + "/operations/" + id + "?done=operation-" + string(do), err
	}
}

// filterJSON returns a filter as forms have it.
func filterJSON(f api.OperationFilter) string {
	f.All = false
	if text, err := json.Marshal(f); err == nil && string(text) != "{}" {
		return string(text)
	}
	return `{"all":true}`
}

// matches says in words what a filter selects.
func matches(do string, f api.OperationFilter) string {
	var all []string
	for _, part := range []named{
		{"tenant", f.Tenant}, {"group", f.Group}, {"type", f.Type}, {"status", string(f.Status)},
		{"", textOf(f.Paused, func(yes bool) string { return either(yes, "paused", "not paused") })},
		{"", textOf(f.FailedJobs, func(yes bool) string { return either(yes, "with failed jobs", "without failed jobs") })},
		{"id begins with", f.Prefix}, {"code", f.Code}, {"tag", strings.Join(f.Tags.Pairs(), ", tag ")},
		{"since", textOf(f.Since, plainTime)}, {"before", textOf(f.Until, plainTime)},
	} {
		if part.Text != "" {
			all = append(all, strings.TrimSpace(part.Name+" "+part.Text))
		}
	}
	return cmp.Or(strings.Join(all, ", "), "all "+strings.TrimPrefix(unitOf(do, 0), "0 "))
}

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// textOf returns a value as text; "" if there is none.
func textOf[T any](value *T, text func(T) string) string {
	if value == nil {
		return ""
	}
	return text(*value)
}

// exampleOf returns the path of a group, or of a job, that an operation names.
func exampleOf(do, id string) string {
	if at := strings.LastIndexByte(id, '.'); api.OnDeadLetters(do) && at > 0 {
		return root + "/groups/" + id[:at] + "/jobs/" + id[at+1:]
	}
	return root + "/groups/" + id
}

// allMatching is the form that starts operations on what a list shows.
type allMatching struct {
	Filter string
	Kinds  []string
}

// unitOf returns what an operation counts, in words.
func unitOf(do string, n int64) string {
	unit := "group"
	if api.OnDeadLetters(do) {
		unit = "dead letter"
	}
	return plural(int(n), unit, unit+"s")
}

// doneTo says what an operation does to these.
func doneTo(do string) string {
	return map[string]string{
		api.OpCancel: "Cancel", api.OpPause: "Pause", api.OpResume: "Resume", api.OpRetry: "Retry the failed jobs of",
		api.OpRetryDeadLetters: "Run again", api.OpDeleteDeadLetters: "Delete",
	}[do]
}
