package redisx

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// lossyProxy is a TCP proxy in front of a server. It drops the reply to the first command with a
// given name, and closes the connection of that command.
type lossyProxy struct {
	net.Listener
	lose   string
	once   sync.Once
	copies sync.WaitGroup
}

func startLossyProxy(t *testing.T, target, lose string) *lossyProxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &lossyProxy{Listener: l, lose: lose}
	p.copies.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.copies.Go(func() { p.serve(client, target) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); p.copies.Wait() })
	return p
}

func (p *lossyProxy) serve(client net.Conn, target string) {
	defer client.Close()
	upstream, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer upstream.Close()
	requests, replies := bufio.NewReader(client), bufio.NewReader(upstream)
	for buf := make([]byte, 64<<10); ; {
		n, err := requests.Read(buf)
		if err != nil {
			return
		}
		lost := false
		if strings.Contains(strings.ToLower(string(buf[:n])), p.lose) {
			p.once.Do(func() { lost = true })
		}
		if _, err := upstream.Write(buf[:n]); err != nil {
			return
		}
		n, err = replies.Read(buf) // one reply for each request: the tests use no pipelines
		if err != nil || lost {
			return
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}

func TestLostReplyIsNotRetried(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t)
	direct := connect(t, s.URL())

	for _, pool := range []string{"cmd", "block"} {
		stream := "stream-" + pool
		proxy := startLossyProxy(t, s.Addr(), "xadd")
		c := connect(t, "redis://"+proxy.Addr().String())
		client := c.Cmd
		if pool == "block" {
			client = c.Block
		}
		err := client.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "v"}}).Err()
		require.Error(t, err, pool)
		require.True(t, call.IsUnavailable(err), "%s: %v", pool, err)
		require.EqualValues(t, 1, direct.Cmd.XLen(ctx, stream).Val(), pool)
		require.NoError(t, c.Close())
	}

	// Control: a client with go-redis's default retries adds the entry twice when the reply is
	// lost, and returns no error.
	proxy := startLossyProxy(t, s.Addr(), "xadd")
	retrying := redis.NewClient(&redis.Options{Addr: proxy.Addr().String(), Protocol: 2, DisableIdentity: true})
	defer retrying.Close()
	require.NoError(t, retrying.XAdd(ctx, &redis.XAddArgs{Stream: "twice", Values: []string{"k", "v"}}).Err())
	require.EqualValues(t, 2, direct.Cmd.XLen(ctx, "twice").Val())
}

func TestConnectWithoutRedis(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t)
	s.Kill()
	c := connect(t, s.URL())
	err := c.Ping(ctx)
	require.True(t, call.IsUnavailable(err), "%v", err)

	s.Restart()
	require.Eventually(t, func() bool { return c.Ping(ctx) == nil }, patience, glance)
}

// TestSilentServerIsUnavailable: after the command timeout a server that hangs counts as
// unavailable; the command may have been executed.
func TestSilentServerIsUnavailable(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t)
	c, err := Connect(ctx, Config{URL: s.URL(), CommandTimeout: 100 * time.Millisecond})
	require.NoError(t, err)
	defer c.Close()
	s.Suspend()
	err = c.Cmd.Incr(ctx, "n").Err()
	require.True(t, call.IsUnavailable(err), "%v", err)
	s.Resume()
	require.Eventually(t, func() bool { return c.Cmd.Get(ctx, "n").Val() == "1" }, patience, glance)
}

func TestConnectRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t, redistest.Args("--requirepass", "sesame", "--databases", "2"))

	_, err := Connect(ctx, Config{URL: "redis://:open@" + s.Addr()})
	require.ErrorContains(t, err, "WRONGPASS")
	require.NotContains(t, err.Error(), "open@")
	_, err = Connect(ctx, Config{URL: "redis://" + s.Addr()})
	require.ErrorContains(t, err, "NOAUTH")
	_, err = Connect(ctx, Config{URL: "redis://:sesame@" + s.Addr() + "/9"})
	require.ErrorContains(t, err, "out of range")
	require.NotContains(t, err.Error(), "sesame")
	_, err = Connect(ctx, Config{URL: "redis://:sesame@" + s.Addr() + "?cluster=true"})
	require.ErrorContains(t, err, "cluster support disabled")
	_, err = Connect(ctx, Config{URL: "nonsense"})
	require.ErrorContains(t, err, "parse redis url")

	c, err := Connect(ctx, Config{URL: "redis://:sesame@" + s.Addr() + "/1", ClientName: "ingest-1"})
	require.NoError(t, err)
	require.Equal(t, "ingest-1", c.Cmd.ClientGetName(ctx).Val())
	require.False(t, c.IsCluster())
	require.NoError(t, c.Close())
}

func TestConnectCluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	url, nodes := redistest.Cluster(t, 3)

	for _, url := range []string{url, nodes[2].URL() + "?cluster=true"} {
		c := connect(t, url)
		require.True(t, c.IsCluster(), url)
		require.NoError(t, c.Ping(ctx), url)
		var masters atomic.Int32
		require.NoError(t, c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
			masters.Add(1)
			return shard.Ping(ctx).Err()
		}))
		require.EqualValues(t, 3, masters.Load(), url)
	}

	nodes[1].Kill()
	c := connect(t, url)
	require.True(t, call.IsUnavailable(c.Ping(ctx)), "every shard counts")
}

func TestConnectSentinel(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	master := redistest.Server(t, redistest.Args("--requirepass", "sesame"))
	host, port, _ := strings.Cut(master.Addr(), ":")
	sentinel := redistest.Server(t, redistest.Args("--sentinel"), func(o *redisproc.Options) {
		o.Config = fmt.Sprintf("sentinel monitor main %s %s 1\nsentinel auth-pass main sesame\nrequirepass open\n", host, port)
	})

	c := connect(t, "redis-sentinel://:sesame@"+sentinel.Addr()+"/main/2?sentinel_password=open")
	require.NoError(t, c.Ping(ctx))
	require.False(t, c.IsCluster())
	require.NoError(t, c.Cmd.Set(ctx, "k", "v", 0).Err())
	direct := connect(t, "redis://:sesame@"+master.Addr()+"/2")
	require.Equal(t, "v", direct.Cmd.Get(ctx, "k").Val())
}

// TestBlockingReadsHaveRoom: 30 blocking reads wait at the same time, although there are only two
// connections for commands.
func TestBlockingReadsHaveRoom(t *testing.T) {
	t.Parallel()
	_, url := redistest.Mini(t)
	const n = 30
	c, err := Connect(t.Context(), Config{URL: url, PoolMaxActive: 2, BlockingReads: n, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	var reads sync.WaitGroup
	for i := range n {
		reads.Go(func() { _ = c.Block.BLPop(context.WithoutCancel(t.Context()), patience, fmt.Sprint("list", i)).Err() })
	}
	require.Eventually(t, func() bool { return c.Block.PoolStats().TotalConns == n }, patience, time.Millisecond)
	for i := range n {
		require.NoError(t, c.Cmd.RPush(t.Context(), fmt.Sprint("list", i), "x").Err())
	}
	reads.Wait()
}

// TestNoScriptRunsOnHalfAPartition: while a hash slot migrates, some keys of a partition are on the
// source master and some on the target. A script that declares two keys, one of them missing, runs
// on neither. A script that declares a single key is redirected to the target and would see only a
// part of the data.
func TestNoScriptRunsOnHalfAPartition(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 2)
	c := connect(t, cluster.URL)
	space, err := keyspace.New("half:", 1)
	require.NoError(t, err)
	p := space.Partition(0)
	for i := range 25 {
		require.NoError(t, c.Cmd.Set(ctx, p.Group(fmt.Sprint(i)), i, 0).Err())
	}
	count := call.NewScript("count", `
local found = 0
for i = 0, 24 do found = found + redis.call('EXISTS', KEYS[1] .. 'group:' .. i) end
if ARGV[1] then redis.call('INCR', KEYS[1] .. 'runs') end
return found`)
	slot := cluster.SlotOf(p.Base())
	to := cluster.Masters[0]
	if cluster.MasterOf(slot) == to {
		to = cluster.Masters[1]
	}
	found, err := count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
	require.NoError(t, err)
	require.EqualValues(t, 25, found)

	var halves []int64
	cluster.MoveSlot(slot, to, func(left int) {
		_, err := count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
		require.ErrorContains(t, err, "TRYAGAIN")
		require.True(t, call.IsUnavailable(err))

		found, err := count.Run(ctx, c.Cmd, []string{p.Base()}, nil)
		require.NoError(t, err)
		halves = append(halves, found.(int64))
	})
	require.Equal(t, []any{int64(0), int64(25)}, []any{halves[0], halves[len(halves)-1]}, "the control")
	require.True(t, slices.ContainsFunc(halves, func(n int64) bool { return n > 0 && n < 25 }), "the control: %v", halves)
	found, err = count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
	require.NoError(t, err)
	require.EqualValues(t, 25, found)
	require.Equal(t, "2", c.Cmd.Get(ctx, p.Base()+"runs").Val(), "what was refused has changed nothing")
}

// TestHeirIsFoundAtOnce: a dead master redirects no command. After its replica was promoted, each
// kind of call (command, pipeline, automatic pipeline, blocking read, Ping of all masters) reaches
// the new master in less than 30 s, although go-redis would find it after a minute.
func TestHeirIsFoundAtOnce(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 3)
	none := func(err error) error {
		if errors.Is(err, redis.Nil) {
			return nil
		}
		return err
	}
	own := func() *redis.ClusterClient { return connect(t, cluster.URL).Cmd.(*redis.ClusterClient) } // separate clients, so that no client's reload helps another
	single, several, block, shards := own(), own(), connect(t, cluster.URL).Block, connect(t, cluster.URL)
	pipe, err := own().AutoPipeline()
	require.NoError(t, err)
	t.Cleanup(func() { _ = pipe.Close() })
	ways := map[string]func() error{
		"command": func() error { return single.Incr(ctx, "k").Err() },
		"pipeline": func() error {
			var n *redis.IntCmd // the second command: a pipeline returns the error of its first one, here a missing key
			_, _ = several.Pipelined(ctx, func(p redis.Pipeliner) error { p.Get(ctx, "{k}none"); n = p.Incr(ctx, "k"); return nil })
			return n.Err()
		},
		"gathered": func() error { return pipe.Incr(ctx, "k").Err() },
		"blocking": func() error { return none(block.BLPop(ctx, 10*time.Millisecond, "{k}none").Err()) },
		"shards":   func() error { return shards.Ping(ctx) },
	}
	for way, do := range ways {
		require.NoError(t, do(), way)
	}
	dead := cluster.MasterOf(cluster.SlotOf("k"))
	dead.Kill()
	for way, do := range ways {
		require.Error(t, do(), way)
	}
	cluster.AwaitFailover()
	for way, do := range ways { // without the hook the client would reload after a minute
		require.Eventually(t, func() bool { return do() == nil }, patience, glance, way)
	}
}

