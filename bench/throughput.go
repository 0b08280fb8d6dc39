package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// ThroughputOptions say how much is run.
type ThroughputOptions struct {
	FleetOptions
	Jobs    int
	Tenants int
	Batch   int // jobs a message
	Payload int // bytes
}

// Throughput is what came of it. Produced and processed happen at once.
type Throughput struct {
	Jobs                int               `json:"jobs"`
	Tenants             int               `json:"tenants"`
	ElapsedSeconds      float64           `json:"elapsed_seconds"`
	JobsPerSecond       float64           `json:"jobs_per_second"`
	RedisCPUPerJob      float64           `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob    float64           `json:"process_cpu_us_per_job"` // all our processes, the producer included
	BytesPerQueuedJob   float64           `json:"redis_bytes_per_queued_job"`
	P50MS               float64           `json:"p50_ms"` // of a paced run's accepted to started
	P99MS               float64           `json:"p99_ms"`
	CommandsPerJob      float64           `json:"redis_commands_per_job"`
	ProcessCPUByRole    map[string]any    `json:"process_cpu_us_per_job_by_role"`
	Overrides           map[string]string `json:"overrides"`
	PayloadBytes        int               `json:"payload_bytes"`
	MessagesJobs        int               `json:"jobs_per_message"`
	UnfinishedAfterWait int               `json:"-"`
}

// noLimit has the machine measured, and not its limit.
const noLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"

// RunThroughput runs no-op jobs through all roles. progress, which may be nil, is called with the jobs done so far.
func RunThroughput(ctx context.Context, o ThroughputOptions, progress func(done int)) (Throughput, error) {
	o.Env = append(o.Env, noLimit)
	out := Throughput{Jobs: o.Jobs, Tenants: o.Tenants, PayloadBytes: o.Payload, MessagesJobs: o.Batch, Overrides: o.Overrides()}
	f, err := StartFleet(ctx, o.FleetOptions)
	if err != nil {
		return out, err
	}
	defer f.Close() //nolint:errcheck // the measurement stands or has failed already
	space, err := keyspace.New("bulk-action:", 1)
	if err != nil {
		return out, err
	}
	b := &run{f: f, p: space.Partition(0), space: space, o: o, name: "bench" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	if err := b.warmUp(ctx); err != nil {
		return out, err
	}
	if out.BytesPerQueuedJob, err = b.queuedBytes(ctx); err != nil {
		return out, err
	}
	before, redisBefore, err := f.Usage(ctx)
	if err != nil {
		return out, err
	}
	commands, err := b.commands(ctx)
	if err != nil {
		return out, err
	}
	roles := b.roleCPU()
	began := time.Now()
	produced := make(chan error, 1)
	go func() { produced <- b.produce(ctx, o.Jobs) }()
	if err := b.await(ctx, o.Jobs, produced, progress); err != nil {
		return out, err
	}
	elapsed := time.Since(began)
	after, redisAfter, err := f.Usage(ctx)
	if err != nil {
		return out, err
	}
	commandsAfter, err := b.commands(ctx)
	if err != nil {
		return out, err
	}
	per := func(d time.Duration) float64 {
		return round(float64(d.Microseconds()) / float64(o.Jobs))
	}
	out.ElapsedSeconds, out.JobsPerSecond = round(elapsed.Seconds()), math.Round(float64(o.Jobs)/elapsed.Seconds())
	out.ProcessCPUPerJob, out.RedisCPUPerJob = per(after-before), per(redisAfter-redisBefore)
	out.CommandsPerJob = round(float64(commandsAfter-commands) / float64(o.Jobs))
	out.ProcessCPUByRole = map[string]any{}
	for role, cpu := range b.roleCPU() {
		out.ProcessCPUByRole[role] = per(cpu - roles[role])
	}
	out.P50MS, out.P99MS, err = b.latency(ctx)
	return out, err
}

type run struct {
	f      *Fleet
	p      keyspace.Partition
	space  keyspace.Space
	o      ThroughputOptions
	name   string
	groups []string
}

func round(x float64) float64 { return math.Round(x*100) / 100 }

// publish writes a message to the ingest stream.
func (b *run) publish(ctx context.Context, pipe redis.Pipeliner, typ string, data any) error {
	return publish(ctx, pipe, b.space, typ, data)
}

func publish(ctx context.Context, pipe redis.Pipeliner, space keyspace.Space, typ string, data any) error {
	body, err := json.Marshal(data)
	if err != nil {
		return err
	}
	pipe.XAdd(ctx, &redis.XAddArgs{Stream: space.Ingest(), Values: []any{"type", typ, "data", body}})
	return nil
}

type job struct {
	Payload json.RawMessage `json:"payload"`
}

// produce publishes a group a tenant, its jobs in messages, in turn among the tenants.
func (b *run) produce(ctx context.Context, jobs int) error {
	payload := json.RawMessage("{}")
	if b.o.Payload > 2 {
		payload = json.RawMessage(`{"pad":"` + strings.Repeat("x", max(1, b.o.Payload-10)) + `"}`)
	}
	pipe := b.f.Conn.Cmd.Pipeline()
	left := make([]int, b.o.Tenants)
	for i := range left {
		id := fmt.Sprintf("%s-%d", b.name, i)
		left[i] = jobs*(i+1)/b.o.Tenants - jobs*i/b.o.Tenants
		b.groups = append(b.groups, id)
		if err := b.publish(ctx, pipe, "group.submit", map[string]any{"id": id, "tenant": fmt.Sprintf("tenant-%d", i), "type": "NOOP", "total": left[i]}); err != nil {
			return err
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("produce: %w", err)
	}
	batch := make([]job, b.o.Batch)
	for i := range batch {
		batch[i].Payload = payload
	}
	for open := true; open; {
		open = false
		n := 0
		for i := range left {
			k := min(left[i], b.o.Batch)
			if k == 0 {
				continue
			}
			open = true
			left[i] -= k
			if err := b.publish(ctx, pipe, "jobs.append", map[string]any{"group": b.groups[i], "jobs": batch[:k]}); err != nil {
				return err
			}
			if n++; n%20 == 0 {
				if _, err := pipe.Exec(ctx); err != nil {
					return fmt.Errorf("produce: %w", err)
				}
			}
		}
		if pipe.Len() > 0 {
			if _, err := pipe.Exec(ctx); err != nil {
				return fmt.Errorf("produce: %w", err)
			}
		}
	}
	return nil
}

// await waits until every group has completed.
func (b *run) await(ctx context.Context, jobs int, produced <-chan error, progress func(int)) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case err := <-produced:
			if err != nil {
				return err
			}
			produced = nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if produced != nil {
			continue
		}
		cmds := make([]*redis.SliceCmd, len(b.groups))
		_, err := b.f.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for i, id := range b.groups {
				cmds[i] = pipe.HMGet(ctx, b.p.Group(id), "status", "done")
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("await the end: %w", err)
		}
		done, completed := 0, 0
		for _, c := range cmds {
			status, _ := c.Val()[0].(string)
			count, _ := c.Val()[1].(string)
			k, _ := strconv.Atoi(count)
			done += k
			if status == string(api.StatusCompleted) {
				completed++
			}
		}
		if progress != nil {
			progress(done)
		}
		if completed == len(b.groups) {
			if done != jobs {
				return fmt.Errorf("all groups are completed with %d jobs done of %d", done, jobs)
			}
			return nil
		}
		if n%50 == 49 {
			if err := b.f.Check(); err != nil {
				return err
			}
		}
	}
}

// warmUp runs some jobs before anything is measured.
func (b *run) warmUp(ctx context.Context) error {
	w := *b
	w.name, w.groups, w.o.Tenants, w.o.Jobs = b.name+"-warm", nil, 1, 2000
	produced := make(chan error, 1)
	go func() { produced <- w.produce(ctx, w.o.Jobs) }()
	return w.await(ctx, w.o.Jobs, produced, nil)
}

// queuedBytes measures what a queued job takes: jobs of a group that may not start yet.
func (b *run) queuedBytes(ctx context.Context) (float64, error) {
	const jobs = 20000
	used := func() (int64, error) {
		info, err := b.f.Conn.Cmd.Info(ctx, "memory").Result()
		if err != nil {
			return 0, fmt.Errorf("measure memory: %w", err)
		}
		for line := range strings.Lines(info) {
			if v, ok := strings.CutPrefix(line, "used_memory:"); ok {
				return strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			}
		}
		return 0, nil
	}
	before, err := used()
	if err != nil {
		return 0, err
	}
	id := b.name + "-queued"
	pipe := b.f.Conn.Cmd.Pipeline()
	if err := b.publish(ctx, pipe, "group.submit", map[string]any{"id": id, "tenant": id, "type": "NOOP", "run_at": time.Now().Add(time.Hour).UTC().Format(time.RFC3339)}); err != nil {
		return 0, err
	}
	payload := json.RawMessage(`{"pad":"` + strings.Repeat("x", max(1, b.o.Payload-10)) + `"}`)
	batch := slices.Repeat([]job{{payload}}, 500)
	for range jobs / len(batch) {
		if err := b.publish(ctx, pipe, "jobs.append", map[string]any{"group": id, "jobs": batch}); err != nil {
			return 0, err
		}
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return 0, fmt.Errorf("measure memory: %w", err)
	}
	for {
		n, err := b.f.Conn.Cmd.HGet(ctx, b.p.Group(id), "accepted").Int()
		if err != nil && !errors.Is(err, redis.Nil) {
			return 0, fmt.Errorf("measure memory: %w", err)
		}
		left, err := b.f.Conn.Cmd.XLen(ctx, b.space.Ingest()).Result()
		if err != nil {
			return 0, fmt.Errorf("measure memory: %w", err)
		}
		if n == jobs && left == 0 {
			break
		}
		if err := redisx.Sleep(ctx, 20*time.Millisecond); err != nil {
			return 0, err
		}
	}
	after, err := used()
	if err != nil {
		return 0, err
	}
	pipe = b.f.Conn.Cmd.Pipeline()
	if err := b.publish(ctx, pipe, "group.cancel", map[string]any{"group": id}); err != nil {
		return 0, err
	}
	_, err = pipe.Exec(ctx)
	return round(float64(after-before) / jobs), err
}

func (b *run) commands(ctx context.Context) (int64, error) {
	info, err := b.f.Conn.Cmd.Info(ctx, "stats").Result()
	if err != nil {
		return 0, fmt.Errorf("count commands: %w", err)
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, "total_commands_processed:"); ok {
			return strconv.ParseInt(strings.TrimSpace(v), 10, 64)
		}
	}
	return 0, nil
}

func (b *run) roleCPU() map[string]time.Duration {
	out := map[string]time.Duration{}
	for _, p := range b.f.procs {
		cpu, err := processCPU(p.PID())
		if err == nil {
			out[p.role] += cpu
		}
	}
	return out
}

// latency paces single jobs and reads from their groups when they were accepted and started.
func (b *run) latency(ctx context.Context) (p50, p99 float64, err error) {
	const n = 300
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s-single-%d", b.name, i)
		pipe := b.f.Conn.Cmd.Pipeline()
		if err := b.publish(ctx, pipe, "group.submit", map[string]any{"id": ids[i], "tenant": "single", "type": "NOOP", "seal": true, "jobs": []job{{json.RawMessage("{}")}}}); err != nil {
			return 0, 0, err
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return 0, 0, fmt.Errorf("measure latency: %w", err)
		}
		if err := redisx.Sleep(ctx, 10*time.Millisecond); err != nil {
			return 0, 0, err
		}
	}
	one := *b
	one.groups = ids
	if err := one.await(ctx, n, nil, nil); err != nil {
		return 0, 0, err
	}
	waits := make([]float64, n)
	for i, id := range ids {
		v, err := b.f.Conn.Cmd.HMGet(ctx, b.p.Group(id), "at:created", "started").Result()
		if err != nil {
			return 0, 0, fmt.Errorf("measure latency: %w", err)
		}
		created, _ := strconv.ParseFloat(fmt.Sprint(v[0]), 64)
		started, _ := strconv.ParseFloat(fmt.Sprint(v[1]), 64)
		waits[i] = started - created
	}
	slices.Sort(waits)
	return waits[n/2], waits[n*99/100], nil
}
