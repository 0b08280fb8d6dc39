package waitingroom_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestNothingHappensWhileTheSlotMoves: while the hash slot of a partition moves from one master of
// a Redis Cluster to another, calls of all scripts but audit_room are refused with TRYAGAIN, and
// change nothing. After the move, snapshot, claim, complete and promote work again.
func TestNothingHappensWhileTheSlotMoves(t *testing.T) {
	t.Parallel()
	cluster := redistest.ClusterWithReplicas(t, 2)
	w := newWorld(t, cluster.URL, "move:")
	ctx := t.Context()
	w.declare(defaults(2))
	fence := w.enter("a")[0].Fence
	w.claim("a")
	w.enter("b", "c", "d")
	for i := range 25 { // so that the keys of the event do not move at once
		require.NoError(t, w.rdb.Set(ctx, w.p.Base()+fmt.Sprint("other", i), i, 0).Err())
	}
	before := w.snapshot()
	capacity := int64(9)
	calls := map[string]func() error{
		"declare": func() error {
			_, err := w.Declare(ctx, event, defaults(9), waitingroom.DeclareOptions{})
			return err
		},
		"change": func() error {
			_, err := w.Change(ctx, event, waitingroom.Changes{Capacity: &capacity})
			return err
		},
		"enter": func() error {
			_, err := w.Enter(ctx, event, waitingroom.EnterNew, 0, visitor("e"))
			return err
		},
		"disconnect": func() error {
			_, err := w.Disconnect(ctx, event, visitor("c"))
			return err
		},
		"leave": func() error {
			_, _, err := w.Leave(ctx, event, "d")
			return err
		},
		"promote": func() error {
			_, err := w.Promote(ctx, event)
			return err
		},
		"claim": func() error {
			_, err := w.Claim(ctx, event, visitor("b"))
			return err
		},
		"renew": func() error {
			_, err := w.Renew(ctx, event, "a", fence)
			return err
		},
		"complete": func() error {
			_, err := w.Complete(ctx, event, "a", fence, true)
			return err
		},
		"expire": func() error {
			_, err := w.Expire(ctx, w.p, event)
			return err
		},
		"sweep": func() error {
			_, _, _, err := w.Sweep(ctx, event, 0, nil)
			return err
		},
		"forget": func() error {
			_, _, err := w.Forget(ctx, event)
			return err
		},
		"snapshot": func() error {
			_, err := w.Snapshot(ctx, w.p, event)
			return err
		},
	}
	slot := cluster.SlotOf(w.p.Base())
	to := cluster.Masters[0]
	if cluster.MasterOf(slot) == to {
		to = cluster.Masters[1]
	}
	steps := 0
	cluster.MoveSlot(slot, to, func(int) {
		steps++
		for name, do := range calls {
			err := do()
			require.ErrorContains(t, err, "TRYAGAIN", name)
			require.True(t, call.IsUnavailable(err), name)
		}
	})
	require.Greater(t, steps, 3)
	require.Eventually(t, func() bool { return calls["snapshot"]() == nil }, time.Minute, time.Millisecond)
	require.Equal(t, before, w.snapshot())
	require.Equal(t, waitingroom.Claimed, w.claim("b")[0].Code)
	done, err := w.Complete(ctx, event, "a", fence, true)
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, 1, w.promote().N)
}
