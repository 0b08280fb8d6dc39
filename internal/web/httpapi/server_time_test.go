package httpapi

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// TestSlowBodyMayTakeLongWhileItMoves: a body of four batches with pauses of idleTimeout less 1 s
// gets 200. With pauses of idleTimeout and 1 s, it gets 408.
func TestSlowBodyMayTakeLongWhileItMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend().withGroup("g")
		client := serve(t, New(options(f)))
		post := func(pause time.Duration) (int, string) {
			in, out := io.Pipe()
			var writer sync.WaitGroup
			defer writer.Wait()
			defer in.Close()
			writer.Go(func() {
				for range 4 {
					if _, err := io.WriteString(out, numbered(maxBatchLines)); err != nil {
						return
					}
					<-time.After(pause)
				}
				out.Close()
			})
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, in)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			return resp.StatusCode, string(body)
		}
		code, body := post(idleTimeout - time.Second)
		require.Equal(t, 200, code, body)
		require.Contains(t, body, `"accepted":2000`)

		code, body = post(idleTimeout + time.Second)
		require.Equal(t, 408, code, body)
		require.Contains(t, body, `"accepted":0`)
	})
}

// TestProblemDoesNotWaitForTheBody: an error that does not depend on the body (404, 405, 415, 422)
// is answered at once while the client sends no body. To cancel a group gets 408, later.
func TestProblemDoesNotWaitForTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := NewServer("127.0.0.1:0", options(newFakeBackend()))
		client := serveOn(t, srv.Server)
		for target, status := range map[string]int{
			"/v1/nothing": 404, "/v1/stats": 405, "/v1/groups": 415, "/v1/groups/%00/jobs": 422, "/v1/groups/g/cancel": 408,
		} {
			in, _ := io.Pipe()
			start := time.Now()
			resp, err := client.Post("http://localhost"+target, "", in)
			require.NoError(t, err)
			require.Equal(t, status, resp.StatusCode, target)
			if status != 408 {
				require.Equal(t, start, time.Now(), target)
			}
			require.NoError(t, resp.Body.Close())
			require.NoError(t, in.Close())
		}
	})
}

// TestSlowStoreIsNotCutOffByTheBodysDeadline: the read deadline of a body must not end a request
// whose body is complete but whose store is slow. A store slower than storeTimeout leads to 503.
func TestSlowStoreIsNotCutOffByTheBodysDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend().withGroup("g")
		client := serve(t, New(options(slowStore{f, storeTimeout - time.Second})))
		resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, strings.NewReader(numbered(3*maxBatchLines)))
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)

		client = serve(t, New(options(slowStore{f, storeTimeout + time.Second})))
		resp, err = client.Post("http://localhost/v1/groups/g/cancel", jsonType, strings.NewReader("{}"))
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 503, resp.StatusCode)
	})
}

type slowStore struct {
	*fakeBackend
	delay time.Duration
}

func (s slowStore) Append(ctx context.Context, id string, jobs []messages.Job, opt AppendOptions) error {
	<-time.After(s.delay)
	return s.fakeBackend.Append(ctx, id, jobs, opt)
}

func (s slowStore) Cancel(ctx context.Context, _ string) (api.Accepted, error) {
	select {
	case <-ctx.Done():
		return api.Accepted{}, fmt.Errorf("cancel group: %w", ctx.Err())
	case <-time.After(s.delay):
		return api.Accepted{}, nil
	}
}

// TestStoreFinishesWhenTheClientLeaves: the store finishes a retry although its client leaves after
// one second.
func TestStoreFinishesWhenTheClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stored := make(chan error, 1)
		client := serve(t, New(options(slowRetryBackend{newFakeBackend(), stored})))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "POST", "http://localhost/v1/groups/g/retry", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, <-stored)
	})
}

type slowRetryBackend struct {
	*fakeBackend
	stored chan error
}

func (b slowRetryBackend) Retry(ctx context.Context, _ string, _ api.RetryChoice) (api.Accepted, error) {
	<-time.After(2 * time.Second)
	b.stored <- ctx.Err()
	return api.Accepted{}, nil
}

// TestClientThatDoesNotReadIsDisconnected: if a client does not read the results that it has asked
// for, writing them fails after idleTimeout.
func TestClientThatDoesNotReadIsDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend().withGroup("g")
		ended := make(chan error, 1)
		f.results = func(yield func([]byte) error) error {
			for {
				if err := yield([]byte(`{"ordinal":1,"duration_ms":1,"attempts":1,"data":null}`)); err != nil {
					ended <- err
					return err
				}
			}
		}
		client := serve(t, New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/results")
		require.NoError(t, err)
		defer resp.Body.Close()
		start := time.Now()
		require.Error(t, <-ended)
		require.Equal(t, idleTimeout, time.Since(start))
	})
}

// TestStopEndsStreams: a stopping server ends an event stream, and answers a streamed append with
// 503, in less than a second, although their clients go on.
func TestStopEndsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := showingGroup(groupInStates(1, created)).withGroup("g")
		srv := NewServer("127.0.0.1:0", options(f))
		client := serveOn(t, srv.Server)
		events, err := client.Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer events.Body.Close()
		require.Len(t, readEvents(t, events.Body, 1), 1)

		in, out := io.Pipe()
		defer in.Close()
		answered := make(chan string, 1)
		go func() {
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, in)
			if err != nil {
				answered <- err.Error()
				return
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			answered <- resp.Status + string(body)
		}()
		_, err = io.WriteString(out, numbered(maxBatchLines+1))
		require.NoError(t, err)

		synctest.Wait() // net/http drops a request that no handler has begun

		start := time.Now()
		srv.Stop(time.Hour)
		require.Less(t, time.Since(start), time.Second)
		_, err = io.ReadAll(events.Body)
		require.Error(t, err, "a watch that the server ends must not look like the group's end")
		answer := <-answered
		require.Contains(t, answer, "503")
		require.Contains(t, answer, `"accepted":500`)
		require.NoError(t, out.Close())
	})
}

// TestStopWaitsForRequests: for a request that takes 10 s, a stopping server waits with a grace
// period of 20 s, and answers it with 503 at the end of one of 7 s.
func TestStopWaitsForRequests(t *testing.T) {
	for name, c := range map[string]struct {
		grace  time.Duration
		status int
	}{"within": {20 * time.Second, 202}, "beyond": {7 * time.Second, 503}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := NewServer("127.0.0.1:0", options(slowStore{newFakeBackend(), 10 * time.Second}))
				client := serveOn(t, srv.Server)
				answered := make(chan int, 1)
				go func() {
					resp, err := client.Post("http://localhost/v1/groups/g/cancel", "", nil)
					if err != nil {
						answered <- 0
						return
					}
					answered <- resp.StatusCode
					resp.Body.Close()
				}()
				synctest.Wait()
				start := time.Now()
				srv.Stop(c.grace)
				require.LessOrEqual(t, time.Since(start), min(c.grace, 10*time.Second)+abortTimeout)
				require.Equal(t, c.status, <-answered)
			})
		})
	}
}

func TestConnectionIsReusedAfterLongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend().withGroup("g")
		srv := NewServer("127.0.0.1:0", options(f))
		client := serveOn(t, srv.Server)
		dials := 0
		dial := client.Transport.(*http.Transport).DialContext
		client.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials++
			return dial(ctx, network, addr)
		}
		for range 3 {
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, strings.NewReader(numbered(3)))
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, 200, resp.StatusCode)
			<-time.After(idleTimeout + bodyTimeout) // later than every deadline of the request, before keepAliveTimeout
		}
		require.Equal(t, 1, dials)
	})
}
