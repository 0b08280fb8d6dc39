package cli

import (
	"encoding/json"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestAudit(t *testing.T) {
	_, url := redistest.Mini(t)
	t.Setenv("BULKACTION_REDIS_URL", url)
	t.Setenv("BULKACTION_KEY_PREFIX", "x:")
	got := console{}.exec(t.Context(), "audit")
	require.Equal(t, run{exitError, "", "bulkaction: no role has used this Redis under the prefix x: yet: there is nothing to audit\n" +
		"Give the Redis of the roles and their prefix with --redis-url and --key-prefix.\n"}, got)

	opts, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := redis.NewClient(opts)
	defer c.Close()
	space, err := keyspace.New("x:", 2)
	require.NoError(t, err)
	require.NoError(t, c.Set(t.Context(), space.PartitionCount(), 2, 0).Err())
	p := space.OfTenant("acme")
	require.NoError(t, c.Set(t.Context(), space.OfGroup("g").Owner("g"), "acme", 0).Err())
	_, err = ledger.Create(t.Context(), c, p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "normal"}})
	require.NoError(t, err)
	_, err = ledger.Append(t.Context(), c, p, ledger.AppendArgs{Group: "g", Limit: 10, Jobs: make([]ledger.NewJob, 3)})
	require.NoError(t, err)

	require.Equal(t, run{exitOK, "ok: 1 groups, 3 jobs\n", ""}, console{}.exec(t.Context(), "audit"))
	require.Equal(t, run{exitOK, `{"ok":true,"groups":1,"jobs":3,"violations":[]}` + "\n", ""}, console{}.exec(t.Context(), "audit", "--json"))

	require.NoError(t, c.LPop(t.Context(), p.Queue("g", "T")).Err())
	const broken = "bulkaction: the audit of 1 groups, 3 jobs found violations: 1\n"
	require.Equal(t, run{exitError, "LAW        PARTITION   GROUP   JOB   DETAIL\n" +
		"location   0           g       0     it is waiting at attempt 0, but not in the group's queues\n", broken}, console{}.exec(t.Context(), "audit"))
	got = console{}.exec(t.Context(), "audit", "--json")
	require.Equal(t, exitError, got.code)
	require.Equal(t, broken, got.err)
	var report audit.Report
	require.NoError(t, json.Unmarshal([]byte(got.out), &report))
	require.False(t, report.OK)
	require.Equal(t, audit.LawLocation, report.Violations[0].Law)

	// A violation in the waiting room names no user.
	require.NoError(t, c.ZAdd(t.Context(), space.OfEvent("sale").RoomWaiting("sale"), redis.Z{Score: 3, Member: "secret"}).Err())
	got = console{}.exec(t.Context(), "audit", "--json")
	require.Equal(t, exitError, got.code)
	require.NotContains(t, got.out, "secret")
	require.NoError(t, json.Unmarshal([]byte(got.out), &report))
	laws := map[string]string{}
	for _, v := range report.Violations {
		laws[v.Law] += v.Detail + "\n"
	}
	require.Contains(t, laws[waitingroom.LawState], "event sale: it has users, but no settings")
	require.Contains(t, laws[waitingroom.LawState], "event sale: the user with number 3 is in waiting and has no record")

	got = console{}.exec(t.Context(), "audit", "--key-prefix", "y:")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "under the prefix y: yet", "the flag goes before the environment")
	require.NoError(t, c.Set(t.Context(), space.PartitionCount(), "many", 0).Err())
	got = console{}.exec(t.Context(), "audit")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, `read number of partitions: "many" is not a number`)
}

func TestAuditRefusesWrongFlagsAndReportsMissingRedis(t *testing.T) {
	for _, args := range [][]string{{"--redis-url", "http://x"}, {"--key-prefix", "{0}"}, {"extra"}, {"--receipts", "no such file"}} {
		_, url := redistest.Mini(t)
		t.Setenv("BULKACTION_REDIS_URL", url)
		got := console{}.exec(t.Context(), append([]string{"audit"}, args...)...)
		require.Equal(t, exitUsage, got.code, got.err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	var logged strings.Builder
	slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
	got := console{}.exec(t.Context(), "audit", "--redis-url", "redis://:secret@"+l.Addr().String())
	require.Equal(t, exitError, got.code)
	require.Empty(t, got.out)
	require.Contains(t, got.err, "connection refused")
	require.Contains(t, got.err, "Give the address of Redis with --redis-url or BULKACTION_REDIS_URL.")
	require.NotContains(t, got.err, "secret")
	require.Empty(t, logged.String(), "no log line may appear: the error says it")
}
