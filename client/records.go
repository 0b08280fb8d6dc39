package client

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// maxRecordBytes is more than the server accepts in one record. The reader cuts a longer record off
// at this size, and the server then rejects it.
const maxRecordBytes = 1 << 20

// record is a line of NDJSON or a row of CSV, with its line break.
type record struct {
	data      []byte
	lines     int64
	truncated bool // the end is missing because the record was too long
}

// recordReader splits NDJSON or CSV into records in the same way as the server. It holds one record
// at a time.
type recordReader struct {
	in        *bufio.Reader
	csv       bool
	linesRead int64
	buf       []byte
}

func newRecordReader(r io.Reader, csv bool) *recordReader {
	return &recordReader{in: bufio.NewReaderSize(r, 64<<10), csv: csv}
}

// header returns the first row of CSV that is not empty. NDJSON has no header.
func (r *recordReader) header() ([]byte, error) {
	for r.csv {
		rec, err := r.next()
		if err != nil || len(bytes.TrimSpace(rec.data)) > 0 {
			return bytes.Clone(rec.data), err
		}
	}
	return nil, nil
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

func (s csvState) next(b byte) csvState {
	switch {
	case s == inQuotes && b != '"':
		return inQuotes
	case s == inQuotes:
		return afterQuote
	case b == ',':
		return fieldStart
	case b == '"' && (s == fieldStart || s == afterQuote):
		return inQuotes
	}
	return inField
}

// next returns the next record, or io.EOF. The record is valid until the next call. A last record
// without a line break gets one.
func (r *recordReader) next() (record, error) {
	if r.csv {
		return r.nextRow()
	}
	rec := record{data: r.buf[:0]}
	for {
		part, err := r.in.ReadSlice('\n')
		full := errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !full && !errors.Is(err, io.EOF) {
			return record{}, err
		}
		if len(part) == 0 && len(rec.data) == 0 {
			return record{}, io.EOF
		}
		text := bytes.TrimSuffix(part, []byte("\n"))
		if room := maxRecordBytes - len(rec.data); len(text) > room {
			text, rec.truncated = text[:room], true
		}
		rec.data = append(rec.data, text...)
		if !full {
			return r.finish(rec), nil
		}
	}
}

// nextRow returns the next record of CSV, in which a quoted field may have line breaks.
func (r *recordReader) nextRow() (record, error) {
	rec := record{data: r.buf[:0]}
	for state := fieldStart; ; {
		b, err := r.in.ReadByte()
		if errors.Is(err, io.EOF) && (len(rec.data) > 0 || rec.lines > 0) {
			return r.finish(rec), nil
		}
		if err != nil {
			return record{}, err
		}
		switch {
		case b == '\n' && state != inQuotes:
			return r.finish(rec), nil
		case b == '\n':
			rec.lines++
		}
		state = state.next(b)
		if len(rec.data) >= maxRecordBytes {
			rec.truncated = true
			continue
		}
		rec.data = append(rec.data, b)
	}
}

func (r *recordReader) finish(rec record) record {
	rec.data = append(rec.data, '\n')
	rec.lines++
	r.buf = rec.data
	r.linesRead += rec.lines
	return rec
}
