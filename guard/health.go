package guard

import (
	"bufio"
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Health is the state of this process's access to guards.
type Health struct {
	Healthy bool          `json:"healthy"` // Redis answers, and it can hold guards
	Redis   RedisHealth   `json:"redis"`
	Pool    PoolHealth    `json:"pool"`
	Guards  []NamedHealth `json:"guards"` // the last 10,000 that this process has used; no limiters
}

// RedisHealth is what Redis answers to PING and INFO. On a Cluster it describes one master.
type RedisHealth struct {
	Reachable   bool    `json:"reachable"`
	Error       string  `json:"error,omitempty"`
	PingMS      float64 `json:"ping_ms"`
	Role        string  `json:"role,omitempty"`
	Evicts      bool    `json:"evicts"`       // it forgets keys when its memory is full
	MemoryRatio float64 `json:"memory_ratio"` // used memory / maxmemory; 0 without a maxmemory
}

// PoolHealth is the connection pool of the Redis client.
type PoolHealth struct {
	Total    uint32 `json:"total"`
	Idle     uint32 `json:"idle"`
	Stale    uint32 `json:"stale"`
	Timeouts uint32 `json:"timeouts"`
}

// NamedHealth is the state of one guard.
type NamedHealth struct {
	Name          string `json:"name"` // KIND/NAME
	Outage        bool   `json:"outage"`
	MembersUsable int64  `json:"members_usable"` // that could be lent by the last reply; -1 = not known yet
}

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
		h.Redis.read(info)
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

func (r *RedisHealth) read(info string) {
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
