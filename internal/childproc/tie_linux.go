package childproc

import "syscall"

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
