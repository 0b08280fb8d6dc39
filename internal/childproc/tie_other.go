//go:build !linux

package childproc

import "syscall"

// DiesWithParent says whether the system itself ends the children of a process that was killed.
const DiesWithParent = false

// tie leaves the child in the parent's process group, where Ctrl-C reaches both.
func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr { return attr }
