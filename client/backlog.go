package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrBacklogFull says that the server is behind with what was published, and nothing was added. It is a *BacklogError
// when the ingest stream is long, and wraps Redis's answer when Redis is out of memory.
var ErrBacklogFull = errors.New("ingest backlog full")

// BacklogError tells how long the backlog is and when to look again.
type BacklogError struct {
	Length, Max int64 // messages
	Wait        time.Duration
}

func (e *BacklogError) Error() string {
	return fmt.Sprintf("%s: %d messages, at most %d: try again in %s", ErrBacklogFull, e.Length, e.Max, e.Wait)
}

// Is makes the error an ErrBacklogFull.
func (e *BacklogError) Is(target error) bool { return target == ErrBacklogFull }

const (
	defaultMaxBacklog = 100_000
	backlogFreshness  = 500 * time.Millisecond
	backlogWait       = time.Second
)

// backlog watches the length of the ingest stream, looking at most once in backlogFreshness.
type backlog struct {
	client redis.Cmdable
	stream string
	max    int64
	now    func() time.Time

	mu     sync.Mutex
	length int64 // as last seen, and what was let in since
	seen   time.Time
}

// admit makes room for n messages or returns a *BacklogError. More than fit at all are let in when the stream is
// empty, since waiting could not help them.
func (b *backlog) admit(ctx context.Context, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.seen.IsZero() || now.Sub(b.seen) > backlogFreshness {
		length, err := b.client.XLen(ctx, b.stream).Result()
		if err != nil {
			return fmt.Errorf("look at backlog: %w", err)
		}
		b.length, b.seen = length, now
	}
	if b.length+min(n, b.max) > b.max {
		return &BacklogError{Length: b.length, Max: b.max, Wait: backlogWait}
	}
	b.length += n
	return nil
}
