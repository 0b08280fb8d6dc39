package waitingroom_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// audit returns the findings as "law: detail".
func (w *world) audit() (all []string) {
	w.Helper()
	found, err := w.Audit(w.Context(), event, nil)
	require.NoError(w, err)
	for _, f := range found {
		require.Equal(w, event, f.Event)
		all = append(all, f.Law+": "+f.Detail)
	}
	return all
}

// audited fills an event with users: a has a token (number 1), b is READY (2), c and d are waiting
// (3, 4), e polls (5), f is away (6).
func audited(w *world) {
	s, stock := defaults(2), int64(10)
	s.Stock = &stock
	w.declare(s)
	w.enter("a", "b", "c", "d")
	w.claim("a")
	_, err := w.Enter(w.Context(), event, waitingroom.EnterNew, time.Second, waitingroom.Visitor{User: "e"})
	require.NoError(w, err)
	w.enter("f")
	_, err = w.Disconnect(w.Context(), event, visitor("f"))
	require.NoError(w, err)
	_, err = w.Expire(w.Context(), w.p, event)
	require.NoError(w, err)
}

// TestAuditFindsViolations: an event is damaged in one of 24 ways. The audit reports as many
// findings as expected, with the expected texts, and changes nothing.
func TestAuditFindsViolations(t *testing.T) {
	t.Parallel()
	type edit func(ctx context.Context, w *world) error
	record := func(user, old, instead string) edit {
		return func(ctx context.Context, w *world) error {
			text, err := w.rdb.HGet(ctx, w.p.RoomUsers(event), user).Result()
			require.NoError(w, err)
			require.Contains(w, text, old)
			return w.rdb.HSet(ctx, w.p.RoomUsers(event), user, strings.Replace(text, old, instead, 1)).Err()
		}
	}
	in := func(key func(*world) string, score float64, user string) edit {
		return func(ctx context.Context, w *world) error {
			return w.rdb.ZAdd(ctx, key(w), redis.Z{Score: score, Member: user}).Err()
		}
	}
	out := func(key func(*world) string, user string) edit {
		return func(ctx context.Context, w *world) error { return w.rdb.ZRem(ctx, key(w), user).Err() }
	}
	field := func(pairs ...any) edit {
		return func(ctx context.Context, w *world) error { return w.rdb.HSet(ctx, w.p.Room(event), pairs...).Err() }
	}
	waiting := func(w *world) string { return w.p.RoomWaiting(event) }
	away := func(w *world) string { return w.p.RoomAway(event) }
	slots := func(w *world) string { return w.p.RoomSlots(event) }
	rooms := func(w *world) string { return w.p.Rooms() }
	const later = 9_000_000_000_001 // ms
	for name, test := range map[string]struct {
		damage edit
		want   []string
	}{
		"not waiting":       {out(waiting, "c"), []string{"room-state: the user with number 3 is in no set, but should be in waiting"}},
		"waiting and away":  {in(away, later, "c"), []string{"room-state: the user with number 3 is in waiting and away, but should be in waiting"}},
		"a lost poll":       {out(away, "e"), []string{"room-state: the user with number 5 is in waiting, but should be in waiting and away"}},
		"away and waiting":  {in(waiting, 6, "f"), []string{"room-state: the user with number 6 is in waiting and away, but should be in away"}},
		"waits with a slot": {in(slots, later, "d"), []string{"room-state: the user with number 4 is in waiting and slots, but should be in waiting"}},
		"no slot": {out(slots, "a"), []string{
			"room-state: the user with number 1 is in no set, but should be in slots",
			"room-state: something is due at ", // a user may be promoted
		}},
		"promoted, waits": {in(waiting, 2, "b"), []string{"room-state: the user with number 2 is in waiting and slots, but should be in slots"}},
		"no record, waits": {func(ctx context.Context, w *world) error {
			return w.rdb.HDel(ctx, w.p.RoomUsers(event), "c").Err()
		}, []string{"room-state: the user with number 3 is in waiting and has no record"}},
		"no record, away":    {in(away, later, "x"), []string{"room-state: a user is in away and has no record, until 2255-03-14T16:00:00.001Z"}},
		"no record, slots":   {in(slots, later, "x"), []string{"room-state: a user is in slots and has no record, until 2255-03-14T16:00:00.001Z"}},
		"unreadable":         {record("c", "W|3", "nonsense"), []string{"room-state: the record of the user with number 3 can't be read"}},
		"the list of events": {out(rooms, event), []string{"room-state: it is not in the list of events, so nothing happens in it"}},
		"never due":          {in(rooms, 9007199254740991, event), []string{"but the list of events says never"}},
		"no settings": {func(ctx context.Context, w *world) error {
			return w.rdb.Del(ctx, w.p.Room(event)).Err()
		}, []string{"room-state: it has users, but no settings"}},
		"a lost setting": {func(ctx context.Context, w *world) error {
			return w.rdb.HDel(ctx, w.p.Room(event), "grace").Err()
		}, []string{"room-state: settings are missing"}},
		"one number twice": {func(ctx context.Context, w *world) error {
			return firstError(record("d", "W|4", "W|3")(ctx, w), in(waiting, 3, "d")(ctx, w))
		}, []string{"room-number: 2 users have the number 3"}},
		"beyond the tail": {func(ctx context.Context, w *world) error {
			return firstError(record("d", "W|4", "W|77")(ctx, w), in(waiting, 77, "d")(ctx, w))
		}, []string{"room-number: the user with number 77 has a number that was not given: the last one is 6"}},
		"another place": {in(waiting, 1, "d"), []string{"room-number: the user with number 4 waits in the place of number 1"}},
		"the slot ends early": {func(ctx context.Context, w *world) error {
			return w.rdb.ZIncrBy(ctx, slots(w), -60_000, "a").Err()
		}, []string{"room-slots: the slot of the user with number 1 ends at "}},
		"no fence": {func(ctx context.Context, w *world) error {
			text, err := w.rdb.HGet(ctx, w.p.RoomUsers(event), "b").Result()
			require.NoError(w, err)
			parts := strings.Split(text, "|")
			parts[4] = ""
			return w.rdb.HSet(ctx, w.p.RoomUsers(event), "b", strings.Join(parts, "|")).Err()
		}, []string{"room-slots: the user with number 2 holds a slot under a fence that was not given"}},
		"a lost fence": {field("fence", 5), []string{
			"room-slots: the user with number 1 holds a slot under a fence", "room-slots: the user with number 2 holds a slot under a fence",
		}},
		"one fence twice": {func(ctx context.Context, w *world) error {
			fence := w.claim("a")[0].Fence
			return record("b", "|"+w.enter("b")[0].Fence+"|", "|"+fence+"|")(ctx, w)
		}, []string{"room-slots: 2 users have the fence "}},
		"too many seats": {field("stock", 11), []string{"room-slots: 11 seats are left, but 10 seats should be"}},
		"no seats": {func(ctx context.Context, w *world) error {
			return w.rdb.HDel(ctx, w.p.Room(event), "stock").Err()
		}, []string{"room-slots: no limited seats are left, but 10 seats should be"}},
	} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				audited(w)
				require.Empty(w, w.audit(), "an undamaged event keeps the laws")
				require.NoError(w, test.damage(w.Context(), w))
				before := w.dump()
				found := w.audit()
				require.Equal(w, before, w.dump(), "the audit changes nothing")
				require.Len(w, found, len(test.want), "%v", found)
				for _, want := range test.want {
					require.Contains(w, strings.Join(found, "\n"), want)
				}
			})
		})
	}
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// dump returns, as text, the contents of the event's keys, of the list of events and of the key
// cleanup, and the length of the stream moves.
func (w *world) dump() string {
	ctx := w.Context()
	var all []any
	for _, set := range []string{w.p.RoomWaiting(event), w.p.RoomAway(event), w.p.RoomSlots(event), w.p.Rooms()} {
		all = append(all, w.rdb.ZRangeWithScores(ctx, set, 0, -1).Val())
	}
	for _, hash := range []string{w.p.Room(event), w.p.RoomUsers(event), w.p.RoomCleanup()} {
		all = append(all, w.rdb.HGetAll(ctx, hash).Val())
	}
	return fmt.Sprint(append(all, w.rdb.XLen(ctx, w.p.Moves()).Val())...)
}

