package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/childproc"
)

const (
	warmJobs   = 2_000  // before anything is measured
	queuedJobs = 20_000 // that lie in the queue while its memory is measured
	stopGrace  = 20 * time.Second
)

// figures of one run, or medians of several. The names are those of `bulkaction bench
// throughput --json`.
type figures struct {
	JobsPerSecond float64  `json:"jobs_per_second"`
	RedisCPU      float64  `json:"redis_cpu_us_per_job"`
	ProcessCPU    float64  `json:"process_cpu_us_per_job"` // the producer included
	QueuedBytes   float64  `json:"redis_bytes_per_queued_job"`
	P50MS         float64  `json:"p50_ms"` // to started, at 100 jobs a second: from when the producer sends it
	P99MS         float64  `json:"p99_ms"`
	TunedP50MS    *float64 `json:"tuned_p50_ms,omitempty"`
	TunedP99MS    *float64 `json:"tuned_p99_ms,omitempty"`
}

type bench struct {
	options
	self  string // this program
	addr  string
	redis *redis.Client
}

// ours is our own benchmark on the same Redis.
func (b *bench) ours(ctx context.Context) (out figures, err error) {
	err = b.run(ctx, &out, "throughput", "--jobs", strconv.Itoa(b.Jobs), "--tenants", strconv.Itoa(b.Tenants),
		"--batch", strconv.Itoa(b.Batch), "--payload", strconv.Itoa(b.Payload))
	if err != nil {
		return out, err
	}
	var waits struct {
		Started struct {
			P50MS float64 `json:"p50_ms"`
			P99MS float64 `json:"p99_ms"`
		} `json:"published_to_started"`
	}
	seconds := max(1, b.Latency/pacePerSecond)
	err = b.run(ctx, &waits, "latency", "--rate", strconv.Itoa(pacePerSecond), "--seconds", strconv.Itoa(seconds))
	out.P50MS, out.P99MS = waits.Started.P50MS, waits.Started.P99MS
	return out, err
}

// pacePerSecond is at what rate latency is measured.
const pacePerSecond = int(time.Second / pace)

// run has our program measure something.
func (b *bench) run(ctx context.Context, out any, what string, args ...string) error {
	text, log := &bytes.Buffer{}, &childproc.Tail{}
	// #nosec G204: a flag
	cmd := exec.Command(b.binary, append([]string{"bench", what, "--json", "--redis-url", "redis://" + b.addr + "/0"},
		args...)...)
	cmd.Stdout, cmd.Stderr = text, log
	child, err := childproc.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-child.Done():
	case <-ctx.Done():
		child.Stop(stopGrace)
		return ctx.Err()
	}
	if !child.State().Success() {
		return fmt.Errorf("bench %s ended with %v: %s", what, child.State(), log)
	}
	if err := json.Unmarshal(text.Bytes(), out); err != nil {
		return fmt.Errorf("read the figures of bench %s: %w", what, err)
	}
	return nil
}

// peer measures all figures of a peer. Redis is empty before each.
func (b *bench) peer(ctx context.Context, name string) (out figures, err error) {
	if out.QueuedBytes, err = b.queuedBytes(ctx, name); err != nil {
		return out, fmt.Errorf("measure memory: %w", err)
	}
	if err := b.throughput(ctx, name, &out); err != nil {
		return out, fmt.Errorf("measure throughput: %w", err)
	}
	if out.P50MS, out.P99MS, err = b.latency(ctx, name, 0); err != nil {
		return out, fmt.Errorf("measure latency: %w", err)
	}
	if name == nameAsynq { // the others wait in Redis, which needs no tuning
		p50, p99, err := b.latency(ctx, name, b.Settings.Check)
		if err != nil {
			return out, fmt.Errorf("measure latency, tuned: %w", err)
		}
		out.TunedP50MS, out.TunedP99MS = &p50, &p99
	}
	return out, nil
}

func (b *bench) queuedBytes(ctx context.Context, name string) (float64, error) {
	if err := b.redis.FlushAll(ctx).Err(); err != nil {
		return 0, err
	}
	// The first jobs bring what all share, a script or a pool of connections.
	if _, err := b.produce(ctx, order{Peer: name, Jobs: warmJobs}); err != nil {
		return 0, err
	}
	before, err := b.info(ctx, "memory", "used_memory")
	if err != nil {
		return 0, err
	}
	if _, err := b.produce(ctx, order{Peer: name, Jobs: queuedJobs}); err != nil {
		return 0, err
	}
	after, err := b.info(ctx, "memory", "used_memory")
	return (after - before) / queuedJobs, err
}

