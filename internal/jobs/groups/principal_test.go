package groups_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// as returns a context of a principal that has this role and tenant, and sees payloads.
func as(t testing.TB, role auth.Role, tenant string) context.Context {
	return auth.With(t.Context(), auth.Principal{KeyID: "key_test", Role: role, Tenant: tenant, Payloads: true})
}

func submission(id, tenant string) *messages.SubmitGroup {
	return &messages.SubmitGroup{ID: id, Tenant: tenant, Type: "T", Seal: true, Jobs: stagetest.Numbered(1)}
}

// TestCallsNeedAPrincipal: 14 calls about groups, tenants and their messages are refused if the
// context has no principal, or an empty one.
func TestCallsNeedAPrincipal(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	_, err := w.Store.Submit(stagetest.Trusted(t), submission("g", "acme"), now)
	require.NoError(t, err)
	for _, ctx := range []context.Context{t.Context(), auth.With(t.Context(), auth.Principal{})} {
		calls := map[string]func() error{
			"submit":        func() error { _, err := w.Store.Submit(ctx, submission("h", "acme"), now); return err },
			"append":        func() error { return w.Store.Append(ctx, "g", stagetest.Numbered(1), "r", now) },
			"group":         func() error { _, err := w.Store.Group(ctx, "g"); return err },
			"cancel":        func() error { _, err := w.Store.Cancel(ctx, "g"); return err },
			"groups":        func() error { _, err := w.Store.Groups(ctx, messages.ListQuery{Limit: 1, Tenant: "acme"}); return err },
			"results":       func() error { return w.Store.Results(ctx, "g", func([]byte) error { return nil }) },
			"tenant":        func() error { _, err := w.Store.Tenant(ctx, "acme"); return err },
			"preview":       func() error { _, err := w.Store.PreviewTenant(ctx, "acme", api.TenantPatch{}); return err },
			"set tenant":    func() error { _, err := w.Store.SetTenant(ctx, "acme", api.TenantSettings{}); return err },
			"pause tenant":  func() error { return w.Store.PauseTenant(ctx, "acme") },
			"resume tenant": func() error { return w.Store.ResumeTenant(ctx, "acme") },
			"tenants":       func() error { _, err := w.Store.Tenants(ctx, "", 1, false); return err },
			"dead letters":  func() error { _, err := w.Store.DeadLetters(ctx, messages.DeadLetterQuery{Limit: 1}); return err },
			"rejected":      func() error { _, err := w.Store.Rejected(ctx, "", 1, true); return err },
		}
		for name, call := range calls {
			require.Error(t, call(), name)
		}
	}
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts("g"))
}

// TestTenantComesFromTheKey: a group belongs to the tenant of the API key. If another tenant's
// group has the id, the call is refused, and the answer does not say whose group it is.
func TestTenantComesFromTheKey(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	acme := as(t, auth.Producer, "acme")
	a, err := w.Store.Submit(acme, submission("g", ""), now)
	require.NoError(t, err)
	require.Equal(t, "acme", a.Tenant)
	_, err = w.Store.Submit(acme, submission("g", "acme"), now)
	require.NoError(t, err, "a repetition that names the tenant has the same content")
	_, err = w.Store.Submit(acme, submission("h", "globex"), now)
	require.ErrorIs(t, err, api.ErrTenant)
	require.ErrorContains(t, err, "tenant is not yours: globex; that of the API key is acme")
	_, err = w.Store.Submit(as(t, auth.Producer, "globex"), submission("g", ""), now)
	require.ErrorIs(t, err, api.ErrConflict)
	require.EqualError(t, err, "group g: this id is taken: choose another: conflict")
	_, err = w.Store.Tenant(acme, "globex")
	require.ErrorIs(t, err, api.ErrNotFound)
	require.EqualError(t, err, "tenant globex: has neither groups nor settings")

	all := as(t, auth.Producer, auth.AllTenants)
	a, err = w.Store.Submit(all, submission("h", "globex"), now)
	require.NoError(t, err)
	require.Equal(t, "globex", a.Tenant)
	a, err = w.Store.Submit(all, submission("i", ""), now)
	require.NoError(t, err)
	require.Equal(t, "i", a.Tenant)
}

