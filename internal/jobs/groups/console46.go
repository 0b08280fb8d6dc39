package groups

import (
	"context"
	"errors"

	"github.com/bulkaction/bulkaction/api"
)

// TenantHistory returns the figures of the last minutes of a tenant, as far as it was among the busiest.
func (s *Store) TenantHistory(_ context.Context, _ string, _ int) (api.TenantHistory, error) {
	return api.TenantHistory{}, errors.ErrUnsupported
}
