package waitingroom_test

import (
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestTheWayOfAUser: a user enters, waits, is promoted, gets a token, and gives the slot back.
func TestTheWayOfAUser(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(1))
		first := w.enter("a")[0]
		require.Equal(w, waitingroom.Ready, first.Code) // nobody waits and a slot is free
		require.EqualValues(w, 1, first.Number)
		claimed := w.claim("a")[0]
		require.Equal(w, waitingroom.Claimed, claimed.Code)
		require.Equal(w, first.Fence, claimed.Fence)
		require.Equal(w, claimed, w.claim("a")[0]) // twice

		second := w.enter("b", "c")
		require.Equal(w, waitingroom.Entered, second[0].Code)
		require.EqualValues(w, 2, second[0].Number)
		require.EqualValues(w, 3, second[1].Number)
		require.Equal(w, waitingroom.Back, w.enter("b")[0].Code)
		require.Zero(w, w.promote().N) // no slot is free
		require.Equal(w, waitingroom.None, w.claim("b")[0].Code)

		done, err := w.Complete(w.Context(), event, "a", claimed.Fence, false)
		require.NoError(w, err)
		require.True(w, done)
		done, err = w.Complete(w.Context(), event, "a", claimed.Fence, false)
		require.NoError(w, err)
		require.False(w, done)
		p := w.promote()
		require.Equal(w, 1, p.N)
		s := w.snapshot()
		require.EqualValues(w, 1, s.Used)
		require.EqualValues(w, 1, s.Waiting)
		require.Zero(w, s.Free)
		require.EqualValues(w, 3, s.Tail)

		// The dispatch message names the broker of user b, and the stream moves names the user's
		// number.
		entries, err := w.rdb.XRange(w.Context(), w.p.Entry(), "-", "+").Result()
		require.NoError(w, err)
		require.Len(w, entries, 1)
		require.Equal(w, "entry.promoted", entries[0].Values["type"])
		ready := w.enter("b")[0]
		require.Equal(w, waitingroom.Ready, ready.Code)
		require.JSONEq(w, fmt.Sprintf(`{"event":%q,"to":"00000001","users":[{"user":"b","conn":%q,"fence":%s,"until":%d}]}`,
			event, connOf("b"), ready.Fence, ready.Expires.UnixMilli()), entries[0].Values["data"].(string))
		moves, err := w.Moves(w.Context(), w.p, "0", 0)
		require.NoError(w, err)
		require.Len(w, moves, 2)
		require.Equal(w, []waitingroom.Range{{First: 2, Count: 1}}, moves[1].Gone)
		require.Equal(w, moves[0].Change+1, moves[1].Change)
		require.Equal(w, s.Change, moves[1].Change)
	})
}

func TestDisconnectAndReturn(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(0))
		w.enter("a", "b", "c")
		codes, err := w.Disconnect(w.Context(), event, visitor("a"), waitingroom.Visitor{User: "b", Conn: "00000002.1"}, visitor("x"))
		require.NoError(w, err)
		require.Equal(w, []waitingroom.Code{waitingroom.Away, waitingroom.Stale, waitingroom.Stale}, codes)
		codes, err = w.Disconnect(w.Context(), event, visitor("a"))
		require.NoError(w, err)
		require.Equal(w, []waitingroom.Code{waitingroom.Noted}, codes)
		require.EqualValues(w, 1, w.snapshot().Away)

		// A user who is away is not promoted, keeps the number, and can come back through another
		// broker.
		one := int64(1)
		_, err = w.Change(w.Context(), event, waitingroom.Changes{Capacity: &one})
		require.NoError(w, err)
		require.Equal(w, 1, w.promote().N)
		require.Equal(w, waitingroom.Ready, w.enter("b")[0].Code)
		e, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, waitingroom.Visitor{User: "a", Conn: "00000002.9"})
		require.NoError(w, err)
		require.Equal(w, waitingroom.Back, e.Entries[0].Code)
		require.EqualValues(w, 1, e.Entries[0].Number)
		require.Equal(w, connOf("a"), e.Entries[0].Replaced)

		// The old broker's streams are stale.
		e, err = w.Enter(w.Context(), event, waitingroom.EnterAgain, 0, visitor("a"), visitor("c"), visitor("nobody"))
		require.NoError(w, err)
		require.Equal(w, waitingroom.Stale, e.Entries[0].Code)
		require.Equal(w, waitingroom.Back, e.Entries[1].Code)
		require.Equal(w, waitingroom.None, e.Entries[2].Code)
	})
}

