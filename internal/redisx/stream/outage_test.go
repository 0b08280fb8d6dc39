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

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
