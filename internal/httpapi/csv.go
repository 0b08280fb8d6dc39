package httpapi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/records"
)

// csvSource turns each row of a table (RFC 4180) into a job. The payload is an object: its keys are
// the columns' names in the header, and its values are strings. Unlike encoding/csv, it continues
// behind a malformed row.
type csvSource struct {
	rows  *records.Reader
	row   csvRow
	names []string // as they are written in the payload: `{"a":`, `,"b":`, …
}

// newCSVSource reads the header row and returns a source of the rows behind it.
func newCSVSource(in *bufio.Reader) (*csvSource, error) {
	s := &csvSource{rows: newRecords(in, records.CSV)}
	line, err := s.nextRow()
	var bad *lineError
	switch {
	case errors.Is(err, io.EOF):
		return nil, invalidField("header", "is missing: the first row names the payload's fields")
	case errors.As(err, &bad):
		return nil, invalidField("header", bad.problem)
	case err != nil:
		return nil, brokenRecord(err, line)
	}
	seen := make(map[string]bool)
	for i := range s.row.fields() {
		name := s.row.field(i)
		if len(name) == 0 || seen[string(name)] {
			return nil, newProblem(api.Invalid, "each column of the header needs a name of its own",
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
	line, err := s.nextRow()
	if err != nil {
		return messages.Job{}, line, 0, err
	}
	if got, want := s.row.fields(), len(s.names); got != want {
		return messages.Job{}, line, 0, &lineError{fmt.Sprintf("has %d columns where the header has %d", got, want)}
	}
	payload := make([]byte, 0, len(s.row.text)+16*len(s.names))
	for i, name := range s.names {
		payload = appendJSONString(append(payload, name...), s.row.field(i))
	}
	payload = append(payload, '}')
	if len(payload) > messages.MaxPayloadBytes {
		return messages.Job{}, line, 0, errLongLine
	}
	return messages.Job{Payload: payload}, line, len(payload), nil
}

// nextRow reads the next row that is not empty, and returns the line at which it begins. It returns
// a *lineError for a malformed row.
func (s *csvSource) nextRow() (line int64, err error) {
	for {
		rec, err := s.rows.Next()
		if err != nil {
			return rec.Line, err
		}
		text := bytes.TrimSuffix(rec.Data, []byte("\r"))
		switch {
		case rec.Open:
			return rec.Line, &lineError{"opens a quote that is never closed"}
		case rec.Truncated, len(text) > maxLine:
			return rec.Line, errLongLine
		case len(text) > 0:
			return rec.Line, s.row.split(text)
		}
	}
}

// csvRow holds the fields of a row, one behind the other, without quotes and commas.
type csvRow struct {
	text []byte
	ends []int // where each field ends in text
}

func (c *csvRow) fields() int { return len(c.ends) }

func (c *csvRow) field(i int) []byte {
	if i == 0 {
		return c.text[:c.ends[0]]
	}
	return c.text[c.ends[i-1]:c.ends[i]]
}

// split divides a row into fields. Each quoted field of the row must be closed.
func (c *csvRow) split(row []byte) error {
	c.text, c.ends = c.text[:0], c.ends[:0]
	for rest, more := row, true; more; {
		quoted := bytes.HasPrefix(rest, quote)
		for bytes.HasPrefix(rest, quote) {
			var text []byte
			text, rest, _ = bytes.Cut(rest[1:], quote)
			if c.text = append(c.text, text...); bytes.HasPrefix(rest, quote) {
				c.text = append(c.text, '"') // two quotes stand for one
			}
		}
		var text []byte
		text, rest, more = bytes.Cut(rest, comma)
		switch {
		case quoted && len(text) > 0:
			return &lineError{"goes on after a closing quote"}
		case bytes.Contains(text, quote):
			return &lineError{"has a quote inside a field that is not quoted"}
		}
		c.text = append(c.text, text...)
		c.ends = append(c.ends, len(c.text))
	}
	if !utf8.Valid(row) {
		return &lineError{"is not UTF-8"}
	}
	return nil
}

var quote, comma = []byte{'"'}, []byte{','}

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
