// Package bench measures the system as it is deployed: real processes on a private redis-server, or
// on the Redis that [Options.RedisURL] names.
// Its figures come from Redis, the operating system, the processes' journals and the load
// generator's clock, not from metrics that the processes show about themselves.
//
// One harness starts Redis and the roles (fleet), publishes a load and waits for it (run), and
// measures what was used meanwhile (fleetUse). Each experiment is a file with its load, its figures
// and its result.
package bench

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

// Options say how an experiment starts the roles, and on which Redis. Role is the command that
// starts a role, for example {"bulkaction", "role"}; the name of the role is appended.
type Options struct {
	Role       []string
	RedisURL   string         // "": private redis-servers for each run
	Access     redisx.Access  // to the Redis of RedisURL
	AccessEnv  []string       // NAME=value with which the roles have the same access
	AOF        bool           // the private redis-server writes an append-only file
	Masters    int            // of a private cluster; up to 1: a single server
	Partitions int            // 0: 1
	Replicas   map[string]int // processes of each role; 1 for a role that is missing
	Env        []string       // NAME=value for the roles; wins over the experiment's own settings
	Profile    string         // folder in which processes write CPU profiles; "": none
	// Progress, if not nil, is called repeatedly with how much of a part of the experiment is done.
	Progress func(part string, done, total int64)
}

func (o *Options) progress(part string, done, total int) {
	if o.Progress != nil && part != "" {
		o.Progress(part, int64(done), int64(total))
	}
}

// defaultEnv has environment variables that all processes of a fleet get, unless the experiment or
// Options.Env sets them: an API address with any free port, logs from warnings up, and the NOOP
// processor.
var defaultEnv = map[string]string{
	"BULKACTION_API_ADDR":     "127.0.0.1:0",
	"BULKACTION_LOG_LEVEL":    "warn",
	"BULKACTION_WORKER_TYPES": "NOOP",
}

// overrides returns the environment variables that a fleet gives to its processes, without the URL
// of Redis and o.AccessEnv: defaultEnv, env and o.Env, where a later value replaces an earlier one.
// The processes do not inherit BULKACTION_ and OTEL_ variables, so all other settings have their
// defaults.
func (o *Options) overrides(env ...string) map[string]string {
	all := maps.Clone(defaultEnv)
	for _, kv := range slices.Concat(env, o.Env) {
		name, value, _ := strings.Cut(kv, "=")
		all[name] = value
	}
	return all
}

// roles has the names of the six roles of jobs, in the order in which a fleet starts them.
var roles = []string{"aggregator", "watcher", "worker", "dispatcher", "fetcher", "ingest"}

// Roles returns the names of the six roles of jobs. Options.Replicas can name them.
func Roles() []string { return slices.Clone(roles) }

// fleet is a Redis, and the processes of the roles that run on it. Each process is a child of this
// one.
type fleet struct {
	conn    *redisx.Conn
	url     string
	servers []*redisproc.Server // private ones
	procs   []process
}

type process struct {
	*childproc.Child
	role string
	log  *childproc.Tail
}

// startRedis returns a fleet without role processes, connected to its Redis: private servers that
// it starts, or the Redis of o.RedisURL. pool is the largest number of connections to one server
// for commands.
func startRedis(ctx context.Context, o Options, pool int) (*fleet, error) {
	f := &fleet{url: o.RedisURL}
	if f.url == "" {
		if err := f.startServers(ctx, max(1, o.Masters), o.AOF); err != nil {
			return nil, errors.Join(err, f.close())
		}
	}
	var err error
	config := redisx.Config{URL: f.url, PoolMaxActive: pool, CommandTimeout: 10 * time.Second}
	if o.RedisURL != "" {
		config.Access = o.Access
	}
	if f.conn, err = redisx.Connect(ctx, config); err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// startRoles starts the processes of all roles with these environment variables. It does not wait
// until they are ready. journals is the folder in which they log permits and starts of jobs; "":
// they log none.
func (f *fleet) startRoles(o Options, overrides map[string]string, journals string) error {
	for _, role := range roles {
		for i := range max(1, o.Replicas[role]) {
			if err := f.startRole(o, role, i, overrides, journals); err != nil {
				return err
			}
		}
	}
	return nil
}

// startRole starts the i-th process of a role; see startRoles for the arguments.
func (f *fleet) startRole(o Options, role string, i int, overrides map[string]string, journals string) error {
	args := append(slices.Clone(o.Role[1:]), role)
	if journals != "" {
		args = append(args, "--journal", journals)
	}
	if o.Profile != "" {
		args = append(args, "--cpuprofile", filepath.Join(o.Profile, fmt.Sprintf("%s-%d.pprof", role, i)))
	}
	cmd := exec.Command(o.Role[0], args...) // #nosec G204: the command comes from our own options
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "BULKACTION_") || strings.HasPrefix(kv, "OTEL_")
	})
	cmd.Env = append(cmd.Env, "BULKACTION_REDIS_URL="+f.url)
	if o.RedisURL != "" {
		cmd.Env = append(cmd.Env, o.AccessEnv...)
	}
	for name, value := range overrides {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	log := &childproc.Tail{}
	cmd.Stderr, cmd.Stdout = log, io.Discard
	child, err := childproc.Start(cmd)
	if err != nil {
		return fmt.Errorf("start %s: %w", role, err)
	}
	f.procs = append(f.procs, process{child, role, log})
	return nil
}

// check returns an error, with the process's last output, if a role process has ended; nil if all
// run.
func (f *fleet) check() error {
	for _, p := range f.procs {
		if !p.Running() {
			return fmt.Errorf("the %s has ended: %s", p.role, p.log)
		}
	}
	return nil
}

// stopGrace is how long stop waits for a process to end before it kills the process.
const stopGrace = 15 * time.Second

// stop sends one SIGTERM to each process of the roles at once, kills those that still run after
// stopGrace, and waits for their end. A second signal would end a process without a drain. It is an
// error if a process does not end with success. Redis keeps running.
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

// close stops the role processes, closes the connection to Redis, and stops private redis-servers.
func (f *fleet) close() error {
	errs := []error{f.stop()}
	if f.conn != nil {
		errs = append(errs, f.conn.Close())
	}
	for _, s := range f.servers {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
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

// awaitAPI waits until the API of ingest answers, with any status.
func (f *fleet) awaitAPI(ctx context.Context, addr string) error {
	return f.awaitHTTP(ctx, "the API", "http://"+addr+"/v1/stats")
}

// awaitHTTP waits until a GET of a URL gets an answer, with any status.
func (f *fleet) awaitHTTP(ctx context.Context, what, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	return f.await(ctx, what, pollInterval, func() (int, error) {
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 1, nil //nolint:nilerr // the process has not started to listen
		}
		return 0, resp.Body.Close()
	})
}
