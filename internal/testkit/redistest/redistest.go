// Package redistest provides Redis servers for tests: real servers for one test or shared by a test
// binary, miniredis, a Cluster and a Sentinel set-up, all on loopback. It hides their processes,
// which end with the test or the test binary, and the wait until they are ready. If no redis-server
// is installed, tests fail with an error that says what to do.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// Redis is a real server for one test. A method that fails ends the test.
type Redis struct {
	t      testing.TB
	server *redisproc.Server
	admin  *redis.Client // for the commands of this package
	tls    bool          // other servers and Sentinel reach it at TLSAddr
}

// Option is a function that changes the settings of a server before it is started.
type Option func(*redisproc.Options)

// AOF is an option: the server writes each change to its append-only file before it answers, so
// that changes survive Kill. It never waits for the disk (fsync): that can take seconds while other
// tests run, and protects only against the end of the whole machine. With everysec, a slow disk
// would also delay the writes.
func AOF(o *redisproc.Options) {
	o.AOF = true
	o.Args = append(o.Args, "--appendfsync", "no")
}

// MaxMemory is an option: the server refuses writes while it uses more than this number of bytes.
func MaxMemory(bytes int64) Option {
	return func(o *redisproc.Options) { o.MaxMemory = bytes }
}

// TLS is an option: the server also serves TLS, with a certificate of an authority, on the port of
// TLSAddr. Servers use TLS among themselves, and demand a certificate of their clients.
func TLS(a *Authority, opts ...CertOption) Option {
	return func(o *redisproc.Options) {
		pair := a.Issue(opts...)
		o.TLS = &redisproc.TLS{CertFile: pair.CertFile, KeyFile: pair.KeyFile, CAFile: a.CAFile}
	}
}

// Args is an option: it adds arguments to redis-server's command line.
func Args(args ...string) Option {
	return func(o *redisproc.Options) { o.Args = append(o.Args, args...) }
}

// Server starts a redis-server that ends with the test. It persists nothing, unless an
// option says so.
func Server(t testing.TB, opts ...Option) *Redis {
	t.Helper()
	var o redisproc.Options
	for _, opt := range opts {
		opt(&o)
	}
	return start(t, o)
}

func start(t testing.TB, o redisproc.Options) *Redis {
	t.Helper()
	server, err := redisproc.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of redis-server at %s:\n%s", server.Addr(), server.Log())
		}
		if err := server.Close(); err != nil {
			t.Errorf("close redis-server: %v", err)
		}
	})
	return &Redis{t: t, server: server, admin: client(t, server.Addr()), tls: o.TLS != nil}
}

// URL returns the server's address in the form of BULKACTION_REDIS_URL.
func (r *Redis) URL() string { return r.server.URL() }

// Addr returns the server's host:port. It stays the same after restarts.
func (r *Redis) Addr() string { return r.server.Addr() }

// TLSAddr returns the host:port at which a server with the option TLS serves TLS.
func (r *Redis) TLSAddr() string { return r.server.TLSAddr() }

// peerAddr returns the host:port at which other servers and Sentinel reach the server.
func (r *Redis) peerAddr() string {
	if r.tls {
		return r.TLSAddr()
	}
	return r.Addr()
}

// PID returns the id of the server's process; a restart changes it.
func (r *Redis) PID() int { return r.server.PID() }

// Client returns a new client that never retries and is closed with the test.
func (r *Redis) Client() *redis.Client { return client(r.t, r.Addr()) }

func client(t testing.TB, addr string) *redis.Client {
	c := redis.NewClient(&redis.Options{
		Addr:                     addr,
		MaxRetries:               -1, // never retry: a retried write may be a second write
		DialerRetries:            1,
		Protocol:                 2,
		DisableIdentity:          true, // miniredis does not know these commands
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Kill ends the server like a crash, and waits for its end.
func (r *Redis) Kill() { r.server.Kill() }

// Restart starts the server again at the same address with its persisted data, and waits until it
// answers. A running server is killed first.
func (r *Redis) Restart() {
	r.t.Helper()
	if err := r.server.Restart(context.WithoutCancel(r.t.Context())); err != nil { // works in clean-ups too
		r.t.Fatal(err)
	}
}

// Backup returns the server's data as a snapshot in Redis's format (RDB).
func (r *Redis) Backup() []byte {
	r.t.Helper()
	do(r.t, r.admin, "bgsave")
	await(r.t, "snapshot", func(ctx context.Context) error {
		info := r.admin.Info(ctx, "persistence")
		return errors.Join(lacks(info, "rdb_bgsave_in_progress:0\r\n"), lacks(info, "rdb_last_bgsave_status:ok\r\n"))
	})
	snapshot, err := os.ReadFile(r.snapshotFile())
	if err != nil {
		r.t.Fatalf("read the snapshot: %v", err)
	}
	return snapshot
}

// Restore starts the server again on a snapshot of Backup, in place of its present data. The server
// must be without an AOF, which Redis would load instead.
func (r *Redis) Restore(snapshot []byte) {
	r.t.Helper()
	r.Kill()
	if err := os.WriteFile(r.snapshotFile(), snapshot, 0o600); err != nil {
		r.t.Fatalf("restore a snapshot: %v", err)
	}
	r.Restart()
}

func (r *Redis) snapshotFile() string { return filepath.Join(r.server.Dir(), "dump.rdb") }

// Suspend stops the server's process (SIGSTOP) without closing its connections, like a stalled
// machine.
func (r *Redis) Suspend() {
	r.t.Helper()
	if err := r.server.Suspend(); err != nil {
		r.t.Fatal(err)
	}
}

// Resume continues a suspended server.
func (r *Redis) Resume() {
	r.t.Helper()
	r.signal(syscall.SIGCONT)
}

func (r *Redis) signal(sig os.Signal) {
	r.t.Helper()
	if err := r.server.Signal(sig); err != nil {
		r.t.Fatal(err)
	}
}

// readyTimeout is the longest time for which await waits, for example until a Cluster is ready.
const readyTimeout = 60 * time.Second

// await calls ready until it returns nil. The test fails after readyTimeout.
func await(t testing.TB, what string, ready func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), readyTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("await %s: %v", what, err)
		case <-tick.C:
		}
	}
}

