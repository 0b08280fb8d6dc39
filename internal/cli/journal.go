package cli

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// journal is the file in which one process of an experiment records the permits that it spends and
// the jobs that it starts, with the time of Redis (µs). The module bench reads it: also that of
// another revision, so the form of its lines may not change. It is safe for concurrent use.
type journal struct {
	file *os.File

	mu     sync.Mutex
	buffer *bufio.Writer // remembers the first write error
}

// openJournal creates the journal file of the process named instance in the folder dir, which must
// exist. It fails if the file exists.
func openJournal(dir, instance string) (*journal, error) {
	name := filepath.Join(dir, instance+".journal.tsv")
	file, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal of %s: %w", instance, err)
	}
	return &journal{file: file, buffer: bufio.NewWriterSize(file, 1<<20)}, nil
}

func (j *journal) admitted(at int64, partition int, typ string, permits []ledger.Permit) {
	j.permits(at, partition, "admit", typ, permits)
}

func (j *journal) promoted(at int64, partition int, permits []ledger.Permit) {
	j.permits(at, partition, "promote", "", permits)
}

func (j *journal) permits(at int64, partition int, by, typ string, permits []ledger.Permit) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range permits {
		line := append(append(j.beginLine('P', at, partition, typ, p.Tenant), by...), '\t')
		_, _ = j.buffer.Write(append(strconv.AppendInt(line, p.N, 10), '\n')) // close returns the error
	}
}

func (j *journal) started(at int64, partition int, typ, tenant, group string, ordinal int64, attempt int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	line := append(append(j.beginLine('S', at, partition, typ, tenant), group...), '\t')
	line = append(strconv.AppendInt(line, ordinal, 10), '\t')
	_, _ = j.buffer.Write(append(strconv.AppendInt(line, int64(attempt), 10), '\n')) // close returns the error
}

// beginLine returns the first fields of a line, for the caller to complete and write. It uses the
// free space of the buffer, and allocates only if that is too small. The caller holds the lock.
func (j *journal) beginLine(kind byte, at int64, partition int, typ, tenant string) []byte {
	b := append(j.buffer.AvailableBuffer(), kind, '\t')
	b = append(strconv.AppendInt(b, at, 10), '\t')
	b = append(strconv.AppendInt(b, int64(partition), 10), '\t')
	b = append(append(b, typ...), '\t')
	return append(append(b, tenant...), '\t')
}

// close writes the rest and closes the file. It returns the first error of any write.
func (j *journal) close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := errors.Join(j.buffer.Flush(), j.file.Close()); err != nil {
		return fmt.Errorf("write journal %s: %w: the experiment's figures would be wrong", j.file.Name(), err)
	}
	return nil
}
