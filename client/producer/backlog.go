package producer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// ErrBacklogFull says that too many published messages wait for the server. When the ingest stream
// is too long, the error is a *BacklogError, and nothing was published. When Redis is out of
// memory, it wraps Redis's answer, and earlier messages of the same call may have been published.
var ErrBacklogFull = errors.New("ingest backlog full")

// BacklogError says how long the ingest stream is and when the caller should try again.
type BacklogError struct {
	Length, Max int64 // messages in the stream (approximately), and their limit
	Wait        time.Duration
}

func (e *BacklogError) Error() string {
	return fmt.Sprintf("%s: %d messages, at most %d: try again in %s", ErrBacklogFull, e.Length, e.Max, e.Wait)
}

// Is makes errors.Is find ErrBacklogFull in the error.
func (e *BacklogError) Is(target error) bool { return target == ErrBacklogFull }

const (
	defaultMaxBacklog = 100_000
	backlogMaxAge     = 500 * time.Millisecond
	backlogMinWait    = time.Second
	backlogMaxWait    = time.Minute
)

// backlog refuses messages with a *BacklogError while the ingest stream is too long. It never
// waits. The limit is approximate: the length is read again only after backlogMaxAge, and in
// between only the messages of this producer are counted.
type backlog struct {
	client redis.Cmdable
	stream string
	max    int64
	now    func() time.Time

	mu     sync.Mutex
	length int64 // length at the last read, plus the messages accepted since then
	readAt time.Time
	// drainRate estimates how many messages per second the server takes from the stream, smoothed
	// over several reads. It is too low while other producers add messages.
	drainRate float64
	// freeAt is when the stream will have space for all messages that were refused so far, at most
	// backlogMaxWait ahead.
	freeAt time.Time
}

// accept counts n messages as published, or returns a *BacklogError when the stream has no space
// for them. If a message is not published after all, it stays counted until the next read of the
// length. More messages than the limit are accepted only into an empty stream: waiting would not
// help them.
func (b *backlog) accept(ctx context.Context, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.readAt.IsZero() || now.Sub(b.readAt) > backlogMaxAge {
		length, err := b.client.XLen(ctx, b.stream).Result()
		if err != nil {
			return fmt.Errorf("read length of ingest stream: %w", err)
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

// retryAfter returns how long a caller with n refused messages should wait. It moves freeAt, so
// each refused caller gets a later time than the caller before it, up to backlogMaxWait: so callers
// do not all come back at once. While the stream does not drain, it returns backlogMinWait.
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
