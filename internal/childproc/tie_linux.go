package childproc

import "syscall"

// DiesWithParent says whether the system itself ends the children of a process that was killed.
const DiesWithParent = true

func tie(attr *syscall.SysProcAttr) *syscall.SysProcAttr {
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Pdeathsig = syscall.SIGKILL
	attr.Setpgid = true // Ctrl-C is for the parent, which then ends its children in order
	return attr
}
