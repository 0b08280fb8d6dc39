package lending_test

import (
	"context"
	"log/slog"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/calls/lending"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// patience is the limit for events that must happen.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial))
}

// newLender returns a lender with a guard client of its own, like a process.
func newLender(t *testing.T, url, prefix string, wait time.Duration) lending.Lender {
	t.Helper()
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(o)
	guards := guard.New(rdb, guard.Prefix(prefix))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second) // for loans that are on their way back
		defer cancel()
		_ = guards.Close(ctx)
		_ = rdb.Close()
	})
	return lending.Lender{Guards: guards, Wait: wait, MaxWait: time.Minute, Log: slog.New(slog.DiscardHandler)}
}

func limits(rate credential.Rate, concurrency credential.Concurrency, breaker credential.Breaker) credential.Limits {
	return credential.Limits{Rate: rate, Limiter: credential.Sliding, Breaker: breaker, Concurrency: concurrency}
}

var (
	hourly  = credential.Rate{Permits: 2, Window: time.Hour}
	breaker = credential.Breaker{Failures: 3, OpenFor: time.Hour, Successes: 2}
)

// denied returns the denial of the next call.
func denied(t *testing.T, s credential.Source) *credential.DeniedError {
	t.Helper()
	loan, err := s.Borrow(t.Context())
	require.Nil(t, loan)
	var d *credential.DeniedError
	require.ErrorAs(t, err, &d)
	return d
}

// back returns a loan with an outcome, and waits until the guard named name has no lease in Redis.
func back(t *testing.T, n lending.Lender, name string, loan credential.Loan, o credential.Outcome) {
	t.Helper()
	loan.Return(o)
	require.Eventually(t, func() bool {
		view, err := n.Guards.Inspect(t.Context(), name)
		if err != nil {
			return false
		}
		held := int64(0)
		for _, m := range view.Members {
			held += m.Held
		}
		return held == 0
	}, patience, time.Millisecond)
}

func TestAccountsHaveTheirLimits(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		n := newLender(t, url, prefix, 0)
		own := credential.Rate{Permits: 1, Window: time.Hour}
		s, err := n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}, {ID: "b", Rate: &own}})
		require.NoError(t, err)
		uses := map[string]int{}
		for range 3 {
			loan, err := s.Borrow(t.Context())
			require.NoError(t, err)
			uses[loan.ID()]++
			back(t, n, "pool/smtp", loan, credential.Outcome{Kind: credential.Success})
		}
		require.Equal(t, map[string]int{"a": 2, "b": 1}, uses)
		d := denied(t, s)
		require.Equal(t, "rate limit", d.Reason)
		require.Equal(t, "smtp", d.Guard)
		require.InDelta(t, time.Hour, d.After, float64(5*time.Minute))
		a := s.(processor.Limited).Availability()
		require.Zero(t, a.Free)
		require.WithinDuration(t, time.Now().Add(time.Minute), a.Next, 30*time.Second, "the limit may be raised before")
		require.InDelta(t, 3.0/3600, a.PerSecond, 1e-9)
	})
}

// TestAccountsThatAreInUse: while the only account is lent, a call that may not wait is denied, and
// Availability names no time at which one is free.
func TestAccountsThatAreInUse(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s, err := n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	loan, err := s.Borrow(t.Context())
	require.NoError(t, err)
	require.Equal(t, "all are in use", denied(t, s).Reason)
	require.Zero(t, s.(processor.Limited).Availability().Next)

	// A call that may wait gets the account when it comes back.
	waiting := newLender(t, url, prefix, time.Minute)
	w, err := waiting.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	got := make(chan error, 1)
	go func() {
		next, err := w.Borrow(t.Context())
		if err == nil {
			next.Return(credential.Outcome{Kind: credential.Success})
		}
		got <- err
	}()
	require.Eventually(t, func() bool {
		view, err := n.Guards.Inspect(t.Context(), "pool/smtp")
		return err == nil && view.Queue.Length == 1
	}, patience, time.Millisecond)
	require.Equal(t, "others wait for one", denied(t, s).Reason)
	loan.Return(credential.Outcome{Kind: credential.Success})
	select {
	case err := <-got:
		require.NoError(t, err)
	case <-time.After(patience):
		require.Fail(t, "the waiting call got nothing")
	}
}

