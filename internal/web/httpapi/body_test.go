package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/web"
)

// answer is the status and the body of an answer, and how long the client waited for it.
type answer struct {
	status int
	after  time.Duration
	body   string
}

// send posts a body in pieces, with a pause after each. If the body is not complete, it then keeps
// the connection open without sending. size is the announced size; -1: chunked encoding.
func send(t *testing.T, client *http.Client, target, typ string, size int64, pause time.Duration, complete bool, pieces ...string) <-chan answer {
	t.Helper()
	in, out := io.Pipe()
	t.Cleanup(func() { in.Close() })
	go func() {
		for _, piece := range pieces {
			if _, err := io.WriteString(out, piece); err != nil {
				return
			}
			<-time.After(pause)
		}
		if complete {
			out.Close()
		}
	}()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://localhost"+target, in)
	require.NoError(t, err)
	req.ContentLength = size
	req.Header.Set("Content-Type", typ)
	answered := make(chan answer, 1)
	start := time.Now()
	go func() {
		resp, err := client.Do(req)
		if err != nil {
			answered <- answer{body: err.Error()}
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		answered <- answer{resp.StatusCode, time.Since(start), string(body)}
	}()
	return answered
}

// TestSendersThatStopBlockNoOthers: eight clients, of which four announce 32 MiB, send three bytes
// and no more. Meanwhile two larger bodies are accepted. The eight get 408 after slowStart.
func TestSendersThatStopBlockNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := serve(t, New(options(newFakeBackend())))
		var stalled []<-chan answer
		for _, size := range []int64{32 << 20, 32 << 20, 32 << 20, 32 << 20, -1, -1, -1, -1} {
			stalled = append(stalled, send(t, client, "/v1/groups", jsonType, size, 0, false, `{"t`))
		}
		synctest.Wait()
		large := `{"type":"NOOP"}` + strings.Repeat(" ", smallBody)
		require.Equal(t, answer{status: 202}, withoutBody(<-send(t, client, "/v1/groups", jsonType, -1, 0, true, large)))
		require.Equal(t, answer{status: 202}, withoutBody(<-send(t, client, "/v1/groups", jsonType, int64(len(large)), 0, true, large)))
		for _, s := range stalled {
			got := <-s
			require.Equal(t, answer{408, slowStart, ""}, withoutBody(got))
			require.Contains(t, got.body, "after 5s it must bring 1024 bytes a second, and be complete after 1m0s")
		}
		<-time.After(time.Second) // net/http closes the connections a moment after the answers
	})
}

func withoutBody(a answer) answer { a.body = ""; return a }

func TestSlowBodiesAreRefused(t *testing.T) {
	spaces := func(n int) string { return strings.Repeat(" ", n) }
	group := `{"type":"NOOP"}`
	// In no case does a piece arrive at the moment of the refusal: the client might then see its
	// failed write before the answer.
	for name, c := range map[string]struct {
		target, typ string
		pause       time.Duration
		complete    bool
		pieces      []string
		want        answer
	}{
		"fast enough":       {"/v1/groups", jsonType, time.Second, true, []string{group, spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200), spaces(1200)}, answer{202, 8 * time.Second, ""}},
		"too slow":          {"/v1/groups", jsonType, 2 * time.Second, true, []string{group, spaces(500), spaces(500), spaces(500), spaces(500), spaces(500), spaces(500)}, answer{status: 408}},
		"stops in between":  {"/v1/groups", jsonType, 0, false, []string{group, spaces(1 << 20)}, answer{408, slowStart, ""}},
		"not complete":      {"/v1/groups", jsonType, 1300 * time.Millisecond, true, strings.Split(strings.Repeat(spaces(2000)+"|", 100), "|"), answer{408, bodyTimeout, ""}},
		"lines, slow":       {"/v1/groups/g/jobs", ndjson, idleTimeout - time.Second, true, []string{"{\"payload\":1}\n", "{\"payload\":2}\n", "{\"payload\":3}\n"}, answer{200, 3 * (idleTimeout - time.Second), ""}},
		"a line, slow":      {"/v1/groups/g/jobs", ndjson, 2 * time.Second, true, []string{`{"payload":`, "1", "2", "3", "4", "5", "}\n"}, answer{status: 408}},
		"lines that stop":   {"/v1/groups/g/jobs", ndjson, 0, false, []string{"{\"payload\":1}\n"}, answer{408, idleTimeout, ""}},
		"no line":           {"/v1/groups/g/jobs", ndjson, 0, false, []string{`{"p`}, answer{408, slowStart, ""}},
		"a header, no line": {"/v1/groups/g/jobs", "text/csv", 0, false, []string{"to"}, answer{408, slowStart, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := serve(t, New(options(newFakeBackend().withGroup("g"))))
				got := <-send(t, client, c.target, c.typ, -1, c.pause, c.complete, c.pieces...)
				require.Equal(t, c.want.status, got.status, got.body)
				if c.want.after > 0 {
					require.InDelta(t, c.want.after, got.after, float64(50*time.Millisecond))
				}
				if got.status == 408 {
					require.Contains(t, got.body, "the body arrived too slowly")
				}
				<-time.After(time.Minute) // net/http closes the connection a moment after the answer
			})
		})
	}
}

// TestSlowStoreUsesNoCredit: a body of nine batches that the client sends without a pause gets 200,
// although the store takes storeTimeout less 1 s for a batch.
func TestSlowStoreUsesNoCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend().withGroup("g")
		client := serve(t, New(options(slowStore{f, storeTimeout - time.Second})))
		got := <-send(t, client, "/v1/groups/g/jobs", ndjson, -1, 0, true, numbered(9*maxBatchLines))
		require.Equal(t, 200, got.status, got.body)
	})
}

// TestBodiesDoNotWaitForEachOther: if all bodies that hold memory need more, they don't block each
// other: at least half are refused with 429, and the memory that they free lets the others go on.
func TestBodiesDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newBodyMemory()
		const n = 8
		size := int64(maxBodyMemory / n)
		done, refused := make(chan time.Duration, n), make(chan *web.Problem, n)
		for range n {
			go func() {
				l := &memoryLease{pool: m}
				defer l.release()
				err := l.grow(context.Background(), size)
				<-time.After(3 * time.Second)
				if err == nil {
					err = l.grow(context.Background(), 2*size)
				}
				if p, ok := errors.AsType[*web.Problem](err); ok {
					refused <- p
					return
				}
				<-time.After(4 * time.Second)
				done <- time.Since(l.since)
			}()
		}
		grown := 0 // how many depends on the order in which the goroutines run
		for range n {
			select {
			case held := <-done:
				require.Equal(t, 7*time.Second, held)
				grown++
			case p := <-refused:
				require.Equal(t, 429, p.Status)
			}
		}
		synctest.Wait() // all have released their memory
		require.Positive(t, grown, "the memory of those that were refused")
		require.LessOrEqual(t, grown, n/2, "a body that grows needs the memory of one that was refused")
		require.True(t, m.free.TryAcquire(maxBodyMemory))
		p, ok := errors.AsType[*web.Problem](m.full(context.Background()))
		require.True(t, ok)
		require.Greater(t, p.RetryAfter, 3*time.Second, "bodies have held memory for 3 to 7 s")
		require.Less(t, p.RetryAfter, 7*time.Second)
	})
}
