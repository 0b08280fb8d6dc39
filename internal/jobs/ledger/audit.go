package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// AuditState is what the leader of a partition knows of its audits.
type AuditState struct {
	LookedAt *time.Time       `json:"looked_at"` // time of the last incremental check; nil: none
	DeepAt   *time.Time       `json:"deep_at"`   // time of the last full audit; nil: none
	ByLaw    map[string]int64 `json:"by_law"`    // number of open violations
	// Violations are the open violations; the caller of StoreAudit bounds their number.
	Violations []AuditedViolation `json:"violations"`
}

// AuditedViolation is an open violation, with what the next leader needs to continue tracking it.
type AuditedViolation struct {
	api.Violation
	Key  string `json:"key,omitempty"` // Violation.Key
	Deep bool   `json:"deep"`          // a full audit has found it
}

// StoreAudit replaces the stored audit state of a partition. A process that has lost its leadership
// without knowing may store an older state; the next check of the leader replaces it.
func StoreAudit(ctx context.Context, c redis.Cmdable, p keyspace.Partition, s AuditState) error {
	document, err := json.Marshal(s)
	if err == nil {
		err = c.Set(ctx, p.Audit(), document, 0).Err()
	}
	if err != nil {
		return fmt.Errorf("store the state of the audit of partition %d: %w", p.Index(), err)
	}
	return nil
}

// ReadAudit returns the audit state that StoreAudit stored last; the zero AuditState if there is
// none.
func ReadAudit(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (s AuditState, err error) {
	document, err := c.Get(ctx, p.Audit()).Bytes()
	if errors.Is(err, redis.Nil) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(document, &s)
	}
	if err != nil {
		return s, fmt.Errorf("read the state of the audit of partition %d: %w", p.Index(), err)
	}
	for i := range s.Violations {
		s.Violations[i].Violation.Key = s.Violations[i].Key
	}
	return s, nil
}

// Leader returns the id of the watcher process whose lease on a partition's leadership is valid by
// Redis's clock; "" if there is none.
func Leader(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (string, error) {
	now, err := c.Time(ctx).Result()
	if err != nil {
		return "", fmt.Errorf("read the time of Redis: %w", err)
	}
	lease, err := c.HMGet(ctx, p.Watch(), layout.WatchOwner, layout.WatchUntil).Result()
	if err != nil {
		return "", fmt.Errorf("read the leader of partition %d: %w", p.Index(), err)
	}
	if !values(lease).when(1).After(now) {
		return "", nil
	}
	return values(lease).str(0), nil
}
