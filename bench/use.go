package bench

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/bench/measure"
)

const (
	producerRole = "producer" // stands for this process in figures by role
	redisRole    = "redis"    // stands for the redis-servers in figures by role
)

// fleetUse is what the processes of the fleet, this process and Redis have used: CPU time, commands
// and memory. It counts from their start or, after since, between two reads.
type fleetUse struct {
	roles   map[string]time.Duration // CPU time of all processes of each role; this one is producerRole
	masters []measure.Redis          // ordered by address
}

// measure calls do, and returns what the fleet, this process and Redis have used meanwhile.
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

// use reads what the fleet has used so far: CPU times from the operating system, and statistics
// from each redis-server.
func (f *fleet) use(ctx context.Context) (fleetUse, error) {
	out := fleetUse{roles: map[string]time.Duration{}}
	for role, pids := range f.pids() {
		for _, pid := range pids {
			t, err := measure.CPU(pid)
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
		m := measure.ReadInfo(info)
		if single, ok := c.(*redis.Client); ok {
			m.Addr = single.Options().Addr
		}
		mu.Lock()
		defer mu.Unlock()
		out.masters = append(out.masters, m)
		return nil
	})
	slices.SortFunc(out.masters, func(a, b measure.Redis) int { return cmp.Compare(a.Addr, b.Addr) })
	return out, err
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
	for i := range min(len(u.masters), len(before.masters)) {
		out.masters = append(out.masters, u.masters[i].Add(before.masters[i], -1))
	}
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

// redisTotal returns the sum over all redis-servers.
func (u fleetUse) redisTotal() (sum measure.Redis) {
	for _, m := range u.masters {
		sum = sum.Add(m, 1)
	}
	return sum
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
			mb, err := measure.PeakMB(pid)
			if err != nil {
				return nil, err
			}
			out[role] = max(out[role], mb)
		}
	}
	return out, nil
}
