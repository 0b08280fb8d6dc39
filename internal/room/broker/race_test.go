package broker_test

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// commands is a hook of the Redis client for commands outside of pipelines. It calls before with
// the text of each command that a broker sends, and after with that of each one that has succeeded.
type commands struct {
	redistest.NoHook
	before, after func(text string) // nil: nothing happens
}

func (c *commands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		text := fmt.Sprintln(cmd.Args()...)
		if c.before != nil {
			c.before(text)
		}
		err := next(ctx, cmd)
		if c.after != nil && err == nil {
			c.after(text)
		}
		return err
	}
}

// isStatus tells whether the text of a command is the one by which a broker publishes its status.
func isStatus(text string) bool { return status.MatchString(text) }

var status = regexp.MustCompile(`brokers [0-9a-f]{8} `)

func isEnter(text, mode string) bool { return strings.Contains(text, " "+event+" "+mode+" ") }

// TestConnectingDuringReentry: after a silence, a broker repeats enter for its users. A user whose
// first call of enter still runs has no place yet; the repetition leaves this user out, and does
// not end the stream.
func TestConnectingDuringReentry(t *testing.T) {
	w := shared(t)
	w.declare(0)
	var silent atomic.Bool
	var once, reentered sync.Once
	entering, again, late := make(chan struct{}), make(chan struct{}), make(chan struct{})
	b := w.startWith(func(c redis.UniversalClient) {
		c.AddHook(&commands{before: func(text string) {
			switch {
			case isStatus(text) && silent.CompareAndSwap(true, false):
				time.Sleep(2200 * time.Millisecond)
			case isEnter(text, "new 0 b"):
				once.Do(func() { close(entering); <-late })
			}
		}, after: func(text string) {
			if isEnter(text, "again") {
				reentered.Do(func() { close(again) })
			}
		}})
	})
	unblock := sync.OnceFunc(func() { close(late) })
	t.Cleanup(unblock)
	b.open("a").at(1)
	silent.Store(true)
	opened := make(chan *client)
	go func() { opened <- b.open("b") }()
	for _, seen := range []chan struct{}{entering, again} {
		select {
		case <-seen:
		case <-time.After(patience):
			require.Fail(t, "the broker does not let its users enter again")
		}
	}
	unblock()
	c := <-opened
	require.Equal(t, api.TicketInEntry, c.next("state").State)
	c.at(2)
}

// TestPromotedBeforeTheAnswer: a user is promoted, and claims the token, before the answer of the
// script enter reaches the broker. The first frame "state" of the user says IN_PROGRESS, and the
// token follows.
func TestPromotedBeforeTheAnswer(t *testing.T) {
	w := shared(t)
	w.declare(0)
	var statuses atomic.Int64
	late := make(chan struct{})
	b := w.startWith(func(c redis.UniversalClient) {
		c.AddHook(&commands{after: func(text string) {
			if isStatus(text) {
				statuses.Add(1)
			}
			if isEnter(text, "new") {
				<-late
			}
		}})
	})
	opened := make(chan *client)
	go func() { opened <- b.open("a") }()
	w.await("a waits", func() bool { _, letter := w.number("a"); return letter == "W" })
	w.capacity(1)
	w.await("a has a token", func() bool { _, letter := w.number("a"); return letter == "P" })
	n := statuses.Load() // the token is delivered long before another status is published
	w.await("the broker goes on", func() bool { return statuses.Load() > n+1 })
	close(late)
	c := <-opened
	require.Equal(t, api.TicketInProgress, c.next("state").State)
	c.next("admitted")
}

