package cli

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestAudit(t *testing.T) {
	_, url := redistest.Mini(t)
	t.Setenv("BULKACTION_REDIS_URL", url)
	t.Setenv("BULKACTION_KEY_PREFIX", "x:")
	got := console{}.exec(t.Context(), "audit")
	require.Equal(t, run{exitError, "", "bulkaction: no role has used this Redis under the prefix x: yet: there is nothing to work on\n" +
		"Give the Redis of the roles and their prefix with --redis-url and --key-prefix.\n"}, got)

	opts, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := redis.NewClient(opts)
	defer c.Close()
	space, err := keyspace.New("x:", 2)
	require.NoError(t, err)
	inUse(t, c, space)
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

	console{}.exec(t.Context(), "audit", "--key-prefix", "y:").ends(t, exitError, "under the prefix y: yet")
	require.NoError(t, c.Set(t.Context(), space.PartitionCount(), "many", 0).Err())
	console{}.exec(t.Context(), "audit").ends(t, exitError, `read number of partitions: "many" is not a number`)
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

// inUse makes Redis that of an installation with this key space.
func inUse(t *testing.T, c *redis.Client, space keyspace.Space) {
	require.NoError(t, c.Set(t.Context(), space.PartitionCount(), space.Partitions(), 0).Err())
	require.NoError(t, c.HSet(t.Context(), space.Layouts(), ledger.Layout.Name, ledger.Layout.Newest).Err())
}

// newAuditedGroup stores the group g of the tenant acme, with three jobs, and sets the environment
// so that `bulkaction audit` uses its Redis. It returns a client of this Redis, and the key space.
func newAuditedGroup(t *testing.T) (*redis.Client, keyspace.Space) {
	_, url := redistest.Mini(t)
	const prefix = "x:"
	t.Setenv("BULKACTION_REDIS_URL", url)
	t.Setenv("BULKACTION_KEY_PREFIX", prefix)
	opts, err := redis.ParseURL(url)
	require.NoError(t, err)
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	space, err := keyspace.New(prefix, 2)
	require.NoError(t, err)
	inUse(t, c, space)
	p := space.OfTenant("acme")
	require.NoError(t, c.Set(t.Context(), space.OfGroup("g").Owner("g"), "acme", 0).Err())
	_, err = ledger.Create(t.Context(), c, p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "normal"}})
	require.NoError(t, err)
	_, err = ledger.Append(t.Context(), c, p, ledger.AppendArgs{Group: "g", Limit: 10, Mode: ledger.AppendSeal, Jobs: make([]ledger.NewJob, 3)})
	require.NoError(t, err)
	return c, space
}

func TestAuditRepair(t *testing.T) {
	c, space := newAuditedGroup(t)
	p := space.OfTenant("acme")
	require.NoError(t, c.LPop(t.Context(), p.Queue("g", "T")).Err())
	require.NoError(t, c.Set(t.Context(), space.OfGroup("gone").Owner("gone"), "acme", 0).Err())
	stagetest.SetEntered(t, c, p, "g", api.StatusRunning, time.UnixMilli(9e12))

	type answer struct {
		audit.Report
		Repairs []repair.Result `json:"repairs"`
	}
	got := console{}.exec(t.Context(), "audit", "--repair", "--json")
	require.Equal(t, exitError, got.code, "violations that a repair cannot remove remain")
	var report answer
	require.NoError(t, json.Unmarshal([]byte(got.out), &report))
	require.Len(t, report.Violations, 1)
	require.Equal(t, audit.LawLifecycle, report.Violations[0].Law)
	zero := int64(0)
	require.Equal(t, []repair.Result{
		{Law: "location", Partition: p.Index(), Group: "g", Ordinal: &zero, Done: true, Detail: "it was waiting at attempt 0 and at no location: it has failed, with code LOST"},
		{Law: "lifecycle", Partition: p.Index(), Group: "g", Detail: report.Violations[0].Detail + "; the right times are not known, and nothing depends on them: it stays until the group is deleted"},
		{Law: "registry", Partition: space.OfGroup("gone").Index(), Group: "gone", Done: true,
			Detail: "its owner key says tenant acme, but there is no such group; now the key is gone"},
	}, report.Repairs)
	require.Contains(t, got.err, "repaired: partition")
	require.Contains(t, got.err, "not repaired: partition")
	require.NotContains(t, got.err, "; repaired", "a line contains the repair once")
	require.Zero(t, c.Exists(t.Context(), space.OfGroup("gone").Owner("gone")).Val())
	repaired, err := ledger.ReadGroups(t.Context(), c, p, []string{"g"})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"LOST": 1}, repaired[0].FailuresByCode)

	stagetest.SetEntered(t, c, p, "g", api.StatusRunning, time.Time{})
	require.Equal(t, run{exitOK, `{"ok":true,"groups":1,"jobs":3,"violations":[],"repairs":[]}` + "\n", ""}, console{}.exec(t.Context(), "audit", "--repair", "--json"))
	require.Equal(t, run{exitOK, "ok: 1 groups, 3 jobs\n", ""}, console{}.exec(t.Context(), "audit"))
}

