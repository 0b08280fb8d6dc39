package broker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/broker"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestUsersAreAdmittedInOrder: six users enter through two brokers in turn. Each time the capacity
// grows by one, the next user gets a token, in the order in which they have entered.
func TestUsersAreAdmittedInOrder(t *testing.T) {
	w := shared(t)
	w.declare(0)
	brokers := []*instance{w.start(), w.start()}
	var clients []*client
	for i := range 6 {
		c := brokers[i%2].open(fmt.Sprintf("u%d", i))
		require.Equal(t, api.TicketInEntry, c.next("state").State)
		c.at(int64(i + 1))
		clients = append(clients, c)
	}
	for i, c := range clients {
		w.capacity(int64(i + 1))
		admitted := c.next("admitted")
		claims, err := w.keys.Verify(admitted.Token)
		require.NoError(t, err)
		require.Equal(t, c.user, claims.User)
		require.Equal(t, event, claims.Event)
		if i+1 < len(clients) {
			clients[i+1].at(1)
		}
	}
	require.EqualValues(t, 6, w.snapshot().Used)
}

// TestEmptyQueue: a user who finds a free slot and an empty queue gets the token at once.
func TestEmptyQueue(t *testing.T) {
	w := shared(t)
	w.declare(2)
	b := w.start()
	first := b.open("a").next("admitted")
	require.Equal(t, first.Token, b.open("a").next("admitted").Token, "the same token on another stream")
	resp, err := http.Get(b.url + "/events/" + event) //nolint:noctx // the test ends with it
	require.NoError(t, err)
	defer resp.Body.Close()
	var status api.EventStatus
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&status))
	require.Equal(t, "open", status.Status)
	require.Zero(t, *status.ETASeconds, "a user who enters now is admitted at once")
}

// dropDispatch is a hook of the Redis client. It leaves out each XADD of a dispatch message, so
// that the message is lost, and counts these messages.
type dropDispatch struct {
	redistest.NoHook
	lost atomic.Int64
}

func (d *dropDispatch) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		return next(ctx, slices.DeleteFunc(slices.Clone(cmds), func(cmd redis.Cmder) bool {
			drop := cmd.Name() == "xadd" && strings.Contains(fmt.Sprint(cmd.Args()[1]), "dispatch:")
			if drop {
				d.lost.Add(1)
			}
			return drop
		}))
	}
}

// TestLostMessages: all dispatch messages are lost. The broker still finds out that its users were
// promoted, and delivers their tokens.
func TestLostMessages(t *testing.T) {
	w := shared(t)
	w.declare(0)
	drop := &dropDispatch{}
	b := w.startWith(func(c redis.UniversalClient) { c.AddHook(drop) })
	var clients []*client
	for i := range 5 {
		c := b.open(fmt.Sprint("u", i))
		c.at(int64(i + 1))
		clients = append(clients, c)
	}
	w.capacity(5)
	for _, c := range clients {
		c.next("admitted")
	}
	require.Positive(t, drop.lost.Load())
	_, left, err := w.Leave(t.Context(), event, "u0") // removed without a message
	require.NoError(t, err)
	require.True(t, left)
}

// TestNewerStreamReplacesTheOlder: a newer stream of a user replaces the older one, at the same
// broker and at another one.
func TestNewerStreamReplacesTheOlder(t *testing.T) {
	w := shared(t)
	w.declare(0)
	one, two := w.start(), w.start()
	first := one.open("a")
	first.at(1)
	number, _ := w.number("a")
	second := one.open("a")
	require.Equal(t, "replaced", first.next("ended").Reason)
	second.at(1)
	third := two.open("a")
	require.Equal(t, "replaced", second.next("ended").Reason)
	third.at(1)
	same, letter := w.number("a")
	require.Equal(t, number, same)
	require.Equal(t, "W", letter)
}

