package producer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const ingest = "bulk-action:ingest"

func ptr[T any](v T) *T { return &v }

func newProducer(t *testing.T, addr string, opts ...producer.Option) *producer.Producer {
	t.Helper()
	p, err := producer.New(t.Context(), "redis://"+addr, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// TestAProducerIsToldThatNobodyReads: a Producer warns, once a minute, while no process reads its
// stream: no consumer group has read it, or messages wait and the group takes none. It says nothing
// while one reads.
func TestAProducerIsToldThatNobodyReads(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	r := miniredis.RunT(t)
	c := redis.NewClient(&redis.Options{Addr: r.Addr()})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	now := time.Now()
	p := newProducer(t, r.Addr(), producer.WithPrefix("other:"))
	p.SetBacklogClock(func() time.Time { return now })
	warned := func(later time.Duration) bool {
		now = now.Add(later)
		log.Reset()
		_, err := p.Submit(t.Context(), client.Submission{Tenant: "acme", Type: "T"})
		require.NoError(t, err)
		return strings.Contains(log.String(), "no ingest process reads this stream") && strings.Contains(log.String(), "stream=other:ingest")
	}
	read := func() {
		args := redis.XReadGroupArgs{Group: "ingest", Consumer: "c", Streams: []string{"other:ingest", ">"}, Block: -1}
		got, err := c.XReadGroup(t.Context(), &args).Result()
		require.NoError(t, err)
		for _, m := range got[0].Messages {
			require.NoError(t, c.XAck(t.Context(), "other:ingest", "ingest", m.ID).Err())
			require.NoError(t, c.XDel(t.Context(), "other:ingest", m.ID).Err())
		}
	}
	require.True(t, warned(0), "no stream")
	require.False(t, warned(time.Second), "once a minute")
	require.True(t, warned(time.Minute), "no group")
	require.NoError(t, c.XGroupCreate(t.Context(), "other:ingest", "ingest", "0").Err())
	require.False(t, warned(2*time.Minute), "a reader has started")
	read()
	require.False(t, warned(2*time.Minute), "it reads")
	read()
	require.False(t, warned(2*time.Minute), "it has read all there was")
	require.True(t, warned(2*time.Minute), "and nothing since then")
	read()
	require.False(t, warned(2*time.Minute), "it reads again")
}

func streamEntries(t *testing.T, r *miniredis.Miniredis, stream string) []map[string]string {
	t.Helper()
	if !r.Exists(stream) {
		return nil
	}
	entries, err := r.Stream(stream)
	require.NoError(t, err)
	var all []map[string]string
	for _, e := range entries {
		fields := map[string]string{}
		for i := 0; i < len(e.Values); i += 2 {
			fields[e.Values[i]] = e.Values[i+1]
		}
		all = append(all, fields)
	}
	return all
}

func jobsOf(t *testing.T, entry map[string]string) []messages.Job {
	t.Helper()
	var body struct{ Jobs []messages.Job }
	require.NoError(t, json.Unmarshal([]byte(entry["data"]), &body))
	return body.Jobs
}

func TestProducerWritesFlatEntries(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr())
	ctx := t.Context()

	id, err := p.Submit(ctx, client.Submission{ID: "g", Tenant: "acme", Type: "SEND_EMAIL", Seal: true, Jobs: []client.NewJob{{Payload: map[string]string{"to": "a@example.com"}}}})
	require.NoError(t, err)
	require.Equal(t, "g", id)
	n, err := p.AppendJobs(ctx, "g", []client.NewJob{{Payload: 1}, {Payload: "<2>", Type: "NOOP"}})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.NoError(t, p.Seal(ctx, "g", nil))
	require.NoError(t, p.Seal(ctx, "g", ptr(int64(3))))
	require.NoError(t, p.Cancel(ctx, "g"))
	n, err = p.AppendJobs(ctx, "g", nil)
	require.NoError(t, err)
	require.Zero(t, n)

	var got []string
	ids := map[string]bool{}
	for _, e := range streamEntries(t, r, ingest) {
		require.Len(t, e, 3, "fields type, data and id; no traceparent without a trace")
		got = append(got, e["type"]+" "+e["data"])
		ids[e["id"]] = true
	}
	require.Equal(t, []string{
		`group.submit {"id":"g","tenant":"acme","type":"SEND_EMAIL","seal":true,"jobs":[{"payload":{"to":"a@example.com"}}]}`,
		`jobs.append {"group":"g","jobs":[{"payload":1},{"payload":"<2>","type":"NOOP"}]}`,
		`group.seal {"group":"g"}`,
		`group.seal {"group":"g","total":3}`,
		`group.cancel {"group":"g"}`,
	}, got)
	require.Len(t, ids, 5, "each message must have its own id")
}

func TestProducerMakesUpAGroupID(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr(), producer.WithPrefix("other:"))
	id, err := p.Submit(t.Context(), client.Submission{Type: "NOOP"})
	require.NoError(t, err)
	require.NotEmpty(t, id)
	entries := streamEntries(t, r, "other:ingest")
	require.Len(t, entries, 1)
	require.JSONEq(t, fmt.Sprintf(`{"id": %q, "type": "NOOP"}`, id), entries[0]["data"])
}

