package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// producerRole stands for this process in figures by role.
const producerRole = "producer"

// redisRole stands for the redis-servers in figures by role.
const redisRole = "redis"

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

// measureUse reads the CPU time of the processes from the operating system, and statistics from
// each redis-server.
func (f *Fleet) measureUse(ctx context.Context) (fleetUse, error) {
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
	err := f.Conn.Shards(ctx, func(ctx context.Context, c redis.UniversalClient) error {
		m, err := readMasterUse(ctx, c)
		if err != nil {
			return fmt.Errorf("read Redis's statistics: %w", err)
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
func (f *Fleet) pids() map[string][]int {
	out := map[string][]int{producerRole: {os.Getpid()}}
	for _, p := range f.procs {
		out[p.role] = append(out[p.role], p.PID())
	}
	return out
}

func readMasterUse(ctx context.Context, c redis.UniversalClient) (masterUse, error) {
	m := masterUse{byName: map[string]commandUse{}}
	if single, ok := c.(*redis.Client); ok {
		m.addr = single.Options().Addr
	}
	info, err := c.Info(ctx, "all").Result()
	if err != nil {
		return m, err
	}
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
	return m, nil
}

// since returns the difference of two measurements.
func (u fleetUse) since(before fleetUse) fleetUse {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, cpu := range u.roles {
		out.roles[role] = cpu - before.roles[role]
	}
	for i, m := range u.masters {
		if i >= len(before.masters) {
			break
		}
		was := before.masters[i]
		d := masterUse{
			addr:     m.addr,
			cpu:      m.cpu - was.cpu,
			commands: m.commands - was.commands,
			memory:   m.memory - was.memory,
			byName:   map[string]commandUse{},
		}
		for name, k := range m.byName {
			if n := k.calls - was.byName[name].calls; n > 0 {
				d.byName[name] = commandUse{n, k.us - was.byName[name].us}
			}
		}
		out.masters = append(out.masters, d)
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
	sum.byName = map[string]commandUse{}
	for _, m := range u.masters {
		sum.cpu, sum.commands, sum.memory = sum.cpu+m.cpu, sum.commands+m.commands, sum.memory+m.memory
		for name, k := range m.byName {
			sum.byName[name] = commandUse{sum.byName[name].calls + k.calls, sum.byName[name].us + k.us}
		}
	}
	return sum
}

// table lists the calls and the CPU time of each command, and its time divided by calls and by
// jobs. The command with the most time comes first. A command that a script calls is counted twice:
// by itself and in the time of the script.
func (m masterUse) table(jobs int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-24s %12s %12s %10s %10s\n", "command", "calls", "µs", "µs/call", "µs/job")
	names := make([]string, 0, len(m.byName))
	for name := range m.byName {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, c string) int {
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

func perJob(d time.Duration, jobs int) float64 {
	return round2(float64(d.Nanoseconds()) / 1e3 / float64(jobs))
}

// seconds returns the value of a field in the text of INFO that is a number of seconds; 0 if it is
// missing.
func seconds(info, name string) time.Duration {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			s, _ := strconv.ParseFloat(strings.TrimSpace(v), 64)
			return time.Duration(s * float64(time.Second))
		}
	}
	return 0
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
func (f *Fleet) peaks() (map[string]float64, error) {
	out := map[string]float64{}
	for role, pids := range f.pids() {
		for _, pid := range pids {
			mb, err := peakMB(pid)
			if err != nil {
				return nil, err
			}
			out[role] = max(out[role], mb)
		}
	}
	for _, s := range f.servers {
		mb, err := peakMB(s.PID())
		if err != nil {
			return nil, err
		}
		out[redisRole] = max(out[redisRole], mb)
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
