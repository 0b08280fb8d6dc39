package stream

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestRenewDoesNotSteal: Renew reports entries that another consumer has claimed, and does not
// claim them back.
func TestRenewDoesNotSteal(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		lost, err := r.Renew(ctx, "s", []string{"1-1"}, 0)
		require.NoError(t, err, "a group that is away")
		require.Empty(t, lost)

		require.NoError(t, r.EnsureGroup(ctx, "s"))
		for range 450 {
			add(t, c, "s", "k", "v")
		}
		batches, err := r.Read(ctx, []string{"s"}, 450, 0)
		require.NoError(t, err)
		entries := batches[0].Entries
		ids := make([]string, len(entries))
		for i, e := range entries {
			ids[i] = e.ID
		}
		taken, _, _, err := NewReader(c, "g", "other").Claim(ctx, "s", 0, "0-0", 3)
		require.NoError(t, err)
		require.Len(t, taken, 3)

		lost, err = r.Renew(ctx, "s", append(ids, "1-1"), time.Hour)
		require.NoError(t, err)
		require.Equal(t, ids[:3], lost)
		for consumer, want := range map[string]int{"me": 447, "other": 3} {
			held, err := c.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: "s", Group: "g", Start: "-", End: "+", Count: 500, Consumer: consumer}).Result()
			require.NoError(t, err)
			require.Len(t, held, want)
			require.Equal(t, consumer == "me", held[0].Idle >= time.Hour)
		}
	})
}

func TestForgetDeadConsumers(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		forgotten := func(age time.Duration) int64 {
			n, err := r.ForgetDead(ctx, "s", age)
			require.NoError(t, err)
			return n
		}
		require.Zero(t, forgotten(0), "no stream")
		add(t, c, "s", "k", "v")
		require.Zero(t, forgotten(0), "no group")

		_, err := NewReader(c, "g", "holder").Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		require.NoError(t, c.Cmd.XGroupCreateConsumer(ctx, "s", "g", "idler").Err())
		// In miniredis a consumer's idle time begins with its first command.
		require.NoError(t, c.Cmd.XClaimJustID(ctx, &redis.XClaimArgs{Stream: "s", Group: "g", Consumer: "idler", Messages: []string{"1-1"}}).Err())
		consumers := func() (names []string) {
			for _, consumer := range c.Cmd.XInfoConsumers(ctx, "s", "g").Val() {
				names = append(names, consumer.Name)
			}
			return names
		}
		require.Zero(t, forgotten(time.Hour))
		require.Equal(t, []string{"holder", "idler"}, consumers(), "not idle for long")
		require.Eventually(t, func() bool { return forgotten(0) == 1 }, patience, glance)
		require.Equal(t, []string{"holder"}, consumers())
		require.EqualValues(t, 1, c.Cmd.XPending(ctx, "s", "g").Val().Count)
	})
}

func TestOldestPending(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		idle := NewConsumer(c, ConsumerConfig{Stream: stream, Group: group, Name: "idle", Log: slog.Default()})
		_, _, err := idle.OldestPending(ctx)
		require.True(t, call.IsNoGroup(err), "%v", err)

		out, consumer, _ := subscribe(t, c, stream, ConsumerConfig{})
		publishLarge(t, c, stream, 0, 2)
		first, second := receive(t, out), receive(t, out)
		if second.ID < first.ID {
			first, second = second, first
		}
		id, ok, err := consumer.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first.ID, id)

		// An entry stops counting as pending as soon as the handler has acknowledged it and
		// returned, although the consumer sends acknowledgements later.
		first.Ack()
		require.Eventually(t, func() bool {
			id, ok, err := consumer.OldestPending(ctx)
			return err == nil && ok && id == second.ID
		}, patience, glance)
		second.Ack()
		require.Eventually(t, func() bool {
			_, ok, err := consumer.OldestPending(ctx)
			return err == nil && !ok
		}, patience, glance)
	})
}

// TestOldestPendingFlushes: OldestPending itself sends the acknowledgements that the consumer has
// collected and not sent yet.
func TestOldestPendingFlushes(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		idle := NewConsumer(c, ConsumerConfig{Stream: stream, Group: group, Name: "idle", Log: slog.Default()})
		require.NoError(t, idle.reader.EnsureGroup(ctx, stream))
		publish(t, c, stream, 0, 2)
		batches, err := idle.reader.Read(ctx, []string{stream}, 2, 0)
		require.NoError(t, err)
		entries := batches[0].Entries
		idle.acks.add([]string{entries[0].ID})
		id, ok, err := idle.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, entries[1].ID, id)
	})
}

