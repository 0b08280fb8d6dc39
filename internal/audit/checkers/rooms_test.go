package checkers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/checkers"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// roomWorld is a test's Redis with ten events in three partitions. In each event, the user with
// number 1 has a token, and the user with number 2 is waiting.
type roomWorld struct {
	*testing.T
	conn  *redisx.Conn
	space keyspace.Space
}

func eachRoomWorld(t *testing.T, test func(w *roomWorld)) {
	t.Helper()
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		space, err := keyspace.New(prefix, 3)
		require.NoError(t, err)
		rooms := waitingroom.New(conn, space, nil)
		for i := range 10 {
			event, ctx := fmt.Sprint("e", i), t.Context()
			_, err := rooms.Declare(ctx, event, waitingroom.Settings{
				Capacity: 1, MaxWaiting: 10, TokenTTL: time.Minute, Ready: time.Minute, Grace: time.Minute, OnClose: "keep",
				NoShow: "wait", Retention: time.Hour,
			}, waitingroom.DeclareOptions{})
			require.NoError(t, err)
			_, err = rooms.Enter(ctx, event, waitingroom.EnterNew, 0,
				waitingroom.Visitor{User: "secret-1", Conn: "00000001.1"}, waitingroom.Visitor{User: "secret-2", Conn: "00000001.2"})
			require.NoError(t, err)
			_, err = rooms.Claim(ctx, event, waitingroom.Visitor{User: "secret-1"})
			require.NoError(t, err)
		}
		test(&roomWorld{t, conn, space})
	})
}

// violations audits all events.
func (w *roomWorld) violations() []api.Violation {
	w.Helper()
	var report audit.Report
	require.NoError(w, checkers.CheckRooms(w.Context(), w.conn, w.space, &report))
	require.Equal(w, len(report.Violations) == 0, report.OK)
	text, err := json.Marshal(report.Violations)
	require.NoError(w, err)
	require.NotContains(w, string(text), "secret", "ids of users are sensitive")
	return report.Violations
}

// TestCheckRooms: the event e7 is damaged in one of six ways. The violation names the law, the
// partition, the event and what is wrong, and no user.
func TestCheckRooms(t *testing.T) {
	t.Parallel()
	const event = "e7"
	for name, test := range map[string]struct {
		damage      func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error
		law, detail string
	}{
		"state": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			return c.ZRem(ctx, p.RoomWaiting(event), "secret-2").Err()
		}, waitingroom.LawState, "event e7: the user with number 2 is in no set, but should be in waiting"},
		"number": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			return c.ZAdd(ctx, p.RoomWaiting(event), redis.Z{Score: 1, Member: "secret-2"}).Err()
		}, waitingroom.LawNumber, "event e7: the user with number 2 waits in the place of number 1"},
		"slots": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			return c.ZIncrBy(ctx, p.RoomSlots(event), -10_000, "secret-1").Err()
		}, waitingroom.LawSlots, "event e7: the slot of the user with number 1 ends at "},
		"unlisted": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			return c.ZRem(ctx, p.Rooms(), event).Err()
		}, waitingroom.LawState, "event e7: it is not in the list of events"},
		"without settings": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			return c.Del(ctx, p.Room(event), p.RoomUsers(event), p.RoomWaiting(event)).Err()
		}, waitingroom.LawState, "event e7: it has users, but no settings"},
		"a wrong type": {func(ctx context.Context, c redis.UniversalClient, p keyspace.Partition) error {
			require.NoError(t, c.Del(ctx, p.RoomSlots(event)).Err())
			return c.Set(ctx, p.RoomSlots(event), "x", 0).Err()
		}, waitingroom.LawState, "event e7: a key that its scripts use is of another type than it must be"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRoomWorld(t, func(w *roomWorld) {
				require.Empty(w, w.violations())
				p := w.space.OfEvent(event)
				require.NoError(w, test.damage(w.Context(), w.conn.Cmd, p))
				found := w.violations()
				if name == "without settings" {
					require.Len(w, found, 2) // a user is in slots and has no record
					found = found[1:]
				}
				require.Len(w, found, 1, "%v", found)
				require.Equal(w, test.law, found[0].Law)
				require.Equal(w, p.Index(), found[0].Partition)
				require.Empty(w, found[0].Group)
				require.Contains(w, found[0].Detail, test.detail)
				require.Contains(w, checkers.Laws, found[0].Law)

				// CheckRoomsOf of the event's partition finds the same violation, unless the event
				// is missing in the partition's list.
				for _, other := range w.space.All() {
					var report audit.Report
					require.NoError(w, checkers.CheckRoomsOf(w.Context(), w.conn, w.space, other, audit.Options{Rate: 1 << 30}, &report))
					if other.Index() != p.Index() || name == "unlisted" {
						require.Empty(w, report.Violations)
						require.True(w, report.OK)
					} else {
						require.Contains(w, report.Violations, found[0])
					}
				}
			})
		})
	}
}

// TestCheckRoomsWithoutAList: if the list of events has the wrong Redis type, a violation says so,
// and the audit still finds the event e7 by its keys.
func TestCheckRoomsWithoutAList(t *testing.T) {
	t.Parallel()
	eachRoomWorld(t, func(w *roomWorld) {
		p := w.space.OfEvent("e7")
		require.NoError(w, w.conn.Cmd.Del(w.Context(), p.Rooms()).Err())
		require.NoError(w, w.conn.Cmd.Set(w.Context(), p.Rooms(), "x", 0).Err())
		var details []string
		for _, v := range w.violations() {
			require.Equal(w, waitingroom.LawState, v.Law)
			require.Equal(w, p.Index(), v.Partition)
			details = append(details, v.Detail)
		}
		all := strings.Join(details, "\n")
		require.Contains(w, all, "the list of events is of another type than it must be")
		require.Contains(w, all, "event e7: a key that its scripts use is of another type")
	})
}