// TestAuditOfManyUsers: the audit reads an event of 1,000 users in pages of less than 500 elements.
// Of 300 violations it reports 100, and the sum of the other 200.
func TestAuditOfManyUsers(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(0))
		for from := 0; from < 1000; from += 200 {
			var users []string
			for i := range 200 {
				users = append(users, fmt.Sprint("u", from+i))
			}
			w.enter(users...)
		}
		_, err := w.Expire(w.Context(), w.p, event)
		require.NoError(w, err)
		require.Empty(w, w.audit())
		paced := 0
		_, err = w.Audit(w.Context(), event, func(_ context.Context, elements, bytes int) error {
			require.Less(w, elements, 500)
			require.GreaterOrEqual(w, bytes, elements)
			paced++
			return nil
		})
		require.NoError(w, err)
		if strings.HasSuffix(w.Name(), "/redis") { // miniredis answers HSCAN in one piece
			require.Greater(w, paced, 3)
		}
		for i := range 300 {
			require.NoError(w, w.rdb.ZRem(w.Context(), w.p.RoomWaiting(event), fmt.Sprint("u", i)).Err())
		}
		found, err := w.Audit(w.Context(), event, nil)
		require.NoError(w, err)
		require.Len(w, found, 101)
		require.Equal(w, waitingroom.Finding{
			Event: event, Law: waitingroom.LawState, Detail: "and 200 more like these", Key: "more", Count: 200,
		}, found[100])
	})
}

// TestAuditWhileUsersMove: while users move, the audit finds nothing.
func TestAuditWhileUsersMove(t *testing.T) {
	onStores(t, func(w *world) {
		s := defaults(20)
		s.Grace, s.Ready = 50*time.Millisecond, 20*time.Millisecond
		w.declare(s)
		ctx, stop := context.WithCancel(w.Context())
		done := make(chan error)
		go func() {
			done <- func() error {
				for i := 0; ctx.Err() == nil; i++ {
					var list []waitingroom.Visitor
					for j := range 20 {
						list = append(list, visitor(fmt.Sprint("u", (i*13+j)%400)))
					}
					_, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, list...)
					if err != nil {
						return err
					}
					if _, err := w.Promote(w.Context(), event); err != nil {
						return err
					}
					if _, err := w.Claim(w.Context(), event, list[:7]...); err != nil {
						return err
					}
					if _, err := w.Disconnect(w.Context(), event, list[5:15]...); err != nil {
						return err
					}
					if _, err := w.Expire(w.Context(), w.p, event); err != nil {
						return err
					}
					if _, _, err := w.Leave(w.Context(), event, list[3].User); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
		for range 40 {
			require.Empty(w, w.audit())
		}
		stop()
		require.NoError(w, <-done)
	})
}

func TestAuditOfAnUnknownEvent(t *testing.T) {
	onStores(t, func(w *world) { require.Empty(w, w.audit()) })
}

// TestARecordIsRight: another program has added users to sorted sets that their records contradict.
// The scripts trust the records: the users keep their places and slots, and leave the wrong sets.
func TestARecordIsRight(t *testing.T) {
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
