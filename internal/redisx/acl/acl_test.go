package acl_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	_ "github.com/bulkaction/bulkaction/internal/access/apikey" // its script
	_ "github.com/bulkaction/bulkaction/internal/process/roles" // its scripts
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/acl"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

const (
	prefix   = "bulk-action:"
	password = "sesame"
)

func of(t testing.TB, name string) acl.User {
	t.Helper()
	u, err := acl.Of(name, prefix)
	require.NoError(t, err)
	return u
}

// world is a Redis, with an administrator.
type world struct {
	testing.TB
	server *redistest.Redis
	admin  *redis.Client
}

func newWorld(t testing.TB) world {
	server := redistest.Server(t)
	return world{t, server, server.Client()}
}

// set gives a user of Redis the rights of u.
func (w world) set(u acl.User) {
	w.Helper()
	args := []any{"acl", "setuser", u.Name, "reset"}
	for rule := range strings.FieldsSeq(u.Rules(acl.Hash(password))) {
		args = append(args, rule)
	}
	require.NoError(w, w.admin.Do(w.Context(), args...).Err())
}

func (w world) connect(user string) (*redisx.Conn, error) {
	return redisx.Connect(w.Context(), redisx.Config{URL: fmt.Sprintf("redis://%s:%s@%s", user, password, w.server.Addr())})
}

// check connects as u, and checks the rights of want.
func (w world) check(u acl.User, want acl.User) error {
	w.Helper()
	w.set(u)
	conn, err := w.connect(u.Name)
	if err != nil {
		return err
	}
	defer conn.Close()
	return acl.Check(w.Context(), conn, want)
}

// TestRightsSuffice: each Redis user that has exactly the printed rights passes the check, and so
// does a user that may do everything.
func TestRightsSuffice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range append(acl.Roles(), acl.All) {
		require.NoError(t, w.check(of(t, name), of(t, name)), name)
		conn, err := redisx.Connect(t.Context(), redisx.Config{URL: w.server.URL()})
		require.NoError(t, err)
		require.NoError(t, acl.Check(t.Context(), conn, of(t, name)), name)
		require.NoError(t, conn.Close())
	}
	require.Empty(t, w.admin.Do(t.Context(), "acl", "log").Val())
}

// TestMissingRights: a Redis user that lacks one right of its role is refused, and the error names
// this right.
func TestMissingRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range acl.Roles() {
		role := of(t, name)
		for _, command := range role.Commands {
			u := role
			u.Commands = slices.DeleteFunc(slices.Clone(u.Commands), func(c string) bool { return c == command })
			err := w.check(u, role)
			if command == "ping" { // go-redis can't even connect
				require.ErrorContains(t, err, "NOPERM", "%s without %s", name, command)
				continue
			}
			var missing *acl.Missing
			require.ErrorAs(t, err, &missing, "%s without %s", name, command)
			want := &acl.Missing{User: name, Commands: []string{command}}
			if command == "publish" && !slices.Contains(role.Commands, "subscribe") {
				want.Channels = role.Channels // no other command could tell which of the two is missing
			}
			require.Equal(t, want, missing)
			require.ErrorContains(t, err, command)
			require.ErrorContains(t, err, "bulkaction acl --role "+name)
		}
		for _, pattern := range role.Keys {
			u := role
			u.Keys = slices.DeleteFunc(slices.Clone(u.Keys), func(k string) bool { return k == pattern })
			err := w.check(u, role)
			var missing *acl.Missing
			require.ErrorAs(t, err, &missing, "%s without %s", name, pattern)
			require.Equal(t, &acl.Missing{User: name, Keys: []string{pattern}}, missing)
			u.ReadOnly = []string{pattern}
			require.ErrorAs(t, w.check(u, role), &missing, "%s may only read %s", name, pattern)
			require.Equal(t, []string{pattern}, missing.Keys)
		}
		for _, pattern := range role.Channels {
			u := role
			u.Channels = slices.DeleteFunc(slices.Clone(u.Channels), func(c string) bool { return c == pattern })
			var missing *acl.Missing
			require.ErrorAs(t, w.check(u, role), &missing, "%s without %s", name, pattern)
			require.Equal(t, []string{pattern}, missing.Channels)
		}
	}
}

