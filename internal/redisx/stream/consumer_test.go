package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const group = "workers"

// delivered is an entry that the test's handler passed to the test. The handler returns when the
// test has given a verdict on each entry of its batch, or when the handler's context ends.
type delivered struct {
	Entry
	ctx     context.Context //nolint:containedctx // tests look at the context that a handler got
	verdict chan Verdict
}

func (d delivered) Ack()  { d.verdict <- Verdict{Action: Ack} }
func (d delivered) Nack() { d.verdict <- Verdict{Action: RetryAfter} }

// run starts a consumer with the given settings; fields that are not set get the tests' defaults.
// stop ends it and returns the error of Run.
func run(t testing.TB, c *redisx.Conn, stream string, cfg ConsumerConfig) (consumer *Consumer, stop func() error) {
	t.Helper()
	cfg.Stream, cfg.Group, cfg.Block = stream, group, 50*time.Millisecond
	cfg.Rejected.Key = stream + ":rejected"
	if cfg.Name == "" {
		cfg.Name = unique("consumer")
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = 1000
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = 64 << 20
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	for at, value := range map[*time.Duration]time.Duration{
		&cfg.Lease: patience, &cfg.RetryAfter: 250 * time.Millisecond, &cfg.CloseTimeout: patience,
	} {
		if *at == 0 {
			*at = value
		}
	}
	consumer = NewConsumer(c, cfg)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = stop() })
	return consumer, stop
}

// subscribe runs a consumer that sends each entry to the channel out. The test gives the verdict by
// Ack or Nack.
func subscribe(
	t testing.TB, c *redisx.Conn, stream string, cfg ConsumerConfig,
) (out <-chan delivered, consumer *Consumer, stop func() error) {
	t.Helper()
	entries := make(chan delivered)
	cfg.Handle = func(ctx context.Context, batch []Entry) []Verdict {
		verdicts, sent := make([]Verdict, len(batch)), make([]delivered, len(batch))
		for i, e := range batch {
			sent[i] = delivered{e, ctx, make(chan Verdict, 1)}
			select {
			case entries <- sent[i]:
			case <-ctx.Done():
			}
		}
		for i, d := range sent {
			select {
			case verdicts[i] = <-d.verdict:
			case <-ctx.Done():
			}
		}
		return verdicts
	}
	consumer, stop = run(t, c, stream, cfg)
	return entries, consumer, stop
}

// route runs a consumer that calls handle with the id field of each entry, concurrently for all
// entries of a batch. An entry whose handle returns an error is delivered again.
func route(t testing.TB, c *redisx.Conn, stream string, cfg ConsumerConfig, handle func(id string) error) (stop func()) {
	t.Helper()
	cfg.Handle = func(_ context.Context, batch []Entry) []Verdict {
		verdicts := make([]Verdict, len(batch))
		var calls sync.WaitGroup
		for i, e := range batch {
			calls.Go(func() {
				if handle(e.Get("id")) == nil {
					verdicts[i].Action = Ack
				}
			})
		}
		calls.Wait()
		return verdicts
	}
	_, end := run(t, c, stream, cfg)
	return func() { require.NoError(t, end()) }
}

func receive(t testing.TB, out <-chan delivered) delivered {
	t.Helper()
	select {
	case d := <-out:
		return d
	case <-time.After(patience):
		require.FailNow(t, "no entry came")
		return delivered{}
	}
}

// tally counts how often each entry was handled.
type tally struct {
	mu   sync.Mutex
	seen map[string]int
}

func (y *tally) add(id string) (times int) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.seen == nil {
		y.seen = map[string]int{}
	}
	y.seen[id]++
	return y.seen[id]
}

func (y *tally) size() int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return len(y.seen)
}

func publish(t testing.TB, c *redisx.Conn, stream string, from, to int) {
	t.Helper()
	publishData(t, c, stream, from, to, "{}")
}

// publishLarge publishes entries of more than largeEntry bytes, each of which the consumer handles
// in a batch of its own.
func publishLarge(t testing.TB, c *redisx.Conn, stream string, from, to int) {
	t.Helper()
	publishData(t, c, stream, from, to, strings.Repeat("x", largeEntry))
}

