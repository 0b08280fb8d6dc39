package stream

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// reads has the methods Read and ReadSmall: tests run with each of them and expect the same result.
var reads = map[string]func(*Reader, context.Context, []string, int, time.Duration) ([]Batch, error){
	"any": (*Reader).Read, "small": (*Reader).ReadSmall,
}

func TestReader(t *testing.T) {
	for name, read := range reads {
		t.Run(name, func(t *testing.T) { testReader(t, read) })
	}
}

func testReader(t *testing.T, read func(*Reader, context.Context, []string, int, time.Duration) ([]Batch, error)) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		first, second := "{0}:a", "{0}:b"
		both := []string{first, second}

		batches, err := read(r, ctx, both, 10, 0) // creates both groups
		require.NoError(t, err)
		require.Nil(t, batches)
		batches, err = read(r, ctx, both, 10, time.Microsecond) // must not become BLOCK 0, which waits forever
		require.NoError(t, err)
		require.Nil(t, batches)

		// Fields keep their order, names may be repeated, and values may be any bytes.
		fields := []string{"z", "1", "a", "\x00\xff\r\n$5", "z", "2", "", ""}
		id := add(t, c, first, fields...)
		other := add(t, c, second, "k", "v")
		batches, err = read(r, ctx, both, 10, redisx.MaxBlock)
		require.NoError(t, err)
		require.Equal(t, []Batch{
			{Stream: first, Entries: []Entry{{ID: id, Fields: fields}}},
			{Stream: second, Entries: []Entry{{ID: other, Fields: []string{"k", "v"}}}},
		}, batches)
		entry := batches[0].Entries[0]
		require.Equal(t, "1", entry.Get("z"))
		require.Equal(t, "\x00\xff\r\n$5", entry.Get("a"))
		require.Empty(t, entry.Get("v"))

		for i := range 5 {
			add(t, c, first, "n", fmt.Sprint(i))
		}
		batches, err = read(r, ctx, both, 3, 0)
		require.NoError(t, err)
		require.Len(t, batches, 1)
		require.Len(t, batches[0].Entries, 3)
	})
}

func TestReaderRecreatesGroups(t *testing.T) {
	for name, read := range reads {
		t.Run(name, func(t *testing.T) { testRecreates(t, read) })
	}
}

func testRecreates(t *testing.T, read func(*Reader, context.Context, []string, int, time.Duration) ([]Batch, error)) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		require.NoError(t, r.EnsureGroup(ctx, "s"))
		require.NoError(t, r.EnsureGroup(ctx, "s"))

		require.NoError(t, c.Cmd.FlushAll(ctx).Err())
		id := add(t, c, "s", "k", "v") // before any read has seen that the group is gone
		batches, err := read(r, ctx, []string{"s"}, 10, 0)
		require.NoError(t, err)
		require.Equal(t, []Batch{{Stream: "s", Entries: []Entry{{ID: id, Fields: []string{"k", "v"}}}}}, batches)

		require.NoError(t, c.Cmd.Set(ctx, "string", "x", 0).Err())
		_, err = read(r, ctx, []string{"string"}, 10, 0)
		require.ErrorContains(t, err, "WRONGTYPE")
		require.ErrorContains(t, r.EnsureGroup(ctx, "string"), "WRONGTYPE")
	})
}

// TestVanishedStreamIsNoGroup: if a stream is deleted during a blocking read, Redis answers with
// another error code than NOGROUP, for which IsNoGroup is true, too.
func TestVanishedStreamIsNoGroup(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	replies := make(chan error, 1)
	go func() {
		_, err := r.read(ctx, []string{"s"}, 1, redisx.MaxBlock, r.decoded)
		replies <- err
	}()
	require.Eventually(t, func() bool { return strings.Contains(c.Cmd.Info(ctx, "clients").Val(), "blocked_clients:1") }, patience, time.Millisecond)
	require.NoError(t, c.Cmd.FlushAll(ctx).Err())
	require.True(t, call.IsNoGroup(<-replies))
}