func TestProducerOfAFurtherStream(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr(), producer.WithPrefix("other:"), producer.WithStream("acme"))
	_, err := p.Submit(t.Context(), client.Submission{ID: "g", Type: "NOOP"})
	require.NoError(t, err)
	require.Len(t, streamEntries(t, r, "other:ingest:acme"), 1)
	require.False(t, r.Exists("other:ingest"))
}

func TestProducerSplitsLargeGroups(t *testing.T) {
	small := make([]client.NewJob, 2*producer.MaxMessageJobs+1)
	for i := range small {
		small[i].Payload = i
	}
	large := make([]client.NewJob, 5)
	for i := range large {
		large[i].Payload = fmt.Sprint(i, strings.Repeat("x", 200<<10))
	}
	for _, c := range []struct {
		name    string
		jobs    []client.NewJob
		batches []int
	}{
		{"by number", small, []int{producer.MaxMessageJobs, producer.MaxMessageJobs, 1}},
		{"by size", large, []int{2, 2, 1}},
		{"not", small[:producer.MaxMessageJobs], []int{producer.MaxMessageJobs}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := miniredis.RunT(t)
			p := newProducer(t, r.Addr())
			g := client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Seal: true, Jobs: c.jobs}
			_, err := p.Submit(t.Context(), g)
			require.NoError(t, err)
			n, err := p.AppendJobs(t.Context(), "h", c.jobs)
			require.NoError(t, err)
			require.Equal(t, len(c.jobs), n)

			entries := streamEntries(t, r, ingest)
			require.Len(t, entries, 2*len(c.batches))
			for half := range 2 {
				var payloads []json.RawMessage
				for i, size := range c.batches {
					e := entries[half*len(c.batches)+i]
					require.LessOrEqual(t, len(e["data"]), producer.MaxMessageBytes)
					jobs := jobsOf(t, e)
					require.Len(t, jobs, size)
					for _, j := range jobs {
						payloads = append(payloads, j.Payload)
					}
				}
				for i, job := range c.jobs {
					want, _ := json.Marshal(job.Payload)
					require.Equal(t, string(want), string(payloads[i]), "no job is lost, and all are in order")
				}
			}
			var first messages.SubmitGroup
			require.NoError(t, json.Unmarshal([]byte(entries[0]["data"]), &first))
			if len(c.batches) == 1 {
				require.True(t, first.Seal)
				require.Nil(t, first.Total)
				return
			}
			require.False(t, first.Seal, "a group in several messages is not sealed by its first one")
			require.EqualValues(t, len(c.jobs), *first.Total)
			require.Equal(t, messages.TypeJobsAppend, entries[1]["type"])
		})
	}
}