// TestOldestPendingSeesUnownedEntries: OldestPending also returns an older entry that no consumer
// owns, because it is delivered again later.
func TestOldestPendingSeesUnownedEntries(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		me := NewConsumer(c, ConsumerConfig{Stream: "s", Group: "g", Name: "me", Log: slog.Default()})
		require.NoError(t, me.reader.EnsureGroup(ctx, "s"))
		first := add(t, c, "s", "k", "v")
		_, err := NewReader(c, "g", "gone").Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		add(t, c, "s", "k", "v")
		_, err = me.reader.Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		id, ok, err := me.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first, id)
	})
}

// owners returns the consumer of each pending entry, by id.
func owners(t *testing.T, c *redisx.Conn) map[string]string {
	t.Helper()
	pending, err := c.Cmd.XPendingExt(context.Background(),
		&redis.XPendingExtArgs{Stream: "s", Group: "g", Start: "-", End: "+", Count: 10_000}).Result()
	require.NoError(t, err)
	all := map[string]string{}
	for _, p := range pending {
		all[p.ID] = p.Consumer
	}
	return all
}

func TestClaimUnowned(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		claim := func() []string {
			listed, err := Unowned(ctx, c.Cmd, "s", "g")
			require.NoError(t, err)
			ids, err := r.ClaimUnowned(ctx, "s", time.Hour)
			require.NoError(t, err)
			require.Equal(t, listed, ids)
			listed, err = Unowned(ctx, c.Cmd, "s", "g")
			require.NoError(t, err)
			require.Equal(t, listed, ids, "until another consumer claims them")
			again, err := r.ClaimUnowned(ctx, "s", time.Hour)
			require.NoError(t, err)
			require.Empty(t, again, "once")
			return ids
		}
		require.Empty(t, claim(), "no stream")
		ids := []string{add(t, c, "s", "n", "0")}
		require.Empty(t, claim(), "no group")
		require.NoError(t, r.EnsureGroup(ctx, "s"))
		require.Empty(t, claim(), "nothing was delivered")
		for range 7 {
			ids = append(ids, add(t, c, "s", "k", "v"))
		}
		read := func(consumer string, n int) {
			_, err := NewReader(c, "g", consumer).Read(ctx, []string{"s"}, n, 0)
			require.NoError(t, err)
		}

		// A consumer that owns entries is deleted: only its entries are unowned, not those of other
		// consumers, and not undelivered ones.
		read("gone", 2)
		read("me", 1)
		read("gone", 2)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		require.Equal(t, []string{ids[0], ids[1], ids[3], ids[4]}, claim())
		require.Equal(t, map[string]string{
			ids[0]: "unowned", ids[1]: "unowned", ids[2]: "me", ids[3]: "unowned", ids[4]: "unowned",
		}, owners(t, c))
		got, _, _, err := r.Claim(ctx, "s", time.Hour, "0-0", 10)
		require.NoError(t, err)
		require.Len(t, got, 4, "they are idle for as long as asked")
		require.NoError(t, r.ack(ctx, "s", ids[0]))
		require.Empty(t, claim(), "an acknowledged entry does not come back")
	})
}

// TestClaimUnownedAfterSetID: entries that XGROUP SETID makes a group skip are unowned. Pending
// ones to which it goes back are not.
func TestClaimUnownedAfterSetID(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	var ids []string
	for range 4 {
		ids = append(ids, add(t, c, "s", "k", "v"))
	}
	_, err := r.Read(ctx, []string{"s"}, 2, 0)
	require.NoError(t, err)
	for setID, want := range map[string][]string{ids[0]: nil, ids[1]: nil, ids[2]: ids[2:3], "$": ids[2:]} {
		require.NoError(t, c.Cmd.XGroupSetID(ctx, "s", "g", setID).Err())
		unowned, err := Unowned(ctx, c.Cmd, "s", "g")
		require.NoError(t, err)
		require.Equal(t, want, unowned, setID)
	}

	// An entry that was deleted from the stream while it was pending is not reported as unowned:
	// Claim reports it.
	require.NoError(t, c.Cmd.XGroupSetID(ctx, "s", "g", "$").Err())
	require.NoError(t, c.Cmd.XDel(ctx, "s", ids[0], ids[3]).Err())
	claimed, err := r.ClaimUnowned(ctx, "s", 0)
	require.NoError(t, err)
	require.Equal(t, ids[2:3], claimed)
	require.Equal(t, map[string]string{ids[0]: "me", ids[1]: "me", ids[2]: "unowned"}, owners(t, c))
}

