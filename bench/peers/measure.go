package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

const (
	// warmJobs is the number of jobs that run before speed is measured, and that are queued before
	// the memory of queued jobs is measured.
	warmJobs   = 2_000
	queuedJobs = 20_000 // jobs that wait in the queue while its memory is measured
	stopGrace  = 20 * time.Second
)

// figures has the figures of one run, or medians or ratios of several runs. Output of `bulkaction
// bench throughput --json` is decoded into it, so speed, CPU and memory have the JSON names of that
// command. Its p50_ms and p99_ms mean something else; measureOurs replaces them. Only asynq has
// tuned figures.
type figures struct {
	JobsPerSecond float64 `json:"jobs_per_second"`
	RedisCPU      float64 `json:"redis_cpu_us_per_job"`
	ProcessCPU    float64 `json:"process_cpu_us_per_job"` // all processes but redis-server
	QueuedBytes   float64 `json:"redis_bytes_per_queued_job"`
	// P50MS and P99MS are the time from the producer's call to the start of the job, at 100 jobs a
	// second. For our program it is published_to_started of `bulkaction bench latency --json`.
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	// TunedP50MS and TunedP99MS are the same times of a peer whose settings are tuned for latency;
	// 0 for others.
	TunedP50MS float64 `json:"tuned_p50_ms,omitempty"`
	TunedP99MS float64 `json:"tuned_p99_ms,omitempty"`
}

type runner struct {
	options
	executable string // path of this program
	addr       string
	redis      *redis.Client
}

// measureOurs runs the benchmarks of the program bulkaction on the Redis that all peers use: first
// throughput, then latency, from which P50MS and P99MS come.
func (r *runner) measureOurs(ctx context.Context) (out figures, err error) {
	err = r.runOurs(ctx, &out, "throughput", "--jobs", strconv.Itoa(r.Jobs), "--tenants", strconv.Itoa(r.Tenants),
		"--batch", strconv.Itoa(r.Batch), "--payload", strconv.Itoa(r.Payload))
	if err != nil {
		return out, err
	}
	var waits struct {
		Started struct {
			P50MS float64 `json:"p50_ms"`
			P99MS float64 `json:"p99_ms"`
		} `json:"published_to_started"`
	}
	seconds := max(1, r.Latency/pacedRate)
	err = r.runOurs(ctx, &waits, "latency", "--rate", strconv.Itoa(pacedRate), "--seconds", strconv.Itoa(seconds))
	out.P50MS, out.P99MS = waits.Started.P50MS, waits.Started.P99MS
	return out, err
}

// pacedRate is the number of jobs a second while latency is measured.
const pacedRate = int(time.Second / pacedInterval)

