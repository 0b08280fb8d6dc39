package broker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/broker"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/room/roomadmin"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// patience is the longest time that a test waits for something that must happen; a healthy run
// needs a fraction of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	read := "github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream.(*Subscriber).read"
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial), goleak.IgnoreAnyFunction(read))
}

// world is a prefix of keys in a test's Redis, with events, on which a test starts brokers.
type world struct {
	*testing.T
	*waitingroom.Rooms
	conn  *redisx.Conn
	space keyspace.Space
	p     keyspace.Partition
	keys  *entrytoken.Keys

	brokerURL string // of Redis, with the user of role broker
}

const event = "sale"

func newWorld(t *testing.T, url, prefix string) *world {
	t.Helper()
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	w := &world{T: t}
	w.brokerURL = proctest.AddUser(t, url, "broker", prefix, nil)
	w.conn = w.connect(url)
	if w.keys, err = entrytoken.Read(path, telemetry.Nop().Log); err != nil {
		t.Fatal(err)
	}
	if w.space, err = keyspace.New(prefix, 1); err != nil {
		t.Fatal(err)
	}
	w.p = w.space.Partition(0)
	w.Rooms = waitingroom.New(w.conn, w.space, nil)
	return w
}

func (w *world) connect(url string) *redisx.Conn {
	w.Helper()
	conn, err := redisx.Connect(context.Background(), redisx.Config{
		URL: url, PoolMaxIdle: 10, PoolMaxActive: 50, CommandTimeout: time.Second, BlockingReads: 8,
	})
	require.NoError(w, err)
	w.Cleanup(func() { require.NoError(w, conn.Close()) })
	return conn
}

// shared makes the test parallel, and returns a new world in the Redis that all tests share.
func shared(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	url, prefix := redistest.Shared(t)
	return newWorld(t, url, prefix)
}

// declare creates or replaces the event "sale" with a capacity, in mode open, with the standard
// settings as change alters them.
func (w *world) declare(capacity int64, change ...func(*waitingroom.Settings)) {
	w.Helper()
	w.declareEvent(event, capacity, change...)
}

func (w *world) declareEvent(name string, capacity int64, change ...func(*waitingroom.Settings)) {
	w.Helper()
	s := roomadmin.Standard()
	s.Capacity, s.Mode = capacity, api.ModeOpen
	for _, f := range change {
		f(&s)
	}
	_, err := w.Declare(w.Context(), name, s, waitingroom.DeclareOptions{})
	require.NoError(w, err)
}

func (w *world) capacity(n int64) {
	w.Helper()
	_, err := w.Change(w.Context(), event, waitingroom.Changes{Capacity: &n})
	require.NoError(w, err)
}

func (w *world) snapshot() waitingroom.Snapshot {
	w.Helper()
	s, err := w.Snapshot(w.Context(), w.p, event)
	require.NoError(w, err)
	require.Len(w, s.Events, 1)
	return s.Events[0]
}

// await waits until a condition holds.
func (w *world) await(what string, holds func() bool) {
	w.Helper()
	require.Eventually(w, holds, patience, 5*time.Millisecond, what)
}

// instance is a running broker.
type instance struct {
	w    *world
	url  string
	stop func() // as SIGTERM does
	kill func() // its streams break off

	requests *atomic.Int64 // that have begun
}

var started sync.Map // to give each broker an id of its own

// start starts a broker with an HTTP server. The header X-User of a request names the visitor.
func (w *world) start(change ...func(*broker.Config)) *instance {
	w.Helper()
	return w.startWith(func(redis.UniversalClient) {}, change...)
}