// TestClaimUnownedInPages: the search for unowned entries reads the stream page by page: pages of
// pending entries, and pages of unowned ones.
func TestClaimUnownedInPages(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		require.NoError(t, r.EnsureGroup(ctx, "s"))
		read := func(consumer string, n int) {
			_, err := c.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
				for range n {
					pipe.XAdd(ctx, &redis.XAddArgs{Stream: "s", Values: []string{"k", "v"}})
				}
				return nil
			})
			require.NoError(t, err)
			_, err = NewReader(c, "g", consumer).Read(ctx, []string{"s"}, n, 0)
			require.NoError(t, err)
		}
		read("gone", 3*unownedPage)
		read("me", 2*pendingPage+1)
		read("gone", unownedPage)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		ids, err := r.ClaimUnowned(ctx, "s", 0)
		require.NoError(t, err)
		require.Len(t, ids, 4*unownedPage)
		require.Len(t, owners(t, c), 4*unownedPage+2*pendingPage+1)
		listed, err := Unowned(ctx, c.Cmd, "s", "g")
		require.NoError(t, err)
		require.Equal(t, ids, listed)
	})
}

// TestConsumerHandlesUnownedEntries: a consumer with a lease of 300 ms finds and handles entries
// that were delivered and that no consumer owns.
func TestConsumerHandlesUnownedEntries(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{Lease: 300 * time.Millisecond})
		publish(t, c, stream, 0, 1)
		receive(t, out).Ack()
		// Each entry is delivered to another consumer, and that consumer is deleted at once.
		ids := make([]string, 2)
		for i := range ids {
			gone, err := c.Cmd.TxPipelined(ctx, func(tx redis.Pipeliner) error {
				tx.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "v"}})
				tx.XReadGroup(ctx, &redis.XReadGroupArgs{Group: group, Consumer: "gone", Streams: []string{stream, ">"}, Block: -1})
				tx.XGroupDelConsumer(ctx, stream, group, "gone")
				return nil
			})
			require.NoError(t, err)
			ids[i] = gone[0].(*redis.StringCmd).Val()
		}
		for _, id := range ids {
			d := receive(t, out)
			require.Equal(t, id, d.ID)
			d.Ack()
		}
		require.Eventually(t, func() bool { return c.Cmd.XLen(ctx, stream).Val() == 0 }, patience, glance)
	})
}

const largestID = "18446744073709551615-18446744073709551615"

// TestConsumerRecoversFromTheLargestID: an entry with the largest possible id blocks its stream. It
// is handled once, under another id, and the stream takes further entries.
func TestConsumerRecoversFromTheLargestID(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	stream := unique("ingest")
	out, _, _ := subscribe(t, c, stream, ConsumerConfig{})
	for range 2 { // the id can be used again
		ordinary := add(t, c, stream, "k", "ordinary")
		d := receive(t, out)
		require.Equal(t, ordinary, d.ID)
		// The last id is the second largest possible one, so Redis gives the next entry the largest
		// one. Then it refuses all further entries, until the consumer has moved that entry to
		// another id.
		require.NoError(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{
			Stream: stream, ID: "18446744073709551615-18446744073709551614", Values: []string{"k", "first"}}).Err())
		_ = c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "second"}}) // refused if it comes late
		d.Ack()
		seen := receive(t, out)
		require.Equal(t, "first", seen.Get("k"))
		require.False(t, InFuture(seen.ID))
		seen.Ack()
		var id string
		require.Eventually(t, func() bool {
			var err error
			id, err = c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "last"}}).Result()
			return err == nil
		}, patience, glance)
		require.False(t, InFuture(id))
		for seen.Get("k") != "last" {
			seen = receive(t, out)
			require.False(t, InFuture(seen.ID))
			seen.Ack()
		}
		require.Eventually(t, func() bool {
			select { // the entry with the largest id may come after the last one
			case seen := <-out:
				seen.Ack()
			default:
			}
			return c.Cmd.XLen(ctx, stream).Val() == 0
		}, patience, glance)
	}
}

