package httpapi

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// skipBOM drops the byte order mark that spreadsheets put before UTF-8. An error comes again with
// the next read.
func skipBOM(in *bufio.Reader) {
	const mark = "\xef\xbb\xbf"
	if head, _ := in.Peek(len(mark)); string(head) == mark {
		_, _ = in.Discard(len(mark))
	}
}

// lineReader splits a body into lines, trimmed of white space, and holds no more than limit
// bytes of one.
type lineReader struct {
	in    *bufio.Reader
	limit int
	line  int64 // of the line read last, from 1
	buf   []byte
}

func newLineReader(in *bufio.Reader, limit int) *lineReader { return &lineReader{in: in, limit: limit} }

// next returns the next line, valid until the call after. One over the limit is skipped
// with errLongLine.
func (l *lineReader) next() ([]byte, error) {
	l.buf = l.buf[:0]
	l.line++
	for size := 0; ; {
		part, err := l.in.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		size += len(part)
		if size <= l.limit+2 { // with its line break
			l.buf = append(l.buf, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case size == 0: // an empty line has its break
			return nil, io.EOF
		case size > l.limit+2:
			return nil, errLongLine
		default:
			return bytes.TrimSpace(l.buf), nil
		}
	}
}