// TestWithoutRightsInTheServer: the check accepts a server that can't report rights.
func TestWithoutRightsInTheServer(t *testing.T) {
	t.Parallel()
	_, url := redistest.Mini(t)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, acl.Check(t.Context(), conn, of(t, "worker")))
}

// TestCheckWithoutRedis: a Redis that is away is not a missing right.
func TestCheckWithoutRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: w.server.URL()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	w.server.Kill()
	err = acl.Check(t.Context(), conn, of(t, "worker"))
	var missing *acl.Missing
	require.Error(t, err)
	require.NotErrorAs(t, err, &missing)
}

// TestEachMasterIsAsked: each master of a Cluster has users of its own. Check finds a right that is
// missing on one of three masters.
func TestEachMasterIsAsked(t *testing.T) {
	t.Parallel()
	url, nodes := redistest.Cluster(t, 3)
	role := of(t, "worker")
	for i, node := range nodes {
		w := world{t, node, node.Client()}
		u := role
		if i == 2 {
			u.Commands = slices.DeleteFunc(slices.Clone(u.Commands), func(c string) bool { return c == "xack" })
		}
		w.set(u)
	}
	_, hosts, _ := strings.Cut(url, "://")
	with := "redis://worker:" + password + "@" + strings.ReplaceAll(hosts, ",", ",worker:"+password+"@")
	conn, err := redisx.Connect(context.WithoutCancel(t.Context()), redisx.Config{URL: with})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.EqualError(t, acl.Check(t.Context(), conn, role), (&acl.Missing{User: "worker", Commands: []string{"xack"}}).Error())
	world{t, nodes[2], nodes[2].Client()}.set(role)
	require.NoError(t, acl.Check(t.Context(), conn, role))
	for _, node := range nodes {
		require.Empty(t, node.Client().Do(t.Context(), "acl", "log").Val())
	}
}

// TestNobodyMay: no user may run the listed commands, such as FLUSHALL, or read keys with another
// prefix. Only the listed users may run commands on the keys of secrets and of some streams.
func TestNobodyMay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range acl.Names() {
		u := of(t, name)
		w.set(u)
		for _, command := range []string{
			"flushall", "flushdb", "config get save", "config set save x", "keys *", "script flush", "acl list", "acl setuser x",
			"debug object x", "monitor", "shutdown", "replicaof no one", "function list", "get other:key", "migrate h 1 k 0 1",
		} {
			answer := w.admin.Do(t.Context(), append([]any{"acl", "dryrun", name}, words(command)...)...)
			require.NotEqual(t, "OK", fmt.Sprint(answer.Val()), "%s: %s", name, command)
		}
	}
	for command, users := range map[string][]string{
		"hget bulk-action:auth:keys x":       {"ingest", "cli", "all"},
		"xadd bulk-action:activity * a b":    {"ingest", "watcher", "cli", "all"}, // the watcher notes the ends of operations
		"xadd bulk-action:events * a b":      {"watcher", "ingest", "all", "cli"}, // ingest deletes those of deleted groups
		"xadd bulk-action:ingest * a b":      {"ingest", "watcher", "producer", "all", "cli"},
		"xread streams bulk-action:events 0": {"event-reader", "all"},
	} {
		for _, name := range acl.Names() {
			answer := w.admin.Do(t.Context(), append([]any{"acl", "dryrun", name}, words(command)...)...)
			if fmt.Sprint(answer.Val()) == "OK" {
				require.Contains(t, users, name, command)
			} else if name == users[0] {
				require.Fail(t, "not allowed", "%s: %s: %v", name, command, answer.Val())
			}
		}
	}
}

func words(text string) []any {
	var all []any
	for word := range strings.FieldsSeq(text) {
		all = append(all, word)
	}
	return all
}
