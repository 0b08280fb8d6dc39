package redisproc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

const (
	probeInterval = 5 * time.Millisecond
	probeTimeout  = 250 * time.Millisecond
	tailBytes     = 16 << 10
)

// awaitReady waits until the child answers at addr as a Redis server. If another process has taken
// the port, its answers don't count, unless it demands a password (see probe). awaitReady returns
// an error if the child or ctx ends first.
func awaitReady(ctx context.Context, addr string, child *childproc.Child) error {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	for {
		err := probe(ctx, addr, child.PID())
		if err == nil {
			return nil
		}
		select {
		case <-child.Done():
			return errors.New("it ended at once")
		case <-ctx.Done():
			return fmt.Errorf("it does not answer (%w): %w", err, ctx.Err())
		case <-tick.C:
		}
	}
}

// probe returns nil if the server at addr is the process pid and has loaded its data, or if the
// server demands a password: then the pid can't be checked. It writes the Redis protocol itself, so
// that a failed attempt leaves no connection pool and no log line.
func probe(ctx context.Context, addr string, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	if _, err := io.WriteString(conn, "INFO\r\n"); err != nil {
		return err
	}
	r := bufio.NewReader(conn)
	head, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	if strings.HasPrefix(head, "-NOAUTH") {
		return nil // the server asks for a password: it is running, and more can't be checked
	}
	size, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(head, "$")))
	if err != nil {
		return fmt.Errorf("it answered %q", strings.TrimSpace(head))
	}
	info := make([]byte, size)
	if _, err := io.ReadFull(r, info); err != nil {
		return err
	}
	switch text := string(info); {
	case !strings.Contains(text, fmt.Sprintf("\r\nprocess_id:%d\r\n", pid)):
		return errPortTaken
	case strings.Contains(text, "\r\nloading:1\r\n"):
		return errors.New("it is loading its data")
	}
	return nil
}

// Log returns the last part of the server's log; restarts append to it.
func (s *Server) Log() string { return s.logFrom(max(0, s.logSize()-tailBytes)) }

func (s *Server) logFrom(offset int64) string {
	text, err := io.ReadAll(io.NewSectionReader(s.log, offset, tailBytes))
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Sprintf("%s\n(read redis-server's log: %v)", text, err)
	}
	return string(text)
}

func (s *Server) logSize() int64 {
	info, err := s.log.Stat()
	if err != nil {
		return 0
	}
	return info.Size()
}
