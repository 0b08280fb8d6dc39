package app

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReadinessReport(t *testing.T) {
	ok := func(context.Context) error { return nil }
	r := NewReadiness()
	require.Equal(t, ReadyReport{Status: "starting"}, r.Report(t.Context()))
	r.Add("redis", ok)
	require.Equal(t, ReadyReport{Status: "ready"}, r.Report(t.Context()))
	r.Add("redis", func(context.Context) error { return errors.New("away") }) // the check of another role in this process
	r.Add("leader", func(context.Context) error { return errors.New("none") })
	require.Equal(t, ReadyReport{Status: "failing", Failing: map[string]string{"redis": "away", "leader": "none"}}, r.Report(t.Context()))
	r.SetDraining()
	require.Equal(t, ReadyReport{Status: "draining"}, r.Report(t.Context()))
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
		report := r.Report(t.Context())
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
			require.Equal(t, map[string]string{"stuck": "no answer within 1s"}, r.Report(t.Context()).Failing)
		}
		synctest.Wait()
		require.Equal(t, 1, calls)
		close(hangs)
		synctest.Wait()
		require.Equal(t, "ready", r.Report(t.Context()).Status)
		synctest.Wait()
		require.Equal(t, 2, calls)
	})
}

// When the request that started a check is cancelled, the other requests still get the result.
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
		go func() { reports <- r.Report(first) }()
		synctest.Wait()
		go func() { reports <- r.Report(t.Context()) }()
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
		require.Equal(t, "draining", p.Ready.Report(t.Context()).Status)
	})
}
