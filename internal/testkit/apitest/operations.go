package apitest

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// StartOperation stores nothing: the answer is OperationView with what was asked for.
func (f *Backend) StartOperation(_ context.Context, _ string, r api.OperationRequest) (api.Operation, error) {
	f.Mu.Lock()
	f.Started = r
	f.Mu.Unlock()
	o := OperationView()
	o.Do, o.Filter, o.DryRun = r.Do, r.Filter, r.DryRun
	return o, f.Record("start " + r.Do)
}

// Operations returns OperationView.
func (f *Backend) Operations(_ context.Context, cursor string, limit int) (api.OperationList, error) {
	return api.OperationList{Operations: []api.Operation{OperationView()}}, f.Record(fmt.Sprint("operations ", cursor, " ", limit))
}

// Operation returns OperationView.
func (f *Backend) Operation(_ context.Context, id string) (api.Operation, error) {
	o := OperationView()
	if id != o.ID && f.Err == nil {
		return api.Operation{}, fmt.Errorf("operation %s: %w", id, api.ErrNotFound)
	}
	return o, f.Err
}

// ControlOperation records the command.
func (f *Backend) ControlOperation(ctx context.Context, id string, do api.OperationCommand) (api.Operation, error) {
	o, err := f.Operation(ctx, id)
	if err == nil {
		err = f.Record(fmt.Sprint(do, " ", id))
	}
	return o, err
}

// OperationView is the operation of a Backend.
func OperationView() api.Operation {
	return api.Operation{
		ID: "op-1", Do: api.OpRetry, Filter: api.OperationFilter{Tenant: "acme"}, State: api.OperationRunning,
		Matched: 30, Changed: 20, Skipped: 10, Examined: 50, Total: 100, Progress: 0.5,
		Reasons:   []api.OperationSkip{{Reason: api.SkipNotEnded, Count: 10, Examples: []string{"g-1", "g-2"}}},
		CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}