// TestReconnect: a stream that breaks off costs nothing: the user becomes away, is passed over by
// promotions, and after a new connect has the same number, or the token.
func TestReconnect(t *testing.T) {
	w := shared(t)
	w.declare(0)
	one, two := w.start(), w.start()
	a, b := one.open("a"), one.open("b")
	a.at(1)
	b.at(2)
	a.close()
	w.await("a is away", func() bool { _, letter := w.number("a"); return letter == "A" })
	w.capacity(1)
	b.next("admitted")
	again := two.open("a")
	again.at(1)
	number, _ := w.number("a")
	require.Equal(t, "1", number)

	// The stream breaks off between promotion and claim.
	again.close()
	w.await("a is away", func() bool { _, letter := w.number("a"); return letter == "A" })
	_, err := w.Enter(t.Context(), event, waitingroom.EnterNew, 0, waitingroom.Visitor{User: "a", Conn: "ffffffff.1"})
	require.NoError(t, err)
	w.capacity(2)
	w.await("a is promoted", func() bool { _, letter := w.number("a"); return letter == "R" })
	token := one.open("a").next("admitted").Token
	require.Equal(t, token, two.open("a").next("admitted").Token)
	require.EqualValues(t, 2, w.snapshot().Used)
}

// TestTheDocumentsBehaviour: with grace 0 and the settings on_close and no_show "release", the end
// of a stream frees the place of a user who waits, and the slot of one who has a token.
func TestTheDocumentsBehaviour(t *testing.T) {
	w := shared(t)
	w.declare(1, func(s *waitingroom.Settings) { s.Grace, s.OnClose, s.NoShow = 0, "release", "release" })
	b := w.start()
	a := b.open("a")
	a.next("admitted")
	c, d := b.open("c"), b.open("d")
	c.at(1)
	d.at(2)
	c.close()
	d.at(1)
	a.close()
	d.next("admitted")
	d.close()
	w.await("all are gone", func() bool { s := w.snapshot(); return s.Used+s.Waiting+s.Away == 0 })
}

// TestStatus: the status that a broker publishes says how many streams it has, and how old the
// positions are that it shows.
func TestStatus(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	c := b.open("u")
	c.at(1)
	counts := func() map[string]int64 {
		all, err := presence.Brokers(t.Context(), w.conn, w.space)
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, "broker", all[0].Role)
		return all[0].Counts
	}
	w.await("the stream counts", func() bool { return counts()["streams"] == 1 && counts()["position_age_ms"] > 0 })
	c.close()
	w.await("nobody is there", func() bool { return counts()["streams"] == 0 && counts()["position_age_ms"] == 0 })
}

// TestStop: a broker that stops sends its users a frame "reconnect". They connect to another broker
// and keep their numbers, and none was away.
func TestStop(t *testing.T) {
	w := shared(t)
	w.declare(0)
	one, two := w.start(), w.start()
	var clients []*client
	for i := range 5 {
		c := one.open(fmt.Sprint("u", i))
		c.at(int64(i + 1))
		clients = append(clients, c)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); one.stop() }()
	for _, c := range clients {
		require.Equal(t, "draining", c.next("reconnect").Reason)
	}
	<-stopped
	require.Zero(t, w.snapshot().Away)
	for i, c := range clients {
		two.open(c.user).at(int64(i + 1))
		number, _ := w.number(c.user)
		require.Equal(t, fmt.Sprint(i+1), number)
	}
}

// TestRedisStandsStill: Redis stands still for longer than a broker's status is valid
// (presence.TTL). No connected user loses the place.
func TestRedisStandsStill(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 7 seconds")
	}
	t.Parallel()
	server := redistest.Server(t)
	w := newWorld(t, server.URL(), "t:")
	w.declare(0, func(s *waitingroom.Settings) { s.Grace = time.Second })
	one, two := w.start(), w.start()
	a, b := one.open("a"), two.open("b")
	a.at(1)
	b.at(2)
	server.Suspend()
	time.AfterFunc(6500*time.Millisecond, server.Resume)
	w.await("redis answers", func() bool { return w.conn.Cmd.Ping(t.Context()).Err() == nil })
	w.capacity(2)
	a.next("admitted")
	b.next("admitted")
	require.EqualValues(t, 2, w.snapshot().Used)
}

