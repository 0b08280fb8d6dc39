package audit

import (
	"context"
	"slices"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// checkOperations checks the operations of the installation, which are in partition 0. One that was
// set aside breaks no law any more.
func (s *scope) checkOperations(ctx context.Context) error {
	if s.p.Index() != 0 {
		return nil
	}
	report := func(id, format string, args ...any) {
		s.found.add(newFinding(LawOperations, "", "", "operation "+id+" "+format, "operation "+id+": "+format, args...))
	}
	ids, err := ledger.AllOperations(ctx, s.Cmd, s.space)
	if err != nil {
		return err
	}
	open, err := ledger.OpenOperations(ctx, s.Cmd, s.space)
	if err != nil {
		return err
	}
	all, err := ledger.ReadOperations(ctx, s.Cmd, s.space, append(slices.Clone(ids), open...)...)
	if err != nil {
		return err
	}
	ended := map[string]bool{}
	for i := range all {
		o := &all[i]
		if _, seen := ended[o.ID]; seen {
			continue
		}
		ended[o.ID] = o.State.Ended()
		switch isOpen := slices.Contains(open, o.ID); {
		case o.Err != nil && o.EndedAt == nil:
			report(o.ID, "%s", o.Error)
		case o.Err == nil && o.State.Ended() == isOpen:
			report(o.ID, "it is %s, but its place among those that have not ended says otherwise", o.State)
		case o.Err == nil && !slices.Contains(ids, o.ID):
			report(o.ID, "it is not on the list of operations")
		}
	}
	for _, id := range append(ids, open...) {
		if _, exists := ended[id]; !exists {
			report(id, "it is on a list, but does not exist")
		}
	}
	return nil
}
