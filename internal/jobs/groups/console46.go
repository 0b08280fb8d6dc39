package groups

import (
	"context"
	"errors"

	"github.com/bulkaction/bulkaction/api"
)

// CancelJob ends a job that has not started, as cancelled.
func (s *Store) CancelJob(_ context.Context, _ string, _ int64) (api.Job, error) {
	return api.Job{}, errors.ErrUnsupported
}

// TenantHistory returns the figures of the last minutes of a tenant, as far as it was among the busiest.
func (s *Store) TenantHistory(_ context.Context, _ string, _ int) (api.TenantHistory, error) {
	return api.TenantHistory{}, errors.ErrUnsupported
}