// TestReaderOfACluster: one read serves several streams with the same hash tag, on whichever
// cluster node they are.
func TestReaderOfACluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	url, nodes := redistest.Cluster(t, 3)
	for i, url := range []string{url, nodes[2].URL() + "?cluster=true"} {
		c := connect(t, url)
		for _, tag := range []string{"{0}:", "{1}:", "{5}:"} {
			r := NewReader(c, fmt.Sprint("group-", i), "me")
			_, err := r.Read(ctx, []string{tag + "a", tag + "b"}, 1, redisx.MaxBlock/100)
			require.NoError(t, err)
			add(t, c, tag+"a", "k", "v")
			add(t, c, tag+"b", "k", "v")
			batches, err := r.Read(ctx, []string{tag + "a", tag + "b"}, 1, redisx.MaxBlock)
			require.NoError(t, err)
			require.Len(t, batches, 2)
		}
	}
}

func TestBlockedReadOutlastsCommandTimeout(t *testing.T) {
	t.Parallel()
	const timeout = redisx.MaxBlock * 9 / 10 // almost as long, so that a busy machine does not end the read
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: redistest.Server(t).URL(), CommandTimeout: timeout})
	require.NoError(t, err)
	defer c.Close()
	batches, err := NewReader(c, "g", "c").Read(context.Background(), []string{"empty"}, 1, 5*redisx.MaxBlock)
	require.NoError(t, err, "one read blocks for redisx.MaxBlock at most, so that its own timeout does not end it")
	require.Empty(t, batches)
}

func TestReaderClaims(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		dead, heir := NewReader(c, "g", "dead"), NewReader(c, "g", "heir")
		for range 3 {
			add(t, c, "s", "k", "v")
		}
		batches, err := dead.Read(ctx, []string{"s"}, 10, 0)
		if batches == nil { // the first read has created the group
			batches, err = dead.Read(ctx, []string{"s"}, 10, 0)
		}
		require.NoError(t, err)
		require.Len(t, batches[0].Entries, 3)

		got, next, deleted, err := heir.Claim(ctx, "s", time.Hour, "0-0", 10)
		require.NoError(t, err)
		require.Empty(t, got)
		require.Equal(t, "0-0", next)
		require.Zero(t, deleted)

		got, next, _, err = heir.Claim(ctx, "s", 0, "0-0", 2)
		require.NoError(t, err)
		require.Equal(t, batches[0].Entries[:2], got)
		require.NotEqual(t, "0-0", next)
		got, next, _, err = heir.Claim(ctx, "s", 0, next, 2)
		require.NoError(t, err)
		require.Equal(t, batches[0].Entries[2:], got)
		require.Equal(t, "0-0", next)
	})
}

// TestReaderClaimCountsDeleted: when a consumer claims, Redis reports once which pending entries
// were deleted from the stream (miniredis does not report them). Each of them is an incident: its
// job may be lost.
func TestReaderClaimCountsDeleted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	id := add(t, c, "s", "k", "v")
	_, err := r.Read(ctx, []string{"s"}, 1, 0)
	require.NoError(t, err)
	require.NoError(t, c.Cmd.XDel(ctx, "s", id).Err())
	got, _, deleted, err := r.Claim(ctx, "s", 0, "0-0", 10)
	require.NoError(t, err)
	require.Empty(t, got)
	require.Equal(t, 1, deleted)
	require.Zero(t, c.Cmd.XPending(ctx, "s", "g").Val().Count)
}

func TestDecodeRefusesMalformedReplies(t *testing.T) {
	for _, reply := range []any{
		nil, "x", int64(1), []any{"x"}, []any{[]any{"s"}}, []any{[]any{int64(1), []any{}}}, []any{[]any{"s", "x"}},
		[]any{[]any{"s", []any{[]any{"1-0"}}}}, []any{[]any{"s", []any{[]any{"1-0", "x"}}}},
		[]any{[]any{"s", []any{[]any{"1-0", []any{int64(1)}}}}}, []any{[]any{"s", []any{[]any{int64(1), []any{}}}}},
	} {
		_, err := decodeBatches(reply)
		require.ErrorIs(t, err, errMalformed, "%v", reply)
	}
	entries, err := decodeEntries([]any{nil, []any{"1-0", []any{"odd"}}})
	require.NoError(t, err)
	require.Equal(t, []Entry{{ID: "1-0", Fields: []string{"odd"}}}, entries)
	require.Empty(t, entries[0].Get("odd"))
}

