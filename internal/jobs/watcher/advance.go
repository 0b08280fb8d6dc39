package watcher

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// advancer moves the groups of one partition through their states: dirty groups at once, and all
// open groups from time to time.
type advancer struct {
	*partition
	// cursor is where the pass over all open groups continues (a ZSCAN cursor); 0: a new pass
	// begins.
	cursor       uint64
	reconciledAt time.Time // when the last page of open groups was advanced
}

// groupBatch is about how many groups at most one piece of work advances or expires in a step.
const groupBatch = 100

// advanceDirty advances up to groupBatch dirty groups. They are chosen at random, so that groups
// that stay dirty don't hold up the others. It returns whether there were any.
func (a *advancer) advanceDirty(ctx context.Context) (bool, error) {
	ids, err := a.Conn.Cmd.SRandMemberN(ctx, a.Dirty(), groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read dirty groups: %w", err)
	}
	return len(ids) > 0, a.advanceAll(ctx, ids)
}

// advanceAll advances the groups ids, and first completes the cancellation or reopening of a group
// if it is unfinished. A group that needs more memory than Redis has stays dirty, and the others
// advance all the same; the returned error then says that memory was missing.
func (a *advancer) advanceAll(ctx context.Context, ids []string) error {
	unsettled, err := ledger.Unsettled(ctx, a.Conn.Cmd, a.Partition, ids)
	if err != nil {
		return err
	}
	var oom error
	advance := func(id string, unsettled bool) error {
		err := a.advanceGroup(ctx, id, unsettled)
		if call.IsOOM(err) {
			oom, err = err, nil
		}
		return err
	}
	for _, id := range ids {
		if err := advance(id, unsettled[id]); err != nil {
			return err
		}
	}
	// A group that was cancelled or reopened since the first call of Unsettled may no longer be
	// dirty. Complete it now, because no other code may look at it again.
	unsettledNow, err := ledger.Unsettled(ctx, a.Conn.Cmd, a.Partition, ids)
	if err != nil {
		return err
	}
	for id := range unsettledNow {
		if unsettled[id] {
			continue
		}
		if err := advance(id, true); err != nil {
			return err
		}
	}
	return oom
}

// advanceGroup moves a group through as many states as its counts allow. If its cancellation or
// reopening is unfinished, it is completed first. An error that concerns this group alone is logged
// and not returned, so that the other groups advance.
func (a *advancer) advanceGroup(ctx context.Context, id string, unsettled bool) error {
	if unsettled {
		if err := a.settle(ctx, id); err != nil {
			return err
		}
	}
	for {
		r, err := ledger.Advance(ctx, a.Conn.Cmd, a.Partition, id, a.fence)
		if err == nil && r.Failures > 0 {
			err = a.store.ReduceFailures(ctx, a.Partition, id, r, a.keepLead)
		}
		if err != nil {
			return a.skipGroup(ctx, id, err)
		}
		if r.Failures == 0 {
			return nil
		}
	}
}

// settle completes a group's cancellation (all its jobs that have not ended become cancelled, those
// in flight too) or reopening (its failed jobs wait again) in chunks, and renews the leader lease
// between chunks.
func (a *advancer) settle(ctx context.Context, id string) error {
	for _, chunk := range []func() (bool, error){
		func() (bool, error) {
			more, steps, err := ledger.Sweep(ctx, a.Conn.Cmd, a.Partition, id)
			for _, s := range steps {
				a.Tel.RecordStep(ctx, a.Group(id), telemetry.JobStep(s))
			}
			return more, err
		},
		func() (bool, error) { return ledger.Requeue(ctx, a.Conn.Cmd, a.Partition, id) },
	} {
		for more := true; more; {
			var err error
			if more, err = chunk(); err != nil {
				return a.skipGroup(ctx, id, err)
			}
			if err := a.keepLead(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// skipGroup handles an error about one group. An error that concerns the whole partition, or that
// says that Redis has no memory left, is returned. Any other error is logged and the group is taken
// out of the dirty groups, so that it can't keep the watcher busy; the next pass over all open
// groups tries it again.
func (a *advancer) skipGroup(ctx context.Context, id string, err error) error {
	if endsStep(ctx, err) || call.IsOOM(err) {
		return err
	}
	a.log.Warn("group can't be advanced, trying again in the next pass over open groups", "group", id, "error", err)
	return a.Conn.Cmd.SRem(ctx, a.Dirty(), id).Err()
}

// reconcile advances a page of the open groups. A pass over all of them begins Interval after the
// end of the last one: it finds groups that could advance and are missing in the set of dirty
// groups. reconcile returns whether more pages of this pass follow.
func (a *advancer) reconcile(ctx context.Context) (bool, error) {
	if a.cursor == 0 && time.Since(a.reconciledAt) <= a.cfg.Interval {
		return false, nil
	}
	page, next, err := a.Conn.Cmd.ZScan(ctx, a.Open(), a.cursor, "", groupBatch).Result()
	if err != nil {
		return false, fmt.Errorf("read open groups: %w", err)
	}
	ids := make([]string, 0, len(page)/2)
	for i := 0; i < len(page); i += 2 {
		ids = append(ids, page[i])
	}
	if err := a.advanceAll(ctx, ids); err != nil {
		return false, err
	}
	a.cursor, a.reconciledAt = next, time.Now()
	return next != 0, nil
}
