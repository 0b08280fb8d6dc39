package wm

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// NewFollower returns a watermill Subscriber without a consumer group: each subscription gets all
// messages of a stream, from the oldest on, and Redis stores no position for it. It deletes from
// the stream the messages before the last one that it has read, some time later, so a stream must
// have only one follower. Close leaves conn open.
func NewFollower(conn *redisx.Conn, log *slog.Logger) (message.Subscriber, error) {
	s, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client:                        &follower{UniversalClient: conn.Block, conn: conn},
		Unmarshaller:                  stream.Marshaller{},
		FanOutOldestId:                "0",
		BlockTime:                     redisx.MaxBlock,
		DisableIndefiniteInitialBlock: true, // otherwise a read without messages would outlast Close
		ShouldStopOnReadErrors:        func(error) bool { return false },
	}, watermill.NewSlogLogger(log))
	if err != nil {
		return nil, fmt.Errorf("create subscriber: %w", err)
	}
	return s, nil
}

// follower is the Redis client inside NewFollower's Subscriber. It changes two methods: Close does
// nothing, because watermill would close a shared client; XRead also trims the stream, because
// watermill deletes nothing, so the stream would grow without bound.
type follower struct {
	redis.UniversalClient // for reads that wait
	conn                  *redisx.Conn

	mu      sync.Mutex
	trimmed map[string]trimmed // by stream
}

// trimmed says up to which id a stream was trimmed, and when.
type trimmed struct {
	id string
	at time.Time
}

// trimInterval is the shortest time between two trims of a stream.
const trimInterval = 500 * time.Millisecond

func (*follower) Close() error { return nil }

// XRead trims the entries before the last one that was read, if that is due, and then reads the
// next ones. An error of the trim is ignored: a later call trims more.
func (f *follower) XRead(ctx context.Context, a *redis.XReadArgs) *redis.XStreamSliceCmd {
	if len(a.Streams) == 2 {
		stream, last := a.Streams[0], a.Streams[1]
		if f.due(stream, last) {
			_ = f.conn.Cmd.XTrimMinID(ctx, stream, last).Err()
		}
	}
	return f.UniversalClient.XRead(ctx, a)
}

// due reports whether XRead should trim the entries before last now, and notes that it does.
func (f *follower) due(stream, last string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.trimmed[stream]
	if last == "0" || was.id == last || time.Since(was.at) < trimInterval {
		return false
	}
	if f.trimmed == nil {
		f.trimmed = map[string]trimmed{}
	}
	f.trimmed[stream] = trimmed{last, time.Now()}
	return true
}