func TestDecodeRawRefusesMalformedReplies(t *testing.T) {
	const whole = "*1\r\n*2\r\n$1\r\ns\r\n*2\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nk\r\n$0\r\n\r\n*2\r\n$3\r\n2-0\r\n*1\r\n$3\r\nodd\r\n"
	batches, err := decodeRaw([]byte(whole))
	require.NoError(t, err)
	require.Equal(t, []Batch{{Stream: "s", Entries: []Entry{{ID: "1-0", Fields: []string{"k", ""}}, {ID: "2-0", Fields: []string{"odd"}}}}}, batches)
	for n := range len(whole) {
		_, err := decodeRaw([]byte(whole[:n]))
		require.ErrorIs(t, err, errMalformed, "%q", whole[:n])
	}
	for _, reply := range []string{
		whole + "x", ":1\r\n", "+OK\r\n", "*1\r\n$1\r\ns\r\n", "*1\r\n*1\r\n$1\r\ns\r\n", "*1\r\n*2\r\n:1\r\n*0\r\n", "*1\r\n*2\r\n$1\r\ns\r\n*9999999999\r\n",
		"*1\r\n*2\r\n$1\r\ns\r\n*99999999999999999999\r\n", "*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*-1\r\n", "*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*-1\r\n",
	} {
		_, err := decodeRaw([]byte(reply))
		require.ErrorIs(t, err, errMalformed, "%q", reply)
	}
	_, err = decodeRaw([]byte("*-1\r\n"))
	require.ErrorIs(t, err, redis.Nil)
}

// BenchmarkDecode reads 200 entries of 350 bytes from Redis and decodes them: as Read does (ours),
// as ReadSmall does (small), and by go-redis (typed).
func BenchmarkDecode(b *testing.B) {
	ctx := context.Background()
	c := connect(b, redistest.Server(b).URL())
	for range 200 {
		add(b, c, "s", "job", string(make([]byte, 350)))
	}
	b.Run("ours", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			reply, err := do(ctx, c.Cmd, 4, []any{"xread", "count", 200, "streams", "s", "0"})
			require.NoError(b, err)
			batches, err := decodeBatches(reply)
			require.NoError(b, err)
			require.Len(b, batches[0].Entries, 200)
		}
	})
	b.Run("small", func(b *testing.B) {
		b.ReportAllocs()
		r := NewReader(c, "g", "me")
		for b.Loop() {
			batches, err := r.raw(ctx, c.Cmd, 4, []any{"xread", "count", 200, "streams", "s", "0"})
			require.NoError(b, err)
			require.Len(b, batches[0].Entries, 200)
		}
	})
	b.Run("typed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			streams, err := c.Cmd.XRead(ctx, &redis.XReadArgs{Streams: []string{"s", "0"}, Count: 200, Block: -1}).Result()
			require.NoError(b, err)
			require.Len(b, streams[0].Messages, 200)
		}
	})
}

// FuzzDecodeBatches: a reply of any shape is either refused with an error or decoded into one batch
// for each of its elements.
func FuzzDecodeBatches(f *testing.F) {
	f.Add([]byte("[[s[[1-1[ab]][2-0[]]]]]"))
	f.Add([]byte("[[s[[1-1n]n]]]"))
	f.Add([]byte("[[s]]"))
	f.Add([]byte("n"))
	f.Fuzz(func(t *testing.T, shape []byte) {
		reply, _ := build(shape, 0)
		batches, err := decodeBatches(reply)
		if err != nil {
			require.Nil(t, batches)
			return
		}
		require.Len(t, batches, len(reply.([]any)))
		for _, b := range batches {
			for _, e := range b.Entries {
				e.Get("a")
			}
		}
	})
}

// build returns a reply from its text form: [ and ] enclose an array, n is nil, 1 is a number, and
// any other character is a string of this character.
func build(shape []byte, depth int) (any, []byte) {
	if len(shape) == 0 || depth > 8 {
		return nil, nil
	}
	head, rest := shape[0], shape[1:]
	switch head {
	case '[':
		list := []any{}
		for len(rest) > 0 && rest[0] != ']' {
			var v any
			v, rest = build(rest, depth+1)
			list = append(list, v)
		}
		if len(rest) > 0 {
			rest = rest[1:]
		}
		return list, rest
	case 'n', ']':
		return nil, rest
	case '1':
		return int64(1), rest
	}
	return string(head), rest
}

