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
