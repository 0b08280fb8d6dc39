package cli

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// redisFlags are the flags of commands that use the Redis of the roles directly.
type redisFlags struct{ url, prefix string }

func (f *redisFlags) add(flags *pflag.FlagSet) {
	f.url, f.prefix = os.Getenv("BULKACTION_REDIS_URL"), os.Getenv("BULKACTION_KEY_PREFIX")
	if f.url == "" {
		f.url = "redis://127.0.0.1:6379/0"
	}
	if f.prefix == "" {
		f.prefix = "bulk-action:"
	}
	flags.StringVar(&f.url, "redis-url", f.url, "Redis of the roles; BULKACTION_REDIS_URL sets the default")
	flags.StringVar(&f.prefix, "key-prefix", f.prefix,
		"prefix of the roles' keys; BULKACTION_KEY_PREFIX sets the default")
}

// check returns an error if the URL is malformed.
func (f *redisFlags) check() error {
	if _, err := redisx.ParseURL(f.url); err != nil {
		return usagef("--redis-url: %v", err)
	}
	return nil
}

// connect returns a connection to a Redis that answers. The caller must close it.
func (f *redisFlags) connect(ctx context.Context) (*redisx.Conn, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	// errors are returned; log lines would only repeat them
	slog.SetDefault(slog.New(slog.DiscardHandler))
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            f.url,
		DialTimeout:    5 * time.Second,
		CommandTimeout: 10 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	if err := conn.Ping(ctx); err != nil {
		_ = conn.Close() // no command is running
		return nil, withHint(err, "Give the address of Redis with --redis-url or BULKACTION_REDIS_URL.")
	}
	return conn, nil
}

// space returns the key space of an installation with this number of partitions.
func (f *redisFlags) space(partitions int) (keyspace.Space, error) {
	space, err := keyspace.New(f.prefix, partitions)
	if err != nil {
		return keyspace.Space{}, usagef("--key-prefix: %v", err)
	}
	return space, nil
}
