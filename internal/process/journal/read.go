package journal

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// PermitEvent is a line of the journal: the permits that one script call spent for one tenant.
type PermitEvent struct {
	At        int64 // time of Redis, µs
	Partition int
	By        string // [Admit] or [Promote]
	Type      string // "" with Promote
	Tenant    string
	N         int64 // number of permits
}

// StartEvent is a line about the start of a job.
type StartEvent struct {
	At        int64 // time of Redis, µs
	Partition int
	Type      string
	Tenant    string
	Group     string
	Ordinal   int64
	Attempt   int
}

// Log is the content of the journals of all processes. Each list is ordered by time.
type Log struct {
	Permits []PermitEvent
	Starts  []StartEvent
}

// Read reads the journals of all processes in the folder dir. It ignores a last line without a line
// feed, which a process leaves when it is killed; any other unreadable line is an error.
func Read(dir string) (Log, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err != nil {
		return Log{}, fmt.Errorf("read journals in %s: %w", dir, err)
	}
	r := reader{interned: map[string]string{}}
	for _, file := range files {
		if err := r.readFile(file); err != nil {
			return Log{}, fmt.Errorf("read journal %s: %w", file, err)
		}
	}
	slices.SortStableFunc(r.log.Permits, func(a, b PermitEvent) int { return cmp.Compare(a.At, b.At) })
	slices.SortStableFunc(r.log.Starts, func(a, b StartEvent) int { return cmp.Compare(a.At, b.At) })
	return r.log, nil
}

// reader collects the lines of all files.
type reader struct {
	log      Log
	interned map[string]string // one copy of each name, so that the log does not keep whole lines in memory
}

// readFile adds the lines of the file name to the log.
func (r *reader) readFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // no write can be lost
	in := bufio.NewReaderSize(f, 1<<16)
	for n := 1; ; n++ {
		line, err := in.ReadString('\n')
		if errors.Is(err, io.EOF) { // the last line, which has no line feed, is ignored
			return nil
		}
		if err != nil {
			return err
		}
		if err := r.readLine(strings.Split(line[:len(line)-1], "\t")); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
}

// readLine adds the line with the fields f to the log. An unknown kind of line, another number of
// fields or a wrong number is an error.
func (r *reader) readLine(f []string) (err error) {
	number := func(i int) int64 {
		n, bad := strconv.ParseInt(f[i], 10, 64)
		err = cmp.Or(err, bad)
		return n
	}
	switch {
	case f[0] == "P" && len(f) == 7:
		r.log.Permits = append(r.log.Permits, PermitEvent{
			At: number(1), Partition: int(number(2)), Type: r.intern(f[3]),
			Tenant: r.intern(f[4]), By: r.intern(f[5]), N: number(6),
		})
	case f[0] == "S" && len(f) == 8:
		r.log.Starts = append(r.log.Starts, StartEvent{
			At: number(1), Partition: int(number(2)), Type: r.intern(f[3]),
			Tenant: r.intern(f[4]), Group: r.intern(f[5]), Ordinal: number(6), Attempt: int(number(7)),
		})
	default:
		return fmt.Errorf("%d fields beginning with %q: neither a permit nor a start", len(f), f[0])
	}
	return err
}

// intern returns the one copy of s that the log keeps.
func (r *reader) intern(s string) string {
	if stored, ok := r.interned[s]; ok {
		return stored
	}
	s = strings.Clone(s)
	r.interned[s] = s
	return s
}