// TestAuditRepairsGuards breaks each law of guards once.
func TestAuditRepairsGuards(t *testing.T) {
	c, space := newAuditedGroup(t)
	ctx := t.Context()
	guards := guard.New(c, guard.Prefix(space.Prefix()))
	_, err := guards.Pool(ctx, "smtp", guard.Spec{Members: []guard.Member{{ID: "a"}, {ID: "b"}}})
	require.NoError(t, err)
	base := keyspace.GuardBase(space.Prefix(), "pool", "smtp")
	require.Equal(t, run{exitOK, "ok: 1 groups, 3 jobs\n", ""}, console{}.exec(ctx, "audit"))

	require.NoError(t, c.ZRem(ctx, base+"free", "a").Err())
	require.NoError(t, c.HSet(ctx, base+"m:b", "h", 0, "p", 2).Err())
	require.NoError(t, c.HSet(ctx, base+"waiters", "x", "client|1").Err())
	got := console{}.exec(ctx, "audit")
	got.ends(t, exitError, "found violations: 3")
	require.NotContains(t, got.out, "-1", "a guard is in no partition")
	for _, want := range []string{
		"guard pool/smtp: member a could be lent", "guard pool/smtp: member b counts 2 probes", "guard pool/smtp: call x waits",
	} {
		require.Contains(t, got.out, want)
	}
	console{}.exec(ctx, "audit", "--repair", "--json").ends(t, exitOK, "repaired: guard-state: guard pool/smtp: member a could be lent", "repaired: guard-held: ", "repaired: guard-queue: ")
	require.Equal(t, run{exitOK, `{"ok":true,"groups":1,"jobs":3,"violations":[],"repairs":[]}` + "\n", ""}, console{}.exec(ctx, "audit", "--repair", "--json"))
}

func TestAuditReceipts(t *testing.T) {
	c, space := newAuditedGroup(t)
	file := filepath.Join(t.TempDir(), "receipts")
	receipts := func(lines ...string) run {
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
		return console{}.exec(t.Context(), "audit", "--receipts", file, "--json")
	}
	const fine = `{"ok":true,"groups":1,"jobs":3,"violations":[],"receipts":%d}` + "\n"
	require.Equal(t, run{exitOK, fmt.Sprintf(fine, 1), ""}, receipts(`{"group":"g","accepted":2}`, "", `{"group":"g","accepted":3}`))
	require.Equal(t, run{exitOK, fmt.Sprintf(fine, 0), ""}, receipts(), "an empty file of receipts is reported as 0 receipts")
	require.Equal(t, run{exitOK, "ok: 1 groups, 3 jobs, 0 receipts\n", ""}, console{}.exec(t.Context(), "audit", "--receipts", file))
	receipts(`{"group":"g","accepted":2}`, strings.Repeat(" ", 1<<17)).ends(t, exitUsage, "--receipts: line 2: it is longer than 65536 bytes")
	for _, bad := range []string{"nonsense", `{"group":"g"}`, `{"accepted":1}`, `{"group":"g","accepted":-1}`} {
		got := receipts(`{"group":"g","accepted":2}`, bad)
		got.ends(t, exitUsage, `--receipts: line 2: {"group": "…", "accepted": n} is expected`)
	}

	require.NoError(t, c.Set(t.Context(), space.OfGroup("half").Owner("half"), "acme", 0).Err())
	got := receipts(`{"group":"g","accepted":5}`, `{"group":"gone","accepted":7}`, `{"group":"half","accepted":4}`)
	require.Equal(t, exitError, got.code)
	var report audit.Report
	require.NoError(t, json.Unmarshal([]byte(got.out), &report))
	var told []string
	for _, v := range report.Violations {
		told = append(told, v.Law+" "+v.Group+": "+v.Detail)
	}
	require.ElementsMatch(t, []string{
		"receipt g: 2 jobs are missing: it holds 3 of the 5 that its producer was told",
		"receipt gone: 7 jobs are missing: there is no such group",
		"receipt half: 4 jobs are missing: it holds 0 of the 4 that its producer was told",
		"registry half: its owner key says tenant acme, but there is no such group",
	}, told)
}

// TestAuditCountsAll: of many violations of the same kind, the audit prints 100 and a last line
// that says how many more there are. It counts all of them.
func TestAuditCountsAll(t *testing.T) {
	c, space := newAuditedGroup(t)
	p := space.OfTenant("acme")
	_, err := ledger.Create(t.Context(), c, p, ledger.CreateArgs{Group: "many", Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "normal"}})
	require.NoError(t, err)
	require.NoError(t, c.Set(t.Context(), space.OfGroup("many").Owner("many"), "acme", 0).Err())
	_, err = ledger.Append(t.Context(), c, p, ledger.AppendArgs{Group: "many", Limit: 1000, Jobs: make([]ledger.NewJob, 150)})
	require.NoError(t, err)
	require.NoError(t, c.Del(t.Context(), p.Queue("many", "T")).Err())
	got := console{}.exec(t.Context(), "audit")
	require.Equal(t, exitError, got.code)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 1+100+1)
	require.Contains(t, lines[101], "and 50 more like these")
	require.Contains(t, got.err, "found violations: 150\n")
}

