package redisproc

import (
	"bufio"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echo starts a server that sends back each line that it receives, and also sends it to the
// returned channel.
func echo(t *testing.T) (addr string, lines chan string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	lines = make(chan string, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				for {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					lines <- line
					_, _ = io.WriteString(c, line) // fails only if the client is gone
				}
			}()
		}
	}()
	return l.Addr().String(), lines
}

func startProxy(t *testing.T) (*Proxy, chan string) {
	addr, lines := echo(t)
	p, err := NewProxy(addr)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p, lines
}

type conn struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func dial(t *testing.T, p *Proxy) *conn {
	c, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return &conn{c, t, bufio.NewReader(c)}
}

func (c *conn) say(line string) {
	_, err := io.WriteString(c, line)
	require.NoError(c.t, err)
}

func (c *conn) hears(line string) {
	got, err := c.r.ReadString('\n')
	require.NoError(c.t, err)
	require.Equal(c.t, line, got)
}

func (c *conn) isReset() {
	_, err := c.r.ReadString('\n')
	require.ErrorIs(c.t, err, syscall.ECONNRESET)
}

func TestReset(t *testing.T) {
	p, _ := startProxy(t)
	c := dial(t, p)
	c.say("one\n")
	c.hears("one\n")
	p.Reset()
	c.isReset()
	c = dial(t, p)
	c.say("two\n")
	c.hears("two\n")
}

func TestDelay(t *testing.T) {
	p, _ := startProxy(t)
	c := dial(t, p)
	const d = 50 * time.Millisecond
	p.Delay(d)
	before := time.Now()
	c.say("one\n")
	c.hears("one\n")
	require.GreaterOrEqual(t, time.Since(before), 2*d, "delayed in both directions")
}

func TestHalfOpen(t *testing.T) {
	p, lines := startProxy(t)
	c := dial(t, p)
	c.say("one\n")
	c.hears("one\n")
	<-lines
	p.HalfOpen()
	late := dial(t, p)
	c.say("two\n")
	late.say("three\n")
	for _, silent := range []*conn{c, late} {
		require.NoError(t, silent.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		_, err := silent.r.ReadString('\n')
		var timeout net.Error
		require.ErrorAs(t, err, &timeout)
		require.True(t, timeout.Timeout())
		require.NoError(t, silent.SetReadDeadline(time.Time{}))
	}
	p.Heal()
	c.isReset()
	late.isReset()
	require.Empty(t, lines, "the server has read nothing")
	c = dial(t, p)
	c.say("four\n")
	c.hears("four\n")
}

func TestDropReplies(t *testing.T) {
	p, lines := startProxy(t)
	p.DropReplies(0.3, rand.New(rand.NewPCG(1, 2)))
	heard, lost := 0, 0
	c := dial(t, p)
	for range 100 {
		c.say("x\n")
		<-lines // the server has executed the command although its reply was dropped
		if _, err := c.r.ReadString('\n'); err != nil {
			lost++
			c = dial(t, p)
			continue
		}
		heard++
	}
	require.Equal(t, lost, p.Dropped())
	require.InDelta(t, 30, lost, 20)
	require.Equal(t, 100, heard+lost)
	p.Heal()
	for range 50 {
		c.say("y\n")
		c.hears("y\n")
	}
}