// NoHook is a hook of a Redis client that changes nothing. A hook of a test embeds it and has only
// the methods that it needs.
type NoHook struct{}

// DialHook returns next.
func (NoHook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook returns next.
func (NoHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// ProcessPipelineHook returns next.
func (NoHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// group is one server, or the masters of a Cluster, that all tests of the binary share.
type group struct {
	url     string
	servers []*redisproc.Server
	users   int
}

var shared struct {
	sync.Mutex
	groups map[string]*group // by store.name
}

// Parallel is [Shared] for a test that runs in parallel with others.
func Parallel(t *testing.T) (url, prefix string) {
	t.Helper()
	t.Parallel()
	return Shared(t)
}

// Shared returns the URL of the redis-server that all tests of the binary share, and a key prefix
// for this test alone. The first call starts the server. Tests that use it may run in parallel;
// they must not flush, configure or stop it.
func Shared(t testing.TB) (url, prefix string) {
	t.Helper()
	return share(t, store{name: "redis", masters: 1})
}

func share(t testing.TB, s store) (url, prefix string) {
	t.Helper()
	g := acquire(t, s)
	t.Cleanup(func() {
		for _, server := range g.servers {
			if t.Failed() && !server.Running() {
				t.Logf("the shared redis-server has ended; its log:\n%s", server.Log())
			}
		}
		if err := release(s); err != nil {
			t.Errorf("close the shared redis-server: %v", err)
		}
	})
	return g.url, fmt.Sprintf("t%08x:", rand.Uint32())
}

func acquire(t testing.TB, s store) *group {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	g := shared.groups[s.name]
	if g == nil {
		g = &group{}
		var nodes []*Redis
		for range s.masters {
			// Not the test's context: the server must outlive the test.
			server, err := redisproc.Start(context.Background(), redisproc.Options{Binary: s.binary, Cluster: s.masters > 1})
			if err != nil {
				t.Fatal(errors.Join(err, g.close()))
			}
			g.servers = append(g.servers, server)
			nodes = append(nodes, &Redis{t: t, server: server, admin: client(t, server.Addr())})
		}
		if g.url = nodes[0].URL(); s.masters > 1 {
			form(t, nodes, s.masters)
			for _, node := range nodes {
				await(t, "redis cluster", node.clusterOK)
			}
			g.url = clusterURL(nodes)
		}
		for _, server := range g.servers {
			// Remove the folder now, because no code runs when the process ends. The server writes
			// nothing to it that a test reads.
			if err := os.RemoveAll(server.Dir()); err != nil {
				t.Fatal(errors.Join(err, g.close()))
			}
		}
		if shared.groups == nil {
			shared.groups = map[string]*group{}
		}
		shared.groups[s.name] = g
	}
	g.users++
	return g
}

// release is called when a test that uses a shared server ends. After the last one it stops the
// server, unless the operating system ends the server together with the test binary: then it keeps
// the server for later tests.
func release(s store) error {
	shared.Lock()
	defer shared.Unlock()
	g := shared.groups[s.name]
	g.users--
	if g.users > 0 || childproc.DiesWithParent {
		return nil
	}
	delete(shared.groups, s.name)
	return g.close()
}

func (g *group) close() error {
	var errs []error
	for _, server := range g.servers {
		errs = append(errs, server.Close())
	}
	return errors.Join(errs...)
}

// IgnoreServers returns an option of goleak that ignores the goroutines that wait for child
// processes: the shared redis-server runs until the test binary ends.
func IgnoreServers() goleak.Option {
	return goleak.IgnoreAnyFunction("github.com/bulkaction/bulkaction/internal/testkit/childproc.(*Child).run")
}

// Mini starts a miniredis whose keys expire as time passes. It returns the server, which ends with
// the test, and its URL.
func Mini(t testing.TB) (mini *miniredis.Miniredis, url string) {
	t.Helper()
	mini = miniredis.RunT(t)
	mini.ClockTTL(true)
	return mini, "redis://" + mini.Addr() + "/0"
}

// Both runs a test on the shared redis-server and on miniredis, as subtests "redis" and
// "miniredis", each with a key prefix of its own. The test may call t.Parallel.
func Both(t *testing.T, test func(t *testing.T, url, prefix string)) {
	t.Helper()
	t.Run("redis", func(t *testing.T) {
		url, prefix := Shared(t)
		test(t, url, prefix)
	})
	t.Run("miniredis", func(t *testing.T) {
		_, url := Mini(t)
		test(t, url, "t:")
	})
}

// BothAlone runs a test on a redis-server and on a miniredis, as parallel subtests. No other test
// uses these servers, so the test may stop, flush and configure them.
func BothAlone(t *testing.T, test func(t *testing.T, url string)) {
	t.Helper()
	t.Parallel()
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		test(t, Server(t).URL())
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		_, url := Mini(t)
		test(t, url)
	})
}
