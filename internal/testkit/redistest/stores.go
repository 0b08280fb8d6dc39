package redistest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

// EnvBinaries is the environment variable with the paths of further servers for [Stores], such as
// those of Redis 8 and Valkey, separated as in PATH.
const EnvBinaries = "BULKACTION_REDIS_SERVERS"

// store is a kind of server on which the contract tests run.
type store struct {
	name    string // of the subtest
	binary  string // empty: the installed redis-server
	masters int    // more than one: a Cluster
}

var stores = sync.OnceValues(func() ([]store, error) { return storesOf(os.Getenv(EnvBinaries)) })

// storesOf returns the installed redis-server, a Cluster of it, and the same of each binary in a
// value of EnvBinaries. The miniredis of [Stores] has a server for each test instead.
func storesOf(binaries string) ([]store, error) {
	all := []store{{name: "redis", masters: 1}, {name: "cluster", masters: 2}}
	for _, binary := range filepath.SplitList(binaries) {
		out, err := exec.Command(binary, "--version").Output()
		found := regexp.MustCompile(`^(Redis|Valkey) server v=([0-9.]+) `).FindSubmatch(out)
		if err == nil && found == nil {
			err = errors.New("this is no version of Redis or Valkey")
		}
		if err != nil {
			return nil, fmt.Errorf("%s has %q, which is no Redis server: with --version it prints %q: %w",
				EnvBinaries, binary, out, err)
		}
		name := strings.ToLower(string(found[1])) + "-" + string(found[2])
		if slices.ContainsFunc(all, func(s store) bool { return s.name == name }) {
			return nil, fmt.Errorf("%s has two servers of the version %s", EnvBinaries, name)
		}
		all = append(all, store{name, binary, 1}, store{name + "-cluster", binary, 2})
	}
	return all, nil
}

// Stores runs a contract test on each kind of server that the product is checked with: the shared
// redis-server, a shared Cluster of two masters, miniredis, and the servers of EnvBinaries, alone
// and as a Cluster. They are subtests with the name of the kind, each with a key prefix of its own.
// A server that does not start is a failure. The test may call t.Parallel.
func Stores(t *testing.T, test func(t *testing.T, url, prefix string)) {
	t.Helper()
	all, err := stores()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			url, prefix := share(t, s)
			test(t, url, prefix)
		})
	}
	t.Run("miniredis", func(t *testing.T) {
		_, url := Mini(t)
		test(t, url, "t:")
	})
}

// Options returns the options of a client of a server or Cluster of [Stores].
func Options(t testing.TB, url string) *redis.UniversalOptions {
	t.Helper()
	first, others, _ := strings.Cut(url, ",")
	o, err := redis.ParseURL(first)
	if err != nil {
		t.Fatal(err)
	}
	u := &redis.UniversalOptions{Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password, IsClusterMode: others != ""}
	if u.IsClusterMode {
		u.Addrs = append(u.Addrs, strings.Split(others, ",")...)
	}
	return u
}

// Keys returns the keys that match a pattern, of all nodes, in order.
func Keys(ctx context.Context, c redis.UniversalClient, pattern string) ([]string, error) {
	var mu sync.Mutex
	var keys []string
	scan := func(ctx context.Context, c redis.Cmdable) error {
		found, err := c.Keys(ctx, pattern).Result()
		mu.Lock()
		defer mu.Unlock()
		keys = append(keys, found...)
		return err
	}
	var err error
	if cluster, ok := c.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return scan(ctx, c) })
	} else {
		err = scan(ctx, c)
	}
	slices.Sort(keys)
	return keys, err
}
