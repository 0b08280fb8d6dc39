package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

// Ceiling is the speed of the simplest possible queue with one stream entry per job: the least-work
// ceiling. A batch of jobs is pushed to a list; a script moves it to a stream; a consumer group
// reads it; a script acknowledges, deletes and counts it. There are no tenants, limits, attempts or
// results. No such queue can be faster on the same machine, so the difference to our speed is what
// our features cost.
type Ceiling struct {
	Jobs             int     `json:"jobs"`
	Batch            int     `json:"batch"`
	PayloadBytes     int     `json:"payload_bytes"`
	ElapsedSeconds   float64 `json:"elapsed_seconds"`
	JobsPerSecond    float64 `json:"jobs_per_second"`
	RedisCPUPerJob   float64 `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob float64 `json:"process_cpu_us_per_job"` // of this process, which does it all
}

const (
	ceilingBatch = 200
	// ceilingLoops is the number of goroutines that push and read jobs at the same time, so that
	// Redis never waits for this process.
	ceilingLoops = 2
)

// ceilingAdmit and ceilingOutcome are Lua scripts that do the least work that an admission and a
// done outcome need. They are not in package lua, because only this benchmark uses them. They do
// not use the keys of the system.
var (
	ceilingAdmit = redis.NewScript(`local jobs = redis.call('LPOP', KEYS[1], ARGV[1])
for i = 1, #jobs do redis.call('XADD', KEYS[2], '*', 'job', jobs[i]) end
return #jobs`)
	ceilingOutcome = redis.NewScript(`redis.call('XACK', KEYS[1], 'workers', unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV))
return redis.call('HINCRBY', KEYS[2], 'done', #ARGV)`)
)

var ceilingBenchmark = benchmark{
	"ceiling", "The speed of the simplest queue with one stream entry a job, on this machine's Redis",
	func(f *flags) runner {
		var jobs, payload int
		f.int(&jobs, "jobs", 200_000, 1, 0, "number of jobs")
		f.int(&payload, "payload", 200, 0, 256<<10, "bytes of each job's payload")
		f.aof()
		f.redis()
		f.noRoles = true
		return func(ctx context.Context, o options) (any, error) {
			fleet := startRedis(ctx, o)
			defer fleet.close()
			return fleet.measureCeiling(ctx, jobs, payload), nil
		}
	},
}

// measureCeiling measures the ceiling on the fleet's Redis, which may hold other data: it uses keys
// with a prefix of its own, and deletes them at the end, but not if a batch failed. The processes
// of the fleet must be idle meanwhile.
func (f *fleet) measureCeiling(ctx context.Context, jobs, payload int) Ceiling {
	base := "bulk-action-ceiling-" + rand.Text() + ":"
	for _, s := range []*redis.Script{ceilingAdmit, ceilingOutcome} {
		check(f.conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
			return s.Load(ctx, c).Err()
		}))
	}
	alone := &fleet{conn: f.conn} // without the roles
	u := alone.measure(ctx, func() {
		loops, ctx := errgroup.WithContext(ctx)
		for i := range ceilingLoops {
			n := jobs*(i+1)/ceilingLoops - jobs*i/ceilingLoops
			loops.Go(func() error { return ceilingLoop(ctx, f.conn.Cmd, fmt.Sprintf("%s{%d}:", base, i), n, payload) })
		}
		check(loops.Wait())
	})
	return Ceiling{
		Jobs:             jobs,
		Batch:            ceilingBatch,
		PayloadBytes:     payload,
		ElapsedSeconds:   round4(u.took.Seconds()),
		JobsPerSecond:    math.Round(float64(jobs) / u.took.Seconds()),
		RedisCPUPerJob:   perJob(u.redis.cpu, jobs),
		ProcessCPUPerJob: perJob(u.processCPU(), jobs),
	}
}

// ceilingLoop runs jobs through one list and one stream, in batches. One round trip reports the
// previous batch as done and pushes, moves and reads the next one. At the end ceilingLoop checks
// that each job was counted, and deletes the keys.
func ceilingLoop(ctx context.Context, c redis.UniversalClient, base string, jobs, payload int) error {
	list, stream, ledger := base+"queue", base+"ready", base+"ledger"
	if err := c.XGroupCreateMkStream(ctx, stream, "workers", "0").Err(); err != nil {
		return err
	}
	blobs := slices.Repeat([]any{[]byte(strings.Repeat("x", payload))}, ceilingBatch)
	ids, done := make([]any, 0, ceilingBatch), 0
	for done < jobs {
		pipe := c.Pipeline()
		if len(ids) > 0 {
			pipe.EvalSha(ctx, ceilingOutcome.Hash(), []string{stream, ledger}, ids...)
			done += len(ids)
		}
		var read *redis.XStreamSliceCmd
		if n := min(jobs-done, ceilingBatch); n > 0 {
			pipe.RPush(ctx, list, blobs[:n]...)
			pipe.EvalSha(ctx, ceilingAdmit.Hash(), []string{list, stream}, n)
			read = pipe.XReadGroup(ctx, &redis.XReadGroupArgs{
				Group:    "workers",
				Consumer: "one",
				Streams:  []string{stream, ">"},
				Count:    ceilingBatch,
				Block:    -1,
			})
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		ids = ids[:0]
		if read != nil {
			for _, m := range read.Val()[0].Messages {
				ids = append(ids, m.ID)
			}
		}
	}
	counted, err := c.HGet(ctx, ledger, "done").Int()
	if err == nil && counted != jobs {
		err = fmt.Errorf("%d jobs were counted of %d", counted, jobs)
	}
	return errors.Join(err, c.Unlink(context.WithoutCancel(ctx), list, stream, ledger).Err())
}

// mean returns a copy of c whose times and speeds are the means of those of c and d.
func (c Ceiling) mean(d Ceiling) *Ceiling {
	half := func(a, b float64) float64 { return round4((a + b) / 2) }
	c.ElapsedSeconds, c.JobsPerSecond = half(c.ElapsedSeconds, d.ElapsedSeconds), half(c.JobsPerSecond, d.JobsPerSecond)
	c.RedisCPUPerJob, c.ProcessCPUPerJob = half(c.RedisCPUPerJob, d.RedisCPUPerJob),
		half(c.ProcessCPUPerJob, d.ProcessCPUPerJob)
	return &c
}
