// Package childproc runs child processes that do not outlive this one. It hides the kernel's idea
// of a parent, which is a thread, and who waits for a child.
package childproc

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// pipeDelay is how long a dead child's own children may hold its output open before it is closed.
const pipeDelay = 2 * time.Second

// Child is a running or ended process. Its methods are safe for concurrent use.
type Child struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts cmd, which must not have been started, and waits for it in a goroutine. On Linux the
// child is killed when this process ends in any way, and no terminal signal reaches it: whoever
// started it decides when it stops. Elsewhere see [DiesWithParent].
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

// run keeps its thread for as long as the child lives: to the kernel that thread is the parent, and
// its end would kill the child.
func (c *Child) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	err := c.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	_ = c.cmd.Wait() // the exit code says it better
	close(c.done)
}

// PID is the process's id.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done is closed when the process has ended and all of its output is read.
func (c *Child) Done() <-chan struct{} { return c.done }

// Running says whether the process has not ended yet.
func (c *Child) Running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// State waits for the end and tells what the process came to: its exit code, -1 when a signal ended
// it, and the CPU time that it used.
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

// Kill ends the process at once, as a crash would, and waits for its end.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill() // fails only when it has ended
	<-c.done
}

// Stop asks the process to end, kills it when it still runs after grace, and waits for its end.
func (c *Child) Stop(grace time.Duration) {
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails only when it has ended, or where there is no SIGTERM
	select {
	case <-c.done:
	case <-time.After(grace):
		c.Kill()
	}
}
