package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web"
)

const operationsPath = "/v1/operations"

func (s *server) operationRoutes() []route {
	const one = operationsPath + "/{id}"
	all := []route{
		{method: http.MethodPost, path: operationsPath, scope: auth.Control, object: tenantInBody, serve: s.startOperation},
		{method: http.MethodGet, path: operationsPath, scope: auth.Read, object: ownInList,
			serve: showPage(s.listOperations), query: []string{"cursor", "limit"}},
		{method: http.MethodGet, path: one, scope: auth.Read, object: operationInPath, serve: showByID(s.getOperation)},
	}
	for _, do := range api.OperationCommands {
		all = append(all, route{method: http.MethodPost, path: one + "/" + string(do), scope: auth.Control,
			object: operationInPath, serve: commandOn(s, "id", nil,
				func(ctx context.Context, id string, _ struct{}) (any, error) {
					o, err := s.Backend.ControlOperation(ctx, id, do)
					return withOperationLinks(o), err
				})})
	}
	return all
}

func withOperationLinks(o api.Operation) api.Operation {
	o.Reasons = orEmpty(o.Reasons)
	o.Links = map[string]string{"self": operationsPath + "/" + o.ID}
	for _, do := range api.OperationCommands {
		o.Links[string(do)] = operationsPath + "/" + o.ID + "/" + string(do)
	}
	return o
}

// NewOperationID returns an id for a new operation.
func NewOperationID() string { return uuid.Must(uuid.NewV7()).String() }

func (s *server) startOperation(w http.ResponseWriter, r *http.Request) error {
	f, err := readFields(s, r)
	if err != nil {
		return err
	}
	request := api.OperationRequest{Do: f.text("do"), DryRun: f.boolean("dry_run")}
	f.object("filter", func(f *fields) {
		request.Filter = api.OperationFilter{
			All: f.boolean("all"), Tenant: f.text("tenant"), Type: f.text("type"), Code: f.text("code"),
			Since: f.time("since"), Until: f.time("until"), Group: f.text("group"), Status: api.Status(f.text("status")),
			Paused: f.optionalBoolean("paused"), FailedJobs: f.optionalBoolean("failed_jobs"), Prefix: f.text("prefix"),
			Tags: f.tags("tags"),
		}
	})
	if err := f.err(); err != nil {
		return err
	}
	var o api.Operation
	err = s.write(r.Context(), func(ctx context.Context) (err error) {
		o, err = s.Backend.StartOperation(ctx, NewOperationID(), request)
		return err
	})
	if err != nil {
		return err
	}
	o = withOperationLinks(o)
	w.Header().Set("Location", o.Links["self"])
	web.WriteJSON(w, http.StatusCreated, jsonType, o)
	return nil
}

// tags reads a field that must be an object with texts.
func (f *fields) tags(name string) (tags api.Tags) {
	if v := f.take(name); v != nil && json.Unmarshal(v, &tags) != nil {
		f.problem(name, "must be an object with strings")
	}
	return tags
}

// time reads a field that must be a time.
func (f *fields) time(name string) *time.Time {
	v := f.take(name)
	if v == nil {
		return nil
	}
	var t time.Time
	if json.Unmarshal(v, &t) != nil || t.UnixMilli() < 0 {
		f.problem(name, "must be a time such as 2026-01-02T15:04:05Z, from 1970 on")
	}
	return &t
}

func (s *server) listOperations(ctx context.Context, cursor string, limit int) (api.OperationList, error) {
	l, err := s.Backend.Operations(ctx, cursor, limit)
	l.Operations = orEmpty(l.Operations)
	for i, o := range l.Operations {
		l.Operations[i] = withOperationLinks(o)
	}
	return l, err
}

func (s *server) getOperation(ctx context.Context, id string) (api.Operation, error) {
	o, err := s.Backend.Operation(ctx, id)
	return withOperationLinks(o), err
}

// operationState is what the log shows of an operation before a command.
type operationState struct {
	State   api.OperationState `json:"state"`
	Matched int64              `json:"matched"`
	Changed int64              `json:"changed"`
	Skipped int64              `json:"skipped"`
}

func (b recorded) StartOperation(ctx context.Context, id string, r api.OperationRequest) (api.Operation, error) {
	return recordedCall(ctx, b.log, entry("operation.start", id, nil, r),
		func(ctx context.Context) (api.Operation, error) { return b.Backend.StartOperation(ctx, id, r) })
}

func (b recorded) ControlOperation(
	ctx context.Context, id string, do api.OperationCommand,
) (o api.Operation, err error) {
	o, err = b.Backend.Operation(ctx, id)
	if err != nil {
		return o, err
	}
	before := operationState{o.State, o.Matched, o.Changed, o.Skipped}
	return recordedCall(ctx, b.log, entry("operation."+string(do), id, before, nil),
		func(ctx context.Context) (api.Operation, error) { return b.Backend.ControlOperation(ctx, id, do) })
}