func TestProducerRepeatsUnderTheSameMessageIDs(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr())
	jobs := make([]client.NewJob, producer.MaxMessageJobs+1)
	ids := func(do func()) (all []string) {
		before := len(streamEntries(t, r, ingest))
		do()
		for _, e := range streamEntries(t, r, ingest)[before:] {
			all = append(all, e["id"])
		}
		return all
	}
	submit := func(priority string) func() {
		return func() {
			_, err := p.Submit(t.Context(), client.Submission{ID: "g", Type: "NOOP", Priority: priority, Seal: true, Jobs: jobs})
			require.NoError(t, err)
		}
	}
	app := func(jobs []client.NewJob, opts ...producer.AppendOption) func() {
		return func() {
			_, err := p.AppendJobs(t.Context(), "g", jobs, opts...)
			require.NoError(t, err)
		}
	}
	first := ids(submit("low"))
	require.Len(t, first, 2)
	require.Equal(t, first, ids(submit("low")), "the same group is published under the same message ids")
	require.NotEqual(t, first[0], ids(submit("high"))[0], "other content gets another message id")

	require.NotEqual(t, ids(app(jobs)), ids(app(jobs)), "without a dedup key each call has message ids of its own")
	keyed := ids(app(jobs, producer.WithDedupKey("k")))
	require.Equal(t, keyed, ids(app(jobs, producer.WithDedupKey("k"))))
	require.NotEqual(t, keyed, ids(app(jobs, producer.WithDedupKey("l"))))
	require.NotEqual(t, keyed[0], keyed[1])
}

func TestProducerRefusesWhatTheServerWould(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr())
	secret := strings.Repeat("secret", 50_000)
	for name, g := range map[string]client.Submission{
		`id: must match`:                       {ID: "a/b", Type: "NOOP"},
		`type: required`:                       {},
		`tenant: must match`:                   {Type: "NOOP", Tenant: "a{b}"},
		`priority: must be`:                    {Type: "NOOP", Priority: "urgent"},
		`jobs[1].type: must match`:             {Type: "NOOP", Jobs: []client.NewJob{{}, {Type: "a b"}}},
		`after the first 500 jobs: `:           {Type: "NOOP", Jobs: append(make([]client.NewJob, producer.MaxMessageJobs), client.NewJob{Type: "a b"})},
		`jobs[0].payload`:                      {Type: "NOOP", Jobs: []client.NewJob{{Payload: secret}}},
		`encode job 0: json: unsupported type`: {Type: "NOOP", Jobs: []client.NewJob{{Payload: func() {}}}},
		`total is 3, but it is sealed with 1`:  {Type: "NOOP", Jobs: []client.NewJob{{}}, Total: ptr(int64(3)), Seal: true},
	} {
		_, err := p.Submit(t.Context(), g)
		require.ErrorContains(t, err, name)
		require.NotContains(t, err.Error(), "secret")
	}
	_, err := p.AppendJobs(t.Context(), "", []client.NewJob{{}})
	require.ErrorContains(t, err, `group: required`)
	_, err = p.AppendJobs(t.Context(), `"}`, []client.NewJob{{}})
	require.ErrorContains(t, err, `group: must match`)
	require.Error(t, p.Seal(t.Context(), "a b", nil))
	require.Error(t, p.Cancel(t.Context(), "a b"))
	require.Empty(t, streamEntries(t, r, ingest))

	_, err = p.Submit(t.Context(), client.Submission{Type: "NOOP", Aggregate: []client.Aggregate{{As: "x", Op: "of_your_own", Field: "data"}}})
	require.NoError(t, err, "a reducer that only the server knows is accepted")
}

// TestBytesOfJSONAreRefused: bytes that are JSON would become text in base64, which no processor
// expects. The error says what to do.
func TestBytesOfJSONAreRefused(t *testing.T) {
	type own []byte
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr())
	api := client.NewAPI("http://127.0.0.1:1") // never called
	text := []byte(`{"to": "a@example.com"}`)
	for _, payload := range []any{text, &text, own("[1]"), []byte(" 1\n")} {
		jobs := []client.NewJob{{Payload: 1}, {Payload: payload}}
		_, submitted := p.Submit(t.Context(), client.Submission{ID: "g", Type: "T", Jobs: jobs})
		_, appended := p.AppendJobs(t.Context(), "g", jobs)
		_, byAPI := api.Submit(t.Context(), client.Submission{ID: "g", Type: "T", Jobs: jobs})
		_, appendedByAPI := api.Append(t.Context(), "g", slices.Values(jobs))
		for _, err := range []error{submitted, appended, byAPI, appendedByAPI} {
			require.ErrorContains(t, err, fmt.Sprintf("encode job 1: payload: a %T of JSON would be sent as text in base64: make it a json.RawMessage", payload))
		}
	}
	require.Empty(t, streamEntries(t, r, ingest))
	raw := json.RawMessage(text)
	var none *[]byte
	n, err := p.AppendJobs(t.Context(), "g", []client.NewJob{{Payload: raw}, {Payload: &raw}, {Payload: string(text)}, {Payload: []byte{0xff}}, {Payload: none}, {}})
	require.NoError(t, err)
	require.Equal(t, 6, n)
	require.JSONEq(t, string(text), string(jobsOf(t, streamEntries(t, r, ingest)[0])[1].Payload))
}

