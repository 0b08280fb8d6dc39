package bench

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
)

// lostReplies is the part of the replies that a lossy proxy drops.
const lostReplies = 0.05

// lossyProxy forwards connections to a Redis. While it is lossy it drops some of the replies and
// closes their connections, so that the client can't know whether its command was executed.
type lossyProxy struct {
	listener net.Listener
	lossy    atomic.Bool
	dropped  atomic.Int64
	stop     context.CancelFunc
	working  sync.WaitGroup
}

func startLossyProxy(ctx context.Context, target string) (*lossyProxy, error) {
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start a lossy proxy: %w", err)
	}
	p := &lossyProxy{listener: listener}
	ctx, p.stop = context.WithCancel(ctx)
	p.working.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			p.working.Go(func() { p.forward(ctx, client, target) })
		}
	})
	return p, nil
}

// forward forwards a connection until one side or ctx ends it.
func (p *lossyProxy) forward(ctx context.Context, client net.Conn, target string) {
	defer client.Close()
	var d net.Dialer
	server, err := d.DialContext(ctx, "tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	defer context.AfterFunc(ctx, func() {
		_, _ = client.Close(), server.Close() // to end the copies
	})()
	p.working.Go(func() {
		_, _ = io.Copy(server, client) // it ends when a side is closed
		_ = server.Close()
	})
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if err != nil {
			return
		}
		if p.lossy.Load() && rand.Float64() < lostReplies {
			p.dropped.Add(1)
			return
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}

// close closes all connections and waits until all goroutines have ended.
func (p *lossyProxy) close() {
	_ = p.listener.Close()
	p.stop()
	p.working.Wait()
}
