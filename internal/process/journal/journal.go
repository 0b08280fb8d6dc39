// Package journal is the raw log of an experiment: each process logs the permits that it spends and
// the jobs that it starts, with the time of Redis. The experiment's figures can be recomputed from
// it. Outside experiments there is no journal. The package hides the format of the files.
package journal

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// What spent a permit.
const (
	Admit   = "admit"
	Promote = "promote"
)

const (
	flushInterval = 100 * time.Millisecond
	// bufferSize is the size of the buffer in bytes. A full buffer is written to the file at once,
	// without waiting for flushInterval.
	bufferSize = 1 << 20
)

// Journal is the file in which one process of an experiment records the permits that it spends and
// the jobs that it starts. It is safe for concurrent use.
type Journal struct {
	file *os.File
	stop chan struct{}
	done chan struct{} // closed when flushRegularly has ended

	mu     sync.Mutex
	buffer *bufio.Writer // remembers the first write error
	closed bool
}

// suffix is the end of the name of each journal file.
const suffix = ".journal.tsv"

// Open creates the journal file of the process named instance in the folder dir, which must exist.
// It fails if the file exists.
func Open(dir, instance string) (*Journal, error) {
	file, err := os.OpenFile(filepath.Join(dir, instance+suffix), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal of %s: %w: give each process a name of its own and a folder that is there",
			instance, err)
	}
	j := &Journal{
		file: file, buffer: bufio.NewWriterSize(file, bufferSize),
		stop: make(chan struct{}), done: make(chan struct{}),
	}
	go j.flushRegularly()
	return j, nil
}

// Admitted logs the permits that a fetcher spent at the time at (µs, by Redis's clock).
func (j *Journal) Admitted(at int64, partition int, typ string, permits []ledger.Permit) {
	j.permits(at, partition, Admit, typ, permits)
}

// Promoted logs the permits that a dispatcher spent at the time at (µs, by Redis's clock).
func (j *Journal) Promoted(at int64, partition int, permits []ledger.Permit) {
	j.permits(at, partition, Promote, "", permits)
}

func (j *Journal) permits(at int64, partition int, by, typ string, permits []ledger.Permit) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range permits {
		line := append(append(j.beginLine('P', at, partition, typ, p.Tenant), by...), '\t')
		_, _ = j.buffer.Write(append(strconv.AppendInt(line, p.N, 10), '\n')) // Close returns the error
	}
}

// Started logs a job that a worker started at the time at (µs, by Redis's clock).
func (j *Journal) Started(at int64, partition int, typ, tenant, group string, ordinal int64, attempt int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	line := append(append(j.beginLine('S', at, partition, typ, tenant), group...), '\t')
	line = append(strconv.AppendInt(line, ordinal, 10), '\t')
	_, _ = j.buffer.Write(append(strconv.AppendInt(line, int64(attempt), 10), '\n')) // Close returns the error
}

// beginLine returns the first fields of a line, for the caller to complete and write. It uses the
// free space of the buffer, and allocates only if that is too small. The caller holds the lock.
func (j *Journal) beginLine(kind byte, at int64, partition int, typ, tenant string) []byte {
	b := append(j.buffer.AvailableBuffer(), kind, '\t')
	b = append(strconv.AppendInt(b, at, 10), '\t')
	b = append(strconv.AppendInt(b, int64(partition), 10), '\t')
	b = append(append(b, typ...), '\t')
	return append(append(b, tenant...), '\t')
}

// Close writes the rest and closes the file. It returns the first error of any write. A second call
// does nothing and returns nil. What is logged after Close is lost.
func (j *Journal) Close() error {
	j.mu.Lock()
	again := j.closed
	j.closed = true
	j.mu.Unlock()
	if again {
		return nil
	}
	close(j.stop)
	<-j.done
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := errors.Join(j.buffer.Flush(), j.file.Close()); err != nil {
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
			_ = j.buffer.Flush() // Close returns the error
			j.mu.Unlock()
		}
	}
}
