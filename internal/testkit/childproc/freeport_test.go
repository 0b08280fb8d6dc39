package childproc

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFreePort: FreePort returns a port that is free and outside the range of ephemeral ports, and
// does not return it again soon, even if nobody listens on it.
func TestFreePort(t *testing.T) {
	seen := map[int]bool{}
	for range 300 {
		port := FreePort()
		require.False(t, seen[port], "port %d twice", port)
		seen[port] = true
		require.Less(t, port, 32_768)
		l, err := net.Listen("tcp", loopback(port))
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}

// TestTakeBlock: while one block is taken, 100 further calls of takeBlock, as other processes make
// them, find a free block, and never this one.
func TestTakeBlock(t *testing.T) {
	first, lock := takeBlock()
	require.NotNil(t, lock)
	defer func() { require.NoError(t, lock.Close()) }()
	for range 100 {
		other, otherLock := takeBlock()
		require.NotNil(t, otherLock)
		require.NotEqual(t, first, other)
		require.NoError(t, otherLock.Close())
	}
}

// TestFreePortPassesOver: a port on which a process listens is passed over.
func TestFreePortPassesOver(t *testing.T) {
	port := FreePort()
	l, err := net.Listen("tcp", loopback(port))
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	ports.last = port - 1
	require.NotEqual(t, port, FreePort())
}
