package broker_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

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