func TestProducerLimitsTheBacklog(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr(), producer.WithMaxBacklog(3))
	now := time.Now()
	p.SetBacklogClock(func() time.Time { return now })
	ctx := t.Context()
	one := []client.NewJob{{Payload: 1}}

	_, err := p.AppendJobs(ctx, "g", one)
	require.NoError(t, err)
	_, err = p.AppendJobs(ctx, "g", one)
	require.NoError(t, err)

	n, err := p.AppendJobs(ctx, "g", make([]client.NewJob, producer.MaxMessageJobs+1))
	require.Zero(t, n)
	require.ErrorIs(t, err, producer.ErrBacklogFull)
	var full *producer.BacklogError
	require.ErrorAs(t, err, &full)
	require.Equal(t, producer.BacklogError{Length: 2, Max: 3, Wait: time.Second}, *full)
	require.EqualError(t, err, "publish jobs.append of group g: ingest backlog full: 2 messages, at most 3: try again in 1s")
	require.Len(t, streamEntries(t, r, ingest), 2, "jobs that need two messages are published completely or not at all")

	require.NoError(t, p.Cancel(ctx, "g"), "there is space for one more message")
	require.ErrorIs(t, p.Cancel(ctx, "g"), producer.ErrBacklogFull, "messages published since the last read of the length count")

	r.Del(ingest)
	require.ErrorIs(t, p.Cancel(ctx, "g"), producer.ErrBacklogFull, "the length is not read again so soon")
	now = now.Add(time.Second)
	_, err = p.AppendJobs(ctx, "g", make([]client.NewJob, 10*producer.MaxMessageJobs))
	require.NoError(t, err, "more messages than the limit are accepted into an empty stream")
}

// TestProducerSpreadsWaitsOfRefusedMessages: when 2 messages a second leave the stream, refused
// messages get times for their next attempts half a second apart, but not before a second is over.
func TestProducerSpreadsWaitsOfRefusedMessages(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr(), producer.WithMaxBacklog(8))
	now := time.Now()
	p.SetBacklogClock(func() time.Time { return now })
	for range 8 {
		require.NoError(t, p.Cancel(t.Context(), "g"))
	}
	entries, err := r.Stream(ingest)
	require.NoError(t, err)
	r.Del(ingest)
	for _, e := range entries[4:] {
		_, err := r.XAdd(ingest, e.ID, e.Values)
		require.NoError(t, err)
	}
	now = now.Add(time.Second) // four messages left in a second; averaged with 0 before, that is 2 per second
	for range 4 {
		require.NoError(t, p.Cancel(t.Context(), "g"))
	}
	for _, want := range []time.Duration{time.Second, time.Second, 1500 * time.Millisecond, 2 * time.Second} {
		var full *producer.BacklogError
		require.ErrorAs(t, p.Cancel(t.Context(), "g"), &full)
		require.Equal(t, want, full.Wait)
	}
}

func TestProducerTraces(t *testing.T) {
	r := miniredis.RunT(t)
	spans := tracetest.NewSpanRecorder()
	p := newProducer(t, r.Addr(), producer.WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))))
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	_, err := p.Submit(trace.ContextWithSpanContext(t.Context(), parent), client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: make([]client.NewJob, 2)})
	require.NoError(t, err)

	ended := spans.Ended()
	require.Len(t, ended, 1)
	s := ended[0]
	require.Equal(t, "send ingest", s.Name())
	require.Equal(t, trace.SpanKindProducer, s.SpanKind())
	require.Equal(t, parent.TraceID(), s.SpanContext().TraceID())
	attrs := map[string]string{}
	for _, kv := range s.Attributes() {
		attrs[string(kv.Key)] = kv.Value.String()
	}
	entry := streamEntries(t, r, ingest)[0]
	require.Equal(t, map[string]string{
		"messaging.system": "redis", "messaging.destination.name": ingest, "messaging.operation.name": "send",
		"messaging.operation.type": "send", "messaging.message.id": entry["id"], "messaging.batch.message_count": "2",
		"bulkaction.group": "g", "bulkaction.tenant": "acme",
	}, attrs)
	require.Equal(t, fmt.Sprintf("00-%s-%s-01", s.SpanContext().TraceID(), s.SpanContext().SpanID()), entry["traceparent"])
}

