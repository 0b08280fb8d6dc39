package roomload

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// entries generates the load of a task of kind Entries: new users, each of whom sends one POST
// …/ticket. They share Parallel TCP connections, which stay open between requests.
type entries struct {
	*generator
	next atomic.Int64 // user who enters next

	mu    sync.Mutex
	waits []float64
}

// run lets users enter over Parallel connections until the time of the task is over. With PerSecond
// > 0, calls have planned times, and a call's duration counts from its planned time.
func (e *entries) run(ctx context.Context) {
	began := time.Now()
	end := began.Add(time.Duration(e.Seconds * float64(time.Second)))
	var all sync.WaitGroup
	for c := range max(1, e.Parallel) {
		all.Go(func() {
			if err := e.connection(ctx, e.Brokers[c%len(e.Brokers)], began, end); err != nil && ctx.Err() == nil {
				e.wrong.addf("enter: %v", err)
			}
		})
	}
	all.Wait()
	e.counts.ended.Add(int64(e.Users))
}

// connection lets users enter over one connection.
func (e *entries) connection(ctx context.Context, addr string, began, end time.Time) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	answers := bufio.NewReader(conn)
	var waits []float64
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.waits = append(e.waits, waits...)
	}()
	for {
		i := e.next.Add(1) - 1
		due := time.Now()
		if e.PerSecond > 0 {
			due = began.Add(time.Duration(float64(i) / e.PerSecond * float64(time.Second)))
		}
		if i >= int64(e.Users) || due.After(end) {
			return nil
		}
		sleepUntil(ctx, due)
		user := e.Prefix + strconv.Itoa(e.First+int(i))
		if err := e.enter(conn, answers, addr, e.Events[int(i)%len(e.Events)], user); err != nil {
			return err
		}
		waits = append(waits, float64(time.Since(due).Microseconds())/1000)
		e.counts.entered.Add(1)
	}
}

func (e *entries) enter(conn net.Conn, answers *bufio.Reader, addr, event, user string) error {
	_, err := fmt.Fprintf(conn,
		"POST /events/%s/ticket HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n%s: %s\r\n\r\n",
		event, addr, e.Header, user)
	if err != nil {
		return err
	}
	resp, err := http.ReadResponse(answers, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("status %s for a new user", resp.Status)
	}
	return nil
}
