package cli

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// redisFlags are the flags of commands that connect to the roles' Redis instead of calling the API.
type redisFlags struct{ url, prefix string }

func (f *redisFlags) add(flags *pflag.FlagSet) {
	f.prefix = os.Getenv("BULKACTION_KEY_PREFIX")
	if f.prefix == "" {
		f.prefix = "bulk-action:"
	}
	flags.StringVar(&f.url, "redis-url", "",
		"Redis of the roles; BULKACTION_REDIS_URL sets the default, and the other variables BULKACTION_REDIS_*\n"+
			"the user and TLS (default redis://127.0.0.1:6379/0)")
	flags.StringVar(&f.prefix, "key-prefix", f.prefix,
		"prefix of the roles' keys; BULKACTION_KEY_PREFIX sets the default")
}

// check returns an error if the URL or a variable of the connection is wrong.
func (f *redisFlags) check() error {
	_, err := f.config()
	return err
}

// config returns the settings of the connection, from the flags and from the environment variables
// that roles use, too.
func (f *redisFlags) config() (redisx.Config, error) {
	if err := checkRedisURL(f.url); err != nil {
		return redisx.Config{}, err
	}
	cfg, err := app.LoadRedis(os.Environ(), f.url)
	if err != nil {
		return redisx.Config{}, usagef("%v", err)
	}
	connection := cfg.Connection()
	connection.CommandTimeout = 10 * time.Second
	return connection, nil
}

// connect connects to Redis and checks that it answers. The caller must close the connection. It
// also turns off the default logger of this process.
func (f *redisFlags) connect(ctx context.Context) (*redisx.Conn, error) {
	cfg, err := f.config()
	if err != nil {
		return nil, err
	}
	// errors are returned; log lines would only repeat them
	slog.SetDefault(slog.New(slog.DiscardHandler))
	conn, err := redisx.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := conn.Ping(ctx); err != nil {
		_ = conn.Close() // no command is running
		return nil, withHint(err, "Give the address of Redis with --redis-url or BULKACTION_REDIS_URL.")
	}
	return conn, nil
}

// space returns the key space of an installation that has the given number of partitions.
func (f *redisFlags) space(partitions int) (keyspace.Space, error) {
	space, err := keyspace.New(f.prefix, partitions)
	if err != nil {
		return keyspace.Space{}, usagef("--key-prefix: %v", err)
	}
	return space, nil
}
