package httpapi

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// skipBOM skips a byte order mark, which spreadsheet programs write before UTF-8. If reading fails,
// the next read returns the error.
func skipBOM(in *bufio.Reader) {
	const mark = "\xef\xbb\xbf"
	if head, _ := in.Peek(len(mark)); string(head) == mark {
		_, _ = in.Discard(len(mark))
	}
}

// lineReader splits a body into lines and trims white space. It keeps at most limit bytes of a
// line.
type lineReader struct {
	in    *bufio.Reader
	limit int
	line  int64 // number of the line that was read last, from 1
	buf   []byte
}

func newLineReader(in *bufio.Reader, limit int) *lineReader { return &lineReader{in: in, limit: limit} }

// next returns the next line, or io.EOF. The line is valid until the next call. A line over the
// limit is skipped and reported as errLongLine.
func (l *lineReader) next() ([]byte, error) {
	l.buf = l.buf[:0]
	l.line++
	for size := 0; ; {
		part, err := l.in.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		size += len(part)
		if size <= l.limit+2 { // 2 is the length of a line break
			l.buf = append(l.buf, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case size == 0: // even an empty line has a line break
			return nil, io.EOF
		case size > l.limit+2:
			return nil, errLongLine
		default:
			return bytes.TrimSpace(l.buf), nil
		}
	}
}
