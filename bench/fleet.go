// Package bench measures the system as it is deployed: real processes on a private redis-server. What it
// reports is recomputed from what Redis and the operating system say, not from what the processes claim.
package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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

	redis *redisproc.Server // nil when it is not ours
	procs []process
}

type process struct {
	*childproc.Child
	role string
	log  *childproc.Tail
}

// FleetOptions say what to start. Role is how this very program becomes a role, e.g. {"bulkaction", "role"}:
// the role's name is appended.
type FleetOptions struct {
	Role     []string
	RedisURL string         // "": a private redis-server
	AOF      bool           // of the private one
	Env      []string       // NAME=value; wins over everything
	Replicas map[string]int // of a role; 1 where it says nothing
	Journal  string         // folder to which processes log permits and starts; "": none
}

// plain is what a fleet sets in any case: addresses that collide with nothing, and the processor for drills.
var plain = map[string]string{"BULKACTION_API_ADDR": "127.0.0.1:0", "BULKACTION_LOG_LEVEL": "warn", "BULKACTION_WORKER_TYPES": "NOOP"}

// Overrides are the variables that differ from a fresh installation's. Those of this process's environment are not among
// them: the fleet does not inherit them.
func (o FleetOptions) Overrides() map[string]string {
	all := maps.Clone(plain)
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
		server, err := redisproc.Start(ctx, redisproc.Options{AOF: o.AOF})
		if err != nil {
			return nil, err
		}
		f.redis, f.URL = server, server.URL()
	}
	conn, err := redisx.Connect(ctx, redisx.Config{URL: f.URL, PoolMaxActive: 20, CommandTimeout: 10 * time.Second})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	f.Conn = conn
	for _, role := range roles {
		for range max(1, o.Replicas[role]) {
			if err := f.start(o, role); err != nil {
				return nil, errors.Join(err, f.Close())
			}
		}
	}
	return f, nil
}

func (f *Fleet) start(o FleetOptions, role string) error {
	args := append(slices.Clone(o.Role[1:]), role)
	if o.Journal != "" {
		args = append(args, "--journal", o.Journal)
	}
	cmd := exec.Command(o.Role[0], args...) // #nosec G204: this program itself
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "BULKACTION_") })
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

// Usage is the CPU time of all processes of the fleet and of this one, and of Redis, so far.
func (f *Fleet) Usage(ctx context.Context) (processes, redisCPU time.Duration, err error) {
	for _, p := range f.procs {
		t, err := processCPU(p.PID())
		if err != nil {
			return 0, 0, err
		}
		processes += t
	}
	self, err := processCPU(os.Getpid())
	if err != nil {
		return 0, 0, err
	}
	var mu sync.Mutex
	err = f.Conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
		info, err := c.Info(ctx, "cpu").Result()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		redisCPU += seconds(info, "used_cpu_user") + seconds(info, "used_cpu_sys")
		return nil
	})
	return processes + self, redisCPU, err
}

func seconds(info, name string) time.Duration {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			s, _ := strconv.ParseFloat(strings.TrimSpace(v), 64)
			return time.Duration(s * float64(time.Second))
		}
	}
	return 0
}

// clockTick is what /proc counts CPU time in; it is 100 a second on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

func processCPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w: the bench needs Linux", pid, err)
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	sys, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+sys) * clockTick, errors.Join(err1, err2)
}

// stopGrace is how long a process may take to stop.
const stopGrace = 15 * time.Second

// Stop stops the processes, politely and all at once; Redis stays. (A second signal would end a process at once, so each gets one.)
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

// Close stops the processes and Redis.
func (f *Fleet) Close() error {
	errs := []error{f.Stop()}
	if f.Conn != nil {
		errs = append(errs, f.Conn.Close())
	}
	if f.redis != nil {
		errs = append(errs, f.redis.Close())
	}
	return errors.Join(errs...)
}
