// Package bench measures the system as it is deployed: real processes on a private redis-server.
// What it reports is recomputed from what Redis and the operating system say, not from what the
// processes claim.
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

// Fleet is the six roles as processes, and the Redis under them.
type Fleet struct {
	Conn *redisx.Conn
	URL  string

	servers []*redisproc.Server // none when Redis is not ours
	procs   []process
}

type process struct {
	*childproc.Child
	role string
	log  *childproc.Tail
}

// FleetOptions say what to start. Role is how this very program becomes a role, e.g. {"bulkaction",
// "role"}: the role's name is appended.
type FleetOptions struct {
	Role     []string
	RedisURL string         // "": a private redis-server
	AOF      bool           // of the private one
	Masters  int            // of a private cluster; up to 1: a single server
	Env      []string       // NAME=value; wins over everything
	Replicas map[string]int // of a role; 1 where it says nothing
	Journal  string         // folder to which processes log permits and starts; "": none
	Profile  string         // folder to which processes write CPU profiles; "": none
}

// defaultEnv is what a fleet sets in any case: addresses that collide with nothing, and the
// processor for drills.
var defaultEnv = map[string]string{
	"BULKACTION_API_ADDR":     "127.0.0.1:0",
	"BULKACTION_LOG_LEVEL":    "warn",
	"BULKACTION_WORKER_TYPES": "NOOP",
}

// Overrides are the variables that differ from a fresh installation's. Those of this process's
// environment are not among them: the fleet inherits neither them nor those of OpenTelemetry.
func (o FleetOptions) Overrides() map[string]string {
	all := maps.Clone(defaultEnv)
	for _, kv := range o.Env {
		name, value, _ := strings.Cut(kv, "=")
		all[name] = value
	}
	return all
}

// roles in the order in which they start.
var roles = []string{"aggregator", "watcher", "worker", "dispatcher", "fetcher", "ingest"}

// StartFleet starts Redis and the roles.
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
	cmd := exec.Command(o.Role[0], args...) // #nosec G204: this program itself
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

// Check says whether all processes still run, and what one said that does not.
func (f *Fleet) Check() error {
	for _, p := range f.procs {
		if !p.Running() {
			return fmt.Errorf("the %s has ended: %s", p.role, p.log)
		}
	}
	return nil
}

// stopGrace is how long a process may take to stop.
const stopGrace = 15 * time.Second

// Stop stops the processes, politely and all at once; Redis stays. (A second signal would end a
// process at once, so each gets one.)
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

// removeKeys removes the keys of a run from a Redis that is not ours.
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

// Close stops the processes and Redis.
func (f *Fleet) Close() error {
	errs := []error{f.Stop()}
	if f.Conn != nil {
		errs = append(errs, f.Conn.Close())
	}
	errs = append(errs, closeAll(f.servers))
	return errors.Join(errs...)
}
