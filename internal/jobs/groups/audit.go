package groups

import (
	"cmp"
	"context"
	"slices"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// maxViolations is the most violations that the answer about the audit lists.
const maxViolations = 100

// Audit returns the results that the watchers stored after they last audited their partitions, and
// which watcher leads each partition now. It recounts nothing itself.
func (s *stats) Audit(ctx context.Context) (api.AuditState, error) {
	st := api.AuditState{OK: true, Violations: []api.Violation{}, ByLaw: map[string]int64{}}
	who, err := caller(ctx)
	switch {
	case err != nil:
		return st, err
	case !who.May(auth.ReadSystem):
		return st, api.ErrNotAllowed
	}
	for _, p := range s.space.All() {
		found, err := ledger.ReadAudit(ctx, s.conn.Cmd, p)
		if err != nil {
			return st, apiError(err)
		}
		leader, err := ledger.Leader(ctx, s.conn.Cmd, p)
		if err != nil {
			return st, apiError(err)
		}
		st.Partitions = append(st.Partitions, api.AuditedPartition{
			Partition: p.Index(), Leader: leader, LookedAt: found.LookedAt, DeepAt: found.DeepAt,
		})
		st.OK = st.OK && leader != "" && found.LookedAt != nil
		for law, n := range found.ByLaw {
			st.ByLaw[law] += n
			st.OK = st.OK && n == 0
		}
		for _, v := range found.Violations {
			st.Violations = append(st.Violations, v.Violation)
		}
	}
	slices.SortStableFunc(st.Violations, func(a, b api.Violation) int {
		return cmp.Or(cmp.Compare(a.Law, b.Law), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Group, b.Group))
	})
	st.Violations = st.Violations[:min(len(st.Violations), maxViolations)]
	return st, nil
}