// startWith starts a broker. Before that it calls prepare with the broker's Redis client, for
// example to add a hook.
func (w *world) startWith(prepare func(redis.UniversalClient), change ...func(*broker.Config)) *instance {
	w.Helper()
	cfg := broker.Config{
		PublicURL: "http://127.0.0.1", PromoteInterval: time.Second, PositionInterval: 100 * time.Millisecond,
		Drain: 200 * time.Millisecond, Defaults: roomadmin.Standard(),
	}
	for _, f := range change {
		f(&cfg)
	}
	n := 0
	for _, taken := started.LoadOrStore(n, true); taken; _, taken = started.LoadOrStore(n, true) {
		n++
	}
	conn := w.connect(w.brokerURL)
	prepare(conn.Cmd)
	p := stage.Process{ID: fmt.Sprintf("broker-%08x", n), Conn: conn, Space: w.space, Tel: telemetry.Nop()}
	b := broker.New(p, cfg, w.keys)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := b.Run(ctx); err != nil {
			w.Errorf("broker: %v", err)
		}
	}()
	visitors := roomapi.New(roomapi.Options{
		Room: b, PublicURL: cfg.PublicURL, CookieKeys: w.keys.CookieKeys, IdentityHeader: "X-User",
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, Heartbeat: time.Second,
		WriteTimeout: patience, MaxConnections: 1000, MaxConnectionsPerIP: 1000, EnterRatePerIP: 1000,
		Log: p.Tel.Log, Metrics: roomapi.Metrics{SlowReader: func(string) {}, Refused: b.Metrics().Refused},
	})
	requests := new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		visitors.ServeHTTP(rw, r)
	}))
	i := &instance{w: w, url: server.URL, requests: requests}
	i.stop = sync.OnceFunc(func() { cancel(); <-done; server.Close() })
	i.kill = sync.OnceFunc(func() { server.CloseClientConnections(); i.stop() })
	w.Cleanup(i.kill)
	return i
}

type frame struct {
	Event      string
	State      string   `json:"state"`
	Mode       string   `json:"mode"`
	Position   int64    `json:"position"`
	Total      int64    `json:"total"`
	Token      string   `json:"token"`
	ExpiresAt  string   `json:"expires_at"`
	Reason     string   `json:"reason"`
	ETASeconds *float64 `json:"eta_seconds"`
}

// client is an open stream of a user.
type client struct {
	w      *world
	user   string
	frames chan frame
	close  func()
}

// open opens a stream of a user in the event "sale". The test fails if the status is not 200.
func (i *instance) open(user string) *client { return i.openEvent(event, user) }

func (i *instance) openEvent(name, user string) *client {
	i.w.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, i.url+"/events/"+name+"/tickets/waiting", nil)
	require.NoError(i.w, err)
	req.Header.Set("X-User", user)
	resp, err := http.DefaultClient.Do(req) //nolint:bodyclose // the goroutine below closes it
	require.NoError(i.w, err)
	require.Equal(i.w, http.StatusOK, resp.StatusCode)
	c := &client{w: i.w, user: user, frames: make(chan frame, 1000)}
	ended := make(chan struct{})
	c.close = sync.OnceFunc(func() { cancel(); <-ended })
	i.w.Cleanup(c.close)
	go func() {
		defer close(ended)
		defer close(c.frames)
		defer resp.Body.Close()
		var f frame
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			line := lines.Text()
			if name, ok := strings.CutPrefix(line, "event: "); ok {
				f = frame{Event: name}
			}
			if data, ok := strings.CutPrefix(line, "data: "); ok && json.Unmarshal([]byte(data), &f) == nil {
				c.frames <- f
			}
		}
	}()
	return c
}

// next returns the next frame of the user's stream with this event name, and skips others. The test
// fails if the stream ends before, or if a position rises meanwhile.
func (c *client) next(name string) frame {
	c.w.Helper()
	last := int64(1 << 60)
	for {
		select {
		case f, ok := <-c.frames:
			require.True(c.w, ok, "the stream of %s has ended before a frame %s", c.user, name)
			if f.Event == "position" {
				require.LessOrEqual(c.w, f.Position, last, "position of %s", c.user)
				last = f.Position
			}
			if f.Event == name {
				return f
			}
			require.NotEqual(c.w, "ended", f.Event, "%s: %s instead of %s", c.user, f.Reason, name)
		case <-time.After(patience):
			require.Fail(c.w, "no frame", "%s waits for %s", c.user, name)
		}
	}
}

// at waits until a frame shows this position.
func (c *client) at(position int64) {
	c.w.Helper()
	for c.next("position").Position != position {
	}
}

// number returns the number and the state letter of a user; "" if the user has no record.
func (w *world) number(user string) (number, letter string) {
	w.Helper()
	record := w.conn.Cmd.HGet(w.Context(), w.p.RoomUsers(event), user).Val()
	parts := strings.Split(record, "|")
	if len(parts) < 2 {
		return "", ""
	}
	return parts[1], parts[0]
}
