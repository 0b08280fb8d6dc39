package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// options say how an experiment starts the roles, and on which Redis.
type options struct {
	program    string         // the product's binary; `role NAME` is appended
	worker     []string       // program and arguments of worker processes; nil: those of program
	redisURL   string         // "": private redis-servers for each run
	access     redisx.Access  // to the Redis of redisURL
	accessEnv  []string       // NAME=value with which the roles have the same access
	aof        bool           // the private redis-server writes an append-only file
	partitions int            // 0: 1
	replicas   map[string]int // processes of each role; 1 for a role that is missing
	env        []string       // NAME=value for the roles; wins over the experiment's own settings
	profile    string         // folder in which processes write CPU profiles; "": none
	progress   func(part string, done, total int)
}

func (o *options) show(part string, done, total int) {
	if o.progress != nil && part != "" {
		o.progress(part, done, total)
	}
}

// defaultEnv has environment variables that all processes of a fleet get, unless the experiment or
// options.env sets them.
var defaultEnv = map[string]string{
	"BULKACTION_API_ADDR":     "127.0.0.1:0",
	"BULKACTION_LOG_LEVEL":    "warn",
	"BULKACTION_WORKER_TYPES": "NOOP",
}

// overrides returns the environment variables that a fleet gives to its processes, without the URL
// of Redis and o.accessEnv: defaultEnv, env and o.env, where a later value replaces an earlier one.
// The processes do not inherit BULKACTION_ and OTEL_ variables, so all other settings have their
// defaults.
func (o *options) overrides(env ...string) map[string]string {
	all := maps.Clone(defaultEnv)
	for _, kv := range slices.Concat(env, o.env) {
		name, value, _ := strings.Cut(kv, "=")
		all[name] = value
	}
	return all
}

// roles has the names of the six roles of jobs, in the order in which a fleet starts them.
var roles = []string{"aggregator", "watcher", "worker", "dispatcher", "fetcher", "ingest"}

// fleet is a Redis, and the processes of the roles that run on it.
type fleet struct {
	conn   *redisx.Conn
	url    string
	server *redisproc.Server // a private one; nil: none
	procs  []process
}

type process struct {
	*childproc.Child
	role string
	log  *childproc.Tail
}

// startRedis returns a fleet without role processes, connected to its Redis: a private server that
// it starts, or the Redis of o.redisURL.
func startRedis(ctx context.Context, o options) *fleet {
	f := &fleet{url: o.redisURL}
	check(attempt("start Redis", func() {
		config := redisx.Config{PoolMaxActive: 32, CommandTimeout: 10 * time.Second}
		if f.url == "" {
			f.server = must(redisproc.Start(ctx, redisproc.Options{AOF: o.aof}))
			f.url = f.server.URL()
		} else {
			config.Access = o.access
		}
		config.URL = f.url
		f.conn = must(redisx.Connect(ctx, config))
	}, f.close))
	return f
}

// startRoles starts the processes of all roles with these environment variables. It does not wait
// until they are ready. journals is the folder in which they log permits and starts of jobs; "":
// they log none.
func (f *fleet) startRoles(o options, overrides map[string]string, journals string) {
	for _, role := range roles {
		for i := range max(1, o.replicas[role]) {
			f.startRole(o, role, i, overrides, journals)
		}
	}
}

// startRole starts the i-th process of a role; see startRoles for the arguments.
func (f *fleet) startRole(o options, role string, i int, overrides map[string]string, journals string) {
	args := []string{"role", role}
	if journals != "" {
		args = append(args, "--journal", journals)
	}
	if o.profile != "" {
		args = append(args, "--cpuprofile", filepath.Join(o.profile, fmt.Sprintf("%s-%d.pprof", role, i)))
	}
	command := append([]string{o.program}, args...)
	if role == "worker" && o.worker != nil {
		command = o.worker
	}
	cmd := exec.Command(command[0], command[1:]...) // #nosec G204: the program comes from our own options
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "BULKACTION_") || strings.HasPrefix(kv, "OTEL_")
	})
	cmd.Env = append(cmd.Env, "BULKACTION_REDIS_URL="+f.url)
	cmd.Env = append(cmd.Env, o.accessEnv...)
	for name, value := range overrides {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	log := &childproc.Tail{}
	cmd.Stderr, cmd.Stdout = log, io.Discard
	f.procs = append(f.procs, process{must(childproc.Start(cmd)), role, log})
}

// check returns an error, with the process's last output, if a role process has ended.
func (f *fleet) check() error {
	for _, p := range f.procs {
		if !p.Running() {
			return fmt.Errorf("the %s has ended: %s", p.role, p.log)
		}
	}
	return nil
}

// kill ends a process of a role at once, like a crash.
func (f *fleet) kill(is func(process) bool) {
	i := slices.IndexFunc(f.procs, is)
	if i < 0 {
		failf("there is no process to kill")
	}
	f.procs[i].Kill()
	f.procs = slices.Delete(f.procs, i, i+1)
}

// stopGrace is how long stop waits for a process to end before it kills the process.
const stopGrace = 15 * time.Second

// stop sends one SIGTERM to each process of the roles at once: a second signal would end a process
// without a drain. It is an error if a process does not end with success. Redis keeps running.
func (f *fleet) stop() error {
	var wg sync.WaitGroup
	for _, p := range f.procs {
		wg.Go(func() { p.Stop(stopGrace) })
	}
	wg.Wait()
	var errs []error
	for _, p := range f.procs {
		if state := p.State(); state == nil || !state.Success() {
			errs = append(errs, fmt.Errorf("the %s ended with %v: %s", p.role, state, p.log))
		}
	}
	f.procs = nil
	return errors.Join(errs...)
}

