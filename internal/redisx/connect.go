// Package redisx is how every role connects to Redis. It hides the kinds of servers (single,
// Sentinel, Cluster) and switches go-redis's retries off, which would execute a command twice.
package redisx

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// MaxBlock is the longest that a blocking read waits: a cancelled context does not interrupt one.
const MaxBlock = time.Second

// Config says which Redis, and how to talk to it. Zero durations and sizes take
// go-redis's defaults.
type Config struct {
	URL            string        // see ParseURL
	PoolMinIdle    int           // connections kept open, per server
	PoolMaxActive  int           // most connections for commands, and as many again for blocking reads, per server
	BlockingReads  int           // how many there may be at once: so many connections for them at least
	DialTimeout    time.Duration // to connect
	CommandTimeout time.Duration // to send a command, and to await its reply
	ClientName     string        // shown by CLIENT LIST
}

// Conn is a connection pool to one Redis, cluster or Sentinel-watched master, for any number of
// goroutines. No command is retried: a lost reply is an error that IsAmbiguous knows. (A cluster
// client still may repeat a command while it follows redirects.)
type Conn struct {
	Cmd   redis.UniversalClient // for commands
	Block redis.UniversalClient // for reads that block, so that they starve nobody
}

// Connect opens the pools. A Redis that is away is logged, not an error, since a process outlives
// that; a URL that can't be read, a refused password or a missing database is one.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	o, err := ParseURL(cfg.URL)
	if err != nil {
		return nil, err
	}
	quietLibrary()

	block := cfg
	block.PoolMinIdle = 0
	block.PoolMaxActive = max(cfg.PoolMaxActive, cfg.BlockingReads)
	c := &Conn{
		Cmd:   redis.NewUniversalClient(o.universal(cfg, 0)),
		Block: redis.NewUniversalClient(o.universal(block, MaxBlock)),
	}
	c.follow()
	if err := c.Ping(ctx); err != nil && !call.IsUnavailable(err) && ctx.Err() == nil {
		return nil, errors.Join(fmt.Errorf("connect to redis, %s: %w", o, err), c.Close())
	} else if err != nil {
		slog.WarnContext(ctx, "redis is away, going on without it", "redis", o.String(), "error", err)
	}
	return c, nil
}

// universal leaves readBeyond on top of the command timeout for a blocked read's reply.
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

		MaxRetries:            -1, // a retried write whose reply was lost is a second write
		ContextTimeoutEnabled: true,
		DialTimeout:           cfg.DialTimeout,
		DialerRetries:         1, // callers back off themselves
		WriteTimeout:          cfg.CommandTimeout,

		MinIdleConns:     cfg.PoolMinIdle,
		PoolSize:         cfg.PoolMaxActive,
		PipelinePoolSize: -1, // pipelines share the pool, so that its size is the bound

		// Plain RESP2, without handshakes that older servers and miniredis refuse.
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if cfg.CommandTimeout > 0 {
		u.ReadTimeout = cfg.CommandTimeout + readBeyond
	}
	if o.TLS {
		u.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12} // the server's name is taken from its address
	}
	return u
}

// IsCluster says whether keys are spread over several servers.
func (c *Conn) IsCluster() bool {
	_, ok := c.Cmd.(*redis.ClusterClient)
	return ok
}

// Shards calls fn for each master, at the same time on a cluster, and returns the first error.
func (c *Conn) Shards(ctx context.Context, fn func(ctx context.Context, shard redis.UniversalClient) error) error {
	cluster, ok := c.Cmd.(*redis.ClusterClient)
	if !ok {
		return fn(ctx, c.Cmd)
	}
	err := cluster.ForEachMaster(ctx, func(ctx context.Context, shard *redis.Client) error { return fn(ctx, shard) })
	if call.IsUnavailable(err) {
		cluster.ReloadState(ctx) // see follow
	}
	return err
}

// Ping returns nil when every shard answers.
func (c *Conn) Ping(ctx context.Context) error {
	err := c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error { return shard.Ping(ctx).Err() })
	if err != nil {
		return fmt.Errorf("ping redis: %w", err)
	}
	return nil
}

// Close closes both pools; commands in flight fail.
func (c *Conn) Close() error {
	return errors.Join(c.Cmd.Close(), c.Block.Close())
}

// quietLibrary sends what go-redis would print, once a failed dial, to the debug log: who called it
// reports the error.
var quietLibrary = sync.OnceFunc(func() { redis.SetLogger(debugLogger{}) })

type debugLogger struct{}

func (debugLogger) Printf(ctx context.Context, format string, args ...any) {
	if slog.Default().Enabled(ctx, slog.LevelDebug) {
		slog.DebugContext(ctx, "redis client", "detail", fmt.Sprintf(format, args...))
	}
}
