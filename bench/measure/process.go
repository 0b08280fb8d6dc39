package measure

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of CPU times in /proc: 10 ms on each Linux that Go supports.
const clockTick = 10 * time.Millisecond

// CPU returns the CPU time that a process has used so far.
func CPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w: the bench needs Linux", pid, err)
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	sys, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+sys) * clockTick, errors.Join(err1, err2)
}

// ResetPeak resets the operating system's record of this process's peak of resident memory, so that
// a new run measures its own. If the system forbids that, later peaks include earlier runs.
func ResetPeak() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

// PeakMB returns the peak of a process's resident memory so far, in MB (2^20 bytes).
func PeakMB(pid int) (float64, error) {
	kb, err := statusKB(pid, "VmHWM:")
	return Round2(kb / 1024), err
}

// ResidentKB returns the resident memory of a process at present, in KiB.
func ResidentKB(pid int) (float64, error) { return statusKB(pid, "VmRSS:") }

// statusKB returns a value in kB from /proc/PID/status, by its name there.
func statusKB(pid int, name string) (float64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, fmt.Errorf("read memory of process %d: %w: the bench needs Linux", pid, err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name); ok {
			kb, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 64)
			return kb, nil
		}
	}
	return 0, fmt.Errorf("read memory of process %d: no %s", pid, name)
}