func publishData(t testing.TB, c *redisx.Conn, stream string, from, to int, data string) {
	t.Helper()
	for batch := range slices.Chunk(make([]struct{}, to-from), 200) {
		pipe := c.Cmd.Pipeline()
		for range batch {
			pipe.XAdd(context.Background(), &redis.XAddArgs{Stream: stream, Values: []string{"type", "test", "id", fmt.Sprint("m", from), "data", data}})
			from++
		}
		_, err := pipe.Exec(context.Background())
		require.NoError(t, err)
	}
}

func pending(t testing.TB, c *redisx.Conn, stream string) int64 {
	t.Helper()
	p, err := c.Cmd.XPending(context.Background(), stream, group).Result()
	require.NoError(t, err)
	return p.Count
}

// awaitEmpty waits until a stream has no entries and no pending entries.
func awaitEmpty(t testing.TB, c *redisx.Conn, stream string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return c.Cmd.XLen(context.Background(), stream).Val() == 0 && pending(t, c, stream) == 0
	}, patience, glance)
}

func deliversEverything(t *testing.T, url string, n int) {
	c := connect(t, url)
	stream := unique("ingest")
	publish(t, c, stream, 0, n/2)
	var got tally
	stop := route(t, c, stream, ConsumerConfig{}, func(id string) error {
		got.add(id)
		return nil
	})
	publish(t, c, stream, n/2, n)
	awaitEmpty(t, c, stream)
	stop()
	require.Equal(t, n, got.size())
	for id, times := range got.seen {
		require.Equal(t, 1, times, id)
	}
}

func TestConsumerDeliversEverything(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) { deliversEverything(t, url, 5000) })
}

func TestConsumerDeliversEverythingOfACluster(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Cluster(t, 3)
	deliversEverything(t, url, 500)
}

// TestEntriesArriveAsWritten: a handler gets each entry as it was written.
func TestEntriesArriveAsWritten(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		name := unique("ingest")
		out, _, _ := subscribe(t, c, name, ConsumerConfig{})
		binary := string([]byte{0, 255, '\r', '\n', 0x80})
		for _, fields := range [][]string{
			{"type", "group.seal", "data", `{"group":"g"}`, "id", "m-1", "traceparent", "00-1-2-01"},
			{"type", "group.seal"}, {"data", "{}"}, {"hello", "world"}, {binary, binary, "data", binary, "id", binary},
			{"data", "1", "data", "2"}, {"data", "", "", ""},
		} {
			id := add(t, c, name, fields...)
			d := receive(t, out)
			d.Ack()
			require.Equal(t, Entry{ID: id, Fields: fields}, d.Entry)
		}
		awaitEmpty(t, c, name)
	})
}

// TestRetryDelaysNoOther: an entry that the handler wants delivered again later does not delay the
// other entries of its batch.
func TestRetryDelaysNoOther(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 300)
		var got tally
		stop := route(t, c, stream, ConsumerConfig{RetryAfter: 5 * time.Millisecond}, func(id string) error {
			if times := got.add(id); times < 4 && strings.HasSuffix(id, "7") {
				return errors.New("not yet")
			}
			return nil
		})
		awaitEmpty(t, c, stream)
		stop()
		require.Equal(t, 300, got.size())
		for id, times := range got.seen {
			require.Equal(t, map[bool]int{true: 4, false: 1}[strings.HasSuffix(id, "7")], times, id)
		}

		publish(t, c, stream, 0, 300)
		route(t, c, stream, ConsumerConfig{RetryAfter: time.Hour}, func(id string) error {
			if strings.HasSuffix(id, "7") {
				return errors.New("never")
			}
			return nil
		})
		require.Eventually(t, func() bool { return c.Cmd.XLen(context.Background(), stream).Val() == 30 }, patience, glance)
	})
}

// TestLargeEntryDelaysNoOther: while a handler works on a large entry, other handlers get the
// entries that were read with it.
func TestLargeEntryDelaysNoOther(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 50)
		publishLarge(t, c, stream, 50, 51)
		publish(t, c, stream, 51, 100)
		finish := make(chan struct{})
		stop := route(t, c, stream, ConsumerConfig{}, func(id string) error {
			if id == "m50" {
				<-finish
			}
			return nil
		})
		require.Eventually(t, func() bool { return c.Cmd.XLen(context.Background(), stream).Val() == 1 }, patience, glance)
		close(finish)
		awaitEmpty(t, c, stream)
		stop()
	})
}

