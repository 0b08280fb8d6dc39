// Package journal is the raw log of an experiment: each process writes down the permits that it was
// given and the jobs that it started, by Redis's clock, so that figures can be recomputed from what
// happened. A nil *Journal writes nothing and costs nothing: outside experiments there is none. It
// hides the format of the files.
package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// Who gave a permit.
const (
	Admit   = "admit"
	Promote = "promote"
)

const (
	flushInterval = 100 * time.Millisecond
	// flushAt bounds what is kept between two flushes.
	flushAt = 1 << 20
)

// Start is a job that a worker began.
type Start struct {
	Tenant, Group string
	Ordinal       int64
	Attempt       int
}

// Journal is one process's log. Its methods are safe for concurrent use.
type Journal struct {
	file *os.File
	stop chan struct{}
	done chan struct{} // the flusher has ended

	mu     sync.Mutex
	buffer []byte
	err    error // of the first write that failed
	closed bool
}

// suffix is what the files' names end with.
const suffix = ".journal.tsv"

// Open begins the journal of a process in dir, which must be there. Instance is unique
// to the process.
func Open(dir, instance string) (*Journal, error) {
	file, err := os.OpenFile(filepath.Join(dir, instance+suffix), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal of %s: %w: give each process a name of its own and a folder that is there",
			instance, err)
	}
	j := &Journal{file: file, stop: make(chan struct{}), done: make(chan struct{})}
	go j.flushRegularly()
	return j, nil
}

// Permits notes what was given at a time (µs of Redis), by [Admit] or [Promote].
func (j *Journal) Permits(at int64, partition int, by, typ string, permits []ledger.Permit) {
	if j == nil || len(permits) == 0 {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range permits {
		j.beginLine('P', at, partition, typ, p.Tenant)
		j.buffer = append(append(j.buffer, by...), '\t')
		j.buffer = append(strconv.AppendInt(j.buffer, p.N, 10), '\n')
	}
	j.flushIfFull()
}

// Starts notes jobs that began at a time (µs of Redis).
func (j *Journal) Starts(at int64, partition int, typ string, starts []Start) {
	if j == nil || len(starts) == 0 {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range starts {
		s := &starts[i]
		j.beginLine('S', at, partition, typ, s.Tenant)
		j.buffer = append(append(j.buffer, s.Group...), '\t')
		j.buffer = append(strconv.AppendInt(j.buffer, s.Ordinal, 10), '\t')
		j.buffer = append(strconv.AppendInt(j.buffer, int64(s.Attempt), 10), '\n')
	}
	j.flushIfFull()
}

// head begins a line; the lock is held.
func (j *Journal) beginLine(kind byte, at int64, partition int, typ, tenant string) {
	b := append(j.buffer, kind, '\t')
	b = append(strconv.AppendInt(b, at, 10), '\t')
	b = append(strconv.AppendInt(b, int64(partition), 10), '\t')
	b = append(append(b, typ...), '\t')
	j.buffer = append(append(b, tenant...), '\t')
}

// Close writes what is left, and says whether anything could not be written. Closing again
// does nothing.
func (j *Journal) Close() error {
	if j == nil {
		return nil
	}
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.closed = true
	j.mu.Unlock()
	close(j.stop)
	<-j.done
	j.mu.Lock()
	defer j.mu.Unlock()
	j.flush()
	if err := errors.Join(j.err, j.file.Close()); err != nil {
		return fmt.Errorf("write journal %s: %w: the experiment's figures would be wrong", j.file.Name(), err)
	}
	return nil
}

func (j *Journal) flushRegularly() {
	defer close(j.done)
	tick := time.NewTicker(flushInterval)
	defer tick.Stop()
	for {
		select {
		case <-j.stop:
			return
		case <-tick.C:
			j.mu.Lock()
			j.flush()
			j.mu.Unlock()
		}
	}
}

// flushFull and flush need the lock.
func (j *Journal) flushIfFull() {
	if len(j.buffer) >= flushAt {
		j.flush()
	}
}

func (j *Journal) flush() {
	if len(j.buffer) == 0 {
		return
	}
	if _, err := j.file.Write(j.buffer); err != nil && j.err == nil {
		j.err = err
	}
	j.buffer = j.buffer[:0]
}

type contextKey struct{}

// With returns a context that carries j to the stages of a process.
func NewContext(ctx context.Context, j *Journal) context.Context {
	return context.WithValue(ctx, contextKey{}, j)
}

// From returns the journal that ctx carries, or nil.
func FromContext(ctx context.Context) *Journal {
	j, _ := ctx.Value(contextKey{}).(*Journal)
	return j
}
