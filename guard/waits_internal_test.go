package guard

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestAHeartbeatEndsNoLeaseThatItsCallHolds: after a call has got a lock, the test delivers the
// grant to the client once more, as a heartbeat may do. The lease is still held.
func TestAHeartbeatEndsNoLeaseThatItsCallHolds(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		_, c := newTestClient(t, url, prefix)
		lock := c.Lock("k")
		lease, err := lock.Lock(t.Context())
		require.NoError(t, err)

		c.waits.deliver(lease.call, answer{verdict: "GRANTED", fence: lease.fence}, time.Now())
		_, other := newTestClient(t, url, prefix)
		_, err = other.Lock("k").TryLock(t.Context())
		require.ErrorIs(t, err, ErrDenied, "the lease is held")
		require.NoError(t, lease.Release(t.Context(), Neutral))
	})
}
