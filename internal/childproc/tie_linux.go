package childproc

import "syscall"

// DiesWithParent reports whether the operating system ends the children of a process
// that is killed.
const DiesWithParent = true

func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr {
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Pdeathsig = syscall.SIGKILL
	attr.Setpgid = true // Ctrl-C reaches only the parent, which stops its children in order
	return attr
}
