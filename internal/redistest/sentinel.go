package redistest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisproc"
)

// masterName is what the Sentinel calls its master.
const masterName = "mymaster"

// Sentinels is a master with a replica, watched by a Sentinel that promotes the replica about a second after
// the master is gone.
type Sentinels struct {
	URL      string
	Master   *Redis // at the start
	Replica  *Redis
	Sentinel *Redis
}

// Sentinel starts a Sentinel set-up and waits until a failover would succeed.
func Sentinel(t testing.TB) *Sentinels {
	t.Helper()
	master := Server(t, Args("--repl-diskless-sync-delay", "0"))
	host, port, _ := strings.Cut(master.Addr(), ":")
	replica := Server(t, Args("--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0"))
	c := replica.Client()
	await(t, "replica", func(ctx context.Context) error {
		return lacks(c.Info(ctx, "replication"), "master_link_status:up")
	})
	sentinel := start(t, redisproc.Options{
		Args: []string{"--sentinel"},
		Config: fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]s 1\n"+
			"sentinel down-after-milliseconds %[1]s 500\n"+
			"sentinel failover-timeout %[1]s 5000\n", masterName, host, port),
	})
	c = sentinel.Client()
	await(t, "sentinel", func(ctx context.Context) error {
		return lacks(c.Info(ctx, "sentinel"), "status=ok,address="+master.Addr()+",slaves=1,sentinels=1")
	})
	return &Sentinels{
		URL:      "redis-sentinel://" + sentinel.Addr() + "/" + masterName,
		Master:   master,
		Replica:  replica,
		Sentinel: sentinel,
	}
}

// AwaitFailover waits until the Sentinel names the replica as the master, and it takes writes.
func (s *Sentinels) AwaitFailover() {
	s.Sentinel.t.Helper()
	sentinel, replica := s.Sentinel.Client(), s.Replica.Client()
	await(s.Sentinel.t, "failover", func(ctx context.Context) error {
		if err := lacks(sentinel.Info(ctx, "sentinel"), "address="+s.Replica.Addr()); err != nil {
			return err
		}
		return lacks(replica.Info(ctx, "replication"), "role:master")
	})
}

func lacks(info *redis.StringCmd, want string) error {
	got, err := info.Result()
	if err != nil {
		return err
	}
	if !strings.Contains(got, want) {
		return fmt.Errorf("no %q in\n%s", want, got)
	}
	return nil
}

func do(t testing.TB, c *redis.Client, args ...any) {
	t.Helper()
	if err := c.Do(t.Context(), args...).Err(); err != nil {
		t.Fatalf("redis %v: %v", args, err)
	}
}