// TestPanicCostsOneEntry: a panic rejects the entry that causes it. The others of its batch are
// handled.
func TestPanicCostsOneEntry(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 100)
		var got tally
		_, stop := run(t, c, stream, ConsumerConfig{Handle: func(_ context.Context, batch []Entry) []Verdict {
			verdicts := make([]Verdict, len(batch))
			for i, e := range batch {
				if e.Get("id") == "m42" {
					panic("boom")
				}
				got.add(e.Get("id"))
				verdicts[i].Action = Ack
			}
			return verdicts
		}})
		awaitEmpty(t, c, stream)
		require.NoError(t, stop())
		require.Equal(t, 99, got.size())
		rejected := c.Cmd.XRange(context.Background(), stream+":rejected", "-", "+").Val()
		require.Len(t, rejected, 1)
		require.Equal(t, "m42", rejected[0].Values["id"])
		require.Contains(t, rejected[0].Values["reason"], "panic occurred: boom")
	})
}

// TestRejectedEntryIsQuarantined: a rejected entry is quarantined with the reason and all its
// fields. Fields that are too long are cut. While the quarantine can't be written, the entry stays
// in the stream.
func TestRejectedEntryIsQuarantined(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		require.NoError(t, c.Cmd.Set(ctx, stream+":rejected", "of the wrong type", 0).Err())
		id := add(t, c, stream, "type", "no.such", "data", strings.Repeat("x", maxStoredText+10))
		var calls tally
		_, stop := run(t, c, stream, ConsumerConfig{RetryAfter: glance, Handle: func(context.Context, []Entry) []Verdict {
			calls.add(fmt.Sprint(calls.size()))
			return []Verdict{{Reject, errors.New("unknown")}}
		}})
		require.Eventually(t, func() bool { return calls.size() > 2 }, patience, glance)
		require.EqualValues(t, 1, c.Cmd.XLen(ctx, stream).Val())
		require.NoError(t, c.Cmd.Del(ctx, stream+":rejected").Err())
		awaitEmpty(t, c, stream)
		require.NoError(t, stop())
		rejected := c.Cmd.XRange(ctx, stream+":rejected", "-", "+").Val()
		require.NotEmpty(t, rejected)
		values := rejected[len(rejected)-1].Values
		require.Equal(t, "unknown", values["reason"])
		require.Equal(t, id, values["entry"])
		require.NotEmpty(t, values["at"])
		require.Equal(t, "no.such", values["type"])
		require.Equal(t, strings.Repeat("x", maxStoredText)+"… (10 more bytes)", values["data"])
	})
}

func TestInFlightIsBounded(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publishLarge(t, c, stream, 0, 25)
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{MaxInFlight: 10})
		held := make([]delivered, 0, 10)
		for range 10 {
			held = append(held, receive(t, out))
		}
		require.EqualValues(t, 10, pending(t, c, stream))
		for i := range 15 {
			held[i%10].Ack()
			held[i%10] = receive(t, out) // there is space only because the other entry was acknowledged
			require.LessOrEqual(t, pending(t, c, stream), int64(10))
		}
		for _, d := range held {
			d.Ack()
		}
		awaitEmpty(t, c, stream)
	})
}

// TestHandlerOutlivesItsConsumer: handlers may finish after the consumer was stopped. Their
// contexts end after CloseTimeout.
func TestHandlerOutlivesItsConsumer(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publishLarge(t, c, stream, 0, 2)
		out, consumer, stop := subscribe(t, c, stream, ConsumerConfig{CloseTimeout: 200 * time.Millisecond})
		quick, stuck := receive(t, out), receive(t, out)
		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		require.NoError(t, quick.ctx.Err())
		quick.Ack()
		<-stuck.ctx.Done()
		require.ErrorContains(t, <-stopped, "handlers of 1 entries did not end in time")
		require.EqualValues(t, 1, pending(t, c, stream))
		require.EqualValues(t, 1, c.Cmd.XLen(context.Background(), stream).Val())
		require.NotNil(t, consumer)

		// Another consumer gets at once what the handler has left.
		out, _, _ = subscribe(t, c, stream, ConsumerConfig{Lease: patience})
		again := receive(t, out)
		require.Equal(t, stuck.ID, again.ID)
		again.Ack()
		awaitEmpty(t, c, stream)
	})
}