func TestOutcomesReachTheGuard(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	many := credential.Rate{Permits: 100, Window: time.Hour}
	for name, tt := range map[string]struct {
		outcome credential.Outcome
		times   int
		want    string // reason of the next denial; "": lent
	}{
		"success":   {credential.Outcome{Kind: credential.Success}, 5, ""},
		"neutral":   {credential.Outcome{}, 5, ""},
		"unused":    {credential.Outcome{Kind: credential.Unused}, 5, ""},
		"unknown":   {credential.Outcome{Kind: credential.Unknown}, 5, ""},
		"failure":   {credential.Outcome{Kind: credential.Failure}, 3, "circuit breaker open"},
		"throttled": {credential.Outcome{Kind: credential.Throttled, After: time.Hour}, 1, "rate limit"},
	} {
		s, err := n.Choice(limits(many, 1, breaker))(name, []credential.Account{{ID: "a"}})
		require.NoError(t, err)
		for range tt.times {
			loan, err := s.Borrow(t.Context())
			require.NoError(t, err, name)
			back(t, n, "pool/"+name, loan, tt.outcome)
		}
		if tt.want != "" {
			require.Equal(t, tt.want, denied(t, s).Reason, name)
			continue
		}
		loan, err := s.Borrow(t.Context())
		require.NoError(t, err, name)
		back(t, n, "pool/"+name, loan, tt.outcome)
	}
}

// TestAccountsWithoutLimits: an account with no rate and unbounded concurrency has only a breaker.
// 1,000 calls at the same time share at most 100 leases of it.
func TestAccountsWithoutLimits(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s, err := n.Choice(limits(credential.Rate{}, credential.Unbounded, breaker))("push.fcm", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	require.Equal(t, processor.Availability{Free: -1, PerSecond: math.Inf(1)}, s.(processor.Limited).Availability())

	var mu sync.Mutex
	var loans []credential.Loan
	var all sync.WaitGroup
	for range 1000 {
		all.Go(func() {
			loan, err := s.Borrow(t.Context())
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				loans = append(loans, loan)
			}
		})
	}
	all.Wait()
	require.Len(t, loans, 1000)
	view, err := n.Guards.Inspect(t.Context(), "breaker/push.a")
	require.NoError(t, err)
	require.LessOrEqual(t, view.Counters["granted"], int64(100), "at least ten calls share a permission")
	for _, loan := range loans[1:] {
		loan.Return(credential.Outcome{Kind: credential.Success})
	}
	back(t, n, "breaker/push.a", loans[0], credential.Outcome{Kind: credential.Success})
}

