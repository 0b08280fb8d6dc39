package ledger_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/lua"
)

// TestGuarded: guarded returns what the function returns, and turns only a wrong type into a reply;
// every other error ends the script, with its code.
func TestGuarded(t *testing.T) {
	onStores(t, func(w *world) {
		require.NoError(w, w.c.Set(w.Context(), w.p.Policy(), "x", 0).Err())
		guarded := func(body string) (any, error) {
			s := call.NewScript("guarded", lua.Source("parts/base")+body)
			return s.Run(w.Context(), w.c, w.p.Keys(), nil)
		}
		got, err := guarded(`
			local a, b, c = guarded(function(x, y) return x, nil, y end, 1, 2)
			return { a, b == nil and 'none' or b, c, guarded(call, 'GET', B .. 'policy'), guarded(call, 'LLEN', B .. 'policy') }`)
		require.NoError(w, err)
		values := got.([]any)
		require.Equal(w, []any{int64(1), "none", int64(2), "x"}, values[:4])
		refused := values[4].([]any)
		require.Equal(w, "ERR", refused[0])
		require.Contains(w, refused[1], "WRONGTYPE Operation against a key")
		for body, code := range map[string]string{
			`call('XADD', B .. 'x', '*', 'WRONGTYPE')`: "ERR", `call('INCR', B .. 'policy')`: "ERR", `local x; return x.y`: "ERR",
		} {
			_, plain := guarded(body)
			require.ErrorContains(w, plain, code, body)
			_, err = guarded("return guarded(function() " + body + " end)")
			require.ErrorContains(w, err, strings.Fields(plain.Error())[2], body)
			require.NotContains(w, err.Error(), "ERR ERR", body)
		}
	})
}

// TestGuardedKeepsOOM: when Redis's memory is full, the error of a write keeps its code.
func TestGuardedKeepsOOM(t *testing.T) {
	t.Parallel()
	w := newWorld(t, client(t, redistest.Server(t, redistest.MaxMemory(1)).URL()), "t:")
	s := call.NewScript("guarded", lua.Source("parts/base")+`return guarded(call, 'SET', B .. 'policy', 'x')`)
	_, err := s.Run(w.Context(), w.c, w.p.Keys(), nil)
	require.True(t, call.IsOOM(err), err)
}
