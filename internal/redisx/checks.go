package redisx

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// oldestVersion is the oldest version of Redis with which the tests run: the one that CI installs.
// (`make deps` installs the one of the Linux distribution.)
const oldestVersion = "7.0"

// CheckVersion returns an error if a master is older than the oldest version that is tested, or
// does not answer. It accepts a server that does not report its version, or that this process may
// not ask.
func (c *Conn) CheckVersion(ctx context.Context) error {
	return c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		version, err := call.ServerVersion(ctx, shard)
		if err != nil {
			return fmt.Errorf("ask redis for its version: %w", err)
		}
		if !isOld(version) {
			return nil
		}
		return fmt.Errorf("%s has version %s; bulkaction is tested with %s and later, and its scripts rely on it: "+
			"upgrade Redis, or name another one with BULKACTION_REDIS_URL (`bulkaction dev`: --redis-url)",
			at(shard), version, oldestVersion)
	})
}

// isOld reports whether a version is older than oldestVersion. It compares the first two numbers,
// such as 7.4 of 7.4.2. A version that does not begin with two numbers is unknown, and not old.
func isOld(version string) bool {
	major, minor, ok := parseVersion(version)
	oldMajor, oldMinor, _ := parseVersion(oldestVersion)
	return ok && (major < oldMajor || major == oldMajor && minor < oldMinor)
}

func parseVersion(version string) (major, minor int, ok bool) {
	first, rest, _ := strings.Cut(version, ".")
	second, _, _ := strings.Cut(rest, ".")
	major, err := strconv.Atoi(first)
	if err != nil {
		return 0, 0, false
	}
	minor, err = strconv.Atoi(second)
	return major, minor, err == nil
}

// at names a server in an error.
func at(shard redis.UniversalClient) string {
	// Behind Sentinel, Addr is not the server's address: go-redis sets it to a name without a port.
	if client, ok := shard.(*redis.Client); ok && strings.Contains(client.Options().Addr, ":") {
		return "redis at " + client.Options().Addr
	}
	return "redis"
}

// CheckEviction returns an error if a master may evict keys when its memory is full, because it
// would lose jobs, or if a master does not answer. It accepts a server that does not report its
// policy, such as an embedded one, and one that this process may not ask.
func (c *Conn) CheckEviction(ctx context.Context) error {
	return c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		policy, err := call.EvictionPolicy(ctx, shard)
		if err != nil {
			return fmt.Errorf("ask redis for its eviction policy: %w", err)
		}
		if policy == "" || policy == "noeviction" {
			return nil
		}
		return fmt.Errorf("%s evicts keys when memory is full (maxmemory-policy %s), which would lose jobs: "+
			"run `CONFIG SET maxmemory-policy noeviction` there, and set it in its configuration file",
			at(shard), policy)
	})
}

// inMemory maps an address to the Dialer of a Redis server inside this process. An address has the
// form host:port, but nothing listens there.
var inMemory sync.Map // string → Dialer

// Dialer opens a connection to a Redis server.
type Dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// ServeInMemory makes Connect open connections to addr, a host:port that no real server has, with
// dial instead of the network, until remove is called. It is for tests in a bubble of
// testing/synctest, whose clock stands still while a goroutine waits for the network.
func ServeInMemory(addr string, dial Dialer) (remove func()) {
	inMemory.Store(addr, dial)
	return func() { inMemory.Delete(addr) }
}

// memoryDialer returns the dialer that ServeInMemory has registered for the address in o; nil if
// there is none, or o has several addresses.
func (o Options) memoryDialer() Dialer {
	if len(o.Addrs) != 1 {
		return nil
	}
	dial, _ := inMemory.Load(o.Addrs[0])
	d, _ := dial.(Dialer)
	return d
}