// TestClusterComesBack: after all nodes of a cluster were down, the client finds them again at the
// same addresses.
func TestClusterComesBack(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 2, redistest.AOF)
	c := connect(t, cluster.URL)
	require.NoError(t, c.Cmd.Set(ctx, "k", "v", 0).Err())
	require.NoError(t, c.Ping(ctx))
	nodes := append(cluster.Masters, cluster.Replicas...)
	for _, node := range nodes {
		node.Kill()
	}
	for range 3 { // the first call finds out that no node answers; later calls must give the same error
		err := c.Cmd.Get(ctx, "k").Err()
		require.True(t, call.IsUnavailable(err), "%v", err)
		require.True(t, call.IsUnavailable(c.Ping(ctx)))
	}
	for _, node := range nodes {
		node.Restart()
	}
	require.Eventually(t, func() bool { return c.Cmd.Get(ctx, "k").Val() == "v" && c.Ping(ctx) == nil }, patience, glance)
}

const (
	patience = 30 * time.Second // limit for events that must happen; a healthy run needs a fraction of it
	glance   = 10 * time.Millisecond
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *Conn {
	t.Helper()
	c, err := Connect(context.Background(), Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]Options{
		"redis://127.0.0.1:6379/0":              {Addrs: []string{"127.0.0.1:6379"}},
		"redis://cache":                         {Addrs: []string{"cache:6379"}},
		"redis://[::1]:7000/3":                  {Addrs: []string{"[::1]:7000"}, DB: 3},
		"redis://[::1]":                         {Addrs: []string{"[::1]:6379"}},
		"redis://:pw@h:1":                       {Addrs: []string{"h:1"}, password: "pw"},
		"redis://u:p%2Fw%40%2C%25@h:1/2":        {Addrs: []string{"h:1"}, DB: 2, Username: "u", password: "p/w@,%"},
		"redis://u:p@w@h:1":                     {Addrs: []string{"h:1"}, Username: "u", password: "p@w"},
		"rediss://u:p@h:1/0":                    {Addrs: []string{"h:1"}, TLS: true, Username: "u", password: "p"},
		"redis://h:1?cluster=true":              {Addrs: []string{"h:1"}, Cluster: true},
		"redis://h:1/0?cluster=false":           {Addrs: []string{"h:1"}},
		"redis://h1:1,h2:2,h3:3":                {Addrs: []string{"h1:1", "h2:2", "h3:3"}, Cluster: true},
		"redis://u:p@h1:1,h2:2/0":               {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, Username: "u", password: "p"},
		"redis://h1:1,redis://h2:2":             {Addrs: []string{"h1:1", "h2:2"}, Cluster: true},
		"redis://u:p@h1:1/0,redis://u:p@h2:2/0": {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, Username: "u", password: "p"},
		"redis-sentinel://h1:1,h2/main":         {Addrs: []string{"h1:1", "h2:26379"}, Master: "main"},
		"rediss://u:p@h1:1,h2:2":                {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, TLS: true, Username: "u", password: "p"},
		"rediss-sentinel://h1:1,h2/main":        {Addrs: []string{"h1:1", "h2:26379"}, Master: "main", TLS: true},
		"redis-sentinel://u:p@h1:1/main/4?sentinel_username=su&sentinel_password=sp": {
			Addrs: []string{"h1:1"}, Master: "main", DB: 4, Username: "u", password: "p", sentinelUsername: "su", sentinelPassword: "sp",
		},
	} {
		got, err := ParseURL(raw)
		require.NoError(t, err, raw)
		require.Equal(t, want, got, raw)
	}
}

func TestParseURLRefusesAndKeepsSecrets(t *testing.T) {
	for raw, why := range map[string]string{
		"":                                     "no scheme",
		"h:6379":                               "no scheme",
		"http://h:6379":                        "unknown scheme",
		"redis://":                             "address 1: no host",
		"redis://h1:1,,h2:2":                   "address 2: no host",
		"redis://h:0":                          "port",
		"redis://h:sesame":                     "port",
		"redis://h:70000":                      "port",
		"redis://::1":                          "not host:port",
		"redis://u:sesame/x@h:1":               "a / comes before the host: write it as %2F",
		"redis://u:12/sesame@h:1":              "a / comes before the host: write it as %2F",
		"redis://u:sesame?x@h:1":               "a ? comes before the host: write it as %3F",
		"redis://u:se?s=%zz&same@h:1":          "a ? comes before the host: write it as %3F",
		"redis://u:sesame@h:1\n":               "it contains a line break: remove it, or write it as %0A",
		"redis://u:ses ame@h:1":                "it contains a space: remove it, or write it as %20",
		"redis://u:ses\u00a0ame@h:1":           "it contains the character U+00A0: remove it",
		"redis://u:sesame%zz@h:1":              "malformed % escape",
		"redis://u:ses,ame@h:1":                "write a comma in a user or password as %2C",
		"redis://h:1/sesame":                   "database",
		"redis://h:1/-1":                       "database",
		"redis://h1:1,h2:2/1":                  "only database 0",
		"redis://h:1/1?cluster=true":           "only database 0",
		"redis://h:1?cluster=sesame":           "neither true nor false",
		"redis://h:1?sesame=1":                 "unknown parameter",
		"redis://h:1?sentinel_password=sesame": "unknown parameter",
		"redis://h:1?%zz":                      "malformed parameters",
		"redis://u:p@h1:1,u:sesame@h2:2":       "different users or passwords",
		"redis-sentinel://h:1":                 "no name of a master",
		"rediss://h:1?skip_verify=true":        "skip_verify is refused: name the authority",
		"redis-sentinel://h:1/?cluster=true":   "unknown parameter",
	} {
		_, err := ParseURL(raw)
		require.ErrorContains(t, err, "parse redis url: ", raw)
		require.ErrorContains(t, err, why, raw)
		require.NotContains(t, err.Error(), "sesame", raw)
	}
}

func TestOptionsPrintNoSecrets(t *testing.T) {
	o, err := ParseURL("redis-sentinel://user:sesame@h:1/main?sentinel_password=sesame")
	require.NoError(t, err)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		require.Equal(t, "sentinel master main at h:1 db 0", fmt.Sprintf(verb, o))
	}
}

