package httpapi

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// csvSource turns each row of a table (RFC 4180) into a job. The payload is an object: its keys are
// the columns' names in the header, and its values are strings.
type csvSource struct {
	rows  *csvReader
	names []string // as they are written in the payload: `{"a":`, `,"b":`, …
}

// newCSVSource reads the header row and returns a source of the rows behind it.
func newCSVSource(in *bufio.Reader) (*csvSource, error) {
	s := &csvSource{rows: &csvReader{in: in, limit: maxLine, line: 1}}
	_, err := s.rows.next()
	var bad *lineError
	switch {
	case errors.Is(err, io.EOF):
		return nil, invalidField("header", "is missing: the first row names the payload's fields")
	case errors.As(err, &bad):
		return nil, invalidField("header", bad.problem)
	case err != nil:
		return nil, brokenBody(err)
	}
	seen := make(map[string]bool)
	for i := range s.rows.fields() {
		name := s.rows.field(i)
		if len(name) == 0 || seen[string(name)] {
			return nil, newProblem(http.StatusUnprocessableEntity, "each column of the header needs a name of its own",
				api.FieldError{Field: fmt.Sprintf("header[%d]", i), Problem: "is empty or repeated"})
		}
		seen[string(name)] = true
		open := byte(',')
		if i == 0 {
			open = '{'
		}
		s.names = append(s.names, string(append(appendJSONString([]byte{open}, name), ':')))
	}
	return s, nil
}

func (s *csvSource) next() (messages.Job, int64, int, error) {
	line, err := s.rows.next()
	if err != nil {
		return messages.Job{}, line, 0, err
	}
	if got, want := s.rows.fields(), len(s.names); got != want {
		return messages.Job{}, line, 0, &lineError{fmt.Sprintf("has %d columns where the header has %d", got, want)}
	}
	payload := make([]byte, 0, len(s.rows.record)+16*len(s.names))
	for i, name := range s.names {
		payload = appendJSONString(append(payload, name...), s.rows.field(i))
	}
	payload = append(payload, '}')
	if len(payload) > messages.MaxPayloadBytes {
		return messages.Job{}, line, 0, errLongLine
	}
	return messages.Job{Payload: payload}, line, len(payload), nil
}

// csvReader splits a table into records and keeps at most limit bytes of one. Unlike encoding/csv
// it continues behind a malformed record, and it skips a record of any length without using more
// memory.
type csvReader struct {
	in          *bufio.Reader
	limit       int
	line        int64  // line at which the next record begins
	record      []byte // the fields of the current record, without separators
	ends        []int
	recordBytes int // bytes of the record before its quotes were removed
}

func (c *csvReader) fields() int { return len(c.ends) }

func (c *csvReader) field(i int) []byte {
	if i == 0 {
		return c.record[:c.ends[0]]
	}
	return c.record[c.ends[i-1]:c.ends[i]]
}

// csvState says where in a record the reader is.
type csvState int

const (
	fieldStart csvState = iota
	inField
	inQuotes
	afterQuote // after a closing quote, or after the first of two quotes that stand for one
)

// next reads a record and skips empty lines before it. It returns the line at which the record
// began. A malformed record is read to its end; next then returns a *lineError.
func (c *csvReader) next() (line int64, err error) {
	line, err = c.readRecord()
	for err == nil && c.recordBytes == 0 {
		line, err = c.readRecord()
	}
	for i := 0; err == nil && i < c.fields(); i++ {
		if !utf8.Valid(c.field(i)) {
			err = &lineError{"is not UTF-8"}
		}
	}
	return line, err
}

// readRecord reads to the end of a record, which may be empty.
func (c *csvReader) readRecord() (line int64, fault error) {
	line, c.record, c.ends, c.recordBytes = c.line, c.record[:0], c.ends[:0], 0
	for state := fieldStart; ; c.recordBytes++ {
		b, err := c.in.ReadByte()
		switch {
		case errors.Is(err, io.EOF) && c.recordBytes == 0:
			return line, io.EOF
		case errors.Is(err, io.EOF) && state == inQuotes:
			return line, &lineError{"opens a quote that is never closed"}
		case errors.Is(err, io.EOF):
			b = '\n'
		case err != nil:
			return line, err
		}
		if b == '\n' {
			c.line++
		}
		switch {
		case state == inQuotes && b == '"':
			state = afterQuote
			continue
		case state == inQuotes:
		case b == '\r' && c.lineEnds():
			c.recordBytes-- // the carriage return is part of the line break
			continue
		case b == '\n':
			c.ends = append(c.ends, len(c.record))
			if c.recordBytes > c.limit {
				fault = errLongLine
			}
			return line, fault
		case b == ',':
			state = fieldStart
			if c.recordBytes < c.limit {
				c.ends = append(c.ends, len(c.record))
			}
			continue
		case b == '"' && state == fieldStart:
			state = inQuotes
			continue
		case b == '"' && state == afterQuote:
			state = inQuotes
		case b == '"':
			fault = firstFault(fault, "has a quote inside a field that is not quoted")
		case state == afterQuote:
			fault = firstFault(fault, "goes on after a closing quote")
			state = inField
		default:
			state = inField
		}
		if c.recordBytes < c.limit {
			c.record = append(c.record, b)
		}
	}
}

// lineEnds reports whether a line break or the end of the body is next.
func (c *csvReader) lineEnds() bool {
	next, _ := c.in.Peek(1)
	return len(next) == 0 || next[0] == '\n'
}

func firstFault(fault error, problem string) error {
	if fault != nil {
		return fault
	}
	return &lineError{problem}
}

const hexDigits = "0123456789abcdef"

// appendJSONString appends s, which must be valid UTF-8, as a JSON string.
func appendJSONString(dst, s []byte) []byte {
	dst = append(slices.Grow(dst, len(s)+2), '"')
	for _, b := range s {
		switch {
		case b == '"' || b == '\\':
			dst = append(dst, '\\', b)
		case b == '\n':
			dst = append(dst, '\\', 'n')
		case b == '\t':
			dst = append(dst, '\\', 't')
		case b < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[b>>4], hexDigits[b&15])
		default:
			dst = append(dst, b)
		}
	}
	return append(dst, '"')
}