func TestInFlightRoom(t *testing.T) {
	t.Parallel()
	over, end := context.WithCancel(context.Background())
	end()
	const size = 8 << 10
	f := newInFlight(100, 16*size) // handlers may have a quarter: two entries, each of which counts size + workCost
	room := func() int { return f.awaitRoom(over, size) }
	add := func(id string) []Entry {
		return f.begin([]Entry{{ID: id, Fields: []string{"data", strings.Repeat("x", size)}}})
	}
	require.Equal(t, 2, room())
	first, second := add("1"), add("2")
	require.Zero(t, room())
	f.remove([]string{"1"})
	require.Equal(t, 1, room())

	// Entries that wait to be delivered again count only towards maxBytes, not towards the part for
	// handlers.
	f.pause(first) // changes nothing, because first was removed
	f.pause(second)
	f.pause(second)
	require.Equal(t, 2, room())
	for i := 3; room() > 0; i++ {
		f.pause(add(fmt.Sprint(i)))
	}
	ids, working := f.held()
	require.Len(t, ids, 16)
	require.Zero(t, working)
	require.Equal(t, second, f.resume(second))
	_, working = f.held()
	require.Equal(t, 1, working)
	f.remove(ids)
	require.Equal(t, 2, room())

	// One entry fits, however large it is.
	require.Equal(t, 1, f.awaitRoom(over, 100*size))
}

func TestInFlightBoundsBytes(t *testing.T) {
	f := newInFlight(100, 1000)
	big := []Entry{{ID: "1-0", Fields: []string{"data", string(make([]byte, 2000))}}}
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.Equal(t, big, f.begin(big))
	require.Empty(t, f.begin(big))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.Zero(t, f.awaitRoom(ended, 2000))
	go f.remove([]string{"1-0", "unknown"})
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.Zero(t, f.bytes)
}

// TestBytesInWorkAreBounded: of entries of 8 KiB, handlers have two at a time if MaxBytes is 128
// KiB. Those that wait to be delivered again do not block the entries behind them.
func TestBytesInWorkAreBounded(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publishData(t, c, stream, 0, 14, strings.Repeat("x", 8<<10))
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{MaxBytes: 128 << 10, RetryAfter: patience})
		for i := range 7 {
			held := receive(t, out)
			last := receive(t, out)
			require.EqualValues(t, 2*i+2, pending(t, c, stream))
			held.Nack()
			last.Nack()
		}
	})
}

// TestInFlightForgetsLost: an entry that waits to be delivered again is dropped if another consumer
// has claimed it meanwhile.
func TestInFlightForgetsLost(t *testing.T) {
	t.Parallel()
	f := newInFlight(100, 1<<20)
	var entries []Entry
	var ids []string
	for i := range 4 {
		ids = append(ids, fmt.Sprintf("%d-0", i+1))
		entries = append(entries, Entry{ID: ids[i]})
	}
	require.Len(t, f.begin(entries), 4)
	f.pause(entries)
	lost := ids[:3]
	require.Equal(t, 3, f.setLost(lost))
	require.Zero(t, f.setLost(lost))
	require.Empty(t, f.begin(entries[1:2]), "taken back")
	require.Equal(t, []Entry{entries[1], entries[3]}, f.resume(entries))
	held, working := f.held()
	require.ElementsMatch(t, []string{ids[1], ids[3]}, held)
	require.Equal(t, 2, working)
}

func TestID(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "7", "x", "1-x", "-1-0", "1--1", "1-+1", "99999999999999999999-0"} {
		_, err := ParseID(text)
		require.ErrorContains(t, err, `"`+text+`" is not the id`)
	}
	id := func(text string) ID {
		id, err := ParseID(text)
		require.NoError(t, err)
		require.Equal(t, text, id.String())
		return id
	}
	for _, c := range [][2]string{{"0-0", "0-1"}, {"5-9", "10-1"}, {"10-2", "10-10"}, {"7-1", "18446744073709551615-0"}} {
		require.True(t, id(c[1]).After(id(c[0])), c)
		require.False(t, id(c[0]).After(id(c[1])), c)
		require.False(t, id(c[1]).After(id(c[1])), c)
	}
}
