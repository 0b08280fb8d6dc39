// Package childproc runs child processes that, on Linux, end no later than this process. It hides
// that the Linux kernel regards a thread, not a process, as the parent, and it waits for each
// child.
package childproc

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// pipeDelay is how long after a child's end its output is still read. Then it is closed, even if
// the child's own children still have it open.
const pipeDelay = 2 * time.Second

// Child is a running or ended process. Its methods are safe for concurrent use.
type Child struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts cmd, which must not have been started, and waits for its end in a goroutine. On
// Linux the kernel kills the child when this process ends for any reason, and the child gets no
// signals of the terminal (Ctrl-C): the caller stops it. For other systems see [DiesWithParent].
// Start sets cmd.SysProcAttr and, if it is 0, cmd.WaitDelay.
func Start(cmd *exec.Cmd) (*Child, error) {
	cmd.SysProcAttr = tie(cmd.SysProcAttr)
	if cmd.WaitDelay == 0 {
		cmd.WaitDelay = pipeDelay
	}
	c := &Child{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go c.run(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return c, nil
}

// run starts the child and waits for its end on one locked thread. The kernel regards this thread
// as the parent: if the thread ended, the kernel would kill the child.
func (c *Child) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	err := c.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	_ = c.cmd.Wait() // State returns the exit code
	close(c.done)
}

// PID returns the process's id.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended and all of its output was read.
func (c *Child) Done() <-chan struct{} { return c.done }

// Running reports whether the process still runs, or its output is still being read.
func (c *Child) Running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// State waits for the end of the process and returns its state: the exit code (-1 if a signal ended
// it) and the CPU time that it used.
func (c *Child) State() *os.ProcessState {
	<-c.done
	return c.cmd.ProcessState
}

// Signal sends sig to this process alone. The error is [os.ErrProcessDone] when it has ended.
func (c *Child) Signal(sig os.Signal) error {
	if err := c.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("signal process %d: %w", c.PID(), err)
	}
	return nil
}

// Suspend stops the process with SIGSTOP; SIGCONT continues it. On Linux Suspend returns when all
// threads of the process have stopped. After the signal alone they go on until one of them has
// handled it, which takes long on a busy machine. The error is [os.ErrProcessDone] when the process
// has ended.
func (c *Child) Suspend() error {
	if err := c.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return awaitStop(c.PID())
}

// Kill ends the process at once, like a crash, and waits for its end.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill() // fails only if the process has ended
	<-c.done
}

// Stop sends SIGTERM, kills the process if it still runs after grace, and waits for its end.
func (c *Child) Stop(grace time.Duration) {
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails only if the process has ended, or on a system without SIGTERM
	select {
	case <-c.done:
	case <-time.After(grace):
		c.Kill()
	}
}

// Tail is a writer that stores only the last 64 KiB written to it. It is for the log of a child.
// The zero value is ready for use. It is safe for concurrent use.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 64 << 10

// Write keeps p and drops the oldest bytes. It never fails.
func (w *Tail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf, p...)
	if excess := len(w.buf) - tailBytes; excess > tailBytes { // copies rarely, not at each write
		w.buf = append(w.buf[:0], w.buf[excess:]...)
	}
	return len(p), nil
}

// String returns the last 64 KiB, or all bytes if there are fewer.
func (w *Tail) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.buf[max(0, len(w.buf)-tailBytes):])
}
