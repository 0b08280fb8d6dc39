// Package redisx connects to Redis. It hides the kinds of servers (single, Sentinel, Cluster) and
// switches go-redis's retries off, as far as it can (see Conn), because a retried command could be
// executed twice.
package redisx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// MaxBlock is the longest time that a blocking read may wait in Redis. It is short because a
// cancelled context does not interrupt such a read.
const MaxBlock = time.Second

// Config has the address of Redis and the settings of the connections to it. Zero durations and
// sizes mean go-redis's defaults.
type Config struct {
	URL string // in the form of ParseURL
	Access
	PoolMinIdle int // idle connections that are kept open, for each server
	// PoolMaxIdle is the highest number of idle connections for commands to one server; 0: no
	// limit. It has no effect below PoolMinIdle.
	PoolMaxIdle int
	// PoolMaxActive is the highest number of connections to one server for commands. Blocking reads
	// have a pool of their own, whose size is the higher of PoolMaxActive and BlockingReads.
	PoolMaxActive int
	// BlockingReads is how many blocking reads must be able to run at once. It is no limit: there
	// may be more connections for them.
	BlockingReads  int
	DialTimeout    time.Duration // time limit to connect
	CommandTimeout time.Duration // time limit to send a command, and to receive its reply
	ClientName     string        // shown by CLIENT LIST
	Log            *slog.Logger  // nil: slog.Default
}

// Conn holds connection pools to one Redis server, Cluster or master behind Sentinel, for any
// number of goroutines. No command is retried: a lost reply is an error, although the command may
// have been executed. Except on a Cluster: go-redis's cluster client, which must follow redirects,
// repeats a command up to three times, also after a network error.
type Conn struct {
	Cmd   redis.UniversalClient // for commands
	Block redis.UniversalClient // for blocking reads, so that they do not occupy the connections for commands

	address string
}

// String returns the address of Redis without its password.
func (c *Conn) String() string { return c.address }

// Connect opens the pools. It logs a Redis that does not answer, and returns no error for it,
// because Redis may answer later. What a person must correct is an error, for example a URL that
// can't be parsed, a refused password or a missing database. Connect also sends go-redis's own
// messages to the debug log, for the whole process.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	o, err := ParseURL(cfg.URL)
	if err != nil {
		return nil, err
	}
	if err := cfg.Access.Check(o); err != nil {
		return nil, fmt.Errorf("connect to redis, %s: %w", o, err)
	}
	quietLibrary()

	block := cfg
	block.PoolMinIdle, block.PoolMaxIdle = 0, 0
	block.PoolMaxActive = max(cfg.PoolMaxActive, cfg.BlockingReads)
	c := &Conn{
		Cmd:   redis.NewUniversalClient(o.universal(cfg, 0)),
		Block: redis.NewUniversalClient(o.universal(block, MaxBlock)),

		address: o.String(),
	}
	c.follow()
	if err = c.Ping(ctx); err != nil && o.memoryDialer() == nil {
		err = cfg.explain(ctx, o, adviseTLS(err))
	}
	if err != nil && ctx.Err() == nil && isMistake(err) {
		return nil, errors.Join(fmt.Errorf("connect to redis, %s: %w", o, err), c.Close())
	} else if err != nil {
		log := cfg.Log
		if log == nil {
			log = slog.Default()
		}
		log.WarnContext(ctx, "redis does not answer", "redis", o.String(), "error", err)
	}
	return c, nil
}

// isMistake reports whether the first command of Connect failed for a reason that a person must
// correct, such as a wrong password. It returns false if Redis is away and may come back.
func isMistake(err error) bool {
	_, refused := errors.AsType[*refusalError](err)
	return refused || !call.IsUnavailable(err)
}

