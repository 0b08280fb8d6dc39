package lending_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/calls/lending"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/processor/credential"
)

var (
	failure = credential.Outcome{Kind: credential.Failure}
	success = credential.Outcome{Kind: credential.Success}
)

func unlimited(t *testing.T, n lending.Lender, b credential.Breaker) credential.Source {
	t.Helper()
	s, err := n.Choice(limits(credential.Rate{}, credential.Unbounded, b))("push.fcm", []credential.Account{{ID: "a"}})
	require.NoError(t, err)
	return s
}

func borrow(t *testing.T, s credential.Source, n int) []credential.Loan {
	t.Helper()
	loans := make([]credential.Loan, n)
	for i := range loans {
		var err error
		loans[i], err = s.Borrow(t.Context())
		require.NoError(t, err)
	}
	return loans
}

func giveBack(o credential.Outcome, loans ...credential.Loan) {
	for _, l := range loans {
		l.Return(o)
	}
}

// TestLateOutcomesAreNoProbes: 397 calls that began before the breaker opened succeed afterwards.
// That does not close it: when it is half-open, at most two probes are lent.
func TestLateOutcomesAreNoProbes(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s := unlimited(t, n, credential.Breaker{Failures: 3, OpenFor: 300 * time.Millisecond, Successes: 2})
	loans := borrow(t, s, 400) // at least four permissions
	giveBack(failure, loans[397:]...)
	require.Equal(t, "circuit breaker open", denied(t, s).Reason)
	giveBack(success, loans[:397]...)
	var probes []credential.Loan
	require.Eventually(t, func() bool {
		l, err := s.Borrow(t.Context())
		if err == nil {
			probes = append(probes, l)
		}
		return err == nil
	}, patience, time.Millisecond)
	for range 10 {
		if l, err := s.Borrow(t.Context()); err == nil {
			probes = append(probes, l)
		}
	}
	require.LessOrEqual(t, len(probes), 2)
	giveBack(success, probes...)
}

// TestLateFailuresDoNotCount: a failure of a call that began before the breaker opened does not
// keep the breaker open for longer.
func TestLateFailuresDoNotCount(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s := unlimited(t, n, breaker)
	loans := borrow(t, s, 200) // at least two permissions
	giveBack(failure, loans[197:]...)
	first := denied(t, s)
	giveBack(failure, loans[0])
	require.LessOrEqual(t, denied(t, s).After, first.After)
	giveBack(success, loans[1:197]...)
}

// TestAFailureAfterAThrottle: after a throttle is over, the breaker counts failures as before: one
// failure does not open it.
func TestAFailureAfterAThrottle(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s, other := unlimited(t, n, breaker), unlimited(t, newLender(t, url, prefix, 0), breaker)
	back(t, n, "breaker/push.a", borrow(t, s, 1)[0],
		credential.Outcome{Kind: credential.Throttled, After: 100 * time.Millisecond})
	require.Equal(t, "rate limit", denied(t, other).Reason)
	var loan credential.Loan
	require.Eventually(t, func() (lent bool) {
		l, err := other.Borrow(t.Context())
		if err == nil {
			loan = l
		}
		return err == nil
	}, patience, time.Millisecond)
	back(t, n, "breaker/push.a", loan, failure)
	giveBack(success, borrow(t, other, 1)...)
}

// TestMoreCallsThanProbes: while all probes are out, further calls are denied. The probes that
// succeed still close the breaker.
func TestMoreCallsThanProbes(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	n := newLender(t, url, prefix, 0)
	s := unlimited(t, n, credential.Breaker{Failures: 1, OpenFor: 100 * time.Millisecond, Successes: 2})
	giveBack(failure, borrow(t, s, 1)...)
	var probes []credential.Loan
	require.Eventually(t, func() bool {
		l, err := s.Borrow(t.Context())
		if err == nil {
			probes = append(probes, l)
		}
		return len(probes) == 2
	}, patience, time.Millisecond)
	require.Equal(t, "circuit breaker open", denied(t, s).Reason)
	giveBack(success, probes...)
	require.Eventually(t, func() bool {
		view, err := n.Guards.Inspect(t.Context(), "breaker/push.a")
		return err == nil && view.Members[0].Breaker == "closed"
	}, patience, time.Millisecond)
}
