package waitingroom_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// TestARecordIsRight: another program has added users to sorted sets that their records contradict.
// The scripts trust the records: the users keep their places and slots, and leave the wrong sets.
func TestARecordIsRight(t *testing.T) {
	onBoth(t, func(w *world) {
		w.declare(defaults(1))
		w.enter("inside", "waits", "waits-too", "away")
		w.claim("inside")
		_, err := w.Disconnect(w.Context(), event, visitor("away"))
		require.NoError(w, err)
		for key, users := range map[string][]string{
			w.p.RoomSlots(event):   {"waits", "away"},
			w.p.RoomAway(event):    {"inside", "waits-too"},
			w.p.RoomWaiting(event): {"inside", "away"},
		} {
			for _, user := range users {
				require.NoError(w, w.rdb.ZAdd(w.Context(), key, redis.Z{Score: 1, Member: user}).Err())
			}
		}
		require.Len(w, w.audit(), 4)
		p, err := w.Expire(w.Context(), w.p, event)
		require.NoError(w, err)
		require.Zero(w, p.N)
		require.Zero(w, w.promote().N, "no slot is free")
		three := int64(3)
		_, err = w.Change(w.Context(), event, waitingroom.Changes{Capacity: &three})
		require.NoError(w, err)
		require.Equal(w, 0, w.promote().N, "it drops those whose score is lowest")
		require.Equal(w, 2, w.promote().N)
		require.Equal(w, waitingroom.Ready, w.enter("waits")[0].Code)
		require.Equal(w, waitingroom.InProgress, w.enter("inside")[0].Code)
		require.Equal(w, waitingroom.Back, w.enter("away")[0].Code)
		require.Empty(w, w.audit())
	})
}

// TestForgetWithRecordsOfNobody: a closed event without users is deleted, even if Redis still holds
// records under user ids that never entered.
func TestForgetWithRecordsOfNobody(t *testing.T) {
	onBoth(t, func(w *world) {
		w.declare(defaults(0))
		w.enter("a")
		require.NoError(w, w.rdb.HSet(w.Context(), w.p.RoomUsers(event), "b", "W|9||0|||", "c", "nonsense").Err())
		zero := time.Duration(0)
		_, err := w.Change(w.Context(), event, waitingroom.Changes{Mode: api.ModeClosed, Retention: &zero})
		require.NoError(w, err)
		for range 2 {
			_, _, err = w.Forget(w.Context(), event)
			require.NoError(w, err)
		}
		require.Zero(w, w.rdb.Exists(w.Context(), w.p.Room(event), w.p.RoomUsers(event), w.p.Rooms()).Val())
	})
}

// TestStockIsInAll: two of five seats are sold. When the stock is then declared as 1, 3 and 5
// seats, there are 0, 1 and 3 seats left; with 0 left the event is sold out.
func TestStockIsInAll(t *testing.T) {
	onBoth(t, func(w *world) {
		declare := func(stock *int64) *int64 {
			s := defaults(5)
			s.Stock = stock
			_, err := w.Declare(w.Context(), event, s, waitingroom.DeclareOptions{})
			require.NoError(w, err)
			return w.snapshot().Left
		}
		one, three, five := int64(1), int64(3), int64(5)
		require.Equal(w, &five, declare(&five))
		w.enter("a", "b")
		for i, c := range w.claim("a", "b") {
			done, err := w.Complete(w.Context(), event, []string{"a", "b"}[i], c.Fence, true)
			require.NoError(w, err)
			require.True(w, done)
		}
		require.Zero(w, *declare(&one))
		require.Equal(w, api.ModeSoldOut, w.snapshot().Settings.Mode)
		require.Equal(w, &one, declare(&three))
		require.Equal(w, api.ModeOpen, w.snapshot().Settings.Mode)
		require.Nil(w, declare(nil))
		require.Equal(w, &three, declare(&five))
		require.Empty(w, w.audit())
	})
}
