package main

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// peerOptions say which jobs this project and its peers run.
type peerOptions struct {
	options
	Jobs    int `json:"jobs"`
	Groups  int `json:"groups"`
	Rounds  int `json:"rounds"`
	Payload int `json:"payload_bytes"`
	Latency int `json:"latency_jobs"`

	rdb *redis.Client
}

const (
	asynqConcurrency = 20
	// asynqCheck is asynq's TaskCheckInterval for speed and the tuned figures: with its default, a
	// second, the server would sleep through the first second of a run.
	asynqCheck = 10 * time.Millisecond
)

// peer is another job queue. Only this module depends on it.
type peer struct {
	name, module string
	senders      int // goroutines of the producer; with this number it was fastest
	// sender returns a function that sends one job, and returns when Redis has stored it.
	sender func(o *peerOptions) (func(ctx context.Context, payload []byte) error, error)
	// serve starts a consumer, which calls handle for each job until stop is called. check is
	// asynq's TaskCheckInterval; 0: its default.
	serve func(o *peerOptions, check time.Duration, handle func(payload []byte)) (stop func(), err error)
}

const (
	nameOurs  = "bulkaction"
	nameAsynq = "asynq"
	peerTopic = "noop"
	groupsOf  = "groups_of_" // figures of small groups begin with this
)

var peers = []peer{
	{nameAsynq, "github.com/hibiken/asynq", 8, asynqSender, asynqServe},
	{"watermill-redisstream", "github.com/ThreeDotsLabs/watermill-redisstream", 20, streamSender, streamServe},
}

func asynqSender(o *peerOptions) (func(context.Context, []byte) error, error) {
	client := asynq.NewClientFromRedisClient(o.rdb)
	return func(ctx context.Context, payload []byte) error {
		_, err := client.EnqueueContext(ctx, asynq.NewTask(peerTopic, payload))
		return err
	}, nil
}

func asynqServe(o *peerOptions, check time.Duration, handle func([]byte)) (func(), error) {
	server := asynq.NewServerFromRedisClient(o.rdb, asynq.Config{
		Concurrency: asynqConcurrency, TaskCheckInterval: check, LogLevel: asynq.ErrorLevel,
	})
	return server.Shutdown, server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		handle(t.Payload())
		return nil
	}))
}

func streamSender(o *peerOptions) (func(context.Context, []byte) error, error) {
	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: o.rdb}, nil)
	return func(ctx context.Context, payload []byte) error {
		return publisher.Publish(peerTopic, message.NewMessageWithContext(ctx, watermill.NewUUID(), payload))
	}, err
}

func streamServe(o *peerOptions, _ time.Duration, handle func([]byte)) (func(), error) {
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{Client: o.rdb, ConsumerGroup: peerTopic}, nil)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	messages, err := subscriber.Subscribe(ctx, peerTopic)
	go func() { // until the subscriber closes messages
		for m := range messages {
			handle(m.Payload)
			m.Ack()
		}
	}()
	return stop, err
}

var peersBenchmark = benchmark{
	"peers", "Other job queues with the same work, in turn",
	func(f *flags) runner {
		p := &peerOptions{}
		f.int(&p.Jobs, "jobs", 100_000, 1, 0, "jobs of each run")
		f.int(&p.Groups, "groups", 20_000, 100, 0, "groups of one job, and of five, that we run besides")
		f.int(&p.Rounds, "rounds", 3, 1, 0, "measurements of each project; medians are shown")
		f.int(&p.Payload, "payload", 200, 10, 256<<10, "bytes of each job's payload")
		f.int(&p.Latency, "latency-jobs", 500, 1, 0, "jobs for the measurement of latency, at 100 a second")
		return func(ctx context.Context, o options) (any, error) {
			fleet := startRedis(ctx, o)
			defer fleet.close()
			o.redisURL = fleet.server.URL()
			rdb := redis.NewClient(&redis.Options{Addr: fleet.server.Addr(), PoolSize: 64})
			defer rdb.Close() //nolint:errcheck // it holds nothing to keep
			p.options, p.rdb = o, rdb
			return p.compare(ctx, fleet), nil
		}
	},
}