func TestRenumber(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, renumber(ctx, c.Cmd, "s", slog.Default()), "no stream")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	exact := func() {
		t.Helper()
		require.NoError(t, renumber(ctx, c.Cmd, "s", slog.Default()))
	}
	exact()
	kept := add(t, c, "s", "k", "kept")
	before := c.Cmd.XInfoStream(ctx, "s").Val()
	exact()
	require.Equal(t, before, c.Cmd.XInfoStream(ctx, "s").Val(), "nothing is in the future")

	_, err := c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", ID: largestID, Values: []string{"k", "v", "k", "w"}}).Result()
	require.NoError(t, err)
	_, err = r.Read(ctx, []string{"s"}, 10, 0)
	require.NoError(t, err)
	require.ErrorContains(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", Values: []string{"k", "v"}}).Err(), "exhausted")
	exact()
	require.Equal(t, map[string]string{kept: "me"}, owners(t, c))
	batches, err := r.Read(ctx, []string{"s"}, 10, 0)
	require.NoError(t, err)
	require.Len(t, batches[0].Entries, 1)
	require.Equal(t, []string{"k", "v", "k", "w"}, batches[0].Entries[0].Fields)

	// The entry is gone, its id is not.
	require.NoError(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", ID: largestID, Values: []string{"k", "v"}}).Err())
	require.NoError(t, c.Cmd.XDel(ctx, "s", largestID).Err())
	exact()
	require.False(t, InFuture(add(t, c, "s", "k", "v")))
	require.EqualValues(t, 3, c.Cmd.XLen(ctx, "s").Val())
}

func TestConsumerSurvivesFlush(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{})
		publish(t, c, stream, 0, 1)
		held := receive(t, out)
		require.NoError(t, c.Cmd.FlushAll(context.Background()).Err())
		require.Eventually(t, func() bool { // otherwise the new entry may get the old one's id
			return held.ID < fmt.Sprint(time.Now().UnixMilli())
		}, patience, time.Millisecond)
		continues(t, c, stream, out, held)
	})
}

// continues checks that the consumer delivers the next message while a handler still has the entry
// held, and that both entries can be acknowledged.
func continues(t *testing.T, c *redisx.Conn, stream string, out <-chan delivered, held delivered) {
	t.Helper()
	publish(t, c, stream, 1, 2)
	d := receive(t, out)
	require.Equal(t, "m1", d.Get("id"))
	held.Ack()
	d.Ack()
	awaitEmpty(t, c, stream)
}

// TestConsumerSurvivesLostGroup: a consumer group that is created again delivers all entries again.
// Those that handlers of this process still have are not handled twice.
func TestConsumerSurvivesLostGroup(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{})
		publish(t, c, stream, 0, 1)
		held := receive(t, out)
		require.NoError(t, c.Cmd.XGroupDestroy(context.Background(), stream, group).Err())
		continues(t, c, stream, out, held)
	})
}

func TestConsumerSurvivesRestart(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, redistest.AOF)
	c := connect(t, s.URL())
	stream := unique("ingest")
	publish(t, c, stream, 0, 200)

	var log logBuffer
	var got tally
	half, resume := make(chan struct{}), make(chan struct{})
	stop := route(t, c, stream, ConsumerConfig{Log: slog.New(slog.NewTextHandler(&log, nil))}, func(id string) error {
		got.add(id)
		if id == "m99" {
			close(half)
		}
		if id >= "m2" && id < "m3" {
			<-resume // the handler works during the outage
		}
		return nil
	})
	<-half
	s.Kill()
	require.Eventually(t, func() bool { return log.count("step failed") > 0 }, patience, glance)
	close(resume)
	s.Restart()
	publish(t, c, stream, 200, 300)
	awaitEmpty(t, c, stream)
	require.Eventually(t, func() bool { return log.count("step works again") > 0 }, patience, glance)
	stop()
	require.Equal(t, 300, got.size())
	require.Equal(t, 1, log.count("step failed"), "%s", &log)
	require.Equal(t, 1, log.count("step works again"), "%s", &log)
}

func TestConsumerSurvivesFailover(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Sentinel(t)
	c := connect(t, s.URL)
	stream := unique("ingest")
	var got tally
	stop := route(t, c, stream, ConsumerConfig{}, func(id string) error {
		got.add(id)
		return nil
	})
	publish(t, c, stream, 0, 100)
	awaitEmpty(t, c, stream)
	s.Master.Kill()
	s.AwaitFailover()
	require.Eventually(t, func() bool { return c.Cmd.Set(ctx, "writable", "yes", 0).Err() == nil }, patience, glance)
	publish(t, c, stream, 100, 200)
	require.Eventually(t, func() bool { return got.size() == 200 }, patience, glance)
	require.Eventually(t, func() bool { return c.Cmd.XLen(ctx, stream).Val() == 0 }, patience, glance)
	stop()
}

type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logBuffer) count(text string) int { return strings.Count(l.String(), text) }
