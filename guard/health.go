package guard

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/bulkaction/bulkaction/api"
)

// Health is what Client.Health returns.
type Health = api.GuardHealth

// RedisHealth is the part of Health about Redis.
type RedisHealth = api.GuardRedisHealth

// PoolHealth is the health of a pool.
type PoolHealth = api.GuardPoolHealth

// NamedHealth is the health of a guard.
type NamedHealth = api.GuardNamedHealth

// Health sends PING and INFO to Redis and reports what it finds. It never fails: what is wrong is
// in the report.
func (o operations) Health(ctx context.Context) Health {
	c := o.c
	h := Health{Guards: []NamedHealth{}}
	began := time.Now()
	if err := c.rdb.Ping(ctx).Err(); err != nil {
		h.Redis.Error = err.Error()
	} else {
		h.Redis.Reachable = true
		h.Redis.PingMS = ms(time.Since(began))
		info, _ := c.rdb.Info(ctx).Result() // without it the report is shorter
		readInfo(&h.Redis, info)
	}
	if s := c.rdb.PoolStats(); s != nil {
		h.Pool = PoolHealth{Total: s.TotalConns, Idle: s.IdleConns, Stale: s.StaleConns, Timeouts: s.Timeouts}
	}
	h.Healthy = h.Redis.Reachable && (!h.Redis.Evicts || c.cfg.allowEviction)
	for _, g := range c.used() {
		g.mu.Lock()
		free := g.free
		g.mu.Unlock()
		h.Guards = append(h.Guards, NamedHealth{
			Name: g.kind + "/" + g.name, Outage: g.circuit.isOpen(), MembersUsable: free,
		})
	}
	return h
}

func readInfo(r *RedisHealth, info string) {
	var used, most float64
	lines := bufio.NewScanner(strings.NewReader(info))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		switch name {
		case "role":
			r.Role = value
		case "maxmemory_policy":
			r.Evicts = value != "noeviction"
		case "used_memory":
			used, _ = strconv.ParseFloat(value, 64)
		case "maxmemory":
			most, _ = strconv.ParseFloat(value, 64)
		}
	}
	if most > 0 {
		r.MemoryRatio = used / most
	}
}

// eachMaster calls f for each Redis server that holds keys, one after the other, up to the first
// error. On a Cluster these are the masters.
func eachMaster(ctx context.Context, rdb redis.UniversalClient, f func(context.Context, redis.Cmdable) error) error {
	all, err := masters(ctx, rdb)
	for _, master := range all {
		if err == nil {
			err = f(ctx, master)
		}
	}
	return err
}

// masters returns the Redis servers that hold keys: the masters of a Cluster, ordered by address,
// or else the only server.
func masters(ctx context.Context, rdb redis.UniversalClient) ([]redis.Cmdable, error) {
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return []redis.Cmdable{rdb}, nil
	}
	var mu sync.Mutex
	byAddress := map[string]redis.Cmdable{}
	err := cluster.ForEachMaster(ctx, func(_ context.Context, master *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		byAddress[master.Options().Addr] = master
		return nil
	})
	all := make([]redis.Cmdable, 0, len(byAddress))
	for _, address := range slices.Sorted(maps.Keys(byAddress)) {
		all = append(all, byAddress[address])
	}
	return all, err
}

const (
	// mostKnown is how many names of guards Measure remembers at most from its search of Redis.
	mostKnown = 10_000
	// mostCountedMembers is the number of members of a guard above which Measure counts members
	// that are off as busy. To tell them apart, it would have to read each member.
	mostCountedMembers = 1000
)

// measured holds what Measure has read from Redis for the metrics guard_members and
// guard_leases_ended_total.
type measured struct {
	mu     sync.Mutex
	cursor string   // of the search for guards, which goes on with each Measure
	next   []string // what this search has found so far
	known  []string // what the last search that ended has found

	values atomic.Pointer[map[string]*measurement] // by label; nil before Measure and after StopMeasuring
}

// measurement are the sums of all guards with one label.
type measurement struct{ members, ended map[string]int64 }

// Measure reads the members and counters of at most 64 guards, pools first, for the metrics
// guard_members and guard_leases_ended_total. Call it again and again, for example every 15 s, in
// one process only: the other processes would add the same numbers. Guards of a PerKey are left
// out. A call searches at most 100,000 keys of Redis for new guards, so that its cost is bounded.
// Of a pool with more than 1,000 members the state busy counts those that are off, too.
func (o operations) Measure(ctx context.Context) error {
	m := &o.c.meter.measured
	m.mu.Lock()
	defer m.mu.Unlock()
	names, next, err := o.names(ctx, Query{Cursor: m.cursor, Limit: mostListed})
	if err != nil {
		m.cursor, m.next = "", nil // the servers may have changed
		return err
	}
	m.next = append(m.next, withMembers(names)...)
	m.next = m.next[:min(len(m.next), mostKnown)]
	if m.cursor = next; next == "" {
		m.known, m.next = m.next, nil
	}
	values := map[string]*measurement{}
	for _, name := range firstGuards(slices.Concat(m.known, m.next)) {
		if err := o.measure(ctx, name, values); err != nil && !errors.Is(err, ErrUnknownGuard) {
			return err
		}
	}
	m.values.Store(&values)
	return nil
}

// StopMeasuring removes the values of Measure from the metrics, because another process measures
// now.
func (o operations) StopMeasuring() {
	o.c.meter.measured.values.Store(nil)
}

// firstGuards returns at most mostLabels of the names: pools first, and locks, of which there may
// be many, last.
func firstGuards(names []string) []string {
	kinds := []string{kindPool, kindSemaphore, kindBreaker, kindLock}
	rank := func(name string) int {
		kind, _, _ := strings.Cut(name, "/")
		return slices.Index(kinds, kind)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(rank(a)-rank(b), strings.Compare(a, b)) })
	names = slices.Compact(names)
	return names[:min(len(names), mostLabels)]
}

// measure adds one guard to the values.
func (o operations) measure(ctx context.Context, name string, values map[string]*measurement) error {
	sum, err := o.summary(ctx, name)
	if err != nil {
		return err
	}
	members := map[string]int64{"free": sum.Free, "cooling": sum.Cooling, "busy": 0, "off": 0}
	if sum.Members > mostCountedMembers {
		members["busy"] = max(0, sum.Members-sum.Free-sum.Cooling)
	} else {
		v, err := o.Inspect(ctx, name)
		if err != nil {
			return err
		}
		clear(members)
		for _, m := range v.Members {
			members[m.State]++
		}
	}
	_, label, _ := ParseName(name)
	label = o.c.meter.label(label)
	of := values[label]
	if of == nil {
		of = &measurement{members: map[string]int64{}, ended: map[string]int64{}}
		values[label] = of
	}
	for _, state := range []string{"free", "cooling", "busy", "off"} {
		of.members[state] += members[state]
	}
	for _, how := range []string{"expired", "lost", "stale"} {
		of.ended[how] += sum.Counters[how]
	}
	return nil
}

// observe hands the values to a collection of metrics.
func (m *measured) observe(o metric.Observer, members, ended metric.Int64Observable) {
	values := m.values.Load()
	if values == nil {
		return
	}
	for label, of := range *values {
		with := func(key, value string) metric.ObserveOption {
			return metric.WithAttributes(attribute.String("guard", label), attribute.String(key, value))
		}
		for state, n := range of.members {
			o.ObserveInt64(members, n, with("state", state))
		}
		for how, n := range of.ended {
			o.ObserveInt64(ended, n, with("how", how))
		}
	}
}
