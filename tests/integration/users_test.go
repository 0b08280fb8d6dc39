package integration

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/stream"
	_ "github.com/bulkaction/bulkaction/internal/auth/apikey" // its script
	"github.com/bulkaction/bulkaction/internal/childproc"
	"github.com/bulkaction/bulkaction/internal/entrytoken"
	"github.com/bulkaction/bulkaction/internal/redisproc"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const userPassword = "sesame"

// withUsers gives a server the users of an installation. Each process of the system connects as its
// own user; the tests themselves are the default user.
func withUsers(t testing.TB) redistest.Option {
	t.Helper()
	lines := []string{"user default on nopass ~* &* +@all"}
	for _, name := range acl.Names() {
		u, err := acl.Of(name, "bulk-action:")
		require.NoError(t, err)
		lines = append(lines, "user "+name+" "+u.Rules(acl.Hash(userPassword)))
	}
	file := filepath.Join(t.TempDir(), "users.acl")
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	return func(o *redisproc.Options) { o.Args = append(o.Args, "--aclfile", file) }
}

// as returns the URL of a Redis with a user.
func as(user, url string) string {
	return strings.Replace(url, "://", "://"+user+":"+userPassword+"@", 1)
}

// requireNoDenial requires that Redis has denied nothing to any user.
func (s *system) requireNoDenial() {
	s.t.Helper()
	conn := connect(s.t, s.env["BULKACTION_REDIS_URL"])
	require.NoError(s.t, conn.Shards(s.ctx(), func(ctx context.Context, shard redis.UniversalClient) error {
		denied, err := shard.Do(ctx, "acl", "log").Slice()
		require.Empty(s.t, denied, "ACL LOG")
		return err
	}))
}

// A denial would be found.
func TestDenialsAreFound(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, withUsers(t))
	conn := connect(t, as("producer", server.URL()))
	require.ErrorContains(t, conn.Cmd.Del(t.Context(), "bulk-action:ingest").Err(), "NOPERM")
	denied, err := server.Client().Do(t.Context(), "acl", "log").Slice()
	require.NoError(t, err)
	require.Len(t, denied, 1)
}

// A role whose user lacks a right does not start, and says what to do. Nothing is left half done.
func TestRolesRefuseToStartWithoutARight(t *testing.T) {
	t.Parallel()
	s := start(t)
	for role, command := range map[string]string{
		"ingest": "xadd", "fetcher": "hset", "dispatcher": "zrem", "worker": "xack", "aggregator": "xdel", "watcher": "srem",
	} {
		u, err := acl.Of(role, s.space.Prefix())
		require.NoError(t, err)
		require.Contains(t, u.Commands, command, role)
		u.Commands = slices.DeleteFunc(u.Commands, func(c string) bool { return c == command })
		args := []any{"acl", "setuser", "less-" + role}
		for rule := range strings.FieldsSeq(u.Rules(acl.Hash(userPassword))) {
			args = append(args, rule)
		}
		require.NoError(t, s.rdb.Do(s.ctx(), args...).Err())
		p := proctest.Start(t, role, map[string]string{
			"BULKACTION_REDIS_URL": as("less-"+role, s.redis.URL()), "BULKACTION_WORKER_TYPES": "NOOP",
		})
		require.NotZero(t, p.Wait(patience), role)
		require.Contains(t, p.Log(), "may not run "+command, role)
		require.Contains(t, p.Log(), "bulkaction acl --role "+role)
	}
	id := s.submit(newLoad("acme", 200).group)
	newLoad("acme", 200).check(t, s.wait(id))
}

// A program follows the events as a user who can only read them.
func TestEventReader(t *testing.T) {
	t.Parallel()
	s := start(t)
	reader, err := stream.NewSubscriber(t.Context(), as("event-reader", s.redis.URL()), stream.Config{})
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

// A visitor goes through the waiting room, with a user for each role.
func TestWaitingRoomWithUsers(t *testing.T) {
	t.Parallel()
	text, err := entrytoken.GenerateKeys(1)
	require.NoError(t, err)
	keys := filepath.Join(t.TempDir(), "keys.pem")
	require.NoError(t, entrytoken.WriteKeys(keys, text))
	addr := childproc.FreeAddr()
	s := start(t, env("BROKER_TOKEN_KEYS_FILE", keys), env("BROKER_ADDR", addr), env("BROKER_PUBLIC_URL", "http://"+addr))
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

// token enters, or keeps the visitor's place, and returns the entry token once there is one.
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