// TestAnAccountWithoutLimitsFails: three failures in a row open the breaker for both processes, and
// revoke a loan that is out. After OpenFor, a call that fails opens it again, and two that succeed
// close it.
func TestAnAccountWithoutLimitsFails(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	quick := credential.Breaker{Failures: 3, OpenFor: 300 * time.Millisecond, Successes: 2}
	choose := func() (lending.Lender, credential.Source) {
		n := newLender(t, url, prefix, 0)
		s, err := n.Choice(limits(credential.Rate{}, credential.Unbounded, quick))("push.fcm", []credential.Account{{ID: "a"}})
		require.NoError(t, err)
		return n, s
	}
	n, s := choose()
	_, other := choose()
	borrow := func(s credential.Source) credential.Revocable {
		t.Helper()
		loan, err := s.Borrow(t.Context())
		require.NoError(t, err)
		return loan.(credential.Revocable)
	}
	failure, success := credential.Outcome{Kind: credential.Failure}, credential.Outcome{Kind: credential.Success}

	loans := make([]credential.Revocable, 6)
	for i := range loans {
		loans[i] = borrow(s)
	}
	loans[0].Return(failure)
	loans[1].Return(failure)
	loans[2].Return(success) // ends the row
	loans[3].Return(failure)
	require.Nil(t, loans[5].Revoked())
	one := borrow(s)
	loans[4].Return(failure)
	loans[5].Return(failure)
	require.Equal(t, "circuit breaker open", one.Revoked().Reason)
	one.Return(credential.Outcome{Kind: credential.Unused})
	require.Equal(t, "circuit breaker open", denied(t, s).Reason)
	require.NotZero(t, s.(processor.Limited).Availability().Next)
	require.Eventually(t, func() bool { // the other process learns it from Redis
		_, err := other.Borrow(t.Context())
		return err != nil
	}, patience, time.Millisecond)

	var probe credential.Revocable
	require.Eventually(t, func() bool {
		loan, err := s.Borrow(t.Context())
		if err == nil {
			probe = loan.(credential.Revocable)
		}
		return err == nil
	}, patience, 10*time.Millisecond)
	probe.Return(failure) // one failed probe is enough
	require.Eventually(t, func() bool {
		view, err := n.Guards.Inspect(t.Context(), "breaker/push.a")
		return err == nil && view.Members[0].Breaker == "open"
	}, patience, time.Millisecond)

	for range 2 {
		require.Eventually(t, func() bool {
			loan, err := s.Borrow(t.Context())
			if err == nil {
				loan.Return(success)
			}
			return err == nil
		}, patience, 10*time.Millisecond)
	}
	require.Eventually(t, func() bool {
		view, err := n.Guards.Inspect(t.Context(), "breaker/push.a")
		return err == nil && view.Members[0].Breaker == "closed"
	}, patience, time.Millisecond)
}

// TestAnAccountWithoutLimitsIsThrottled: when a service asks for a pause, the account is not lent
// during the pause. The other account is.
func TestAnAccountWithoutLimitsIsThrottled(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	accounts := []credential.Account{{ID: "a"}, {ID: "b"}}
	s, err := n.Choice(limits(credential.Rate{}, credential.Unbounded, breaker))("push.fcm", accounts)
	require.NoError(t, err)
	first, err := s.Borrow(t.Context())
	require.NoError(t, err)
	back(t, n, "breaker/push."+first.ID(), first, credential.Outcome{Kind: credential.Throttled, After: time.Hour})
	for range 10 {
		loan, err := s.Borrow(t.Context())
		require.NoError(t, err)
		require.NotEqual(t, first.ID(), loan.ID(), "the other account is used")
		loan.Return(credential.Outcome{Kind: credential.Success})
	}
}

// TestBothKindsOfAccounts: of an account with limits and one without, the latter is lent first.
// While it is throttled, the one with limits is lent.
func TestBothKindsOfAccounts(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	none := credential.Rate{}
	s, err := n.Choice(limits(hourly, 1, breaker))("push.fcm", []credential.Account{
		{ID: "few"}, {ID: "many", Rate: &none, Concurrency: credential.Unbounded},
	})
	require.NoError(t, err)
	loan, err := s.Borrow(t.Context())
	require.NoError(t, err)
	require.Equal(t, "many", loan.ID())
	back(t, n, "breaker/push.many", loan, credential.Outcome{Kind: credential.Throttled, After: time.Hour})
	loan, err = s.Borrow(t.Context())
	require.NoError(t, err)
	require.Equal(t, "few", loan.ID())
	require.Equal(t, "all are in use", denied(t, s).Reason, "the shorter wait")
	back(t, n, "pool/push.fcm", loan, credential.Outcome{Kind: credential.Success})
}

