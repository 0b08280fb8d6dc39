package client_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// guardBackend is a backend of the real HTTP API with guards.
type guardBackend struct {
	httpapi.Backend // nil: methods that are not defined here are not called

	calls []string
}

func (b *guardBackend) Guards(_ context.Context, q guard.Query) (api.GuardList, error) {
	b.calls = append(b.calls, fmt.Sprintf("list %q %q %d", q.Kind, q.Cursor, q.Limit))
	if q.Cursor == "" {
		return api.GuardList{Cursor: "0.1.a"}, nil // a page may be empty
	}
	return api.GuardList{Guards: []api.GuardSummary{{Name: "pool/p"}, {Name: "lock/l"}}}, nil
}

func (b *guardBackend) Guard(_ context.Context, name string) (api.Guard, error) {
	b.calls = append(b.calls, "get "+name)
	return api.Guard{Name: name, Spec: api.GuardSpec{Limiter: "none"}}, nil
}

func (b *guardBackend) ControlGuard(_ context.Context, name, member string, do guard.Action) error {
	b.calls = append(b.calls, fmt.Sprintf("%s %s of %s", do, member, name))
	if member == "x" {
		return fmt.Errorf("member x: %w", api.ErrNotFound)
	}
	return nil
}

func TestGuardCallsOnTheRealServer(t *testing.T) {
	b := &guardBackend{}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: b}))
	ctx := t.Context()
	var names []string
	for g, err := range a.Guards(ctx, "pool") {
		require.NoError(t, err)
		names = append(names, g.Name)
	}
	require.Equal(t, []string{"pool/p", "lock/l"}, names)
	for _, name := range []string{"p", "key/hosts/example.org"} {
		v, err := a.Guard(ctx, name)
		require.NoError(t, err)
		require.Equal(t, "none", v.Spec.Limiter)
	}
	done, err := a.ControlGuard(ctx, "lock/l", "1", "take-back")
	require.NoError(t, err)
	require.Equal(t, api.GuardAction{Guard: "lock/l", Member: "1", Action: "take-back"}, done)
	_, err = a.ControlGuard(ctx, "p", "x", "disable")
	var refused *client.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, 404, refused.Status)
	require.ErrorContains(t, err, "disable member x of guard p")
	want := []string{
		`list "pool" "" 1000`, `list "pool" "0.1.a" 1000`, "get pool/p", "get key/hosts/example.org", "take-back 1 of lock/l",
		"disable x of pool/p",
	}
	require.Equal(t, want, b.calls)

	_, err = a.Guard(ctx, "pools/p")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a/b", "open")
	require.ErrorContains(t, err, "member id")
	_, err = a.ControlGuard(ctx, "p/../q", "a", "open")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a", "..")
	require.ErrorContains(t, err, "action")
	require.Equal(t, want, b.calls, "no invalid argument reaches the backend")
}
