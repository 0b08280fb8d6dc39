// Package bench measures the system as it is deployed: real processes on a private redis-server.
// Its figures come from Redis, the operating system, the processes' journals and the load
// generator's clock, not from metrics that the processes show about themselves.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/childproc"
	"github.com/bulkaction/bulkaction/internal/redisproc"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Fleet runs the processes of all six roles and the Redis that they use.
type Fleet struct {
	Conn *redisx.Conn
	URL  string

	servers []*redisproc.Server // private ones; empty when FleetOptions.RedisURL was given
	procs   []process
}

type process struct {
	*childproc.Child
	role string
	log  *childproc.Tail
}

// FleetOptions say what to start. Role is the command that starts a role, for example
// {"bulkaction", "role"}; the name of the role is appended.
type FleetOptions struct {
	Role     []string
	RedisURL string         // "": private redis-servers
	AOF      bool           // the private redis-server writes an append-only file
	Masters  int            // of a private cluster; up to 1: a single server
	Env      []string       // NAME=value for the roles; wins over all other settings
	Replicas map[string]int // processes of each role; 1 for a role that is missing
	Journal  string         // folder in which processes log permits and starts; "": no logs
	Profile  string         // folder in which processes write CPU profiles; "": none
}

// defaultEnv has the settings of each fleet, unless others win: an API address that is always free,
// logs from warnings up, and the NOOP processor.
var defaultEnv = map[string]string{
	"BULKACTION_API_ADDR":     "127.0.0.1:0",
	"BULKACTION_LOG_LEVEL":    "warn",
	"BULKACTION_WORKER_TYPES": "NOOP",
}

// Overrides returns the settings that the fleet gives to its processes: those of defaultEnv and
// o.Env, without the URL of Redis. The processes inherit no variable of this process that begins
// with BULKACTION_ or OTEL_, so all other settings have their defaults.
func (o FleetOptions) Overrides() map[string]string {
	all := maps.Clone(defaultEnv)
	for _, kv := range o.Env {
		name, value, _ := strings.Cut(kv, "=")
		all[name] = value
	}
	return all
}

// roles has the names of the roles, in the order in which they start.
var roles = []string{"aggregator", "watcher", "worker", "dispatcher", "fetcher", "ingest"}

// StartFleet starts Redis, unless the options name one, and then the processes. It waits for Redis,
// but not until the processes are ready. With an error nothing keeps running that it started.
func StartFleet(ctx context.Context, o FleetOptions) (*Fleet, error) {
	f := &Fleet{URL: o.RedisURL}
	if f.URL == "" {
		var err error
		if f.servers, f.URL, err = startRedis(ctx, o.Masters, o.AOF); err != nil {
			return nil, err
		}
	}
	conn, err := redisx.Connect(ctx, redisx.Config{URL: f.URL, PoolMaxActive: 20, CommandTimeout: 10 * time.Second})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	f.Conn = conn
	for _, role := range roles {
		for i := range max(1, o.Replicas[role]) {
			if err := f.start(o, role, i); err != nil {
				return nil, errors.Join(err, f.Close())
			}
		}
	}
	return f, nil
}

func (f *Fleet) start(o FleetOptions, role string, i int) error {
	args := append(slices.Clone(o.Role[1:]), role)
	if o.Journal != "" {
		args = append(args, "--journal", o.Journal)
	}
	if o.Profile != "" {
		args = append(args, "--cpuprofile", filepath.Join(o.Profile, fmt.Sprintf("%s-%d.pprof", role, i)))
	}
	cmd := exec.Command(o.Role[0], args...) // #nosec G204: the command comes from our own options
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "BULKACTION_") || strings.HasPrefix(kv, "OTEL_")
	})
	cmd.Env = append(cmd.Env, "BULKACTION_REDIS_URL="+f.URL)
	for name, value := range o.Overrides() {
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

// Check returns an error with the last output of a process that has ended; nil if all processes
// run.
func (f *Fleet) Check() error {
	for _, p := range f.procs {
		if !p.Running() {
			return fmt.Errorf("the %s has ended: %s", p.role, p.log)
		}
	}
	return nil
}

// stopGrace is the time that a process has to stop before it is killed.
const stopGrace = 15 * time.Second

// Stop signals all processes at once, kills those that still run after stopGrace, and waits for
// their end; Redis keeps running. It returns an error if a process did not end with success. It
// sends one signal to each process, since a second one would end the process without a drain.
func (f *Fleet) Stop() error {
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

// removeKeys deletes all keys with a prefix. It gives up after a minute.
func (f *Fleet) removeKeys(ctx context.Context, prefix string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return f.Conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		keys := shard.Scan(ctx, 0, prefix+"*", 1000).Iterator()
		for keys.Next(ctx) {
			if err := shard.Unlink(ctx, keys.Val()).Err(); err != nil {
				return err
			}
		}
		return keys.Err()
	})
}

// Close stops the processes, closes Conn, and stops the private redis-servers.
func (f *Fleet) Close() error {
	errs := []error{f.Stop()}
	if f.Conn != nil {
		errs = append(errs, f.Conn.Close())
	}
	errs = append(errs, closeAll(f.servers))
	return errors.Join(errs...)
}
