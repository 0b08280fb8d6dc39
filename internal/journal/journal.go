// Package journal is the raw log of an experiment: each process logs the permits that it spends and
// the jobs that it starts, with the time of Redis. Figures can so be recomputed from what happened.
// Outside experiments there is no journal: a nil *Journal logs nothing and costs nothing. The
// package hides the format of the files.
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

// What spent a permit.
const (
	Admit   = "admit"
	Promote = "promote"
)

const (
	flushInterval = 100 * time.Millisecond
	// flushAt is the size of the buffer, in bytes, at which it is flushed before flushInterval is
	// over.
	flushAt = 1 << 20
)

// Start is the start of a job by a worker.
type Start struct {
	Tenant, Group string
	Ordinal       int64
	Attempt       int
}

// Journal is the log of one process. It is safe for concurrent use.
type Journal struct {
	file *os.File
	stop chan struct{}
	done chan struct{} // closed when flushRegularly has ended

	mu     sync.Mutex
	buffer []byte
	err    error // first write error
	closed bool
}

// suffix is the end of the name of each journal file.
const suffix = ".journal.tsv"

// Open creates the journal file of a process in the folder dir, which must exist. instance names
// the process; the file must not exist.
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

// Permits logs permits that were spent at the time at (µs, by Redis's clock). by is [Admit] or
// [Promote].
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

// Starts logs jobs that were started at the time at (µs, by Redis's clock).
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

// beginLine appends the first fields of a line to the buffer. The caller holds the lock.
func (j *Journal) beginLine(kind byte, at int64, partition int, typ, tenant string) {
	b := append(j.buffer, kind, '\t')
	b = append(strconv.AppendInt(b, at, 10), '\t')
	b = append(strconv.AppendInt(b, int64(partition), 10), '\t')
	b = append(append(b, typ...), '\t')
	j.buffer = append(append(b, tenant...), '\t')
}

// Close writes the rest and closes the file. It returns the first error of any write. A second call
// does nothing and returns nil. What is logged after Close is lost.
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

// flushRegularly flushes the buffer every flushInterval until Close.
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

// flushIfFull flushes a buffer that has reached flushAt. The caller holds the lock.
func (j *Journal) flushIfFull() {
	if len(j.buffer) >= flushAt {
		j.flush()
	}
}

// flush writes the buffer to the file and remembers the first error. The caller holds the lock.
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

// NewContext returns a context that carries j to the roles of a process.
func NewContext(ctx context.Context, j *Journal) context.Context {
	return context.WithValue(ctx, contextKey{}, j)
}

// FromContext returns the journal that ctx carries, or nil.
func FromContext(ctx context.Context) *Journal {
	j, _ := ctx.Value(contextKey{}).(*Journal)
	return j
}
