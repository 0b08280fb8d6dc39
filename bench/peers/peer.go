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

// defaultCheckInterval is a short interval at which asynq's polling of an empty queue still costs
// Redis little.
const defaultCheckInterval = 10 * time.Millisecond

// settings of the peers. All other settings have the peers' own defaults.
type settings struct {
	Senders     int `json:"senders"` // 0: the number with which the peer is fastest
	Concurrency int `json:"asynq_concurrency"`
	// how often asynq looks for jobs, while speed and the tuned figures are measured; the other
	// latencies have asynq's default
	CheckInterval time.Duration `json:"asynq_task_check_interval_ns"`
}

// peer is another project to compare with.
type peer struct {
	module  string // Go module, whose version is reported
	senders int    // goroutines of the producer; with this number it was fastest
	// sender connects a producer. send returns when Redis has stored the job. Several goroutines
	// may call it.
	sender func(addr string) (send func(ctx context.Context, payload []byte) error, err error)
	// serve starts a consumer and returns when it runs. The consumer calls handle for each job
	// until the process ends; several goroutines may call it.
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
		Concurrency: s.Concurrency, TaskCheckInterval: s.CheckInterval, LogLevel: asynq.ErrorLevel,
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
	go func() { // runs until the process ends
		for m := range messages {
			handle(m.Payload)
			m.Ack()
		}
	}()
	return nil
}
