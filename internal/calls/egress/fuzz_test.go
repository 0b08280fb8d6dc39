package egress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func FuzzRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "0", "120", "-1", " 5", "18446744073709551615", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "soon"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		after, given := RetryAfter(header, time.Now())
		require.True(t, after >= 0 && after <= maxRetryAfter, "%s", after)
		require.False(t, !given && after != 0)
	})
}
