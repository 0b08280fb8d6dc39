package httpapi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
)

func TestGuards(t *testing.T) {
	f := newFakeBackend()
	h := New(options(f))
	l := decode[api.GuardList](t, call(t, h, "GET", "/v1/guards", ""))
	require.Equal(t, "pool/smtp", l.Guards[0].Name)
	require.Equal(t, "0.5.", l.Cursor)
	call(t, h, "GET", "/v1/guards?kind=key&cursor=0.7.&limit=9", "")
	require.Equal(t, []string{"guards   50", "guards key 0.7. 9"}, f.calls)
	requireProblem(t, call(t, h, "GET", "/v1/guards?kind=pools", ""), 422, "kind")
	requireProblem(t, call(t, h, "GET", "/v1/guards?kind=pool%2Fx", ""), 422, "kind")
	requireProblem(t, call(t, h, "GET", "/v1/guards?limit=0", ""), 422, "limit")
	requireProblem(t, call(t, h, "GET", "/v1/guards?keys=1", ""), 400, "keys")

	for path, name := range map[string]string{
		"smtp": "pool/smtp", "pool%2Fsmtp": "pool/smtp", "lock%2Fa.b": "lock/a.b", "key%2Fhosts%2Fexample.org": "key/hosts/example.org",
	} {
		v := decode[api.Guard](t, call(t, h, "GET", "/v1/guards/"+path, ""))
		require.Equal(t, name, v.Name)
		require.Equal(t, "cooling", v.Members[0].State)
	}
	requireProblem(t, call(t, h, "GET", "/v1/guards/none", ""), 404, "")
	for _, bad := range []string{"a%20b", "pools%2Fa", "pool%2F", "pool%2Fa%2Fb", "key%2Fa", "%2Fa", strings.Repeat("x", 129)} {
		requireProblem(t, call(t, h, "GET", "/v1/guards/"+bad, ""), 400, "name")
	}
	requireProblem(t, call(t, h, "GET", "/v1/guards/pool/smtp", ""), 404, "")
	f.err = api.ErrUnavailable
	requireProblem(t, call(t, h, "GET", "/v1/guards", ""), 503, "")
	requireProblem(t, call(t, h, "GET", "/v1/guards/smtp", ""), 503, "")
}

func TestControlOfGuards(t *testing.T) {
	f := newFakeBackend()
	h := New(options(f))
	var want []string
	for _, do := range guard.Actions {
		path := "/v1/guards/semaphore%2Fs/members/1/" + string(do)
		rec := call(t, h, "POST", path, "")
		require.Equal(t, 202, rec.Code, rec.Body.String())
		require.Equal(t, api.GuardAction{Guard: "semaphore/s", Member: "1", Action: string(do)}, decode[api.GuardAction](t, rec))
		want = append(want, string(do)+" 1 of semaphore/s")
		requireProblem(t, call(t, h, "GET", path, ""), 405, "")
	}
	require.Equal(t, want, f.calls)
	requireProblem(t, call(t, h, "POST", "/v1/guards/a%20b/members/a/open", ""), 400, "name")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a%2Fb/open", ""), 400, "id")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", `{"for":1}`, "Content-Type", jsonType), 422, "for")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/stop", ""), 404, "")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", "", "Origin", "https://evil.example"), 403, "")
	require.Equal(t, want, f.calls, "a refused request must not reach the backend")
	f.err = fmt.Errorf("guard p: member x: %w", api.ErrNotFound)
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/x/disable", ""), 404, "")
	f.err = fmt.Errorf("guard p: member a has no circuit breaker: %w", api.ErrConflict)
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", ""), 409, "")
}
