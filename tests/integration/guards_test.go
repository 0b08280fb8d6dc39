package integration

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// storeEnv and storeRedisEnv are set in the child processes of TestSuspendedHolder: the URL of the
// store, and the address of Redis.
const storeEnv, storeRedisEnv = "GUARDS_STORE", "GUARDS_REDIS"

const (
	holderLease = 500 * time.Millisecond
	holders     = 4
	stops       = 3
	storeWrites = 200 // accepted writes after which the test ends
)

// holdLock runs in a child process. Under a lock it reads the number of the store and writes it back,
// one higher, again and again until the store says that it is enough. It ignores Lost, the signal
// that its lease has ended, so that only the fence protects the store.
func holdLock(addr, store string) error {
	ctx := context.Background()
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	lock := guard.New(rdb, guard.Prefix("t:")).Lock("store", guard.TTL(holderLease))
	for {
		l, err := lock.Lock(ctx)
		if err != nil {
			return err
		}
		fence := strconv.FormatInt(l.Fence(), 10)
		n, status, err := askStore(store, url.Values{"pid": {strconv.Itoa(os.Getpid())}, "fence": {fence}})
		if err != nil || status != http.StatusOK {
			return err
		}
		_, _, err = askStore(store, url.Values{"write": {strconv.Itoa(n + 1)}, "fence": {fence}})
		if err != nil {
			return err
		}
		if err := l.Release(ctx, guard.Neutral); err != nil {
			return err
		}
	}
}

func askStore(store string, q url.Values) (n, status int, err error) {
	resp, err := http.Get(store + "?" + q.Encode()) //nolint:noctx // the child process ends with the test
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, 0, err
	}
	n, _ = strconv.Atoi(string(text)) // refusals have no number
	return n, resp.StatusCode, nil
}

// fencedStore is an HTTP server that stores one number. It refuses a read or write with a fence
// that is smaller than one it has seen.
type fencedStore struct {
	mu                sync.Mutex
	number            int
	fence             int64
	accepted, refused int
	lost              []string // accepted writes that overwrote another one
	suspend           func(pid int)
}

func (s *fencedStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := r.URL.Query()
	fence, _ := strconv.ParseInt(q.Get("fence"), 10, 64) // 0 is refused
	if s.accepted >= storeWrites && q.Has("pid") {
		w.WriteHeader(http.StatusGone)
		return
	}
	if fence < s.fence {
		s.refused++
		w.WriteHeader(http.StatusConflict)
		return
	}
	s.fence = fence
	if q.Has("write") {
		if value := q.Get("write"); value != strconv.Itoa(s.number+1) {
			s.lost = append(s.lost, fmt.Sprintf("%s after %d", value, s.number))
		}
		s.number++
		s.accepted++
		return
	}
	fmt.Fprint(w, s.number)
	if pid, err := strconv.Atoi(q.Get("pid")); err == nil && s.suspend != nil {
		s.suspend(pid)
	}
}

// TestSuspendedHolder: three times the holder of a lock is suspended (SIGSTOP) for three leases
// between reading and writing, and the other three processes may get the lock meanwhile. The store
// refuses at least one late request because of its fence, and no update is lost.
func TestSuspendedHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	store := &fencedStore{}
	suspended := 0
	var resumed sync.WaitGroup
	children := map[int]*childproc.Child{} // by process id; guarded by the store's lock
	store.suspend = func(pid int) {        // called with the store's lock
		if suspended == stops || store.accepted < (suspended+1)*storeWrites/(stops+1) {
			return
		}
		suspended++
		assert.NoError(t, children[pid].Suspend())
		resumed.Go(func() {
			<-time.After(3 * holderLease)
			_ = children[pid].Signal(syscall.SIGCONT) // the process may have ended with the test
		})
	}
	web := httptest.NewServer(store)
	defer web.Close()
	self, err := os.Executable()
	require.NoError(t, err)
	store.mu.Lock()
	for range holders {
		cmd := exec.Command(self) //nolint:noctx // childproc ends it with this process
		cmd.Env = append(os.Environ(), storeEnv+"="+web.URL, storeRedisEnv+"="+server.Addr())
		cmd.Stderr = os.Stderr
		child, err := childproc.Start(cmd)
		require.NoError(t, err)
		t.Cleanup(child.Kill)
		children[child.PID()] = child
	}
	store.mu.Unlock()
	for _, child := range children {
		select {
		case <-child.Done():
			require.Zero(t, child.State().ExitCode())
		case <-time.After(60 * time.Second):
			require.Fail(t, "the processes do not get the lock")
		}
	}
	resumed.Wait()
	store.mu.Lock()
	defer store.mu.Unlock()
	require.Equal(t, stops, suspended)
	require.Empty(t, store.lost, "lost updates")
	require.Equal(t, store.accepted, store.number)
	require.GreaterOrEqual(t, store.refused, 1, "no write came too late, so nothing was shown")
}