// TestDeclaredAfterItWasUnknown: a visitor gets 404 for an event, which is then declared. The
// stream that the visitor opens next shows the mode open, and gets a token that is valid for 5
// minutes.
func TestDeclaredAfterItWasUnknown(t *testing.T) {
	w := shared(t)
	var statuses atomic.Int64
	b := w.startWith(func(c redis.UniversalClient) {
		c.AddHook(&commands{after: func(text string) {
			if isStatus(text) {
				statuses.Add(1)
			}
		}})
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url+"/events/"+event+"/tickets/waiting", nil)
	require.NoError(t, err)
	req.Header.Set("X-User", "a")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusNotFound, resp.StatusCode)
	w.await("the broker knows that there is no such event", func() bool { return statuses.Load() > 5 })
	w.declare(1)
	c := b.open("a")
	require.Equal(t, api.ModeOpen, c.next("state").Mode)
	claims, err := w.keys.Verify(c.next("admitted").Token)
	require.NoError(t, err)
	require.WithinDuration(t, claims.ExpiresAt, claims.IssuedAt.Add(5*time.Minute), time.Second)
}

// TestRedisLosesItsData: Redis has lost its data. The stream of a user who had the position 4 ends
// with the reason "gone", also if the event is declared again and 5 other users enter.
func TestRedisLosesItsData(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint("declared again ", again), func(t *testing.T) {
			w := newWorld(t, server.URL(), "t:")
			w.declare(0)
			b := w.start()
			for i := range 3 {
				b.open(fmt.Sprint("before", i)).at(int64(i + 1))
			}
			a := b.open("a")
			a.at(4)
			require.NoError(t, w.conn.Cmd.FlushAll(t.Context()).Err())
			if again {
				w.declare(0)
				for i := range 5 {
					b.open(fmt.Sprint("later", i)).at(int64(i + 1))
				}
			}
			require.Equal(t, "gone", a.next("ended").Reason)
		})
	}
}

// TestEventIsDeleted: an event is closed with the retention 0, so that it is deleted soon. The
// stream of its user ends with the reason "closed" or "gone".
func TestEventIsDeleted(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	a := b.open("a")
	a.at(1)
	w.declare(0, func(s *waitingroom.Settings) { s.Mode, s.Retention = api.ModeClosed, 0 })
	require.Contains(t, []string{"closed", "gone"}, a.next("ended").Reason)
}

// TestGarbageInTheStreamOfABroker: unreadable messages in the stream of a broker and in the streams
// entry and moves keep no user from the token; nor does a key of another Redis type in place of the
// broker's stream.
func TestGarbageInTheStreamOfABroker(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	a := b.open("a")
	a.at(1)
	record := w.conn.Cmd.HGet(t.Context(), w.p.RoomUsers(event), "a").Val()
	key := w.space.Dispatch(keyspace.InstanceOf(strings.Split(record, "|")[2]))
	for _, data := range []string{"", "null", "[]", `{"users":null}`, `{"event":"sale","users":[{}]}`, "\xff"} {
		for _, typ := range []string{"", "entry.promoted", "entry.replaced", "entry.removed", "x"} {
			require.NoError(t, w.conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"type", typ, "data", data}}).Err())
		}
	}
	require.NoError(t, w.conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.p.Entry(), Values: []string{"x", "y"}}).Err())
	require.NoError(t, w.conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.p.Moves(), Values: []string{"x", "y"}}).Err())
	w.capacity(1)
	a.next("admitted")
	require.Eventually(t, func() bool { return w.conn.Cmd.Exists(t.Context(), w.p.Quarantine()).Val() == 1 },
		10*time.Second, 10*time.Millisecond)
	rejected, err := w.conn.Cmd.LRange(t.Context(), w.p.Quarantine(), 0, -1).Result() // scripts expect a list, too
	require.NoError(t, err)
	require.Len(t, rejected, 1)
	require.Regexp(t, `^entry \d+-0: no message entry.promoted: `, rejected[0])
	c := b.open("c")
	c.at(1)
	require.NoError(t, w.conn.Cmd.Del(t.Context(), key).Err())
	require.NoError(t, w.conn.Cmd.Set(t.Context(), key, "x", 0).Err())
	w.capacity(2)
	c.next("admitted")
	require.NoError(t, w.conn.Cmd.Del(t.Context(), key).Err())
	d := b.open("d")
	d.at(1)
	w.capacity(3)
	d.next("admitted")
}

