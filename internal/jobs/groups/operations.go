package groups

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// StartOperation stores an operation on many groups or dead letters. The watcher carries it out
// (package operations). That of a principal of one tenant is bound to this tenant.
func (s *Store) StartOperation(ctx context.Context, id string, r api.OperationRequest) (api.Operation, error) {
	if bad := operationProblems(&r); len(bad) > 0 {
		return api.Operation{}, &messages.ValidationError{Fields: bad}
	}
	own, err := ownTenant(ctx)
	if err != nil {
		return api.Operation{}, err
	}
	who, tenant, err := callFor(ctx, r.Filter.Tenant)
	if err != nil {
		return api.Operation{}, err
	}
	o := api.Operation{
		ID: id, Do: r.Do, Filter: r.Filter, DryRun: r.DryRun, Tenant: own, CreatedBy: who.KeyID,
	}
	err = retryUnavailable(ctx, func(ctx context.Context) error {
		// How many dead letters other tenants have is nothing for a key of one tenant.
		if own == "" || !api.OnDeadLetters(r.Do) {
			o.Total, err = ledger.CountCandidates(ctx, s.conn.Cmd, s.space, tenant, api.OnDeadLetters(r.Do))
			if err != nil {
				return err
			}
		}
		return ledger.StartOperation(ctx, s.conn.Cmd, s.space, o)
	})
	if err != nil {
		return api.Operation{}, apiError(err)
	}
	return s.Operation(ctx, o.ID)
}

// operationProblems checks a request, and lists its bad fields.
func operationProblems(r *api.OperationRequest) (bad []messages.FieldError) {
	problem := func(is bool, field, text string) {
		if is {
			bad = append(bad, messages.FieldError{Field: field, Problem: text})
		}
	}
	f := &r.Filter
	f.Status = api.Status(strings.ToUpper(string(f.Status)))
	if len(f.Tags) == 0 {
		f.Tags = nil
	}
	if !slices.Contains(api.OperationKinds, r.Do) {
		problem(true, "do", "must be one of "+strings.Join(api.OperationKinds, ", "))
		return bad
	}
	for _, id := range []struct{ field, value string }{
		{"tenant", f.Tenant}, {"type", f.Type}, {"group", f.Group}, {"prefix", f.Prefix},
	} {
		problem(id.value != "" && !api.ValidID(id.value), "filter."+id.field, "must "+api.IDRule)
	}
	problem(len(f.Code) > maxCodeLength, "filter.code", fmt.Sprintf("must be at most %d bytes", maxCodeLength))
	problem(f.Status != "" && !slices.Contains(api.Statuses, f.Status), "filter.status",
		"must be CREATED, DISPATCHED, RUNNING, AGGREGATING, COMPLETED, FAILED or CANCELLED")
	problem(len(f.Tags) > api.MaxTags, "filter.tags", fmt.Sprintf("must be at most %d", api.MaxTags))
	for key, value := range f.Tags {
		problem(!api.ValidTag(key, value), "filter.tags", "must "+api.TagRule)
	}
	problem(f.Since != nil && f.Until != nil && !f.Since.Before(*f.Until), "filter.until", "must be later than since")
	if api.OnDeadLetters(r.Do) {
		const text = "not of dead letters: filter them by tenant, group, type, code, since and until"
		problem(f.Status != "", "filter.status", text)
		problem(f.Paused != nil, "filter.paused", text)
		problem(f.FailedJobs != nil, "filter.failed_jobs", text)
		problem(f.Prefix != "", "filter.prefix", text)
		problem(len(f.Tags) > 0, "filter.tags", text)
	} else {
		problem(f.Group != "", "filter.group", "only of dead letters: filter groups by prefix")
	}
	all := *f
	all.All = false
	switch narrow := !reflect.ValueOf(all).IsZero(); {
	case !narrow && !f.All:
		problem(true, "filter", `matches everything: narrow it, or say {"all": true}`)
	case narrow && f.All:
		problem(true, "filter.all", "must be alone: the other fields narrow the filter")
	}
	return bad
}

// maxCodeLength is the most bytes of an error code.
const maxCodeLength = 128

// Operations returns a page of operations, the newest first. The cursor is the id of the last one. A
// principal of one tenant gets those that keys of this tenant have started.
func (s *Store) Operations(ctx context.Context, cursor string, limit int) (api.OperationList, error) {
	list := api.OperationList{Operations: []api.Operation{}}
	own, err := ownTenant(ctx)
	if err != nil {
		return list, err
	}
	ids, err := ledger.AllOperations(ctx, s.conn.Cmd, s.space)
	if err != nil {
		return list, apiError(err)
	}
	if cursor != "" {
		i := slices.Index(ids, cursor)
		if _, err := uuid.Parse(cursor); i < 0 && err != nil {
			return list, badCursor()
		}
		if i < 0 { // it was deleted, as the oldest one
			return list, nil
		}
		ids = ids[i+1:]
	}
	for len(ids) > 0 {
		chunk := ids[:min(len(ids), 100)]
		ids = ids[len(chunk):]
		all, err := ledger.ReadOperations(ctx, s.conn.Cmd, s.space, chunk...)
		if err != nil {
			return list, apiError(err)
		}
		for _, o := range all {
			if own != "" && o.Tenant != own {
				continue
			}
			if len(list.Operations) == limit {
				list.Cursor = list.Operations[limit-1].ID
				return list, nil
			}
			list.Operations = append(list.Operations, o.Operation)
		}
	}
	return list, nil
}

// Operation returns an operation. For one that a key of another tenant has started it returns the same
// error as for an unknown one.
func (s *Store) Operation(ctx context.Context, id string) (api.Operation, error) {
	own, err := ownTenant(ctx)
	if err != nil {
		return api.Operation{}, err
	}
	found, err := ledger.ReadOperations(ctx, s.conn.Cmd, s.space, id)
	if err != nil {
		return api.Operation{}, apiError(err)
	}
	if len(found) == 0 || own != "" && found[0].Tenant != own {
		return api.Operation{}, fmt.Errorf("operation %s: %w", id, api.ErrNotFound)
	}
	return found[0].Operation, nil
}

// ControlOperation pauses, resumes or cancels an operation, and returns it.
func (s *Store) ControlOperation(
	ctx context.Context, id string, do api.OperationCommand,
) (api.Operation, error) {
	if _, err := s.Operation(ctx, id); err != nil {
		return api.Operation{}, err
	}
	if err := retryUnavailable(ctx, func(ctx context.Context) error {
		return ledger.DirectOperation(ctx, s.conn.Cmd, s.space, id, do)
	}); err != nil {
		return api.Operation{}, apiError(err)
	}
	return s.Operation(ctx, id)
}
