package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	producerRole = "producer" // stands for this process in figures by role
	redisRole    = "redis"    // stands for the redis-servers in figures by role
)

// fleetUse is what the fleet's processes, this process and Redis have used since they started, or
// between two measurements; see since.
type fleetUse struct {
	roles   map[string]time.Duration // CPU time of all processes of each role; this one is producerRole
	masters []masterUse              // ordered by address
}

// masterUse is what one redis-server has used since it started, or between two measurements.
type masterUse struct {
	addr     string
	cpu      time.Duration
	commands int64 // commands that scripts call are included
	memory   int64 // bytes in use; between two measurements: bytes added
	byName   map[string]commandUse
}

type commandUse struct{ calls, us int64 }

// measure calls do, and returns what the fleet has used meanwhile.
func (f *fleet) measure(ctx context.Context, do func() error) (fleetUse, error) {
	before, err := f.use(ctx)
	if err != nil {
		return fleetUse{}, err
	}
	if err := do(); err != nil {
		return fleetUse{}, err
	}
	after, err := f.use(ctx)
	return after.since(before), err
}

// use reads the CPU time of the processes from the operating system, and statistics from each
// redis-server.
func (f *fleet) use(ctx context.Context) (fleetUse, error) {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, pids := range f.pids() {
		for _, pid := range pids {
			t, err := processCPU(pid)
			if err != nil {
				return out, err
			}
			out.roles[role] += t
		}
	}
	var mu sync.Mutex
	err := f.conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
		info, err := c.Info(ctx, "all").Result()
		if err != nil {
			return fmt.Errorf("read Redis's statistics: %w", err)
		}
		m := readInfo(info)
		if single, ok := c.(*redis.Client); ok {
			m.addr = single.Options().Addr
		}
		mu.Lock()
		defer mu.Unlock()
		out.masters = append(out.masters, m)
		return nil
	})
	slices.SortFunc(out.masters, func(a, b masterUse) int { return cmp.Compare(a.addr, b.addr) })
	return out, err
}

// pids returns the ids of the processes by role. This process has the role producerRole.
func (f *fleet) pids() map[string][]int {
	out := map[string][]int{producerRole: {os.Getpid()}}
	for _, p := range f.procs {
		out[p.role] = append(out[p.role], p.PID())
	}
	return out
}

// readInfo reads the text of INFO. The line of a command looks like this:
// cmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,…
func readInfo(info string) masterUse {
	m := masterUse{byName: map[string]commandUse{}}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case name == "used_cpu_user", name == "used_cpu_sys":
			s, _ := strconv.ParseFloat(value, 64)
			m.cpu += time.Duration(s * float64(time.Second))
		case name == "total_commands_processed":
			m.commands, _ = strconv.ParseInt(value, 10, 64)
		case name == "used_memory":
			m.memory, _ = strconv.ParseInt(value, 10, 64)
		case strings.HasPrefix(name, "cmdstat_"):
			var k commandUse
			_, _ = fmt.Sscanf(value, "calls=%d,usec=%d", &k.calls, &k.us)
			m.byName[strings.TrimPrefix(name, "cmdstat_")] = k
		}
	}
	return m
}

// add returns m plus sign times n. Commands with the same number of calls in both are left out of a
// difference.
func (m masterUse) add(n masterUse, sign int64) masterUse {
	m.cpu += time.Duration(sign) * n.cpu
	m.commands, m.memory = m.commands+sign*n.commands, m.memory+sign*n.memory
	byName := map[string]commandUse{}
	for _, names := range []map[string]commandUse{m.byName, n.byName} {
		for name := range names {
			a, b := m.byName[name], n.byName[name]
			if calls := a.calls + sign*b.calls; calls > 0 {
				byName[name] = commandUse{calls, a.us + sign*b.us}
			}
		}
	}
	m.byName = byName
	return m
}

// since returns the difference of two measurements.
func (u fleetUse) since(before fleetUse) fleetUse {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, cpu := range u.roles {
		out.roles[role] = cpu - before.roles[role]
	}
	for i := range min(len(u.masters), len(before.masters)) {
		out.masters = append(out.masters, u.masters[i].add(before.masters[i], -1))
	}
	return out
}

// processCPU returns the CPU time of all processes together: those of the roles and this one, but
// not redis-server.
func (u fleetUse) processCPU() (sum time.Duration) {
	for _, cpu := range u.roles {
		sum += cpu
	}
	return sum
}

// redisTotal returns the sum over all redis-servers.
func (u fleetUse) redisTotal() (sum masterUse) {
	for _, m := range u.masters {
		sum = sum.add(m, 1)
	}
	return sum
}

// table lists the calls and the CPU time of each command, and its time divided by calls and by
// jobs. The command with the most time comes first. A command that a script calls is counted twice:
// by itself and in the time of the script.
func (m masterUse) table(jobs int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-24s %12s %12s %10s %10s\n", "command", "calls", "µs", "µs/call", "µs/job")
	names := slices.SortedFunc(maps.Keys(m.byName), func(a, c string) int {
		return cmp.Or(-cmp.Compare(m.byName[a].us, m.byName[c].us), cmp.Compare(a, c))
	})
	for _, name := range names {
		k := m.byName[name]
		fmt.Fprintf(&b, "%-24s %12d %12d %10.2f %10.3f\n",
			name, k.calls, k.us, float64(k.us)/float64(k.calls), float64(k.us)/float64(jobs))
	}
	fmt.Fprintf(&b, "CPU of Redis in all: %.2f µs/job\n", perJob(m.cpu, jobs))
	return b.String()
}

// clockTick is the unit of CPU times in /proc. It is 10 ms on each Linux that Go supports.
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

// peaks returns for each role, and for producerRole and redisRole, the peak of resident memory of
// its largest process so far, in MB (2^20 bytes). A Redis that is not private is left out.
func (f *fleet) peaks() (map[string]float64, error) {
	all := f.pids()
	for _, s := range f.servers {
		all[redisRole] = append(all[redisRole], s.PID())
	}
	out := map[string]float64{}
	for role, pids := range all {
		for _, pid := range pids {
			mb, err := peakMB(pid)
			if err != nil {
				return nil, err
			}
			out[role] = max(out[role], mb)
		}
	}
	return out, nil
}

// resetPeakMemory resets the peak of this process's resident memory, so that a new run measures its
// own. If the system forbids it, the peak includes earlier runs.
func resetPeakMemory() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

func peakMB(pid int) (float64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, fmt.Errorf("read memory of process %d: %w: the bench needs Linux", pid, err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 64)
			return round2(kb / 1024), nil
		}
	}
	return 0, fmt.Errorf("read memory of process %d: no VmHWM", pid)
}
