package groups

import (
	"context"
	"encoding/json"
	"fmt"
	"math"

	"github.com/bulkaction/bulkaction/internal/jobs/aggregate"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// ReduceFailures reduces the failed jobs of a group that asked for an aggregate of them, and stores
// their partial aggregate. The group can't advance before that. It calls alive after each 1,000
// jobs, so that the caller can renew its lease; an error of alive ends it.
func (s *views) ReduceFailures(
	ctx context.Context, p keyspace.Partition, id string, a ledger.AdvanceReply, alive func(context.Context) error,
) error {
	groups, err := ledger.ReadGroups(ctx, s.conn.Cmd, p, []string{id})
	if err != nil || len(groups) == 0 {
		return err
	}
	plan, err := aggregate.Plan(s.reducers, groups[0].Aggregates)
	if err != nil {
		return err
	}
	state := plan.New()
	var refused error
	err = ledger.Failures(ctx, s.conn.Cmd, p, id, func(e ledger.JobError) error {
		data, err := json.Marshal(map[string]any{"code": e.Code, "error": e.Error, "attempts": e.Attempts})
		if err != nil {
			return err
		}
		r := reducer.Result{Ordinal: e.Ordinal, Attempts: e.Attempts, DurationMS: math.NaN(), Data: data, Failed: true}
		if err := state.Add(r); err != nil {
			refused = err
		}
		if state.Count()%1000 == 0 {
			return alive(ctx)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case state.Count() != a.Failures:
		return fmt.Errorf("group %s: found %d records of %d failed jobs", id, state.Count(), a.Failures)
	case refused != nil:
		s.tel.Log.WarnContext(ctx, "a reducer refused failures", "group", id, "last_error", refused)
	}
	encoded, err := state.Encode()
	if err != nil {
		return err
	}
	return ledger.ReduceFailures(ctx, s.conn.Cmd, p, id, a, encoded)
}
