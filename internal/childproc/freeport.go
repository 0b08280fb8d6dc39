package childproc

import (
	"math/rand/v2"
	"net"
	"strconv"
)

// FreePort returns a port of the loopback address on which no process listens now, for the server
// of a child. It lies below the range from which systems choose the local ports of outgoing
// connections and of listeners on port 0. So those can't occupy it while the child starts, or is
// down.
func FreePort() int {
	const lowest, highest = 10_000, 32_000
	for {
		port := lowest + rand.IntN(highest-lowest)
		l, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		_ = l.Close()
		return port
	}
}

// FreeAddr returns the loopback address with a port of [FreePort], as host:port.
func FreeAddr() string { return loopback(FreePort()) }

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
