package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrBacklogFull says that the server is behind with what was published, and nothing was added.
// It is a *BacklogError when the ingest stream is long, and wraps Redis's answer when Redis is
// out of memory.
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
	backlogMaxAge     = 500 * time.Millisecond
	backlogMinWait    = time.Second // the least
	backlogMaxWait    = time.Minute
)

// backlog watches the length of the ingest stream, looking at most once in backlogFreshness.
type backlog struct {
	client redis.Cmdable
	stream string
	max    int64
	now    func() time.Time

	mu        sync.Mutex
	length    int64 // as last seen, and what was let in since
	readAt    time.Time
	drainRate float64   // messages a second that leave more than others add, smoothed
	freeAt    time.Time // when there is room for all that were refused so far
}

// accept makes room for n messages or returns a *BacklogError. More than fit at all are let in when
// the stream is empty, since waiting could not help them.
func (b *backlog) accept(ctx context.Context, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.readAt.IsZero() || now.Sub(b.readAt) > backlogMaxAge {
		length, err := b.client.XLen(ctx, b.stream).Result()
		if err != nil {
			return fmt.Errorf("look at backlog: %w", err)
		}
		if !b.readAt.IsZero() {
			b.drainRate += (max(0, float64(b.length-length)/now.Sub(b.readAt).Seconds()) - b.drainRate) / 2
		}
		b.length, b.readAt = length, now
	}
	if b.length+min(n, b.max) > b.max {
		return &BacklogError{Length: b.length, Max: b.max, Wait: b.retryAfter(min(n, b.max))}
	}
	b.length += n
	return nil
}

// retryAfter is how long n messages that find no room have to, behind those that were refused before:
// told the same, all would come back at once.
func (b *backlog) retryAfter(n int64) time.Duration {
	if b.drainRate < 1 {
		return backlogMinWait
	}
	now, ahead := b.now(), n
	if b.freeAt.Before(now) {
		b.freeAt, ahead = now, n+b.length-b.max
	}
	b.freeAt = b.freeAt.Add(time.Duration(float64(ahead) / b.drainRate * float64(time.Second)))
	if latest := now.Add(backlogMaxWait); b.freeAt.After(latest) {
		b.freeAt = latest
	}
	return max(backlogMinWait, b.freeAt.Sub(now))
}
