package main

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// defaultCheck is the least interval at which asynq's polling of an empty queue is not yet what
// Redis does all day.
const defaultCheck = 10 * time.Millisecond

// settings of the peers; all others are as they come.
type settings struct {
	Senders     int           `json:"senders"` // 0: as many as make the peer fastest
	Concurrency int           `json:"asynq_concurrency"`
	Check       time.Duration `json:"asynq_task_check_interval_ns"` // where it is tuned; 0: as it comes
}

// peer is what a project needs to take part.
type peer struct {
	module  string // whose version is reported
	senders int    // with which it is fastest; measured
	// sender connects a producer. send returns when Redis has the job; it is called by
	// many goroutines.
	sender func(addr string) (send func(ctx context.Context, payload []byte) error, err error)
	// serve starts to call handle, by many goroutines where the peer does so, until the
	// process ends.
	serve func(addr string, s settings, handle func(payload []byte)) error
}

const (
	nameAsynq  = "asynq"
	nameStream = "watermill-redisstream"
	topic      = "noop"
)

var peers = map[string]peer{
	nameAsynq:  {"github.com/hibiken/asynq", 8, asynqSender, asynqServe},
	nameStream: {"github.com/ThreeDotsLabs/watermill-redisstream", 20, streamSender, streamServe},
}

func peerNames() []string { return slices.Sorted(maps.Keys(peers)) }

func asynqSender(addr string) (func(context.Context, []byte) error, error) {
	client := asynq.NewClient(asynq.RedisClientOpt{Addr: addr})
	return func(ctx context.Context, payload []byte) error {
		_, err := client.EnqueueContext(ctx, asynq.NewTask(topic, payload))
		return err
	}, client.Ping()
}

func asynqServe(addr string, s settings, handle func([]byte)) error {
	server := asynq.NewServer(asynq.RedisClientOpt{Addr: addr}, asynq.Config{
		Concurrency: s.Concurrency, TaskCheckInterval: s.Check, LogLevel: asynq.ErrorLevel,
	})
	return server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		handle(t.Payload())
		return nil
	}))
}

func streamSender(addr string) (func(context.Context, []byte) error, error) {
	client := redis.NewClient(&redis.Options{Addr: addr})
	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: client}, nil)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, payload []byte) error {
		return publisher.Publish(topic, message.NewMessageWithContext(ctx, watermill.NewUUID(), payload))
	}, client.Ping(context.Background()).Err()
}

func streamServe(addr string, _ settings, handle func([]byte)) error {
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: redis.NewClient(&redis.Options{Addr: addr}), ConsumerGroup: topic,
	}, nil)
	if err != nil {
		return err
	}
	messages, err := subscriber.Subscribe(context.Background(), topic)
	if err != nil {
		return err
	}
	go func() { // until the process ends
		for m := range messages {
			handle(m.Payload)
			m.Ack()
		}
	}()
	return nil
}
