package childproc

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFreePortIsBelowTheEphemeralRange(t *testing.T) {
	for range 100 {
		port := FreePort()
		require.Less(t, port, 32_768)
		l, err := net.Listen("tcp", loopback(port))
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}
