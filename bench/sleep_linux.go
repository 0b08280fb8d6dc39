package main

import (
	"syscall"
	"time"
)

// sleepUntil sleeps until t by a system call. Go's timers can be 1 ms late, because the runtime
// waits for events in whole milliseconds; that is too late for a load generator.
func sleepUntil(t time.Time) {
	for {
		left := time.Until(t)
		if left <= 0 {
			return
		}
		ts := syscall.NsecToTimespec(left.Nanoseconds())
		_ = syscall.Nanosleep(&ts, nil) // a signal may interrupt it
	}
}