// TestReopenedAtOnce: an event is closed and opened again before its queue is dissolved. A user
// whose stream was ended by the closing does not wait any more: the user is away, or gone if the
// promoter dissolved the queue in between.
func TestReopenedAtOnce(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	a := b.open("a")
	a.at(1)
	room := w.p.Room(event)
	// Nobody wakes the promoter, which dissolves queues.
	require.NoError(t, w.conn.Cmd.HSet(t.Context(), room, "mode", api.ModeClosed).Err())
	require.Equal(t, "closed", a.next("ended").Reason)
	require.NoError(t, w.conn.Cmd.HSet(t.Context(), room, "mode", api.ModeOpen).Err())
	w.await("a does not wait", func() bool { _, letter := w.number("a"); return letter != "W" })
}

// TestGoneWhileEntering: a visitor closes the connection while the script enter runs. The user is
// away afterwards.
func TestGoneWhileEntering(t *testing.T) {
	w := shared(t)
	w.declare(0)
	entering, late := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b := w.startWith(func(c redis.UniversalClient) {
		c.AddHook(&commands{before: func(text string) {
			if isEnter(text, "new") {
				once.Do(func() { close(entering); <-late })
			}
		}})
	})
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.url+"/events/"+event+"/tickets/waiting", nil)
	require.NoError(t, err)
	req.Header.Set("X-User", "a")
	gone := make(chan error)
	go func() {
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			err = resp.Body.Close()
		}
		gone <- err
	}()
	<-entering
	leave()
	require.ErrorIs(t, <-gone, context.Canceled)
	time.Sleep(100 * time.Millisecond) // the server notices
	close(late)
	w.await("a is away", func() bool { _, letter := w.number("a"); return letter == "A" })
}

// TestLostPromotion: Redis loses a promotion in a failover, after the broker has heard of it. The
// user's stream stays open, and the user gets a token after the next promotion.
func TestLostPromotion(t *testing.T) {
	w := shared(t)
	w.declare(0)
	var once sync.Once
	var record string
	forget := func() {
		ctx := context.Background()
		pipe := w.conn.Cmd.TxPipeline()
		pipe.HSet(ctx, w.p.RoomUsers(event), "a", record)
		pipe.ZAdd(ctx, w.p.RoomWaiting(event), redis.Z{Score: 1, Member: "a"})
		pipe.ZRem(ctx, w.p.RoomSlots(event), "a")
		pipe.HSet(ctx, w.p.Room(event), "capacity", 0)
		_, err := pipe.Exec(ctx)
		if err != nil {
			t.Error(err)
		}
	}
	b := w.startWith(func(c redis.UniversalClient) {
		c.AddHook(&commands{before: func(text string) {
			if strings.Contains(text, " "+event+" a ") { // claim
				once.Do(forget)
			}
		}})
	})
	a := b.open("a")
	a.at(1)
	record = w.conn.Cmd.HGet(t.Context(), w.p.RoomUsers(event), "a").Val()
	w.capacity(1)
	w.await("the promotion is lost", func() bool { return w.snapshot().Settings.Capacity == 0 })
	_, letter := w.number("a")
	require.Equal(t, "W", letter)
	time.Sleep(300 * time.Millisecond) // a stream that ends would do so at once
	w.capacity(1)
	require.NotEmpty(t, a.next("admitted").Token)
}

// TestLostChanges: Redis loses changes of a queue, so that its change number goes back. Users who
// entered with a higher change number still see their positions again.
func TestLostChanges(t *testing.T) {
	w := shared(t)
	w.declare(0)
	b := w.start()
	a, c := b.open("a"), b.open("c")
	a.at(1)
	c.at(2)
	require.NoError(t, w.conn.Cmd.HIncrBy(t.Context(), w.p.Room(event), "change", -1000).Err())
	_, left, err := w.Leave(t.Context(), event, "a")
	require.NoError(t, err)
	require.True(t, left)
	c.at(1)
}