func (b *bench) throughput(ctx context.Context, name string, out *figures) error {
	if err := b.redis.FlushAll(ctx).Err(); err != nil {
		return err
	}
	// Tuned, or else asynq would sleep through the first second of the run.
	server, err := b.start(ctx, order{
		Peer:     name,
		Serve:    true,
		Marks:    []int{warmJobs, warmJobs + b.Jobs},
		Settings: settings{Check: b.Settings.Check},
	})
	if err != nil {
		return err
	}
	defer server.Kill()
	if _, err := b.produce(ctx, order{Peer: name, Jobs: warmJobs}); err != nil {
		return err
	}
	warm, err := server.next(ctx)
	if err != nil {
		return err
	}
	redisBefore, err := b.redisCPU(ctx)
	if err != nil {
		return err
	}
	sent, err := b.produce(ctx, order{Peer: name, Jobs: b.Jobs})
	if err != nil {
		return err
	}
	done, err := server.next(ctx)
	if err != nil {
		return err
	}
	redisAfter, err := b.redisCPU(ctx)
	if err != nil {
		return err
	}
	jobs := float64(b.Jobs)
	out.JobsPerSecond = jobs / done.At.Sub(sent.began.At).Seconds()
	out.RedisCPU = (redisAfter - redisBefore) * 1e6 / jobs
	out.ProcessCPU = float64((done.CPU - warm.CPU + sent.ended.CPU - sent.began.CPU).Microseconds()) / jobs
	return nil
}

// latency is from the producer's call to the handler's start.
func (b *bench) latency(ctx context.Context, name string, check time.Duration) (p50, p99 float64, err error) {
	if err := b.redis.FlushAll(ctx).Err(); err != nil {
		return 0, 0, err
	}
	server, err := b.start(ctx, order{
		Peer:     name,
		Serve:    true,
		Paced:    true,
		Marks:    []int{b.Latency},
		Settings: settings{Check: check},
	})
	if err != nil {
		return 0, 0, err
	}
	defer server.Kill()
	sent, err := b.produce(ctx, order{Peer: name, Jobs: b.Latency, Paced: true})
	if err != nil {
		return 0, 0, err
	}
	done, err := server.next(ctx)
	if err != nil {
		return 0, 0, err
	}
	waits := make([]float64, b.Latency)
	for i := range waits {
		waits[i] = float64(done.Times[i].Sub(sent.ended.Times[i]).Microseconds()) / 1000
	}
	slices.Sort(waits)
	return waits[len(waits)/2], waits[len(waits)*99/100], nil
}

func (b *bench) redisCPU(ctx context.Context) (float64, error) {
	user, err := b.info(ctx, "cpu", "used_cpu_user")
	if err != nil {
		return 0, err
	}
	sys, err := b.info(ctx, "cpu", "used_cpu_sys")
	return user + sys, err
}

func (b *bench) info(ctx context.Context, section, name string) (float64, error) {
	text, err := b.redis.Info(ctx, section).Result()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, fmt.Errorf("INFO %s has no %s", section, name)
}

// production is what a producer reported.
type production struct{ began, ended report }

// produce runs a producer to its end.
func (b *bench) produce(ctx context.Context, o order) (out production, err error) {
	p, err := b.start(ctx, o)
	if err != nil {
		return out, err
	}
	defer p.Kill()
	out.began = p.ready
	out.ended, err = p.next(ctx)
	return out, err
}

// child is a producer or a consumer that is ready.
type child struct {
	*childproc.Child
	ready   report
	reports chan report
	log     *childproc.Tail
}

func (b *bench) start(ctx context.Context, o order) (*child, error) {
	o.Addr, o.Payload = b.addr, b.Payload
	o.Settings.Senders, o.Settings.Concurrency = b.Settings.Senders, b.Settings.Concurrency
	arg, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	c := &child{reports: make(chan report, 1+len(o.Marks)), log: &childproc.Tail{}}
	out, in := io.Pipe()
	cmd := exec.Command(b.self, childCommand, string(arg)) // #nosec G204: this program
	cmd.Stdout, cmd.Stderr = in, c.log
	if c.Child, err = childproc.Start(cmd); err != nil {
		return nil, err
	}
	go func() {
		<-c.Done()
		_ = in.Close() // never fails
	}()
	go func() {
		defer close(c.reports)
		for decoder := json.NewDecoder(out); ; {
			var r report
			if err := decoder.Decode(&r); err != nil {
				return
			}
			c.reports <- r
		}
	}()
	if c.ready, err = c.next(ctx); err != nil {
		c.Kill()
		return nil, err
	}
	return c, nil
}

// next waits for what the child says next.
func (c *child) next(ctx context.Context) (report, error) {
	select {
	case r, ok := <-c.reports:
		if !ok {
			return r, errors.New("it ended early: " + c.log.String())
		}
		return r, nil
	case <-ctx.Done():
		return report{}, ctx.Err()
	}
}
