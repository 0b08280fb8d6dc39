package childproc

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Range of the ports that FreePort returns. It lies below the range from which systems choose the
// local ports of outgoing connections and of listeners on port 0, so that these can't take a port
// while a child starts or is down.
const (
	lowest, highest = 10_000, 32_000
	blockSize       = 500
)

// ports is the block of ports that only this process uses, until it ends.
var ports struct {
	sync.Mutex
	first, last int          // the first port of the block; the one that was returned last
	lock        net.Listener // listens on the first port, so that no other process takes the block
}

// FreePort returns a loopback port for the server of a child. No process listens on it now. While
// this process runs, FreePort in other processes does not return this port, and in this process
// only after hundreds of others: the child may start a minute later. Only if all blocks of ports
// are taken, the port may be returned again at any time.
func FreePort() int {
	ports.Lock()
	defer ports.Unlock()
	if ports.lock == nil {
		ports.first, ports.lock = takeBlock()
		ports.last = ports.first
	}
	for {
		ports.last++
		if ports.last == ports.first+blockSize {
			ports.last = ports.first + 1
		}
		l, err := net.Listen("tcp", loopback(ports.last))
		if err == nil {
			_ = l.Close()
			return ports.last
		}
	}
}

// takeBlock returns the first port of a block that no other process has. It listens on this port to
// lock the block; lock is the listener. If all blocks are taken, lock is nil, and the process
// shares a block with another one.
func takeBlock() (first int, lock net.Listener) {
	for _, i := range rand.Perm((highest - lowest) / blockSize) {
		first = lowest + i*blockSize
		if l, err := net.Listen("tcp", loopback(first)); err == nil {
			return first, l
		}
	}
	return first, nil
}

// FreeAddr returns the loopback address with a port of [FreePort], as host:port.
func FreeAddr() string { return loopback(FreePort()) }

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
