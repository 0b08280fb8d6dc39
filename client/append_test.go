package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func numbered(n int) iter.Seq[client.Job] {
	return func(yield func(client.Job) bool) {
		for i := range n {
			if !yield(client.Job{Payload: map[string]int{"i": i}}) {
				return
			}
		}
	}
}

func TestAppend(t *testing.T) {
	var path, contentType string
	var got []string
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, contentType, got = r.Method+" "+r.URL.Path, r.Header.Get("Content-Type"), nil
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			got = append(got, lines.Text())
		}
		answer(w, http.StatusOK, api.Appended{Accepted: int64(len(got)), Rejected: []api.LineError{{Line: 2, Error: "no payload"}}, RejectedTotal: 1})
	}))

	t.Run("jobs", func(t *testing.T) {
		const n = 5000 // many blocks
		res, err := a.Append(t.Context(), "g", numbered(n))
		require.NoError(t, err)
		require.Equal(t, api.Appended{Accepted: n, Rejected: []api.LineError{{Line: 2, Error: "no payload"}}, RejectedTotal: 1}, res)
		require.Equal(t, "POST /v1/groups/g/jobs", path)
		require.Equal(t, "application/x-ndjson", contentType)
		require.Equal(t, `{"payload":{"i":0}}`, got[0])
		require.Equal(t, fmt.Sprintf(`{"payload":{"i":%d}}`, n-1), got[n-1])
	})
	t.Run("no jobs", func(t *testing.T) {
		_, err := a.Append(t.Context(), "g", numbered(0))
		require.NoError(t, err)
		require.Empty(t, got)
	})
	t.Run("ndjson", func(t *testing.T) {
		_, err := a.AppendNDJSON(t.Context(), "g", strings.NewReader("{\"payload\":1}\n{\"payload\":2}"))
		require.NoError(t, err)
		require.Equal(t, []string{`{"payload":1}`, `{"payload":2}`}, got)
	})
	t.Run("csv", func(t *testing.T) {
		_, err := a.AppendCSV(t.Context(), "g", strings.NewReader("to\na@example.com\n"))
		require.NoError(t, err)
		require.Equal(t, "text/csv", contentType)
		require.Equal(t, []string{"to", "a@example.com"}, got)
	})
	t.Run("a job that can't be encoded", func(t *testing.T) {
		_, err := a.Append(t.Context(), "g", func(yield func(client.Job) bool) {
			_ = yield(client.Job{Payload: 1}) && yield(client.Job{Payload: make(chan int)})
		})
		require.ErrorContains(t, err, "append to group g: ")
		require.ErrorContains(t, err, "encode job 1: json: unsupported type: chan int")
	})
	t.Run("an iterator that panics", func(t *testing.T) {
		require.PanicsWithValue(t, "oh", func() {
			_, _ = a.Append(t.Context(), "g", func(func(client.Job) bool) { panic("oh") })
		})
	})
}

func TestAppendIsRepeatedOnlyWhenUntouched(t *testing.T) {
	for _, c := range []struct {
		name  string
		first func(http.ResponseWriter, *http.Request)
		calls int32
	}{
		{"refused unread", func(w http.ResponseWriter, _ *http.Request) { status(429, "3")(w) }, 2},
		{"refused in the middle", func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadFull(r.Body, make([]byte, 10))
			status(429, "3")(w)
		}, 1},
		{"wrong", func(w http.ResponseWriter, _ *http.Request) { refuse(w, 409, api.Problem{Detail: "is sealed"}) }, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			var size atomic.Int64
			a, w := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if calls.Add(1) == 1 {
					c.first(w, r)
					return
				}
				n, _ := io.Copy(io.Discard, r.Body)
				size.Store(n)
				answer(w, http.StatusOK, api.Appended{Accepted: 1})
			}))
			const body = "{\"payload\":1}\n"
			_, err := a.AppendNDJSON(t.Context(), "g", io.MultiReader(strings.NewReader(body)))
			require.Equal(t, c.calls, calls.Load())
			if c.calls == 2 {
				require.NoError(t, err)
				require.EqualValues(t, len(body), size.Load(), "the whole body, from its start")
				require.Equal(t, []time.Duration{3 * time.Second}, w.taken())
				return
			}
			var e *client.Error
			require.ErrorAs(t, err, &e)
		})
	}
}

func TestAppendStopsTakingJobsAfterAnError(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { refuse(w, 409, api.Problem{Detail: "is sealed"}) }))
	n := 0
	_, err := a.Append(t.Context(), "g", func(yield func(client.Job) bool) {
		for yield(client.Job{Payload: strings.Repeat("x", 1000)}) {
			n++
		}
	})
	require.ErrorContains(t, err, "append to group g: 409 Conflict: is sealed")
	require.Less(t, n, 100)
}

// stuck is a reader that never has anything, like a terminal nobody types at.
type stuck struct{ reading chan struct{} }

func (s stuck) Read([]byte) (int, error) {
	close(s.reading)
	select {}
}

func TestAppendEndsWithContextThoughItsReaderHangs(t *testing.T) {
	gone := make(chan struct{})
	a, _ := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(gone)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	s := stuck{make(chan struct{})}
	go func() {
		<-s.reading
		cancel()
	}()
	_, err := a.AppendNDJSON(ctx, "g", s)
	require.True(t, errors.Is(err, context.Canceled), "%v", err)
	<-gone
}