// peerFigures has the figures of one run, or medians or ratios of several runs, by the names of the
// figures of `throughput`. p50_ms and p99_ms are the time from the producer's call to the start of
// the job, at 100 jobs a second; tuned_p50_ms and tuned_p99_ms the same with settings that are tuned
// for latency, which only asynq has. groups_of_1_jobs_per_second and groups_of_5_jobs_per_second are
// ours with small groups; their ratios are to the peer's jobs_per_second.
type peerFigures map[string]float64

// compare measures our program and the peers in turn, on the same Redis.
func (p *peerOptions) compare(ctx context.Context, fleet *fleet) any {
	versions := moduleVersions()
	versions["redis"] = must(p.rdb.InfoMap(ctx, "server").Result())["Server"]["redis_version"]
	runs := map[string][]peerFigures{}
	for round := range p.Rounds {
		p.show(fmt.Sprintf("round %d of %d", round+1, p.Rounds), round, p.Rounds)
		check(p.rdb.FlushAll(ctx).Err())
		runs[nameOurs] = append(runs[nameOurs], p.ours(ctx))
		for _, one := range peers {
			check(attempt(one.name, func() { runs[one.name] = append(runs[one.name], p.measurePeer(ctx, fleet, one)) }))
		}
	}
	medians, ratios := map[string]peerFigures{}, map[string]peerFigures{}
	for name, of := range runs {
		medians[name] = medianFigures(of)
		if name != nameOurs {
			var each []peerFigures
			for i := range of {
				each = append(each, ratiosOf(runs[nameOurs][i], of[i]))
			}
			ratios[name] = medianFigures(each)
		}
	}
	return struct {
		*peerOptions
		Versions map[string]string        `json:"versions"`
		CPUs     int                      `json:"cpus"`
		Runs     map[string][]peerFigures `json:"runs"`
		Medians  map[string]peerFigures   `json:"medians"`
		Ratios   map[string]peerFigures   `json:"ratios"` // by peer: ours / the peer's, medians of the rounds' ratios
	}{p, versions, runtime.NumCPU(), runs, medians, ratios}
}

func medianFigures(runs []peerFigures) peerFigures {
	all := map[string][]float64{}
	for _, run := range runs {
		for name, figure := range run {
			all[name] = append(all[name], figure)
		}
	}
	return mediansOf(all)
}

// ratiosOf returns our figures / the peer's figures. Our latencies are also divided by the peer's
// tuned latencies, and our speeds with small groups by the peer's speed.
func ratiosOf(ours, peers peerFigures) peerFigures {
	out := peerFigures{}
	for name, figure := range peers {
		out[name] = ratio(ours[strings.TrimPrefix(name, "tuned_")], figure)
	}
	for name, figure := range ours {
		if strings.HasPrefix(name, groupsOf) {
			out[name] = ratio(figure, peers["jobs_per_second"])
		}
	}
	return out
}

func (p *peerOptions) ours(ctx context.Context) peerFigures {
	t := runThroughput(ctx, p.options, ThroughputLoad{
		Jobs: p.Jobs, Tenants: 10, Groups: 1, MessagesJobs: perMessage, PayloadBytes: p.Payload, Partitions: 1,
	})
	waits := runLatency(ctx, p.options, 100, max(1, p.Latency/100)).PublishedStarted
	out := peerFigures{
		"jobs_per_second": t.JobsPerSecond, "redis_cpu_us_per_job": t.RedisCPUPerJob,
		"process_cpu_us_per_job": t.ProcessCPUPerJob, "redis_bytes_per_queued_job": t.BytesPerQueuedJob,
		"p50_ms": waits.P50MS, "p99_ms": waits.P99MS,
	}
	compared := compareOptions{options: p.options, groups: p.Groups}
	for _, v := range compareVariants {
		if v.size > 0 {
			v.payload = p.Payload
			small := roundFigures{}
			compared.measureGroups(ctx, p.program, v, small)
			out[fmt.Sprintf("%s%d_jobs_per_second", groupsOf, v.size)] = small[figureSpeed]
		}
	}
	return out
}

