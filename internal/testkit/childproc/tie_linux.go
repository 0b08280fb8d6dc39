package childproc

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// DiesWithParent says whether the operating system kills the children of a process that ends, even
// one that is killed.
const DiesWithParent = true

func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr {
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Pdeathsig = syscall.SIGKILL
	attr.Setpgid = true // Ctrl-C reaches only the parent, which stops its children in order
	return attr
}

// awaitStop waits until all threads of a child process have stopped, or the child has ended. It
// leaves the child's exit status to the goroutine that waits for the child's end.
func awaitStop(pid int) error {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, syscall.ECHILD):
			return os.ErrProcessDone
		case !errors.Is(err, syscall.EINTR):
			return fmt.Errorf("wait until process %d has stopped: %w", pid, err)
		}
	}
}
