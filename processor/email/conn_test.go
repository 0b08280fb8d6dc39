package email_test

import (
	"context"
	"net"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/email"
)

func TestConnectionRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := config(t, listener.Addr().String())
	require.NoError(t, listener.Close())

	p := start(t, c)
	for range 2 * c.MaxConnections { // a failed connection attempt gives its slot back
		_, err = p.Process(t.Context(), job(1, toBob))
		v := processor.Classify(err)
		require.Equal(t, processor.RetryLater, v.Kind)
		require.Equal(t, email.CodeUnreachable, v.Code)
	}
}

// serve runs a scripted mail server and returns its address. It calls script for each connection;
// the first connection has number 1.
func serve(t *testing.T, script func(c *textproto.Conn, number int)) (addr string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for number := 1; ; number++ {
			socket, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				c := textproto.NewConn(socket)
				script(c, number)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return listener.Addr().String()
}

// answer is a step of the scripted server: it reads one SMTP command of the client, sends reply and
// returns the command.
func answer(c *textproto.Conn, reply string) string {
	command, err := c.ReadLine()
	if err != nil {
		return ""
	}
	_ = c.PrintfLine("%s", reply)
	return command
}

func greet(c *textproto.Conn) {
	_ = c.PrintfLine("220 hello")
	answer(c, "250 hello")
}

func takeMail(c *textproto.Conn) (ok bool) {
	for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
		answer(c, reply)
	}
	_, err := c.ReadDotBytes()
	_ = c.PrintfLine("250 taken")
	return err == nil
}

func TestServerThatHungUpOnAnIdleConnection(t *testing.T) {
	for name, lastCommand := range map[string]func(*textproto.Conn){
		"closed":       func(*textproto.Conn) {},
		"421 on MAIL":  func(c *textproto.Conn) { answer(c, "421 too long idle") },
		"421 unasked":  func(c *textproto.Conn) { _ = c.PrintfLine("421 shutting down") },
		"reset midway": func(c *textproto.Conn) { _, _ = c.ReadLine() },
	} {
		t.Run(name, func(t *testing.T) {
			var taken, connections atomic.Int64
			left := make(chan struct{}, 2)
			addr := serve(t, func(c *textproto.Conn, number int) {
				connections.Add(1)
				greet(c)
				if takeMail(c) {
					taken.Add(1)
				}
				left <- struct{}{}
				if number == 1 {
					lastCommand(c)
					return
				}
				_, _ = c.ReadLine() // QUIT
			})
			p, err := email.New(config(t, addr))
			require.NoError(t, err)
			for i := range int64(2) {
				_, err := p.Process(t.Context(), job(i, toBob))
				require.NoError(t, err)
				<-left
			}
			require.EqualValues(t, 2, taken.Load())
			require.EqualValues(t, 2, connections.Load())
			require.NoError(t, p.Close())
		})
	}
}

// TestLostAnswerIsARetryAndSendsNothingTwice: the server closes the connection after the final dot
// of the second job's mail, without an answer. The client can't know whether the server took the
// mail: the job is to be retried, and the processor itself does not send the mail again.
func TestLostAnswerIsARetryAndSendsNothingTwice(t *testing.T) {
	var bodies atomic.Int64
	addr := serve(t, func(c *textproto.Conn, number int) {
		greet(c)
		if number == 1 && !takeMail(c) {
			return
		}
		for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
			answer(c, reply)
		}
		if _, err := c.ReadDotBytes(); err == nil {
			bodies.Add(1)
		}
	})
	p := start(t, config(t, addr))
	_, err := p.Process(t.Context(), job(1, toBob))
	require.NoError(t, err)
	_, err = p.Process(t.Context(), job(2, toBob)) // on the same connection
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, email.CodeUnreachable, v.Code)
	require.EqualValues(t, 1, bodies.Load())
}

