package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"math"
	"slices"
	"strconv"
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
	// ceilingGroups is the number of groups of a batch, and ceilingEvent the bytes of each event: those
	// of our events of a small group.
	ceilingGroups = 32
	ceilingEvent  = 650
)

// ceilingAdmit and ceilingOutcome are Lua scripts that do the least work that an admission and a
// done outcome need; ceilingStore and ceilingEnd that of groups with their jobs. They are not in package lua, because only this benchmark uses them. They do
// not use the keys of the system.
var (
	ceilingAdmit = redis.NewScript(`local jobs = redis.call('LPOP', KEYS[1], ARGV[1])
for i = 1, #jobs do redis.call('XADD', KEYS[2], '*', 'job', jobs[i]) end
return #jobs`)
	ceilingOutcome = redis.NewScript(`redis.call('XACK', KEYS[1], 'workers', unpack(ARGV))
redis.call('XDEL', KEYS[1], unpack(ARGV))
return redis.call('HINCRBY', KEYS[2], 'done', #ARGV)`)
	ceilingStore = redis.NewScript(`local event, size = ARGV[1], tonumber(ARGV[2])
for i = 4, #KEYS do
  redis.call('HSET', KEYS[i], 'status', 'DISPATCHED', 'accepted', size)
  for j = 1, size do redis.call('XADD', KEYS[1], '*', 'group', KEYS[i], 'job', ARGV[2 + (i - 4) * size + j]) end
  for _, status in ipairs({'created', 'dispatched'}) do redis.call('XADD', KEYS[2], '*', 'type', status, 'data', event) end
end
return 1`)
	ceilingEnd = redis.NewScript(`local event, size = ARGV[1], ARGV[2]
redis.call('XACK', KEYS[1], 'workers', unpack(ARGV, 3))
redis.call('XDEL', KEYS[1], unpack(ARGV, 3))
for i = 4, #KEYS do
  redis.call('HSET', KEYS[i], 'status', 'COMPLETED', 'done', size)
  for _, status in ipairs({'running', 'aggregating', 'completed'}) do redis.call('XADD', KEYS[2], '*', 'type', status, 'data', event) end
end
return redis.call('HINCRBY', KEYS[3], 'done', #KEYS - 3)`)
)

var ceilingBenchmark = benchmark{
	"ceiling", "The speed of the simplest queue with one stream entry a job, on this machine's Redis; also of groups",
	func(f *flags) runner {
		var jobs, groups, payload int
		f.int(&jobs, "jobs", 200_000, 1, 0, "number of jobs")
		f.int(&groups, "groups", 50_000, 1, 0, "number of groups, of one job each and then of five")
		f.int(&payload, "payload", 200, 0, 256<<10, "bytes of each job's payload")
		f.aof()
		f.redis()
		f.noRoles = true
		return func(ctx context.Context, o options) (any, error) {
			fleet := startRedis(ctx, o)
			defer fleet.close()
			out := struct {
				Ceiling
				Groups []GroupCeiling `json:"groups"`
			}{Ceiling: fleet.measureCeiling(ctx, jobs, payload)}
			for _, size := range []int{1, 5} {
				out.Groups = append(out.Groups, fleet.measureGroupCeiling(ctx, groups, size, payload))
			}
			return out, nil
		}
	},
}

