package stage

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestTokenEndsTheWait: a token ends a wait, also after reads that ended without a token. A read
// that outlasts its wait goes on: the token that it then gets ends a later wait.
func TestTokenEndsTheWait(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	w := newWaker(conn, prefix+"wake")
	push := func() { require.NoError(t, conn.Cmd.LPush(t.Context(), w.key, "1").Err()) }
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.wait(t.Context(), time.Hour)
		w.wait(t.Context(), time.Millisecond)
		w.wait(t.Context(), time.Hour)
	}()
	require.NoError(t, redisx.Sleep(t.Context(), redisx.MaxBlock+redisx.MaxBlock/4)) // the first read has ended by then
	push()
	require.NoError(t, redisx.Sleep(t.Context(), 50*time.Millisecond))
	push()
	<-ended
	w.reads.Wait()
}
