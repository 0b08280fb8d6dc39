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

// defaultCheckInterval is the default of --asynq-check: how often asynq looks for jobs in an empty
// queue while speed and the tuned figures are measured. It is so short that latency is low, and
// long enough that the polling costs Redis little.
const defaultCheckInterval = 10 * time.Millisecond

// settings are settings of the peers that this program sets. For all others it uses the peers'
// defaults.
type settings struct {
	Senders     int `json:"senders"` // 0: the number with which the peer is fastest
	Concurrency int `json:"asynq_concurrency"`
	// CheckInterval is how often asynq looks for jobs while speed and the tuned figures are
	// measured. The other latencies are measured with asynq's default.
	CheckInterval time.Duration `json:"asynq_task_check_interval_ns"`
}

// peer is another project to compare with.
type peer struct {
	module  string // Go module, whose version is reported
	senders int    // goroutines of the producer; with this number it was fastest
	// sender connects a producer to Redis. It returns a function that sends one job, and returns
	// when Redis has stored it. Several goroutines may call send.
	sender func(addr string) (send func(ctx context.Context, payload []byte) error, err error)
	// serve starts a consumer and returns when the consumer runs. The consumer calls handle for
	// each job until the process ends, maybe from several goroutines.
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
