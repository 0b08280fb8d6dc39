package app

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReadinessReport(t *testing.T) {
	ok := func(context.Context) error { return nil }
	r := NewReadiness()
	require.Equal(t, ReadyReport{Status: "starting"}, r.Report(t.Context(), ForWork))
	r.Add("redis", ok)
	require.Equal(t, ReadyReport{Status: "ready"}, r.Report(t.Context(), ForWork))
	r.Add("redis", func(context.Context) error { return errors.New("away") }) // the check of another role in this process
	r.Add("leader", func(context.Context) error { return errors.New("none") })
	require.Equal(t, ReadyReport{Status: "failing", Failing: map[string]string{"redis": "away", "leader": "none"}}, r.Report(t.Context(), ForWork))
	r.SetDraining()
	require.Equal(t, ReadyReport{Status: "draining"}, r.Report(t.Context(), ForWork))
}

// TestReadinessForTraffic: while a shared check (Redis) fails, a process is ready for traffic, but
// not while it starts or drains. Only callers on this host see the failing checks.
func TestReadinessForTraffic(t *testing.T) {
	r := NewReadiness()
	redis, start := errors.New("away"), errors.New("waiting for redis")
	r.AddShared("redis", func(context.Context) error { return redis })
	require.Equal(t, "starting", r.Report(t.Context(), ForTraffic).Status)
	r.Add("start", func(context.Context) error { return start })
	get := func(query, peer string) (int, string) {
		request := httptest.NewRequest(http.MethodGet, "/readyz"+query, nil)
		request.RemoteAddr = peer
		response := httptest.NewRecorder()
		r.ServeHTTP(response, request)
		return response.Code, response.Body.String()
	}
	const here, there = "127.0.0.1:1", "192.0.2.1:1"
	for _, step := range []struct {
		query, peer string
		status      int
		body        string
	}{
		{"", here, 503, `{"status":"failing","failing":{"redis":"away","start":"waiting for redis"}}`},
		{"", there, 503, `{"status":"failing"}`},
		{"?for=traffic", here, 503, `{"status":"failing","failing":{"start":"waiting for redis"}}`},
		{"?for=traffic", there, 503, `{"status":"failing"}`},
	} {
		status, body := get(step.query, step.peer)
		require.Equal(t, step.status, status, step)
		require.JSONEq(t, step.body, body, step)
	}
	start = nil
	status, body := get("?for=traffic", there)
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"status":"ready"}`, body)
	status, _ = get("", there)
	require.Equal(t, http.StatusServiceUnavailable, status, "it can't work")
	status, _ = get("?for=fun", here)
	require.Equal(t, http.StatusBadRequest, status)
	r.SetDraining()
	redis = nil
	status, body = get("?for=traffic", there)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.JSONEq(t, `{"status":"draining"}`, body)
}

func TestReadinessChecksRunAtOnceAndEndInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		slow := func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		r.Add("a", slow)
		r.Add("b", slow)
		began := time.Now()
		report := r.Report(t.Context(), ForWork)
		require.Equal(t, time.Second, time.Since(began))
		require.Len(t, report.Failing, 2)
		synctest.Wait()
	})
}

func TestHangingCheckDoesNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		hangs, calls := make(chan struct{}), 0
		r.Add("stuck", func(context.Context) error { // ignores its context
			calls++
			<-hangs
			return nil
		})
		for range 3 {
			require.Equal(t, map[string]string{"stuck": "no answer within 1s"}, r.Report(t.Context(), ForWork).Failing)
		}
		synctest.Wait()
		require.Equal(t, 1, calls)
		close(hangs)
		synctest.Wait()
		require.Equal(t, "ready", r.Report(t.Context(), ForWork).Status)
		synctest.Wait()
		require.Equal(t, 2, calls)
	})
}

// TestCheckOutlivesTheFirstRequest: when the request that started a check is cancelled, the other
// requests still get the result.
func TestCheckOutlivesTheFirstRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewReadiness()
		answer := make(chan struct{})
		r.Add("redis", func(ctx context.Context) error {
			select {
			case <-answer:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		first, hangUp := context.WithCancel(t.Context())
		reports := make(chan ReadyReport, 2)
		go func() { reports <- r.Report(first, ForWork) }()
		synctest.Wait()
		go func() { reports <- r.Report(t.Context(), ForWork) }()
		synctest.Wait()
		hangUp()
		require.Equal(t, map[string]string{"redis": "context canceled"}, (<-reports).Failing)
		close(answer)
		require.Equal(t, "ready", (<-reports).Status)
	})
}

func TestStopIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProcess(Config{}, "worker", nil)
		release := make(chan struct{})
		defer close(release)
		var order []string
		p.OnStop("last", func(context.Context) error {
			order = append(order, "last")
			return nil
		})
		p.OnStop("stuck", func(context.Context) error {
			<-release
			return nil
		})
		p.OnStop("first", func(context.Context) error {
			order = append(order, "first")
			return errors.New("broken")
		})
		began := time.Now()
		err := p.stop(time.Minute)
		require.Equal(t, time.Minute, time.Since(began))
		synctest.Wait()
		require.Equal(t, []string{"first", "last"}, order)
		require.ErrorContains(t, err, "stop first: broken\nstop stuck: context deadline exceeded")
		require.Equal(t, "draining", p.Ready.Report(t.Context(), ForWork).Status)
	})
}