// TestBrokenEventHarmsNoOther: while the key slots of one event has a wrong Redis type, the user of
// another event is admitted. After the repair, the user of the first one is admitted.
func TestBrokenEventHarmsNoOther(t *testing.T) {
	w := shared(t)
	w.declare(0)
	w.declareEvent("broken", 0)
	b := w.start()
	a := b.open("a")
	a.at(1)
	broken := b.openEvent("broken", "a")
	broken.at(1)
	require.NoError(t, w.conn.Cmd.Del(t.Context(), w.p.RoomSlots("broken")).Err())
	require.NoError(t, w.conn.Cmd.Set(t.Context(), w.p.RoomSlots("broken"), "x", 0).Err())
	require.NoError(t, w.conn.Cmd.ZAdd(t.Context(), w.p.Rooms(), redis.Z{Score: 1, Member: "broken"}).Err())
	w.capacity(1)
	a.next("admitted")
	require.NoError(t, w.conn.Cmd.Del(t.Context(), w.p.RoomSlots("broken")).Err())
	require.NoError(t, w.conn.Cmd.ZAdd(t.Context(), w.p.Rooms(), redis.Z{Score: 1, Member: "broken"}).Err())
	one := int64(1)
	_, err := w.Change(t.Context(), "broken", waitingroom.Changes{Capacity: &one})
	require.NoError(t, err)
	broken.next("admitted")
}

func TestEventEnds(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	a := b.open("a")
	a.at(1)
	_, err := w.Change(t.Context(), event, waitingroom.Changes{Mode: api.ModePaused})
	require.NoError(t, err)
	require.Equal(t, api.ModePaused, a.next("state").Mode)
	_, err = w.Change(t.Context(), event, waitingroom.Changes{Mode: api.ModeClosed})
	require.NoError(t, err)
	require.Equal(t, "closed", a.next("ended").Reason)
	w.await("the queue is dissolved", func() bool { return w.snapshot().Waiting == 0 })
}

// TestTokenExpires: a stream ends with the reason "gone" when the user's token expires, and the
// slot becomes free.
func TestTokenExpires(t *testing.T) {
	w := shared(t)
	w.declare(2, func(s *waitingroom.Settings) { s.TokenTTL, s.Leeway = time.Second, 0 })
	b := w.start()
	a := b.open("a")
	a.next("admitted")
	require.Equal(t, "gone", a.next("ended").Reason)
	w.await("the slot is free", func() bool { return w.snapshot().Used == 0 })
}

// TestSeats: an event that nobody has declared gets its capacity from the seat service, here a
// fake. While the fake answers with an error, the user waits; when it says 1, the user is admitted.
func TestSeats(t *testing.T) {
	w := shared(t)
	var known atomic.Bool
	b := w.start(func(c *broker.Config) {
		c.Seats = func(context.Context, string) (int64, error) {
			if known.Load() {
				return 1, nil
			}
			return 0, errors.New("no answer")
		}
	})
	a := b.open("a")
	a.at(1)
	known.Store(true)
	a.next("admitted")
	require.EqualValues(t, 1, w.snapshot().Settings.Capacity)
}

func TestUnknownEvent(t *testing.T) {
	w := shared(t)
	b := w.start()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url+"/events/none/tickets/waiting", nil)
	require.NoError(t, err)
	req.Header.Set("X-User", "a")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusNotFound, resp.StatusCode)
	require.Empty(t, w.conn.Cmd.Keys(t.Context(), w.space.Prefix()+"*room:*").Val())
}

// slowFirst is a hook of the Redis client. It blocks the first call of the script enter for new
// visitors until release is closed, and counts these calls.
type slowFirst struct {
	redistest.NoHook
	calls   atomic.Int64
	release chan struct{}
}

func (s *slowFirst) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); len(args) > 6 && args[6] == string(waitingroom.EnterNew) && s.calls.Add(1) == 1 {
			<-s.release
		}
		return next(ctx, cmd)
	}
}

// TestVisitorsShareCalls: 50 visitors enter while the first call of enter is blocked. Fewer than 50
// calls then give each of them a number of their own.
func TestVisitorsShareCalls(t *testing.T) {
	const users = 50
	w := shared(t)
	w.declare(0)
	slow := &slowFirst{release: make(chan struct{})}
	b := w.startWith(func(c redis.UniversalClient) { c.AddHook(slow) })
	clients := make(chan *client, users)
	for i := range users {
		go func() { clients <- b.open(fmt.Sprint("u", i)) }()
	}
	w.await("all have asked", func() bool { return b.requests.Load() == users })
	close(slow.release)
	numbers := map[string]bool{}
	for range users {
		c := <-clients
		c.next("position")
		number, _ := w.number(c.user)
		numbers[number] = true
	}
	require.Len(t, numbers, users)
	require.Less(t, slow.calls.Load(), int64(users))
	require.EqualValues(t, users, w.snapshot().Tail)
}