// TestTheDocumentsBehaviour: with grace 0, on_close release and no_show release, the end of a
// stream removes the user in every state, as the requirements document says.
func TestTheDocumentsBehaviour(t *testing.T) {
	onStores(t, func(w *world) {
		s := defaults(1)
		s.Grace, s.OnClose, s.NoShow = 0, "release", "release"
		w.declare(s)
		w.enter("a")
		w.claim("a")
		w.enter("b", "c", "d")
		disconnect := func(user string) waitingroom.Code {
			codes, err := w.Disconnect(w.Context(), event, visitor(user))
			require.NoError(w, err)
			return codes[0]
		}
		require.Equal(w, waitingroom.Gone, disconnect("d")) // waiting
		require.Equal(w, waitingroom.Gone, disconnect("a")) // with a token
		require.Equal(w, 1, w.promote().N)
		require.Equal(w, waitingroom.NoShow, disconnect("b")) // promoted, not connected
		require.Equal(w, 1, w.promote().N)
		require.Equal(w, waitingroom.Claimed, w.claim("c")[0].Code)
		require.Equal(w, waitingroom.Gone, disconnect("c"))
		snapshot := w.snapshot()
		require.Zero(w, snapshot.Used+snapshot.Waiting+snapshot.Away)
		require.Zero(w, w.rdb.Exists(w.Context(), w.p.RoomUsers(event)).Val())
	})
}

func TestPolls(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(0))
		poll := func(mode waitingroom.Mode, user string) waitingroom.Code {
			e, err := w.Enter(w.Context(), event, mode, 20*time.Second, waitingroom.Visitor{User: user})
			require.NoError(w, err)
			return e.Entries[0].Code
		}
		require.Equal(w, waitingroom.None, poll(waitingroom.EnterKnown, "a"))
		require.Equal(w, waitingroom.Entered, poll(waitingroom.EnterNew, "a"))
		require.Equal(w, waitingroom.Back, poll(waitingroom.EnterKnown, "a"))
		require.EqualValues(w, 1, w.rdb.ZCard(w.Context(), w.p.RoomAway(event)).Val())
		require.Zero(w, w.snapshot().Away) // it waits

		// When a polling user opens a stream, the record gets the stream's conn. A poll of a user
		// with an open stream does not remove that conn.
		require.Equal(w, waitingroom.Back, w.enter("a")[0].Code)
		require.Zero(w, w.rdb.ZCard(w.Context(), w.p.RoomAway(event)).Val())
		require.Equal(w, waitingroom.Back, poll(waitingroom.EnterKnown, "a"))
		require.Zero(w, w.rdb.ZCard(w.Context(), w.p.RoomAway(event)).Val())
		codes, err := w.Disconnect(w.Context(), event, visitor("a"))
		require.NoError(w, err)
		require.Equal(w, waitingroom.Away, codes[0])
		require.Equal(w, waitingroom.Back, poll(waitingroom.EnterKnown, "a"))
		require.Zero(w, w.snapshot().Away)
	})
}

