//go:build !linux

package childproc

import "syscall"

// DiesWithParent says whether the operating system kills the children of a process that ends, even
// one that is killed.
const DiesWithParent = false

// tie does nothing on this system: the child stays in the parent's process group, so Ctrl-C reaches
// both.
func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr { return attr }

// awaitStop does nothing on this system.
func awaitStop(int) error { return nil }