// TestStopHandsBack: while an entry waits for its next delivery, later entries are delivered. When
// a consumer stops, another consumer gets the entries that it delays at once.
func TestStopHandsBack(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		patient := ConsumerConfig{RetryAfter: time.Hour, Lease: time.Hour}
		out, _, stop := subscribe(t, c, stream, patient)
		publish(t, c, stream, 0, 1)
		nacked := receive(t, out)
		nacked.Nack()
		publish(t, c, stream, 1, 100)
		for range 99 {
			d := receive(t, out)
			require.NotEqual(t, nacked.ID, d.ID)
			d.Ack()
		}
		publish(t, c, stream, 100, 101)
		receive(t, out).Nack()
		require.Eventually(t, func() bool { return pending(t, c, stream) == 2 }, patience, glance)
		require.NoError(t, stop())
		require.EqualValues(t, 2, pending(t, c, stream))

		out, _, _ = subscribe(t, c, stream, patient)
		for _, want := range []string{"m0", "m100"} {
			d := receive(t, out)
			require.Equal(t, want, d.Get("id"))
			d.Ack()
		}
		awaitEmpty(t, c, stream)
	})
}

// TestEntryOfASlowHandlerIsNotClaimed: an entry stays with a slow handler, although other consumers
// claim the entries of dead consumers.
func TestEntryOfASlowHandlerIsNotClaimed(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		stream := unique("ingest")
		cfg := ConsumerConfig{Lease: 3 * time.Second}
		slow, other := connect(t, url), connect(t, url)
		renewals, claims := &calls{begin: []any{"evalsha"}, has: "slow"}, &calls{begin: []any{"xautoclaim"}}
		slow.Cmd.AddHook(renewals)
		other.Cmd.AddHook(claims)

		cfg.Name = "slow" // an argument of the renew script, but not of the script that deletes dead consumers: see calls.has
		out, _, _ := subscribe(t, slow, stream, cfg)
		publish(t, slow, stream, 0, 1)
		d := receive(t, out)
		before := renewals.n.Load()
		require.Eventually(t, func() bool { return renewals.n.Load() >= before+4 }, patience, glance) // the handler has run longer than Lease
		cfg.Name = "thief"
		thief, _, _ := subscribe(t, other, stream, cfg)
		require.Eventually(t, func() bool { return claims.n.Load() >= 1 }, patience, glance)
		select {
		case stolen := <-thief:
			require.FailNow(t, "taken over", stolen.ID)
		default:
		}
		d.Ack()
		awaitEmpty(t, slow, stream)
	})
}

// TestDeadConsumersEntriesAreTakenOver: the control of TestEntryOfASlowHandlerIsNotClaimed: if the
// process of a slow handler has lost its connection to Redis, another consumer claims its entries.
func TestDeadConsumersEntriesAreTakenOver(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		stream := unique("ingest")
		cfg := ConsumerConfig{Lease: 300 * time.Millisecond, CloseTimeout: time.Millisecond}
		dying, c := connect(t, url), connect(t, url)
		publish(t, c, stream, 0, 50)
		out, _, stop := subscribe(t, dying, stream, cfg)
		for range 50 {
			receive(t, out)
		}
		require.NoError(t, dying.Close())
		require.Error(t, stop())

		var got tally
		end := route(t, c, stream, cfg, func(id string) error {
			got.add(id)
			return nil
		})
		awaitEmpty(t, c, stream)
		end()
		require.Equal(t, 50, got.size())
	})
}

