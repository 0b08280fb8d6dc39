package cli

import (
	"encoding/json"
	"fmt"
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
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/tamper"
)

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
	require.NoError(t, c.Set(t.Context(), space.PartitionCount(), 2, 0).Err())
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
	tamper.SetEntered(t, c, p, "g", api.StatusRunning, time.UnixMilli(9e12))

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
		{Law: "lifecycle", Partition: p.Index(), Group: "g", Detail: report.Violations[0].Detail + "; the right times are not known; this does no harm"},
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

	tamper.SetEntered(t, c, p, "g", api.StatusRunning, time.Time{})
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
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.err, "found violations: 3")
	require.NotContains(t, got.out, "-1", "a guard is in no partition")
	for _, want := range []string{
		"guard pool/smtp: member a could be lent", "guard pool/smtp: member b counts 2 probes", "guard pool/smtp: call x waits",
	} {
		require.Contains(t, got.out, want)
	}
	got = console{}.exec(ctx, "audit", "--repair", "--json")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, got.err, "repaired: guard-state: guard pool/smtp: member a could be lent")
	require.Contains(t, got.err, "repaired: guard-held: ")
	require.Contains(t, got.err, "repaired: guard-queue: ")
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
	got := receipts(`{"group":"g","accepted":2}`, strings.Repeat(" ", 1<<17))
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, "--receipts: line 2: it is longer than 65536 bytes")
	for _, bad := range []string{"nonsense", `{"group":"g"}`, `{"accepted":1}`, `{"group":"g","accepted":-1}`} {
		got := receipts(`{"group":"g","accepted":2}`, bad)
		require.Equal(t, exitUsage, got.code)
		require.Contains(t, got.err, `--receipts: line 2: {"group": "…", "accepted": n} is expected`)
	}

	require.NoError(t, c.Set(t.Context(), space.OfGroup("half").Owner("half"), "acme", 0).Err())
	got = receipts(`{"group":"g","accepted":5}`, `{"group":"gone","accepted":7}`, `{"group":"half","accepted":4}`)
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