// measureCeiling measures the ceiling of jobs; see runCeiling.
func (f *fleet) measureCeiling(ctx context.Context, jobs, payload int) Ceiling {
	blobs := slices.Repeat([]any{[]byte(strings.Repeat("x", payload))}, ceilingBatch)
	u := f.runCeiling(ctx, jobs, func(k ceilingKeys) ceilingWork {
		list := k.base + "queue"
		return ceilingWork{
			ceilingBatch, 1,
			func(pipe redis.Pipeliner, _, n int) {
				pipe.RPush(ctx, list, blobs[:n]...)
				pipe.EvalSha(ctx, ceilingAdmit.Hash(), []string{list, k.ready}, n)
			},
			func(pipe redis.Pipeliner, _, _ int, ids []any) {
				pipe.EvalSha(ctx, ceilingOutcome.Hash(), []string{k.ready, k.ledger}, ids...)
			},
		}
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

// GroupCeiling is the speed of the simplest possible queue of groups: a script stores a batch of
// groups with their jobs, a consumer group reads the jobs, and a script ends the groups. Each group
// leaves a hash and five events.
type GroupCeiling struct {
	Groups             int     `json:"groups"`
	JobsOfGroup        int     `json:"jobs_per_group"`
	Batch              int     `json:"batch"`
	GroupsPerSecond    float64 `json:"groups_per_second"`
	RedisCPUPerGroup   float64 `json:"redis_cpu_us_per_group"`
	ProcessCPUPerGroup float64 `json:"process_cpu_us_per_group"`
}

// measureGroupCeiling measures the ceiling of groups with size jobs each; see runCeiling.
func (f *fleet) measureGroupCeiling(ctx context.Context, groups, size, payload int) GroupCeiling {
	blobs := slices.Repeat([]any{[]byte(strings.Repeat("x", payload))}, ceilingGroups*size)
	event := strings.Repeat("x", ceilingEvent)
	u := f.runCeiling(ctx, groups, func(k ceilingKeys) ceilingWork {
		keys := func(from, n int) []string {
			out := []string{k.ready, k.base + "events", k.ledger}
			for i := range n {
				out = append(out, k.base+"group:"+strconv.Itoa(from+i))
			}
			return out
		}
		return ceilingWork{
			ceilingGroups, size,
			func(pipe redis.Pipeliner, from, n int) {
				pipe.EvalSha(ctx, ceilingStore.Hash(), keys(from, n), append([]any{event, size}, blobs[:n*size]...)...)
			},
			func(pipe redis.Pipeliner, from, n int, ids []any) {
				pipe.EvalSha(ctx, ceilingEnd.Hash(), keys(from, n), append([]any{event, size}, ids...)...)
			},
		}
	})
	return GroupCeiling{
		groups, size, ceilingGroups, math.Round(float64(groups) / u.took.Seconds()),
		perJob(u.redis.cpu, groups), perJob(u.processCPU(), groups),
	}
}

// ceilingKeys are the keys of one loop; base is the beginning of all of them.
type ceilingKeys struct{ base, ready, ledger string }

// ceilingWork is what one loop does in each round trip: push stores up to batch jobs or groups, with
// this number of entries each in the stream, and end ends those that were read in the round trip
// before. from is the index of the first of n.
type ceilingWork struct {
	batch, entries int
	push           func(pipe redis.Pipeliner, from, n int)
	end            func(pipe redis.Pipeliner, from, n int, ids []any)
}

// runCeiling runs a number of jobs or groups through ceilingLoops loops on the fleet's Redis, which
// may hold other data: it uses keys with a prefix of its own, and deletes them at the end, but not
// if a batch failed. The processes of the fleet must be idle meanwhile; what it returns is without
// them.
func (f *fleet) runCeiling(ctx context.Context, total int, work func(ceilingKeys) ceilingWork) fleetUse {
	prefix := "bulk-action-ceiling-" + rand.Text() + ":"
	for _, s := range []*redis.Script{ceilingAdmit, ceilingOutcome, ceilingStore, ceilingEnd} {
		check(f.conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
			return s.Load(ctx, c).Err()
		}))
	}
	alone := &fleet{conn: f.conn} // without the roles
	u := alone.measure(ctx, func() {
		loops, ctx := errgroup.WithContext(ctx)
		for i := range ceilingLoops {
			n := total*(i+1)/ceilingLoops - total*i/ceilingLoops
			base := fmt.Sprintf("%s{%d}:", prefix, i)
			keys := ceilingKeys{base, base + "ready", base + "ledger"}
			loops.Go(func() error { return ceilingLoop(ctx, f.conn.Cmd, keys, n, work(keys)) })
		}
		check(loops.Wait())
	})
	check(f.removeKeys(ctx, prefix))
	return u
}

// ceilingLoop runs jobs or groups through one stream, in batches. One round trip ends the previous
// batch, and pushes and reads the next one. At the end ceilingLoop checks that each was counted.
func ceilingLoop(ctx context.Context, c redis.UniversalClient, k ceilingKeys, total int, w ceilingWork) error {
	if err := c.XGroupCreateMkStream(ctx, k.ready, "workers", "0").Err(); err != nil {
		return err
	}
	ids := make([]any, 0, w.batch*w.entries)
	for done, n := 0, 0; done < total; {
		pipe := c.Pipeline()
		if n > 0 {
			w.end(pipe, done, n, ids)
			done += n
		}
		var read *redis.XStreamSliceCmd
		if n = min(total-done, w.batch); n > 0 {
			w.push(pipe, done, n)
			read = pipe.XReadGroup(ctx, &redis.XReadGroupArgs{
				Group:    "workers",
				Consumer: "one",
				Streams:  []string{k.ready, ">"},
				Count:    int64(n * w.entries),
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
	counted, err := c.HGet(ctx, k.ledger, "done").Int()
	if err == nil && counted != total {
		err = fmt.Errorf("%d were counted of %d", counted, total)
	}
	return err
}

// mean returns a copy of c whose times and speeds are the means of those of c and d.
func (c Ceiling) mean(d Ceiling) *Ceiling {
	half := func(a, b float64) float64 { return round4((a + b) / 2) }
	c.ElapsedSeconds, c.JobsPerSecond = half(c.ElapsedSeconds, d.ElapsedSeconds), half(c.JobsPerSecond, d.JobsPerSecond)
	c.RedisCPUPerJob, c.ProcessCPUPerJob = half(c.RedisCPUPerJob, d.RedisCPUPerJob),
		half(c.ProcessCPUPerJob, d.ProcessCPUPerJob)
	return &c
}