// TestLostBatchIsFound: when a reply of XREADGROUP is lost, the entries in it are pending, but no
// process has them. The consumer claims and delivers them.
func TestLostBatchIsFound(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		name := unique("ingest")
		me := ConsumerConfig{Name: "me", Lease: 300 * time.Millisecond}
		reader := NewReader(c, group, me.Name)
		require.NoError(t, reader.EnsureGroup(ctx, name))
		out, _, _ := subscribe(t, c, name, me)
		publish(t, c, name, 0, 1)
		known := receive(t, out)

		// The test imitates lost replies: it reads under the consumer's own name, until it has got
		// some of the entries before the consumer did.
		lost := 0
		for id := 1; lost < 5; id++ {
			publish(t, c, name, id, id+1)
			batches, err := reader.Read(ctx, []string{name}, 10, 0)
			require.NoError(t, err)
			for _, b := range batches {
				lost += len(b.Entries)
			}
			if batches == nil {
				receive(t, out).Ack()
			}
		}
		for range lost {
			receive(t, out).Ack()
		}
		known.Ack() // this entry was renewed all the time, and delivered only once
		awaitEmpty(t, c, name)
	})
}

// BenchmarkConsumer measures entries per second from a stream to a handler that acknowledges at
// once.
func BenchmarkConsumer(b *testing.B) {
	c := connect(b, redistest.Server(b).URL())
	const n = 50_000
	b.ReportAllocs()
	var total time.Duration
	for b.Loop() {
		b.StopTimer()
		stream := unique("ingest")
		for i := 0; i < n; i += 1000 {
			publish(b, c, stream, i, i+1000)
		}
		b.StartTimer()
		start := time.Now()
		_, stop := run(b, c, stream, ConsumerConfig{Handle: func(_ context.Context, batch []Entry) []Verdict {
			verdicts := make([]Verdict, len(batch))
			for i := range verdicts {
				verdicts[i].Action = Ack
			}
			return verdicts
		}})
		awaitEmpty(b, c, stream)
		total += time.Since(start)
		b.StopTimer()
		require.NoError(b, stop())
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)*n/total.Seconds(), "entries/s")
}

// failingReads is a go-redis hook that fails one XREADGROUP in each interval `every`, with the
// error of a broken connection and without sending it.
type failingReads struct {
	redistest.NoHook
	every time.Duration

	mu   sync.Mutex
	last time.Time
}

func (f *failingReads) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "xreadgroup" {
			f.mu.Lock()
			defer f.mu.Unlock()
			if time.Since(f.last) > f.every {
				f.last = time.Now()
				cmd.SetErr(io.ErrUnexpectedEOF)
				return io.ErrUnexpectedEOF
			}
		}
		return next(ctx, cmd)
	}
}

// TestErrorsNowAndThenDoNotStopClaims: a consumer whose reads fail now and then still claims the
// entries of a dead one.
func TestErrorsNowAndThenDoNotStopClaims(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	c, other := connect(t, s.URL()), connect(t, s.URL())
	stream := unique("ingest")
	dead := NewReader(other, group, "dead")
	require.NoError(t, dead.EnsureGroup(t.Context(), stream))
	publish(t, other, stream, 0, 1)
	batches, err := dead.Read(t.Context(), []string{stream}, 1, 0)
	require.NoError(t, err)
	require.Len(t, batches, 1)

	const lease = time.Second
	c.Block.AddHook(&failingReads{every: lease / 2})
	out, _, _ := subscribe(t, c, stream, ConsumerConfig{Lease: lease})
	d := receive(t, out)
	require.Equal(t, "m0", d.Get("id"))
	d.Ack()
	awaitEmpty(t, other, stream)
}

const (
	patience = 30 * time.Second // limit for events that must happen; a healthy run needs a fraction of it
	glance   = 10 * time.Millisecond
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func add(t testing.TB, c *redisx.Conn, stream string, fields ...string) string {
	t.Helper()
	id, err := c.Cmd.XAdd(context.Background(), &redis.XAddArgs{Stream: stream, Values: fields}).Result()
	require.NoError(t, err)
	return id
}

var names atomic.Int64

// unique returns a name that no other test uses.
func unique(what string) string { return fmt.Sprintf("%s-%d", what, names.Add(1)) }

// calls is a hook that counts the client's successful commands that begin with the arguments begin.
// If has is not nil, it counts only those that also have this argument.
type calls struct {
	redistest.NoHook
	begin []any
	has   any
	n     atomic.Int64
}

func (c *calls) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); err == nil && len(args) >= len(c.begin) && slices.Equal(args[:len(c.begin)], c.begin) &&
			(c.has == nil || slices.Contains(args, c.has)) {
			c.n.Add(1)
		}
		return err
	}
}