func TestRefusals(t *testing.T) {
	onStores(t, func(w *world) {
		_, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, visitor("a"))
		require.ErrorIs(w, err, waitingroom.ErrUnknown)
		s := defaults(0)
		s.MaxWaiting = 2
		w.declare(s)
		codes := func(users ...string) (all []waitingroom.Code) {
			for _, e := range w.enter(users...) {
				all = append(all, e.Code)
			}
			return all
		}
		require.Equal(w, []waitingroom.Code{waitingroom.Entered, waitingroom.Entered, waitingroom.Full, waitingroom.Back},
			codes("a", "b", "c", "a"))
		change := func(c waitingroom.Changes) waitingroom.Declared {
			d, err := w.Change(w.Context(), event, c)
			require.NoError(w, err)
			return d
		}
		change(waitingroom.Changes{Mode: api.ModeClosed})
		require.Equal(w, []waitingroom.Code{waitingroom.Closed, waitingroom.Closed}, codes("a", "c"))
		left, wait, err := w.Forget(w.Context(), event)
		require.NoError(w, err)
		require.Zero(w, left)
		require.Greater(w, wait, 23*time.Hour)
		zero := time.Duration(0)
		change(waitingroom.Changes{Retention: &zero})
		_, wait, err = w.Forget(w.Context(), event)
		require.NoError(w, err)
		require.Negative(w, wait)
		require.Zero(w, w.rdb.Exists(w.Context(), w.p.Room(event), w.p.RoomUsers(event), w.p.Rooms()).Val())
	})
}

// TestStock: an event has 5 slots and a stock of 2 seats. Two of three users get in; the third is
// not promoted after the first sale, and the second sale makes the event sold out.
func TestStock(t *testing.T) {
	onStores(t, func(w *world) {
		s, stock := defaults(5), int64(2)
		s.Stock = &stock
		w.declare(s)
		entries := w.enter("a", "b", "c")
		require.Equal(w, waitingroom.Ready, entries[1].Code)
		require.Equal(w, waitingroom.Entered, entries[2].Code)
		claims := w.claim("a", "b")
		complete := func(user, fence string, sold bool) {
			done, err := w.Complete(w.Context(), event, user, fence, sold)
			require.NoError(w, err)
			require.True(w, done)
		}
		complete("a", claims[0].Fence, true)
		require.Zero(w, w.promote().N)
		require.EqualValues(w, 1, *w.snapshot().Left)
		d, err := w.Declare(w.Context(), event, s, waitingroom.DeclareOptions{})
		require.NoError(w, err)
		require.Equal(w, "SAME", d.Code)
		require.EqualValues(w, 1, *w.snapshot().Left)
		complete("b", claims[1].Fence, true)
		require.Equal(w, api.ModeSoldOut, w.snapshot().Settings.Mode)
		require.Equal(w, waitingroom.SoldOut, w.enter("c")[0].Code)

		// More seats open the event again.
		three := int64(3)
		_, err = w.Change(w.Context(), event, waitingroom.Changes{Left: &three})
		require.NoError(w, err)
		require.Equal(w, api.ModeOpen, w.snapshot().Settings.Mode)
		require.EqualValues(w, 5, *w.snapshot().Settings.Stock)
		require.Equal(w, 1, w.promote().N)
	})
}

func TestDeclare(t *testing.T) {
	onStores(t, func(w *world) {
		declare := func(s waitingroom.Settings, o waitingroom.DeclareOptions) (waitingroom.Declared, error) {
			return w.Declare(w.Context(), event, s, o)
		}
		s := defaults(3)
		s.Rate, s.Burst, s.ReturnURL = 0.5, 2, "https://shop.example/buy"
		created, err := declare(s, waitingroom.DeclareOptions{})
		require.NoError(w, err)
		require.Equal(w, "CREATED", created.Code)
		got := w.snapshot()
		want := s
		want.Mode = api.ModeOpen
		require.Equal(w, want, got.Settings)
		require.Equal(w, created.Rev, got.Rev)
		same, err := declare(s, waitingroom.DeclareOptions{Rev: created.Rev})
		require.NoError(w, err)
		require.Equal(w, waitingroom.Declared{Code: "SAME", Rev: created.Rev}, same)
		w.enter("a", "b", "c")
		s.Capacity = 1
		_, err = declare(s, waitingroom.DeclareOptions{Rev: 1})
		require.ErrorIs(w, err, waitingroom.ErrRev)
		same, err = declare(s, waitingroom.DeclareOptions{IfAbsent: true})
		require.NoError(w, err)
		require.Equal(w, "SAME", same.Code)
		changed, err := declare(s, waitingroom.DeclareOptions{Rev: created.Rev})
		require.NoError(w, err)
		require.Equal(w, "CHANGED", changed.Code)
		require.EqualValues(w, 1, changed.Over) // the burst let two in
		_, err = w.Change(w.Context(), "other", waitingroom.Changes{Mode: api.ModePaused})
		require.ErrorIs(w, err, waitingroom.ErrUnknown)
		_, err = w.Change(w.Context(), event, waitingroom.Changes{Mode: api.ModePaused})
		require.NoError(w, err)
		s.Capacity = 9
		_, err = declare(s, waitingroom.DeclareOptions{})
		require.NoError(w, err)
		require.Equal(w, api.ModePaused, w.snapshot().Settings.Mode) // without a mode it stays
		require.Zero(w, w.promote().N)
	})
}

