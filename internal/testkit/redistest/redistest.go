// Package redistest provides Redis servers for tests: real servers for one test or shared by a test
// binary, miniredis, a Cluster and a Sentinel set-up, all on loopback. It hides their processes,
// which end with the test or the test binary, and the wait until they are ready. If no redis-server
// is installed, tests fail with an error that says what to do.
package redistest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

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