// TestHTTPS: with --ca-file, --cert-file and --key-file, or BULKACTION_CA_FILE, a command calls an
// API that speaks https. It explains each of eleven mistakes.
func TestHTTPS(t *testing.T) {
	ca, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	server, own, wrong := ca.Issue(), ca.Issue(), ca.Issue(redistest.ForName("bulk.example"))
	serve := func(pair redistest.Pair, auth tls.ClientAuthType) string {
		loaded, err := tls.LoadX509KeyPair(pair.CertFile, pair.KeyFile)
		require.NoError(t, err)
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"tenants":[]}`))
		}))
		s.TLS = &tls.Config{Certificates: []tls.Certificate{loaded}, ClientAuth: auth, ClientCAs: ca.Pool()}
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	open, closed, misnamed := serve(server, tls.NoClientCert), serve(server, tls.RequireAndVerifyClientCert), serve(wrong, tls.NoClientCert)
	plain := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(plain.Close)
	tenants := func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"tenant", "ls"}, args...)...)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"authority":           {[]string{"--api", open, "--ca-file", ca.CAFile}, exitOK, ""},
		"certificate":         {[]string{"--api", closed, "--ca-file", ca.CAFile, "--cert-file", own.CertFile, "--key-file", own.KeyFile}, exitOK, ""},
		"unknown authority":   {[]string{"--api", open, "--ca-file", other.CAFile}, exitError, "Give the authority that signed the API's certificate with --ca-file or BULKACTION_CA_FILE."},
		"no authority":        {[]string{"--api", open}, exitError, "Give the authority that signed the API's certificate with --ca-file"},
		"wrong name":          {[]string{"--api", misnamed, "--ca-file", ca.CAFile}, exitError, "Give --api a name that the API's certificate has."},
		"no certificate":      {[]string{"--api", closed, "--ca-file", ca.CAFile}, exitError, "The API demands a certificate that it trusts: give it with --cert-file and --key-file."},
		"https to http":       {[]string{"--api", "https://" + plain.Listener.Addr().String(), "--ca-file", ca.CAFile}, exitError, "The API does not speak TLS: give --api with http://."},
		"http to https":       {[]string{"--api", "http" + open[len("https"):]}, exitError, "The API speaks TLS: give --api with https://."},
		"flags without https": {[]string{"--api", plain.URL, "--ca-file", ca.CAFile}, exitUsage, "need an --api that begins with https://"},
		"no key":              {[]string{"--api", open, "--cert-file", own.CertFile}, exitUsage, "give --cert-file and --key-file together"},
		"absent file":         {[]string{"--api", open, "--ca-file", "nosuch.pem"}, exitUsage, "--ca-file: open nosuch.pem"},
		"empty file":          {[]string{"--api", open, "--ca-file", own.KeyFile}, exitUsage, "has no certificate in PEM"},
		"wrong key":           {[]string{"--api", open, "--cert-file", own.CertFile, "--key-file", server.KeyFile}, exitUsage, "--cert-file: "},
	} {
		got := tenants(c.args...)
		require.Equal(t, c.code, got.code, "%s: %s", name, got.err)
		require.Contains(t, got.err, c.says, name)
	}
	t.Setenv("BULKACTION_CA_FILE", ca.CAFile)
	require.Equal(t, exitOK, tenants("--api", open).code)
}

// TestAuditOverTLS: audit, as a command that goes to Redis, uses the environment variables of the
// roles for TLS and for the password.
func TestAuditOverTLS(t *testing.T) {
	ca := redistest.NewAuthority(t)
	own := ca.Issue()
	s := redistest.Server(t, redistest.TLS(ca), redistest.Args("--requirepass", "sesame"))
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("sesame\n"), 0o600))
	url := "rediss://" + s.TLSAddr()
	t.Setenv("BULKACTION_REDIS_URL", "redis://127.0.0.1:1")
	t.Setenv("BULKACTION_REDIS_PASSWORD_FILE", password)
	console{}.exec(t.Context(), "audit", "--redis-url", url).ends(t, exitError, "set REDIS_TLS_CA_FILE")
	t.Setenv("BULKACTION_REDIS_TLS_CA_FILE", ca.CAFile)
	t.Setenv("BULKACTION_REDIS_TLS_CERT_FILE", own.CertFile)
	console{}.exec(t.Context(), "audit", "--redis-url", url).ends(t, exitUsage, "BULKACTION_REDIS_TLS_CERT_FILE: must be set together with TLS_KEY_FILE")
	t.Setenv("BULKACTION_REDIS_TLS_KEY_FILE", own.KeyFile)
	console{}.exec(t.Context(), "audit", "--redis-url", url).ends(t, exitError, "no role has used this Redis")
}