// FuzzParseURL: each accepted URL has addresses of a host and a port. Neither String nor an error
// shows its password.
func FuzzParseURL(f *testing.F) {
	const secret = "s3cr3t"
	for _, seed := range []string{
		"redis://127.0.0.1:6379/0", "rediss://user:" + secret + "@h/1", "redis://h1:1,h2:2", "redis://h1:1/0,redis://h2:2/0", "redis://h?cluster=true", "rediss-sentinel://s1,s2:2/master",
		"redis-sentinel://u:" + secret + "@s1,s2:2/master/3?sentinel_username=u&sentinel_password=" + secret, "redis://[::1]:1/", "redis://:" + secret + "%@h",
		"redis://a:b@c:d@e:1", "http://h", "redis://", "redis://h:0", "redis://0[0", "redis://h/x", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		o, err := ParseURL(raw)
		if err != nil {
			require.NotContains(t, err.Error(), secret)
			require.Contains(t, err.Error(), "parse redis url: ")
			return
		}
		require.NotEmpty(t, o.Addrs)
		for _, addr := range o.Addrs {
			host, port, err := net.SplitHostPort(addr)
			require.NoError(t, err)
			require.NotEmpty(t, host)
			n, err := strconv.Atoi(port)
			require.NoError(t, err)
			require.Greater(t, n, 0)
		}
		require.GreaterOrEqual(t, o.DB, 0)
		require.False(t, o.Cluster && o.DB != 0)
		if o.password == secret && !strings.Contains(strings.Join(o.Addrs, o.Master), secret) {
			require.NotContains(t, o.String(), secret)
		}
	})
}
