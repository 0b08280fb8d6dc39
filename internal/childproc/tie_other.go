//go:build !linux

package childproc

import "syscall"

// DiesWithParent reports whether the operating system ends the children of a process
// that is killed.
const DiesWithParent = false

// tie leaves the child in the parent's process group: Ctrl-C reaches both.
func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr { return attr }
