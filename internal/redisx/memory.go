package redisx

import (
	"context"
	"net"
	"sync"
)

// inMemory maps an address to the Dialer of a Redis server inside this process. An address has the
// form host:port, but nothing listens there.
var inMemory sync.Map // string → Dialer

// Dialer opens a connection to a Redis server.
type Dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// ServeInMemory makes Connect open connections to addr, a host:port that no real server has, with
// dial instead of the network, until remove is called. It is for tests in a bubble of
// testing/synctest, whose clock stands still while a goroutine waits for the network.
func ServeInMemory(addr string, dial Dialer) (remove func()) {
	inMemory.Store(addr, dial)
	return func() { inMemory.Delete(addr) }
}

// memoryDialer returns the dialer that ServeInMemory has registered for the address in o; nil if
// there is none, or o has several addresses.
func (o Options) memoryDialer() Dialer {
	if len(o.Addrs) != 1 {
		return nil
	}
	dial, _ := inMemory.Load(o.Addrs[0])
	d, _ := dial.(Dialer)
	return d
}