// runOurs runs a benchmark of the program bulkaction, waits until it has ended, and decodes its
// JSON output into out. If ctx ends first, it stops the program.
func (r *runner) runOurs(ctx context.Context, out any, what string, args ...string) error {
	text, log := &bytes.Buffer{}, &childproc.Tail{}
	// #nosec G204: the program is a flag
	cmd := exec.Command(r.program, append([]string{"bench", what, "--json", "--redis-url", "redis://" + r.addr + "/0"},
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

// measurePeer measures all figures of a peer: memory, then speed and CPU time, then latency. It
// empties Redis before each of these measurements.
func (r *runner) measurePeer(ctx context.Context, name string) (out figures, err error) {
	for _, m := range []struct {
		what    string
		measure func() error
	}{
		{"memory", func() (err error) {
			out.QueuedBytes, err = r.queuedBytes(ctx, name)
			return err
		}},
		{"throughput", func() error { return r.throughput(ctx, name, &out) }},
		{"latency", func() (err error) {
			out.P50MS, out.P99MS, err = r.latency(ctx, name, 0)
			return err
		}},
		{"latency, tuned", func() (err error) {
			if name == nameAsynq { // the other peers block in Redis and need no tuning
				out.TunedP50MS, out.TunedP99MS, err = r.latency(ctx, name, r.Settings.CheckInterval)
			}
			return err
		}},
	} {
		if err = r.redis.FlushAll(ctx).Err(); err == nil {
			err = m.measure()
		}
		if err != nil {
			return out, fmt.Errorf("measure %s: %w", m.what, err)
		}
	}
	return out, nil
}

func (r *runner) queuedBytes(ctx context.Context, name string) (float64, error) {
	// Some jobs are queued before the measurement. They create what all jobs share, such as a
	// script or connections, and what does not count as memory of a job.
	if _, err := r.produce(ctx, childTask{Peer: name, Jobs: warmJobs}); err != nil {
		return 0, err
	}
	u, err := r.use(ctx, func() error {
		_, err := r.produce(ctx, childTask{Peer: name, Jobs: queuedJobs})
		return err
	})
	return float64(u.Memory) / queuedJobs, err
}

func (r *runner) throughput(ctx context.Context, name string, out *figures) error {
	// The check interval is set here: with asynq's default its server would sleep through the first
	// second of the run.
	server, err := r.start(ctx, childTask{
		Peer:     name,
		Serve:    true,
		ReportAt: []int{warmJobs, warmJobs + r.Jobs},
		Settings: settings{CheckInterval: r.Settings.CheckInterval},
	})
	if err != nil {
		return err
	}
	defer server.Kill()
	if _, err := r.produce(ctx, childTask{Peer: name, Jobs: warmJobs}); err != nil {
		return err
	}
	warm, err := server.next(ctx)
	if err != nil {
		return err
	}
	var sent producerReports
	var done childReport
	u, err := r.use(ctx, func() (err error) {
		if sent, err = r.produce(ctx, childTask{Peer: name, Jobs: r.Jobs}); err == nil {
			done, err = server.next(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
	out.JobsPerSecond = float64(r.Jobs) / done.At.Sub(sent.began.At).Seconds()
	out.RedisCPU = measure.PerJob(u.CPU, r.Jobs)
	out.ProcessCPU = measure.PerJob(done.CPU-warm.CPU+sent.ended.CPU-sent.began.CPU, r.Jobs)
	return nil
}

// latency returns the median and the 99th percentile of the ms from the producer's call to the
// start of the handler, at pacedRate jobs a second. check is asynq's check interval; 0: its
// default.
func (r *runner) latency(ctx context.Context, name string, check time.Duration) (p50, p99 float64, err error) {
	server, err := r.start(ctx, childTask{
		Peer:     name,
		Serve:    true,
		Paced:    true,
		ReportAt: []int{r.Latency},
		Settings: settings{CheckInterval: check},
	})
	if err != nil {
		return 0, 0, err
	}
	defer server.Kill()
	sent, err := r.produce(ctx, childTask{Peer: name, Jobs: r.Latency, Paced: true})
	if err != nil {
		return 0, 0, err
	}
	done, err := server.next(ctx)
	if err != nil {
		return 0, 0, err
	}
	waits := make([]float64, r.Latency)
	for i := range waits {
		waits[i] = float64(done.Times[i].Sub(sent.ended.Times[i]).Microseconds()) / 1000
	}
	return measure.Percentile(waits, 50), measure.Percentile(waits, 99), nil
}

// use calls do, and returns what Redis has used meanwhile.
func (r *runner) use(ctx context.Context, do func() error) (measure.Redis, error) {
	before, err := r.redis.Info(ctx, "all").Result()
	if err != nil {
		return measure.Redis{}, err
	}
	if err := do(); err != nil {
		return measure.Redis{}, err
	}
	after, err := r.redis.Info(ctx, "all").Result()
	return measure.ReadInfo(after).Add(measure.ReadInfo(before), -1), err
}

// producerReports has two reports of a producer process: before its first job, and after its last.
type producerReports struct{ began, ended childReport }

// produce runs a producer process until it has reported that all jobs are sent, and then kills it.
func (r *runner) produce(ctx context.Context, o childTask) (out producerReports, err error) {
	p, err := r.start(ctx, o)
	if err != nil {
		return out, err
	}
	defer p.Kill()
	out.began = p.ready
	out.ended, err = p.next(ctx)
	return out, err
}

// child is a running child process, a producer or a consumer, that has reported that it is ready.
type child struct {
	*childproc.Child
	ready   childReport
	reports chan childReport
	log     *childproc.Tail
}

func (r *runner) start(ctx context.Context, o childTask) (*child, error) {
	o.Addr, o.Payload = r.addr, r.Payload
	o.Settings.Senders, o.Settings.Concurrency = r.Settings.Senders, r.Settings.Concurrency
	arg, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	c := &child{reports: make(chan childReport, 1+len(o.ReportAt)), log: &childproc.Tail{}}
	out, in := io.Pipe()
	cmd := exec.Command(r.executable, childCommand, string(arg)) // #nosec G204: this program
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
			var r childReport
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

// next waits for the next report of the child process. It is an error if the process ends first.
func (c *child) next(ctx context.Context) (childReport, error) {
	select {
	case r, ok := <-c.reports:
		if !ok {
			return r, errors.New("it ended early: " + c.log.String())
		}
		return r, nil
	case <-ctx.Done():
		return childReport{}, ctx.Err()
	}
}
