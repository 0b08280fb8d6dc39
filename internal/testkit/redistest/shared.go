package redistest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

var shared struct {
	sync.Mutex
	server *redisproc.Server
	users  int
}

// Shared returns the URL of the redis-server that all tests of the binary share, and a key prefix
// for this test alone. The first call starts the server. Tests that use it may run in parallel;
// they must not flush, configure or stop it.
func Shared(t testing.TB) (url, prefix string) {
	t.Helper()
	server, err := acquire()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && !server.Running() {
			t.Logf("the shared redis-server has ended; its log:\n%s", server.Log())
		}
		if err := release(); err != nil {
			t.Errorf("close the shared redis-server: %v", err)
		}
	})
	return server.URL(), fmt.Sprintf("t%08x:", rand.Uint32())
}

func acquire() (*redisproc.Server, error) {
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		// Not the test's context: the server must outlive the test.
		server, err := redisproc.Start(context.Background(), redisproc.Options{})
		if err != nil {
			return nil, err
		}
		// Remove the folder now, because no code runs when the process ends. The server writes
		// nothing to it.
		if err := os.RemoveAll(server.Dir()); err != nil {
			return nil, errors.Join(err, server.Close())
		}
		shared.server = server
	}
	shared.users++
	return shared.server, nil
}

// release is called when a test that uses the shared server ends. After the last one it stops the
// server, unless the operating system ends the server together with the test binary: then it keeps
// the server for later tests.
func release() error {
	shared.Lock()
	defer shared.Unlock()
	shared.users--
	if shared.users > 0 || childproc.DiesWithParent {
		return nil
	}
	server := shared.server
	shared.server = nil
	return server.Close()
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
