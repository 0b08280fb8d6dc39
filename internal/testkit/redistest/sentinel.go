package redistest

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// acked matches the line in a master's INFO about a replica that has acknowledged some of the
// replication stream.
var acked = regexp.MustCompile(`slave\d+:.*state=online,offset=[1-9]`)

const masterName = "mymaster"

// Sentinels is a master with a replica and a Sentinel, which promotes the replica about two seconds
// after the master has died.
type Sentinels struct {
	URL      string
	Master   *Redis // at the start
	Replica  *Redis // at the start
	Sentinel *Redis
}

// Sentinel starts a Sentinel set-up and waits until a failover would succeed. The options apply to
// the master and the replica; with the option TLS, Sentinel uses TLS too.
func Sentinel(t testing.TB, opts ...Option) *Sentinels {
	t.Helper()
	opts = append([]Option{Args("--repl-diskless-sync-delay", "0")}, opts...)
	master := Server(t, opts...)
	host, port, _ := strings.Cut(master.peerAddr(), ":")
	replica := Server(t, append(opts, Args("--replicaof", host+" "+port))...)
	await(t, "replica", func(ctx context.Context) error {
		return lacks(replica.admin.Info(ctx, "replication"), "master_link_status:up")
	})
	var o redisproc.Options
	for _, opt := range opts {
		opt(&o)
	}
	sentinel := start(t, redisproc.Options{
		TLS:  o.TLS,
		Args: []string{"--sentinel"},
		Config: fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]s 1\n"+
			// Sentinel pings once a second: with a lower value it would regard a living master as
			// down.
			"sentinel down-after-milliseconds %[1]s 1500\n"+
			// A second failover starts no earlier than twice this time after the first.
			"sentinel failover-timeout %[1]s 3000\n", masterName, host, port),
	})
	scheme := "redis-sentinel://"
	if sentinel.tls {
		scheme = "rediss-sentinel://"
	}
	s := &Sentinels{
		URL:      scheme + sentinel.peerAddr() + "/" + masterName,
		Master:   master,
		Replica:  replica,
		Sentinel: sentinel,
	}
	s.await("sentinel", "status=ok,address="+master.peerAddr()+",slaves=1,sentinels=1")
	return s
}

func (s *Sentinels) await(what, want string) {
	s.Sentinel.t.Helper()
	await(s.Sentinel.t, what, func(ctx context.Context) error {
		return lacks(s.Sentinel.admin.Info(ctx, "sentinel"), want)
	})
}

// StartFailover tells Sentinel to exchange the roles of master and replica, as an administrator
// does before maintenance. It repeats the command until Sentinel knows the replica's state and
// accepts it (before: NOGOODSLAVE).
func (s *Sentinels) StartFailover() {
	s.Sentinel.t.Helper()
	await(s.Sentinel.t, "a replica that Sentinel would promote", func(ctx context.Context) error {
		return s.Sentinel.admin.Do(ctx, "sentinel", "failover", masterName).Err()
	})
}

// AwaitFailover waits until Sentinel names the replica as the master and it accepts writes.
func (s *Sentinels) AwaitFailover() {
	s.Sentinel.t.Helper()
	s.AwaitMaster(s.Replica)
}

// AwaitMaster waits until Sentinel names the given server as the master and it accepts writes.
func (s *Sentinels) AwaitMaster(r *Redis) {
	s.Sentinel.t.Helper()
	s.await("failover", "address="+r.peerAddr())
	await(s.Sentinel.t, "failover", func(ctx context.Context) error {
		return lacks(r.admin.Info(ctx, "replication"), "role:master")
	})
}

// Rejoin starts one of the two servers again as a replica of the other, and waits until it has all
// data and Sentinel would promote it.
func (s *Sentinels) Rejoin(r *Redis) {
	s.Sentinel.t.Helper()
	master := s.Master
	if r == s.Master {
		master = s.Replica
	}
	host, port, _ := strings.Cut(master.peerAddr(), ":")
	r.Restart()
	do(s.Sentinel.t, r.admin, "replicaof", host, port) // Sentinel would do this as well, but later
	await(s.Sentinel.t, "replica", func(ctx context.Context) error {
		return lacks(r.admin.Info(ctx, "replication"), "master_link_status:up")
	})
	// After a full synchronization, the master sends the replica nothing until the replica's first
	// ACK, up to 1 s later: wait for this ACK.
	await(s.Sentinel.t, "the replica's first ACK", func(ctx context.Context) error {
		info, err := master.admin.Info(ctx, "replication").Result()
		if err == nil && !acked.MatchString(info) {
			err = fmt.Errorf("no replica has acknowledged anything in\n%s", info)
		}
		return err
	})
	s.await("sentinel", "status=ok,address="+master.peerAddr()+",slaves=1,sentinels=1")
	await(s.Sentinel.t, "sentinel", func(ctx context.Context) error {
		replicas, err := s.Sentinel.admin.Do(ctx, "sentinel", "replicas", masterName).Result()
		if said := fmt.Sprint(replicas); err == nil &&
			(!strings.Contains(said, "master-link-status ok") || !strings.Contains(said, "flags slave ")) {
			err = fmt.Errorf("the replica is not well: %s", said)
		}
		return err
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
	if err := c.Do(context.WithoutCancel(t.Context()), args...).Err(); err != nil {
		t.Fatalf("redis %v: %v", args, err)
	}
}