// universal returns the options of a go-redis client. The read timeout is the command timeout plus
// readBeyond, the time that a blocking read may wait in Redis.
func (o Options) universal(cfg Config, readBeyond time.Duration) *redis.UniversalOptions {
	u := &redis.UniversalOptions{
		Addrs:            o.Addrs,
		IsClusterMode:    o.Cluster,
		MasterName:       o.Master,
		DB:               o.DB,
		Username:         o.Username,
		Password:         o.password,
		SentinelUsername: o.sentinelUsername,
		SentinelPassword: o.sentinelPassword,
		ClientName:       cfg.ClientName,

		MaxRetries:            -1, // never retry: if a reply was lost, a retried write is a second write
		ContextTimeoutEnabled: true,
		DialTimeout:           cfg.DialTimeout,
		DialerRetries:         1, // the callers retry with backoff themselves
		WriteTimeout:          cfg.CommandTimeout,

		MinIdleConns:     cfg.PoolMinIdle,
		PoolSize:         cfg.PoolMaxActive,
		PipelinePoolSize: -1, // pipelines use the same pool, so that its size bounds all connections

		// Speak RESP2, and send neither CLIENT SETINFO nor CLIENT MAINT_NOTIFICATIONS: older
		// servers and miniredis refuse them.
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if cfg.PoolMaxIdle > 0 {
		u.MaxIdleConns = max(cfg.PoolMaxIdle, cfg.PoolMinIdle)
	}
	if cfg.CommandTimeout > 0 {
		u.ReadTimeout = cfg.CommandTimeout + readBeyond
	}
	if credentials := cfg.credentials(); credentials != nil {
		u.CredentialsProviderContext = credentials
	}
	u.Dialer = o.memoryDialer()
	if o.TLS {
		u.Dialer = cfg.dialTLS
	}
	return u
}

// IsCluster reports whether the connection is to a Redis Cluster, where keys are spread over
// several servers.
func (c *Conn) IsCluster() bool {
	_, ok := c.Cmd.(*redis.ClusterClient)
	return ok
}

// Shards calls fn for each master, on a Cluster concurrently, and returns the first error. Without
// a Cluster there is one master.
func (c *Conn) Shards(ctx context.Context, fn func(ctx context.Context, shard redis.UniversalClient) error) error {
	cluster, ok := c.Cmd.(*redis.ClusterClient)
	if !ok {
		return fn(ctx, c.Cmd)
	}
	err := cluster.ForEachMaster(ctx, func(ctx context.Context, shard *redis.Client) error { return fn(ctx, shard) })
	if call.IsUnavailable(err) {
		cluster.ReloadState(ctx) // the list of masters may be outdated, see follow
	}
	return err
}

// Ping returns nil if every master answers.
func (c *Conn) Ping(ctx context.Context) error {
	err := c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error { return shard.Ping(ctx).Err() })
	if err != nil {
		return fmt.Errorf("ping redis: %w", err)
	}
	return nil
}

// Close closes both pools; running commands fail.
func (c *Conn) Close() error {
	return errors.Join(c.Cmd.Close(), c.Block.Close())
}

// quietLibrary sends go-redis's own messages (one for each failed dial) to the debug log. The
// callers of go-redis report the errors.
var quietLibrary = sync.OnceFunc(func() { redis.SetLogger(debugLogger{}) })

type debugLogger struct{}

func (debugLogger) Printf(ctx context.Context, format string, args ...any) {
	if slog.Default().Enabled(ctx, slog.LevelDebug) {
		slog.DebugContext(ctx, "redis client", "detail", fmt.Sprintf(format, args...))
	}
}

// follow makes the cluster clients reload the map of hash slots after a command that no node
// served. go-redis by itself reloads it only when a node redirects a command. A dead master
// redirects no command, so the client would use it for another minute.
func (c *Conn) follow() {
	for _, client := range []redis.UniversalClient{c.Cmd, c.Block} {
		if cluster, ok := client.(*redis.ClusterClient); ok {
			cluster.AddHook(follower{cluster.ReloadState})
		}
	}
}

// follower is a go-redis hook that calls reload after a command that no node served. reload is
// cheap and does not block.
type follower struct{ reload func(context.Context) }

func (f follower) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f follower) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if call.IsUnavailable(err) {
			f.reload(ctx)
		}
		return err
	}
}

func (f follower) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if err == nil {
			return nil
		}
		for _, cmd := range cmds {
			if call.IsUnavailable(cmd.Err()) {
				f.reload(ctx)
				break
			}
		}
		return err
	}
}

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