// TestForeignAppend: the tenant of a group that a process remembers after an append does not let
// callers of another tenant append to the group.
func TestForeignAppend(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	acme, globex := as(t, auth.Producer, "acme"), as(t, auth.Producer, "globex")
	g := submission("g", "")
	g.Seal = false
	_, err := w.Store.Submit(acme, g, now)
	require.NoError(t, err)
	require.NoError(t, w.Store.Append(acme, "g", stagetest.Numbered(1), "r1", now))
	foreign := w.Store.Append(globex, "g", stagetest.Numbered(1), "r2", now)
	unknown := w.Store.Append(globex, "x", stagetest.Numbered(1), "r2", now)
	require.EqualError(t, foreign, "group g: not found")
	require.EqualError(t, unknown, "group x: not found")
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts("g"))
}

// TestIdempotencyKeysBelongToATenant: two tenants use one idempotency key for two submissions. Who
// may act for all tenants finds, with this key, the submission of the tenant that is named; admins,
// who have no tenant, find only their own.
func TestIdempotencyKeysBelongToATenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	submit := func(ctx context.Context, id, tenant string) string {
		a, err := w.Store.Submit(ctx, submission(id, tenant), groups.Origin{IdempotencyKey: "k", GeneratedID: true, At: time.Now()})
		require.NoError(t, err)
		return a.ID
	}
	acme, globex := as(t, auth.Producer, "acme"), as(t, auth.Producer, "globex")
	require.Equal(t, "g1", submit(acme, "g1", ""))
	require.Equal(t, "g2", submit(globex, "g2", ""))
	require.Equal(t, "g1", submit(acme, "g3", "acme"))
	service := as(t, auth.Producer, auth.AllTenants)
	require.Equal(t, "g2", submit(service, "g4", "globex"))
	require.Equal(t, "g5", submit(service, "g5", ""))
	require.Equal(t, "g6", submit(stagetest.Trusted(t), "g6", "acme"), "callers without a tenant have keys of their own")
	require.Equal(t, "g6", submit(as(t, auth.Admin, ""), "g7", "acme"))
}

func TestListsShowWhatIsTheCallers(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for i, tenant := range []string{"acme", "globex", "acme", "globex"} {
		_, err := w.Store.Submit(stagetest.Trusted(t), submission(fmt.Sprint("g", i), tenant), now)
		require.NoError(t, err)
	}
	list := func(ctx context.Context, q messages.ListQuery) (ids []string, err error) {
		q.Limit = 10
		l, err := w.Store.Groups(ctx, q)
		for _, g := range l.Groups {
			ids = append(ids, g.ID)
		}
		return ids, err
	}
	for _, role := range []auth.Role{auth.Producer, auth.Reader} {
		acme := as(t, role, "acme")
		ids, err := list(acme, messages.ListQuery{Status: api.StatusDispatched})
		require.NoError(t, err)
		require.ElementsMatch(t, []string{"g0", "g2"}, ids)
		_, err = list(acme, messages.ListQuery{Tenant: "globex"})
		require.ErrorIs(t, err, api.ErrTenant)
		tenants, err := w.Store.Tenants(acme, "", 10, true)
		require.NoError(t, err)
		require.Len(t, tenants.Tenants, 1)
		require.Equal(t, "acme", tenants.Tenants[0].ID)
		after, err := w.Store.Tenants(acme, "acme", 10, true)
		require.NoError(t, err)
		require.Empty(t, after.Tenants)
		none, err := w.Store.Tenants(as(t, role, "nobody"), "", 10, true)
		require.NoError(t, err)
		require.Empty(t, none.Tenants)
		_, err = w.Store.Rejected(acme, "", 10, false)
		require.ErrorIs(t, err, api.ErrNotAllowed)
	}
	for _, ctx := range []context.Context{as(t, auth.Operator, ""), as(t, auth.Producer, auth.AllTenants)} {
		ids, err := list(ctx, messages.ListQuery{})
		require.NoError(t, err)
		require.Len(t, ids, 4)
	}
}

