// Package records splits a body of NDJSON or CSV into records while it arrives, and turns the rows
// of CSV into payloads. The server, its Go client and the command line use it, so that all see the
// same records. It hides how a record of any length is read in bounded memory.
package records

import (
	"bufio"
	"errors"
	"io"
)

// Format says where a record ends.
type Format int

// The formats of a body. In CSV (RFC 4180) a field in quotes may have line breaks.
const (
	NDJSON Format = iota
	CSV
)

// Record is a line of NDJSON or a row of CSV.
type Record struct {
	Data      []byte // without the line break that ends the record; valid until the next call of Next
	Line      int64  // the line at which the record begins, from 1
	Lines     int64  // the number of lines that the record has
	Truncated bool   // the end of Data is missing, because the record is longer than the limit
	Open      bool   // CSV only: a quoted field is not closed before the end of the body
}

// ErrTooLong is the error of a record with more than [Reader.Longest] bytes.
var ErrTooLong = errors.New("record is too long")

// Reader reads records. It keeps at most limit bytes of one.
type Reader struct {
	// Longest is the number of bytes of a record after which Next returns [ErrTooLong]. 0 means no
	// bound: then Next reads a record without an end for ever.
	Longest int

	in        *bufio.Reader
	format    Format
	delimiter byte // CSV only: between two fields
	limit     int
	line      int64 // the line at which the next record begins
	buf       []byte
}

// SetDelimiter sets the character between two fields of CSV, instead of a comma. It must be called
// before Next.
func (r *Reader) SetDelimiter(d byte) { r.delimiter = d }

// NewReader returns a reader of the records of in. A record with its line break may have limit
// bytes; a longer one is truncated. NewReader skips a byte order mark, which spreadsheet programs
// write before UTF-8.
func NewReader(in *bufio.Reader, format Format, limit int) *Reader {
	const mark = "\xef\xbb\xbf"
	if head, _ := in.Peek(len(mark)); string(head) == mark { // if reading fails, Next returns the error
		_, _ = in.Discard(len(mark))
	}
	return &Reader{in: in, format: format, delimiter: ',', limit: limit, line: 1}
}

// Next returns the next record. At the end of the body it returns io.EOF and a record without data,
// whose Line is one more than the number of the last line. After an error it must not be called
// again.
func (r *Reader) Next() (Record, error) {
	rec := Record{Line: r.line}
	r.buf = r.buf[:0]
	size := 0
	for state := fieldStart; ; {
		part, err := r.in.ReadSlice('\n')
		if size += len(part); r.Longest > 0 && size > r.Longest {
			return rec, ErrTooLong
		}
		full, end := errors.Is(err, bufio.ErrBufferFull), errors.Is(err, io.EOF)
		if err != nil && !full && !end || end && len(part) == 0 && len(r.buf) == 0 {
			return rec, err
		}
		if r.format == CSV {
			state = state.after(part, r.delimiter)
		}
		kept := min(len(part), r.limit-len(r.buf))
		r.buf = append(r.buf, part[:kept]...)
		rec.Truncated = rec.Truncated || kept < len(part)
		if full {
			continue
		}
		rec.Lines++
		if state == inQuotes && !end {
			continue
		}
		rec.Data, rec.Open = r.buf, state == inQuotes
		if !end && !rec.Truncated {
			rec.Data = r.buf[:len(r.buf)-1]
		}
		r.line += rec.Lines
		return rec, nil
	}
}

// csvState says where in a row of CSV the reader is. A quote opens a quoted field only at the start
// of a field. A line break inside of quotes does not end the row.
type csvState int

const (
	fieldStart csvState = iota
	inField
	inQuotes
	afterQuote // after a closing quote, or after the first of two quotes that stand for one
)

// after returns the state behind text.
func (s csvState) after(text []byte, delimiter byte) csvState {
	for _, b := range text {
		switch {
		case s == inQuotes && b != '"':
		case s == inQuotes:
			s = afterQuote
		case b == delimiter:
			s = fieldStart
		case b == '"' && (s == fieldStart || s == afterQuote):
			s = inQuotes
		default:
			s = inField
		}
	}
	return s
}