func TestProducerWithoutTracerPassesOnTheParent(t *testing.T) {
	r := miniredis.RunT(t)
	p := newProducer(t, r.Addr())
	parent := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	require.NoError(t, p.Cancel(trace.ContextWithSpanContext(t.Context(), parent), "g"))
	require.Equal(t, "00-01000000000000000000000000000000-0200000000000000-01", streamEntries(t, r, ingest)[0]["traceparent"])
}

func TestNewErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	p := newProducer(t, "user:hunter2@"+l.Addr().String())
	err = p.Cancel(t.Context(), "g")
	require.ErrorContains(t, err, "publish group.cancel of group g: read length of ingest stream: ")
	require.NotContains(t, err.Error(), "hunter2")

	_, err = producer.New(t.Context(), "http://user:hunter2@x")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")

	_, err = producer.New(t.Context(), "redis://127.0.0.1", producer.WithPrefix("{x}"))
	require.ErrorContains(t, err, "brace")

	for _, stream := range []string{"rejected", "a:b", "{0}", strings.Repeat("a", 65)} {
		_, err = producer.New(t.Context(), "redis://127.0.0.1", producer.WithStream(stream))
		require.ErrorContains(t, err, fmt.Sprintf("stream %q: must match", stream))
	}
}

// lossyProxy starts a TCP proxy to the Redis at target and returns its own address. It drops the
// replies to XADD, together with their connections, as long as lose is above 0, and counts lose
// down.
func lossyProxy(t *testing.T, target string, lose *atomic.Int32) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = in.Close() }()
				out, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer func() { _ = out.Close() }()
				var adding atomic.Bool
				go func() {
					buf := make([]byte, 64<<10)
					for {
						n, err := in.Read(buf)
						if strings.Contains(strings.ToLower(string(buf[:n])), "xadd") {
							adding.Store(true)
						}
						if _, werr := out.Write(buf[:n]); err != nil || werr != nil {
							_ = out.Close()
							return
						}
					}
				}()
				buf := make([]byte, 64<<10)
				for {
					n, err := out.Read(buf)
					if err != nil || (adding.Swap(false) && lose.Add(-1) >= 0) {
						return
					}
					if _, err := in.Write(buf[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func TestProducerRepeatsUnderOneIDWhenAReplyIsLost(t *testing.T) {
	r := miniredis.RunT(t)
	var lose atomic.Int32
	p := newProducer(t, lossyProxy(t, r.Addr(), &lose))
	lose.Store(2)
	n, err := p.AppendJobs(t.Context(), "g", []client.NewJob{{Payload: 1}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	entries := streamEntries(t, r, ingest)
	require.Len(t, entries, 3, "two attempts whose reply was lost, and one that was answered")
	for _, e := range entries {
		require.Equal(t, entries[0], e)
	}

	lose.Store(100)
	n, err = p.AppendJobs(t.Context(), "g", []client.NewJob{{Payload: 2}})
	require.Zero(t, n)
	require.ErrorContains(t, err, "publish jobs.append of group g: ")
	require.True(t, errors.Is(err, io.EOF), "%v", err)
	require.Len(t, streamEntries(t, r, ingest), 3+4, "four attempts, and no more")
}

func TestProducerDoesNotRetryAnAnswer(t *testing.T) {
	r := miniredis.RunT(t)
	require.NoError(t, r.Set("wrong:ingest", "a string"))
	p := newProducer(t, r.Addr(), producer.WithPrefix("wrong:"))
	err := p.Cancel(t.Context(), "g")
	require.ErrorContains(t, err, "read length of ingest stream: WRONGTYPE")

	p = newProducer(t, r.Addr())
	require.NoError(t, p.Cancel(t.Context(), "g"))
	r.SetError("OOM command not allowed when used memory > 'maxmemory'.")
	err = p.Cancel(t.Context(), "g") // the length is not read again so soon
	require.ErrorIs(t, err, producer.ErrBacklogFull)
	require.ErrorContains(t, err, "OOM")
	var answer redis.Error
	require.ErrorAs(t, err, &answer)

	r.SetError("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.Cancel(ctx, "g"), context.Canceled)
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