// TestDeadLettersOfATenant: a principal of one tenant finds its dead letters among those of others.
// One call looks at a bounded number of them.
func TestDeadLettersOfATenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const others, own = 10_400, 3
	pipe := w.Conn.Cmd.Pipeline()
	add := func(tenant string) {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.DeadLetters(), Values: []string{"tenant", tenant, "code", "X", "error", "secret"}})
	}
	for range own {
		add("acme")
	}
	for range others {
		add("globex")
	}
	_, err := pipe.Exec(t.Context())
	require.NoError(t, err)
	acme := as(t, auth.Producer, "acme")
	first, err := w.Store.DeadLetters(acme, messages.DeadLetterQuery{Limit: 2})
	require.NoError(t, err)
	require.Empty(t, first.DeadLetters)
	require.NotEmpty(t, first.Cursor)
	second, err := w.Store.DeadLetters(acme, messages.DeadLetterQuery{Cursor: first.Cursor, Limit: 2})
	require.NoError(t, err)
	require.Len(t, second.DeadLetters, 2)
	third, err := w.Store.DeadLetters(acme, messages.DeadLetterQuery{Cursor: second.Cursor, Limit: 2})
	require.NoError(t, err)
	require.Len(t, third.DeadLetters, 1)
	require.Empty(t, third.Cursor)
	require.Equal(t, "acme", third.DeadLetters[0].Tenant)
	_, err = w.Store.DeadLetters(acme, messages.DeadLetterQuery{Cursor: "x", Limit: 2})
	require.Error(t, err)
}

// TestPayloadsAreLeftOut: without the flag payloads, a key sees no payload, no data of results and
// no error text.
func TestPayloadsAreLeftOut(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	g := submission("g", "acme")
	g.Jobs = nil
	for range 3 {
		g.Jobs = append(g.Jobs, messages.Job{Payload: []byte(`"secret"`)})
	}
	w.Submit(*g)
	w.Admit("T")
	jobs := w.Take("T", "c", 3)
	w.Done(`"secret"`, jobs[0])
	w.Fail("CODE", jobs[1])
	w.Reduce()
	hidden := auth.With(t.Context(), auth.Principal{Role: auth.Reader, Tenant: "acme"})
	shown := as(t, auth.Reader, "acme")
	for ctx, want := range map[context.Context]bool{hidden: false, shown: true} {
		text := everything(ctx, t, w)
		if want {
			require.Contains(t, text, "secret")
			require.Contains(t, text, "it broke")
		} else {
			require.NotContains(t, text, "secret")
			require.NotContains(t, text, "it broke")
			require.Contains(t, text, "CODE", "error codes are shown")
		}
	}
}

// everything returns, as text, what a principal can read of the three jobs of group g, and requires
// that one of them has a result.
func everything(ctx context.Context, t *testing.T, w *stagetest.World) string {
	t.Helper()
	var out []byte
	add := func(v any, err error) {
		t.Helper()
		require.NoError(t, err)
		text, err := json.Marshal(v)
		require.NoError(t, err)
		out = append(out, text...)
	}
	for i := range int64(3) {
		add(w.Store.Job(ctx, "g", i))
	}
	add(w.Store.Jobs(ctx, "g", messages.JobQuery{Limit: 10}))
	add(w.Store.Why(ctx, "g"))
	add(w.Store.DeadLetters(ctx, messages.DeadLetterQuery{Limit: 10}))
	results := 0
	require.NoError(t, w.Store.Results(ctx, "g", func(result []byte) error {
		results++
		out = append(out, result...)
		return nil
	}))
	require.Equal(t, 1, results)
	require.NoError(t, eachFailure(ctx, w, messages.FailureQuery{Payloads: true}, func(f api.Failure) error {
		add(f, nil)
		return nil
	}))
	return string(out)
}