func TestRenewAndVerify(t *testing.T) {
	onStores(t, func(w *world) {
		s := defaults(1)
		s.MaxSession = 6 * time.Minute
		w.declare(s)
		w.enter("a")
		c := w.claim("a")[0]
		renewed, err := w.Renew(w.Context(), event, "a", c.Fence)
		require.NoError(w, err)
		require.Equal(w, waitingroom.Renewed, renewed.Code)
		require.False(w, renewed.Expires.Before(c.Expires))
		for _, fence := range []string{"1", "", c.Fence + "0"} {
			other, err := w.Renew(w.Context(), event, "a", fence)
			require.NoError(w, err)
			require.Equal(w, waitingroom.None, other.Code)
			v, _, err := w.Verify(w.Context(), event, "a", fence)
			require.NoError(w, err)
			require.Equal(w, waitingroom.None, v.Code)
		}
		v, _, err := w.Verify(w.Context(), event, "a", c.Fence)
		require.NoError(w, err)
		require.Equal(w, waitingroom.InProgress, v.Code)
		require.Equal(w, renewed.Expires, v.Expires)
		conn, left, err := w.Leave(w.Context(), event, "a")
		require.NoError(w, err)
		require.True(w, left)
		require.Equal(w, connOf("a"), conn)
		v, _, err = w.Verify(w.Context(), event, "a", c.Fence)
		require.NoError(w, err)
		require.Equal(w, waitingroom.None, v.Code)
		_, left, err = w.Leave(w.Context(), event, "a")
		require.NoError(w, err)
		require.False(w, left)
	})
}

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial))
}

// TestReentryDuringASweep: a broker that was silent repeats enter for user a, while another broker
// sweeps with an older list of live brokers that does not contain the first. User a stays waiting;
// user b, for whom enter was not repeated, becomes away.
func TestReentryDuringASweep(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(0))
		w.enter("a", "b")
		key := w.p.RoomUsers(event)
		since := regexp.MustCompile(`\|\d{13}\|`)
		for _, user := range []string{"a", "b"} { // their streams are old
			record := w.rdb.HGet(t.Context(), key, user).Val()
			require.Regexp(t, since, record)
			require.NoError(t, w.rdb.HSet(t.Context(), key, user, since.ReplaceAllString(record, "|1000|")).Err())
		}
		reply, err := w.Enter(t.Context(), event, waitingroom.EnterAgain, 0, visitor("a"))
		require.NoError(t, err)
		require.Equal(t, waitingroom.Back, reply.Entries[0].Code)

		_, n, _, err := w.Sweep(t.Context(), event, 0, []string{"00000002"})
		require.NoError(t, err)
		require.Equal(t, 1, n, "only b, who has not entered again, is away")
		state, err := w.State(t.Context(), event, "a")
		require.NoError(t, err)
		require.Equal(t, waitingroom.Entered, state)
	})
}