func TestRepliesThatEndTheConnection(t *testing.T) {
	tests := map[string]struct {
		script func(*textproto.Conn)
		kind   processor.Kind
		code   string
	}{
		"554 greeting": {func(c *textproto.Conn) { _ = c.PrintfLine("554 not you") }, processor.RetryLater, "SMTP_554"},
		"421 greeting": {func(c *textproto.Conn) { _ = c.PrintfLine("421 too busy") }, processor.RetryLater, "SMTP_421"},
		"421 on a new connection": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "421 too busy")
		}, processor.RetryLater, "SMTP_421"},
		"nonsense": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "hello?")
		}, processor.RetryLater, email.CodeUnreachable},
		"RSET refused": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "250 sender")
			answer(c, "550 unknown")
			answer(c, "502 what is RSET?")
		}, processor.Fail, "SMTP_550"},
		"DATA refused": {func(c *textproto.Conn) {
			greet(c)
			answer(c, "250 sender")
			answer(c, "250 recipient")
			answer(c, "451 not now")
		}, processor.RetryLater, "SMTP_451"},
		"mail refused": {func(c *textproto.Conn) {
			greet(c)
			for _, reply := range []string{"250 sender", "250 recipient", "354 go on"} {
				answer(c, reply)
			}
			_, _ = c.ReadDotBytes()
			_ = c.PrintfLine("554 this is spam")
		}, processor.Fail, "SMTP_554"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, func(c *textproto.Conn, _ int) { tt.script(c) })
			_, err := start(t, config(t, addr)).Process(t.Context(), job(1, toBob))
			v := processor.Classify(err)
			require.Equal(t, tt.kind, v.Kind, "%v", err)
			require.Equal(t, tt.code, v.Code)
		})
	}
}

func TestHangEndsWithTheContext(t *testing.T) {
	for name, steps := range map[string]int{"no greeting": 0, "no answer to EHLO": 1, "no answer to MAIL": 2, "no answer to RCPT": 3} {
		t.Run(name, func(t *testing.T) {
			hanging := make(chan struct{})
			addr := serve(t, func(c *textproto.Conn, _ int) {
				replies := []string{"250 hello", "250 sender", "250 recipient"}
				if steps > 0 {
					_ = c.PrintfLine("220 hello")
				}
				for _, reply := range replies[:max(steps-1, 0)] {
					answer(c, reply)
				}
				close(hanging)
				for { // until the client closes the connection
					if _, err := c.ReadLine(); err != nil {
						return
					}
				}
			})
			p := start(t, config(t, addr))
			ctx, cancel := context.WithCancelCause(t.Context())
			go func() {
				<-hanging
				cancel(nil)
			}()
			_, err := p.Process(ctx, job(1, toBob))
			require.ErrorIs(t, err, context.Canceled)
		})
	}
}

func TestHangPastTheDeadlineIsATimeout(t *testing.T) {
	addr := serve(t, func(c *textproto.Conn, _ int) {
		greet(c)
		for {
			if _, err := c.ReadLine(); err != nil {
				return
			}
		}
	})
	p := start(t, config(t, addr))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := p.Process(ctx, job(1, toBob))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, processor.CodeTimeout, v.Code)
}

func TestHangPastItsOwnTimeoutIsARetry(t *testing.T) {
	addr := serve(t, func(c *textproto.Conn, _ int) { _, _ = c.ReadLine() })
	c := config(t, addr)
	c.Timeout = 50 * time.Millisecond
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	v := processor.Classify(err)
	require.Equal(t, processor.RetryLater, v.Kind)
	require.Equal(t, email.CodeUnreachable, v.Code)
}

func TestIdleConnectionEndsWithQUIT(t *testing.T) {
	lastCommand := make(chan string, 1)
	addr := serve(t, func(c *textproto.Conn, _ int) {
		greet(c)
		takeMail(c)
		lastCommand <- answer(c, "221 bye")
	})
	c := config(t, addr)
	c.IdleTimeout = time.Millisecond
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	require.NoError(t, err)
	require.Equal(t, "QUIT", <-lastCommand)
}

func TestHELO(t *testing.T) {
	said := make(chan string, 1)
	addr := serve(t, func(c *textproto.Conn, _ int) {
		_ = c.PrintfLine("220 hello")
		said <- answer(c, "554 no")
	})
	c := config(t, addr)
	c.HELO = "mail.example.com"
	_, err := start(t, c).Process(t.Context(), job(1, toBob))
	require.Error(t, err)
	require.True(t, strings.HasSuffix(<-said, " mail.example.com"))
}