func TestEachKeyHasItsLimit(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	hosts := n.PerKey("http-host", hourly, credential.Sliding, credential.Breaker{})
	for range 2 {
		loan, err := hosts("a.example").Borrow(t.Context())
		require.NoError(t, err)
		loan.Return(credential.Outcome{Kind: credential.Success})
	}
	require.Equal(t, "rate limit", denied(t, hosts("A.example")).Reason)
	loan, err := hosts("b.example").Borrow(t.Context())
	require.NoError(t, err)
	loan.Return(credential.Outcome{Kind: credential.Success})
}

func TestMistakesOfAPool(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	_, err := n.Choice(limits(hourly, 1, breaker))("bad name", []credential.Account{{ID: "a"}})
	require.ErrorIs(t, err, guard.ErrInvalid)
	_, err = n.Choice(limits(credential.Rate{}, credential.Unbounded, breaker))("push.fcm", []credential.Account{{ID: strings.Repeat("a", 128)}})
	require.ErrorContains(t, err, "at most 123 characters")
}

// TestRedisIsAway: while Redis is away, a call is denied with the reason "Redis is unavailable",
// and no pool can be declared.
func TestRedisIsAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	n := newLender(t, server.URL(), "t:", 0)
	s, err := n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	server.Kill()
	require.Equal(t, "Redis is unavailable", denied(t, s).Reason)
	_, err = n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.ErrorIs(t, err, guard.ErrUnavailable)
}

// TestCloseWaitsForLoansOnTheirWayBack: a process that stops waits until the accounts that its last
// jobs have just returned are free in Redis.
func TestCloseWaitsForLoansOnTheirWayBack(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	other := newLender(t, server.URL(), "t:", 0)
	o, err := redis.ParseURL(server.URL())
	require.NoError(t, err)
	rdb := redis.NewClient(o)
	n := lending.Lender{
		Guards: guard.New(rdb, guard.Prefix("t:")), MaxWait: time.Minute, Log: slog.New(slog.DiscardHandler),
	}
	s, err := n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	loan, err := s.Borrow(t.Context())
	require.NoError(t, err)
	require.NoError(t, rdb.Do(t.Context(), "CLIENT", "PAUSE", "300", "WRITE").Err())
	loan.Return(credential.Outcome{Kind: credential.Success})
	require.NoError(t, n.Guards.Close(t.Context()))
	require.NoError(t, rdb.Close())
	view, err := other.Guards.Inspect(t.Context(), "pool/smtp")
	require.NoError(t, err)
	require.Zero(t, view.Members[0].Held)
}

// TestALostLeaseIsRevoked: if the lease of a loan is lost, Revoked says so, so that the job does
// not use an account that others may have by now.
func TestALostLeaseIsRevoked(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s, err := n.Choice(limits(hourly, 1, breaker))("smtp", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	loan, err := s.Borrow(t.Context())
	require.NoError(t, err)
	require.Nil(t, loan.(credential.Revocable).Revoked())
	ended, end := context.WithCancel(t.Context())
	end()
	require.Error(t, n.Guards.Close(ended), "it loses the leases")
	require.Equal(t, "the lease was lost", loan.(credential.Revocable).Revoked().Reason)
	loan.Return(credential.Outcome{Kind: credential.Unused})
}

// TestAccountsThatNothingGuards: two accounts with neither a limit nor a breaker are lent in turn,
// although all four calls fail.
func TestAccountsThatNothingGuards(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s, err := n.Choice(limits(credential.Rate{}, credential.Unbounded, credential.Breaker{}))("push.fcm", []credential.Account{{ID: "a"}, {ID: "b"}})
	require.NoError(t, err)
	require.Equal(t, processor.Availability{Free: -1, PerSecond: math.Inf(1)}, credential.AvailabilityOf(s))
	var ids []string
	for range 4 {
		loan, err := s.Borrow(t.Context())
		require.NoError(t, err)
		ids = append(ids, loan.ID())
		loan.Return(credential.Outcome{Kind: credential.Failure})
	}
	require.Equal(t, []string{"a", "b", "a", "b"}, ids)
}
