// Package joblines reads jobs from a text of NDJSON or CSV, one from each line or row. The server
// appends the jobs that it returns, and the command line checks files with it before it sends them,
// so that both refuse the same lines for the same reasons.
package joblines

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

const (
	readBuffer = 64 << 10
	// MaxLine is the most bytes of a line or row, without its line break. A longer one is rejected.
	MaxLine   = messages.MaxPayloadBytes + records.RowOverhead
	maxRecord = MaxLine + 2 // 2 is the length of a line break
	// MaxSkipped bounds a line that is too long, in bytes. A line up to this length is rejected,
	// and the next ones are read. A longer one, which may be endless, ends the text with
	// records.ErrTooLong. The Go client cuts longer lines to half of this, so that the server can
	// reject them.
	MaxSkipped = 2 << 20
)

// LineError says why one line is rejected. The lines after it can still be read.
type LineError struct{ Problem string }

func (e *LineError) Error() string { return e.Problem }

var errLongLine = &LineError{fmt.Sprintf("is too long: at most %d bytes of payload are accepted",
	messages.MaxPayloadBytes)}

var errArray = &records.TextError{Problem: "is a JSON array, not NDJSON: write one job a line, " +
	`{"payload": …}, without brackets and commas around them`}

// Source reads jobs from a text.
type Source struct {
	lines   *records.Reader // NDJSON
	started bool            // NDJSON: a line that is not empty was read
	table   *records.Table  // CSV; nil for NDJSON
	decoder messages.Decoder
}

// New returns a source of the jobs in a text. It reads the header row of CSV; an error comes with
// the line of this row, and is a *records.HeaderError if the row is refused.
func New(text io.Reader, csv bool, o records.TableOptions, d messages.Decoder) (s *Source, line int64, err error) {
	s = &Source{decoder: d}
	in := bufio.NewReaderSize(text, readBuffer)
	if !csv {
		s.lines = newRecords(in, records.NDJSON)
		return s, 1, nil
	}
	o.MaxPayload = messages.MaxPayloadBytes
	s.table, line, err = records.NewTable(newRecords(in, records.CSV), o)
	return s, line, err
}

func newRecords(in *bufio.Reader, format records.Format) *records.Reader {
	r := records.NewReader(in, format, maxRecord)
	r.Longest = MaxSkipped
	return r
}

// Next returns the next job and the number of the line at which it begins. A *LineError rejects
// only this line. io.EOF is the end of the text, with the number of the line behind it. After any
// other error the text can't be read further. size is the number of bytes by which the line counts
// towards the limit of its batch; it depends only on the line.
func (s *Source) Next() (job messages.Job, line int64, size int, err error) {
	if s.table != nil {
		return s.nextRow()
	}
	return s.nextLine()
}

func (s *Source) nextLine() (messages.Job, int64, int, error) {
	for {
		rec, err := s.lines.Next()
		text := bytes.TrimSpace(rec.Data)
		switch {
		case err != nil:
			return messages.Job{}, rec.Line, 0, err
		case rec.Truncated:
			return messages.Job{}, rec.Line, 0, errLongLine
		case len(text) == 0:
			continue
		case !s.started && opensArray(text):
			return messages.Job{}, rec.Line, 0, errArray
		}
		s.started = true
		job, err := s.decoder.DecodeJob(text)
		if err != nil {
			problem := err.Error()
			if bytes.IndexByte(text, '\r') >= 0 {
				problem += "; the line has a carriage return inside: end lines with LF or CRLF"
			}
			err = &LineError{problem}
		}
		return job, rec.Line, len(text), err
	}
}

// opensArray reports whether a text whose first line this is seems to be a JSON array of jobs. Some
// of its lines, such as the last job, can look like NDJSON. A whole array in one line is a bad line.
func opensArray(line []byte) bool {
	if line[0] != '[' || json.Valid(line) {
		return false
	}
	rest := bytes.TrimSpace(line[1:])
	return len(rest) == 0 || rest[0] == '{'
}

func (s *Source) nextRow() (messages.Job, int64, int, error) {
	payload, key, line, err := s.table.NextWithKey()
	var bad *records.RowError
	switch {
	case errors.Is(err, records.ErrLongRow):
		return messages.Job{}, line, 0, errLongLine
	case errors.As(err, &bad):
		return messages.Job{}, line, 0, &LineError{bad.Problem}
	case err != nil:
		return messages.Job{}, line, 0, err
	}
	if key != "" && !messages.ValidJobKey(key) {
		return messages.Job{}, line, 0, &LineError{"key must " + messages.JobKeyRule}
	}
	return messages.Job{Payload: payload, Key: key}, line, len(payload), nil
}