// TestSweepInPages: a sweep looks at 1,000 users a call, and moves at most 200.
func TestSweepInPages(t *testing.T) {
	onStores(t, func(w *world) {
		w.declare(defaults(0))
		var users []string
		for i := range 1100 {
			users = append(users, fmt.Sprint(i))
		}
		for chunk := range slices.Chunk(users, waitingroom.MostUsers) {
			w.enter(chunk...)
		}
		key := w.p.RoomUsers(event)
		records := w.rdb.HGetAll(t.Context(), key).Val()
		for user, record := range records { // their streams are old
			records[user] = regexp.MustCompile(`\|\d{13}\|`).ReplaceAllString(record, "|1000|")
		}
		require.NoError(t, w.rdb.HSet(t.Context(), key, records).Err())
		sweep := func(alive string) (moved []int) {
			for from := int64(0); ; {
				next, n, _, err := w.Sweep(t.Context(), event, from, []string{alive})
				require.NoError(t, err)
				if moved = append(moved, n); next == 0 {
					return moved
				}
				require.Greater(t, next, from)
				from = next
			}
		}
		require.Equal(t, []int{0, 0}, sweep("00000001"))
		require.Equal(t, []int{200, 200, 200, 200, 200, 100}, sweep("00000002"))
		require.EqualValues(t, 1100, w.snapshot().Away)
	})
}

// world is a key space of its own with the rooms in it.
type world struct {
	*testing.T
	*waitingroom.Rooms
	rdb   redis.UniversalClient
	space keyspace.Space
	p     keyspace.Partition
}

// onStores runs a test on each kind of server.
func onStores(t *testing.T, test func(w *world)) {
	t.Helper()
	t.Parallel()
	redistest.Stores(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		test(newWorld(t, url, prefix))
	})
}

func newWorld(t *testing.T, url, prefix string) *world {
	t.Helper()
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url, PoolMaxIdle: 2, PoolMaxActive: 10})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	space, err := keyspace.New(prefix, 1)
	require.NoError(t, err)
	return &world{T: t, Rooms: waitingroom.New(conn, space, nil), rdb: conn.Cmd, space: space, p: space.Partition(0)}
}

// event is the id of the event of the tests.
const event = "sale"

func defaults(capacity int64) waitingroom.Settings {
	return waitingroom.Settings{
		Capacity: capacity, MaxWaiting: 1_000_000, TokenTTL: 5 * time.Minute, Leeway: 10 * time.Second,
		MaxSession: 15 * time.Minute, Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait",
		Retention: 24 * time.Hour,
	}
}

// declare creates the event.
func (w *world) declare(s waitingroom.Settings) {
	w.Helper()
	d, err := w.Declare(w.Context(), event, s, waitingroom.DeclareOptions{})
	require.NoError(w, err)
	require.Equal(w, "CREATED", d.Code)
}

// enter enters each user with a stream of the broker 00000001, and returns their entries.
func (w *world) enter(users ...string) []waitingroom.Entry {
	w.Helper()
	var visitors []waitingroom.Visitor
	for _, user := range users {
		visitors = append(visitors, waitingroom.Visitor{User: user, Conn: connOf(user)})
	}
	e, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, visitors...)
	require.NoError(w, err)
	require.Len(w, e.Entries, len(users))
	return e.Entries
}

func connOf(user string) string { return "00000001." + user }

func visitor(user string) waitingroom.Visitor {
	return waitingroom.Visitor{User: user, Conn: connOf(user)}
}

func (w *world) snapshot() waitingroom.Snapshot {
	w.Helper()
	s, err := w.Snapshot(w.Context(), w.p, event)
	require.NoError(w, err)
	require.Len(w, s.Events, 1)
	return s.Events[0]
}

func (w *world) promote() waitingroom.Progress {
	w.Helper()
	p, err := w.Promote(w.Context(), event)
	require.NoError(w, err)
	return p
}

func (w *world) claim(users ...string) []waitingroom.Claim {
	w.Helper()
	var visitors []waitingroom.Visitor
	for _, user := range users {
		visitors = append(visitors, visitor(user))
	}
	c, err := w.Claim(w.Context(), event, visitors...)
	require.NoError(w, err)
	return c
}