// measurePeer measures all figures of a peer, whose producer and consumer run in this process:
// memory, then speed and CPU time, then latency. It empties Redis before each of these.
func (p *peerOptions) measurePeer(ctx context.Context, fleet *fleet, of peer) peerFigures {
	const queued = 20_000
	check(p.rdb.FlushAll(ctx).Err())
	p.produce(ctx, of, warmJobs) // creates what all jobs share, such as a script
	memory := fleet.measure(ctx, func() { p.produce(ctx, of, queued) }).redis.memory

	check(p.rdb.FlushAll(ctx).Err())
	var done atomic.Int64
	handled := make(chan time.Time, 2)
	stop := must(of.serve(p, asynqCheck, func([]byte) {
		if n := int(done.Add(1)); n == warmJobs || n == warmJobs+p.Jobs {
			handled <- time.Now()
		}
	}))
	p.produce(ctx, of, warmJobs)
	<-handled
	var took time.Duration
	used := fleet.measure(ctx, func() {
		began := time.Now()
		p.produce(ctx, of, p.Jobs)
		took = (<-handled).Sub(began)
	})
	stop()
	out := peerFigures{
		"jobs_per_second": float64(p.Jobs) / took.Seconds(), "redis_cpu_us_per_job": perJob(used.redis.cpu, p.Jobs),
		"process_cpu_us_per_job": perJob(used.processCPU(), p.Jobs), "redis_bytes_per_queued_job": float64(memory) / queued,
	}
	out["p50_ms"], out["p99_ms"] = p.latency(ctx, of, 0)
	if of.name == nameAsynq { // the other peers block in Redis and need no tuning
		out["tuned_p50_ms"], out["tuned_p99_ms"] = p.latency(ctx, of, asynqCheck)
	}
	return out
}

// produce sends n jobs as fast as the peer can.
func (p *peerOptions) produce(ctx context.Context, of peer, n int) {
	send := must(of.sender(p))
	senders, ctx := errgroup.WithContext(ctx)
	senders.SetLimit(of.senders)
	for i := range n {
		senders.Go(func() error { return send(ctx, peerPayload(i, p.Payload)) })
	}
	check(senders.Wait())
}

// latency returns the median and the 99th percentile of the ms from the producer's call to the start
// of the handler.
func (p *peerOptions) latency(ctx context.Context, of peer, interval time.Duration) (p50, p99 float64) {
	check(p.rdb.FlushAll(ctx).Err())
	send := must(of.sender(p))
	sent, waits, all := make([]time.Time, p.Latency), make([]float64, p.Latency), make(chan struct{})
	var done atomic.Int64
	stop := must(of.serve(p, interval, func(payload []byte) {
		now := time.Now()
		n, _ := strconv.Atoi(string(payload[:numberDigits]))
		if waits[n] == 0 { // a peer may run a job twice
			if waits[n] = millis(now.Sub(sent[n])); int(done.Add(1)) == p.Latency {
				close(all)
			}
		}
	}))
	defer stop()
	for i := range sent {
		check(redisx.Sleep(ctx, 10*time.Millisecond))
		sent[i] = time.Now()
		check(send(ctx, peerPayload(i, p.Payload)))
	}
	select {
	case <-all:
	case <-time.After(stallTimeout):
		failf("%d jobs of %d were handled", done.Load(), p.Latency)
	}
	return percentile(waits, 50), percentile(waits, 99)
}

const numberDigits = 10 // of the job's number, with which each payload begins

// peerPayload returns a job's number, filled up to size bytes.
func peerPayload(n, size int) []byte {
	return append(fmt.Appendf(nil, "%0*d", numberDigits, n), bytes.Repeat([]byte("x"), size-numberDigits)...)
}

// moduleVersions returns the version of Go, and the versions of the peers that this program was
// built with.
func moduleVersions() map[string]string {
	out := map[string]string{"go": runtime.Version()}
	info, _ := debug.ReadBuildInfo()
	for _, dep := range info.Deps {
		for _, p := range peers {
			if dep.Path == p.module {
				out[p.name] = dep.Version
			}
		}
	}
	return out
}
