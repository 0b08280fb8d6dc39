package integration

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// requireNoDenial requires that Redis has not refused any command for a lack of rights.
func (s *system) requireNoDenial() {
	s.t.Helper()
	conn := connect(s.t, s.env["BULKACTION_REDIS_URL"])
	require.NoError(s.t, conn.Shards(s.ctx(), func(_ context.Context, shard redis.UniversalClient) error {
		proctest.RequireNoDenial(s.t, shard)
		return nil
	}))
}

// TestDenialsAreFound: a command that a Redis user has no right to run is refused with NOPERM, and
// is in ACL LOG, where requireNoDenial would find it.
func TestDenialsAreFound(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, proctest.Users(t))
	conn := connect(t, proctest.AsUser("producer", server.URL()))
	require.ErrorContains(t, conn.Cmd.Del(t.Context(), "bulk-action:ingest").Err(), "NOPERM")
	denied, err := server.Client().Do(t.Context(), "acl", "log").Slice()
	require.NoError(t, err)
	require.Len(t, denied, 1)
}

// TestRolesRefuseToStartWithoutARight: each of the seven roles, whose Redis user lacks the right to
// one command here, ends with an error that names the command and `bulkaction acl`. Afterwards a
// group of 200 jobs has its expected outcome in the running system.
func TestRolesRefuseToStartWithoutARight(t *testing.T) {
	t.Parallel()
	s := start(t)
	keys := tokenKeys(t)
	for role, command := range map[string]string{
		"ingest": "xadd", "fetcher": "hset", "dispatcher": "zrem", "worker": "xack", "aggregator": "xdel", "watcher": "srem",
		"broker": "zadd",
	} {
		url := proctest.AddUser(t, s.redis.URL(), role, s.space.Prefix(), func(u *acl.User) {
			require.Contains(t, u.Commands, command, role)
			u.Commands = slices.DeleteFunc(u.Commands, func(c string) bool { return c == command })
		})
		p := proctest.Start(t, "bulkaction", map[string]string{
			"BULKACTION_REDIS_URL": url, "BULKACTION_WORKER_TYPES": "NOOP", "BULKACTION_BROKER_TOKEN_KEYS_FILE": keys,
		}, role)
		require.NotZero(t, p.Wait(patience), role)
		require.Contains(t, p.Log(), "may not run "+command, role)
		require.Contains(t, p.Log(), "bulkaction acl --role "+role)
	}
	id := s.submit(newLoad("acme", 200).group)
	newLoad("acme", 200).check(t, s.wait(id))
}

// TestEventReader: a program that logs in to Redis as the user event-reader subscribes to the
// stream of events, and gets an event of a group that is submitted afterwards.
func TestEventReader(t *testing.T) {
	t.Parallel()
	s := start(t)
	reader, err := stream.NewSubscriber(t.Context(), proctest.AsUser("event-reader", s.redis.URL()), stream.Config{})
	require.NoError(t, err)
	messages, err := reader.Subscribe(s.ctx(), reader.Events())
	require.NoError(t, err)
	id := s.submit(newLoad("acme", 100).group)
	s.wait(id)
	select {
	case m := <-messages:
		e, err := stream.Event(m)
		require.NoError(t, err)
		require.Equal(t, id, e.Group.ID)
		m.Ack()
	case <-time.After(patience):
		require.Fail(t, "no event")
	}
	require.NoError(t, reader.Close())
}

// TestProducerOfOneTenant: a producer whose Redis user may only write to the ingest stream of its
// tenant submits a group there. A group that it submits there for another tenant is rejected.
func TestProducerOfOneTenant(t *testing.T) {
	t.Parallel()
	s := start(t, env("PARTITIONS", "4"), env("INGEST_STREAMS", "acme=bulk-action:ingest:shop"))
	url := proctest.AddUser(t, s.redis.URL(), "producer", s.space.Prefix(), func(u *acl.User) {
		var err error
		*u, err = acl.ProducerOf("shop", s.space.Prefix())
		require.NoError(t, err)
	})
	p, err := producer.New(t.Context(), url, producer.WithStream("shop"))
	require.NoError(t, err)
	defer p.Close()
	l := newLoad("", 700)
	id, err := p.Submit(t.Context(), l.group)
	require.NoError(t, err)
	g := s.wait(id)
	l.check(t, g)
	require.Equal(t, "acme", g.Tenant)

	stolen, err := p.Submit(t.Context(), client.Submission{ID: "stolen", Tenant: "globex", Type: "NOOP", Seal: true, Jobs: jobs(1, `{}`)})
	require.NoError(t, err)
	s.follow(s.space.Rejected(), "rejected message", func(m redis.XMessage) bool {
		require.Equal(t, "stream bulk-action:ingest:shop: tenant is not yours", m.Values["reason"])
		return true
	})
	_, err = s.api.Group(t.Context(), stolen)
	require.ErrorIs(t, err, client.ErrNotFound)
}

// TestWaitingRoomWithUsers: two visitors go through the waiting room, one after the other because
// the event has one slot, while each role has its own Redis user.
func TestWaitingRoomWithUsers(t *testing.T) {
	t.Parallel()
	keys := tokenKeys(t)
	addr := childproc.FreeAddr()
	s := start(t, apart, env("BROKER_TOKEN_KEYS_FILE", keys), env("BROKER_ADDR", addr), env("BROKER_PUBLIC_URL", "http://"+addr))
	s.launch("broker", nil).WaitReady()

	status, body := s.call(http.MethodPut, s.url(0)+"/v1/events/sale", `{"capacity":1}`)
	require.Less(t, status, 300, "%s", body)
	visitors := []*visitor{newVisitor(t, addr), newVisitor(t, addr)} // the event has one slot
	for i, v := range visitors {
		s.await(fmt.Sprint("token of visitor ", i), func() bool { return v.token() != "" })
		require.Empty(t, visitors[1-i].token(), "both have a token")
		status, body := s.call(http.MethodPost, s.url(0)+"/v1/entry-tokens/complete", `{"token":"`+v.has+`"}`)
		require.Equal(t, http.StatusOK, status, "%s", body)
		v.has = ""
	}
}

func tokenKeys(t testing.TB) (path string) {
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	path = filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(path, text))
	return path
}

// visitor is a visitor of the waiting room who polls.
type visitor struct {
	testing.TB
	http.Client
	url string
	has string // the token
}

func newVisitor(t testing.TB, addr string) *visitor {
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	return &visitor{TB: t, Client: http.Client{Jar: jar}, url: "http://" + addr + "/events/sale/ticket"}
}

// token enters the event, which keeps a place that the visitor has, and asks once for the entry
// token. It returns the visitor's token; "": none yet.
func (v *visitor) token() string {
	v.Helper()
	for _, path := range []string{"", "/token"} {
		answer, err := v.Post(v.url+path, "", nil)
		require.NoError(v, err)
		var found api.EntryToken
		_ = json.NewDecoder(answer.Body).Decode(&found) // while there is no token, the answer is another document
		require.NoError(v, answer.Body.Close())
		require.Less(v, answer.StatusCode, 500)
		v.has = cmp.Or(found.Token, v.has)
	}
	return v.has
}