// close stops the role processes, closes the connection to Redis, and stops a private redis-server.
// The figures are computed by then, or there was an error, so errors do not matter.
func (f *fleet) close() {
	_ = f.stop()
	if f.conn != nil {
		_ = f.conn.Close()
	}
	if f.server != nil {
		_ = f.server.Close()
	}
}

// removeKeys deletes all keys of Redis that begin with prefix. It gives up after a minute.
func (f *fleet) removeKeys(ctx context.Context, prefix string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return f.conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		keys := shard.Scan(ctx, 0, prefix+"*", 1000).Iterator()
		for keys.Next(ctx) {
			if err := shard.Unlink(ctx, keys.Val()).Err(); err != nil {
				return err
			}
		}
		return keys.Err()
	})
}

// now returns the time of Redis's clock.
func (f *fleet) now(ctx context.Context) (time.Time, error) {
	t, err := f.conn.Cmd.Time(ctx).Result()
	if err != nil {
		return t, fmt.Errorf("ask for Redis's time: %w", err)
	}
	return t, nil
}

// clockOffset returns Redis's clock minus the clock of this process.
func (f *fleet) clockOffset(ctx context.Context) (time.Duration, error) {
	before := time.Now()
	t, err := f.now(ctx)
	return t.Sub(before.Add(time.Since(before) / 2)), err
}

// stallTimeout is how long await, and the waits that use it, accept that nothing makes progress.
const stallTimeout = 2 * time.Minute

// await calls left every interval until it returns 0. left returns how many things are still
// missing; what names them in errors. It is an error if left fails, a process of the fleet has
// ended, or the number does not change for stallTimeout.
func (f *fleet) await(ctx context.Context, what string, interval time.Duration, left func() (int, error)) error {
	last, movedAt := -1, time.Now()
	for n := 1; ; n++ {
		now, err := left()
		if err != nil || now == 0 {
			return err
		}
		if now != last {
			last, movedAt = now, time.Now()
		}
		if time.Since(movedAt) > stallTimeout {
			return fmt.Errorf("await %s: %d left, no progress for %s", what, now, stallTimeout)
		}
		if n%20 == 0 {
			if err := f.check(); err != nil {
				return err
			}
		}
		if err := redisx.Sleep(ctx, interval); err != nil {
			return err
		}
	}
}

// awaitHTTP waits until a GET of a URL gets an answer, with any status.
func (f *fleet) awaitHTTP(ctx context.Context, url string) error {
	return f.await(ctx, url, pollInterval, func() (int, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return 0, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 1, nil //nolint:nilerr // the process has not started to listen
		}
		return 0, resp.Body.Close()
	})
}

const (
	producerRole = "producer" // stands for this process in figures by role
	redisRole    = "redis"    // stands for the redis-servers in figures by role
)

// fleetUse is what the processes of the fleet, this process and Redis have used: CPU time, commands
// and memory. It counts from their start or, after since, between two reads.
type fleetUse struct {
	roles map[string]time.Duration // CPU time of all processes of each role; this one is producerRole
	redis redisUse                 // of all redis-servers together
	took  time.Duration            // between the two reads
}

// measure calls do, and returns what the fleet, this process and Redis have used meanwhile.
func (f *fleet) measure(ctx context.Context, do func()) fleetUse {
	before, began := f.use(ctx), time.Now()
	do()
	took := time.Since(began)
	out := f.use(ctx).since(before)
	out.took = took
	return out
}

func (f *fleet) use(ctx context.Context) fleetUse {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, pids := range f.pids() {
		for _, pid := range pids {
			out.roles[role] += cpuOf(pid)
		}
	}
	var mu sync.Mutex
	check(f.conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
		info, err := c.Info(ctx, "all").Result()
		mu.Lock()
		defer mu.Unlock()
		out.redis = out.redis.add(readInfo(info), 1)
		return err
	}))
	return out
}

// pids returns the process ids of the fleet by role. This process counts as the role producerRole.
func (f *fleet) pids() map[string][]int {
	out := map[string][]int{producerRole: {os.Getpid()}}
	for _, p := range f.procs {
		out[p.role] = append(out[p.role], p.PID())
	}
	return out
}

// since returns the difference of two measurements.
func (u fleetUse) since(before fleetUse) fleetUse {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, cpu := range u.roles {
		out.roles[role] = cpu - before.roles[role]
	}
	out.redis = u.redis.add(before.redis, -1)
	return out
}

// processCPU returns the CPU time of all processes of the roles and of this process; redis-server
// does not count.
func (u fleetUse) processCPU() (sum time.Duration) {
	for _, cpu := range u.roles {
		sum += cpu
	}
	return sum
}

// peaks returns for each role, and for producerRole and redisRole, the peak of resident memory of
// its largest process so far, in MB (2^20 bytes). A Redis that is not private is left out.
func (f *fleet) peaks() map[string]float64 {
	all := f.pids()
	if f.server != nil {
		all[redisRole] = []int{f.server.PID()}
	}
	out := map[string]float64{}
	for role, pids := range all {
		for _, pid := range pids {
			out[role] = max(out[role], round2(memoryOf(pid, "VmHWM:")/1024))
		}
	}
	return out
}
