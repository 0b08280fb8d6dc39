package childproc

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("CHILDPROC_TEST_PARENT") != "" {
		beParent()
	}
	if os.Getenv("CHILDPROC_TEST_BUSY") != "" {
		beBusy()
	}
	goleak.VerifyTestMain(m)
}

// beParent is the main function of a helper process. It starts a child, prints the child's process
// id, and waits until the test kills the helper.
func beParent() {
	c, err := Start(exec.Command("sleep", "600"))
	if err != nil {
		panic(err)
	}
	fmt.Println(c.PID())
	<-c.Done()
	os.Exit(1)
}

// beBusy is the main function of a helper process, in which four threads are busy. It prints lines
// until its end.
func beBusy() {
	for range 3 {
		go func() {
			for {
				runtime.Gosched()
			}
		}()
	}
	for {
		fmt.Println("busy")
	}
}

func TestKill(t *testing.T) {
	c, err := Start(exec.Command("sleep", "600"))
	require.NoError(t, err)
	require.True(t, c.Running())
	c.Kill()
	require.Equal(t, syscall.SIGKILL, c.State().Sys().(syscall.WaitStatus).Signal())
}

func TestStop(t *testing.T) {
	for name, tc := range map[string]struct {
		script string
		grace  time.Duration
		want   int
	}{
		"that is heeded":  {"trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done", time.Minute, 7},
		"that is ignored": {"trap '' TERM; echo up; while :; do sleep 0.01; done", time.Millisecond, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, in := io.Pipe()
			cmd := exec.Command("sh", "-c", tc.script)
			cmd.Stdout = in
			c, err := Start(cmd)
			require.NoError(t, err)
			_, err = bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			require.NoError(t, out.Close())

			c.Stop(tc.grace)
			require.Equal(t, tc.want, c.State().ExitCode())
		})
	}
}

// TestSuspend: when Suspend returns, each thread of the process has stopped. Then SIGCONT continues
// the process.
func TestSuspend(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Log("on this system Suspend does not wait")
		return
	}
	binary, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), "CHILDPROC_TEST_BUSY=1", "GOMAXPROCS=4")
	out, in := io.Pipe()
	cmd.Stdout = in
	c, err := Start(cmd)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = out.Close() // otherwise Kill would wait until the output is read
		c.Kill()
	})
	lines := bufio.NewReader(out)
	for range 20 {
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
		require.NoError(t, c.Suspend())
		threads, err := filepath.Glob("/proc/" + strconv.Itoa(c.PID()) + "/task/*/stat")
		require.NoError(t, err)
		require.Greater(t, len(threads), 4)
		for _, thread := range threads {
			stat, err := os.ReadFile(thread)
			require.NoError(t, err)
			require.Contains(t, string(stat), ") T ")
		}
		require.NoError(t, c.Signal(syscall.SIGCONT))
	}
	require.NoError(t, out.Close())
	c.Kill()
	require.ErrorIs(t, c.Suspend(), os.ErrProcessDone)
}

// TestChildDiesWithItsParent: when a helper process that has started a child is killed, the child
// ends within ten seconds.
func TestChildDiesWithItsParent(t *testing.T) {
	if !DiesWithParent {
		t.Log("this system leaves children behind")
		return
	}
	binary, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(binary)
	parent.Env = append(os.Environ(), "CHILDPROC_TEST_PARENT=1")
	out, err := parent.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, parent.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)

	require.NoError(t, syscall.Kill(pid, 0), "the child runs")
	require.NoError(t, parent.Process.Kill())
	require.Error(t, parent.Wait())
	require.Eventually(t, func() bool { return gone(pid) }, 10*time.Second, time.Millisecond)
}

// gone reports whether the process has ended. A zombie counts as ended: init may not have reaped it
// yet.
func gone(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestTailKeepsTheEnd(t *testing.T) {
	var tail Tail
	line := strings.Repeat("x", 99) + "\n"
	for range 5000 {
		n, err := io.WriteString(&tail, line)
		require.NoError(t, err)
		require.Equal(t, len(line), n)
	}
	_, err := io.WriteString(&tail, "end")
	require.NoError(t, err)
	require.Len(t, tail.String(), tailBytes)
	require.True(t, strings.HasSuffix(tail.String(), line+"end"))
	require.Less(t, cap(tail.buf), 4*tailBytes)
}

// TestFreePort: FreePort returns a port that is free and outside the range of ephemeral ports, and
// does not return it again soon, even if nobody listens on it.
func TestFreePort(t *testing.T) {
	seen := map[int]bool{}
	for range 300 {
		port := FreePort()
		require.False(t, seen[port], "port %d twice", port)
		seen[port] = true
		require.Less(t, port, 32_768)
		l, err := net.Listen("tcp", loopback(port))
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}

// TestTakeBlock: while one block is taken, 100 further calls of takeBlock, as other processes make
// them, find a free block, and never this one.
func TestTakeBlock(t *testing.T) {
	first, lock := takeBlock()
	require.NotNil(t, lock)
	defer func() { require.NoError(t, lock.Close()) }()
	for range 100 {
		other, otherLock := takeBlock()
		require.NotNil(t, otherLock)
		require.NotEqual(t, first, other)
		require.NoError(t, otherLock.Close())
	}
}

// TestFreePortPassesOver: a port on which a process listens is passed over.
func TestFreePortPassesOver(t *testing.T) {
	port := FreePort()
	l, err := net.Listen("tcp", loopback(port))
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	ports.last = port - 1
	require.NotEqual(t, port, FreePort())
}
