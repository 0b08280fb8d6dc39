package roomload

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// frame is one event of an event stream.
type frame struct {
	Event string // "": a frame without a name
	ID    string // "": the frame has no id
	Data  []byte // valid until emit returns
}

const (
	readBuffer  = 512       // bytes that one read of a stream takes
	longestLine = 256 << 10 // a longer line is an error of the broker
	longestHead = 64 << 10  // status and headers
)

// step is what the parser expects next.
type step int

const (
	atStatus step = iota
	atHeader
	atChunkSize
	inChunk
	atChunkEnd
	atTrailer
	inBody // a body without chunks, until the connection ends
	atEnd  // the body has ended
)

// parser parses the HTTP answer to a stream request from the bytes of a connection: status,
// headers, chunks, and the frames in them (WHATWG HTML, section Server-sent events). The bytes may
// be divided at any place. Between two calls it stores only an unfinished line and frame, so that
// an idle stream takes little memory.
type parser struct {
	Status   int           // 0: not read yet
	Type     string        // of the content
	Retry    time.Duration // the latest retry: field; 0: none
	Comments int

	step    step
	left    int64  // bytes of the chunk that are still to come
	chunked bool   // the headers say so
	head    int    // bytes of status and headers
	wire    []byte // unfinished line of status, headers and chunk sizes

	line    []byte // unfinished line of the body
	wasCR   bool   // the last byte of the body was CR; a LF that follows belongs to it
	begun   bool   // the first line has been read
	event   string
	id      string
	data    []byte
	hasData bool
}

// errEnded means that the server closed the stream in an orderly way: the last chunk was read, or
// the status is 204.
var errEnded = errors.New("the stream has ended")

// feed parses the next bytes of the answer and calls emit for each complete frame. It returns
// errEnded at the end of a chunked body or of an answer with status 204, and an error for bytes
// that are not an HTTP answer.
func (p *parser) feed(b []byte, emit func(frame)) error {
	for len(b) > 0 {
		var err error
		switch p.step {
		case inBody:
			err, b = p.body(b, emit), nil
		case inChunk:
			n := min(int64(len(b)), p.left)
			err = p.body(b[:n], emit)
			if b, p.left = b[n:], p.left-n; p.left == 0 {
				p.step = atChunkEnd
			}
		case atEnd:
			return errEnded
		default:
			b, err = p.control(b)
		}
		if err != nil {
			return err
		}
	}
	if p.step == atEnd {
		return errEnded
	}
	return nil
}

// control parses bytes of a line of status, headers or chunk framing, and acts on the line when it
// is complete. It returns the bytes after the line.
func (p *parser) control(b []byte) ([]byte, error) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		p.wire = append(p.wire, b...)
		if len(p.wire) > longestHead {
			return nil, fmt.Errorf("a line of the answer has more than %d bytes", longestHead)
		}
		return nil, nil
	}
	line := strings.TrimSuffix(string(append(p.wire, b[:end]...)), "\r")
	p.wire = shrink(p.wire)
	return b[end+1:], p.controlLine(line)
}

func (p *parser) controlLine(line string) error {
	switch p.step {
	case atStatus, atHeader:
		if p.head += len(line); p.head > longestHead {
			return fmt.Errorf("the headers have more than %d bytes", longestHead)
		}
		return p.headLine(line)
	case atChunkSize:
		size, _, _ := strings.Cut(line, ";")
		n, err := strconv.ParseInt(strings.TrimSpace(size), 16, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("the size of a chunk is %q", line)
		}
		if p.left, p.step = n, inChunk; n == 0 {
			p.step = atTrailer
		}
	case atChunkEnd:
		if p.step = atChunkSize; line != "" {
			return fmt.Errorf("a chunk ends with %q", line)
		}
	case atTrailer:
		if line == "" {
			p.step = atEnd
		}
	}
	return nil
}

func (p *parser) headLine(line string) error {
	if p.step == atStatus {
		version, rest, _ := strings.Cut(line, " ")
		code, _, _ := strings.Cut(rest, " ")
		status, err := strconv.Atoi(code)
		if err != nil || !strings.HasPrefix(version, "HTTP/1.") {
			return fmt.Errorf("the answer begins with %q", line)
		}
		p.Status, p.step = status, atHeader
		return nil
	}
	name, value, _ := strings.Cut(line, ":")
	switch value = strings.TrimSpace(value); {
	case line == "" && p.Status < 200: // an informational answer comes first
		p.step = atStatus
	case line == "" && p.Status == 204:
		p.step = atEnd
	case line == "" && p.chunked:
		p.step = atChunkSize
	case line == "":
		p.step = inBody
	case strings.EqualFold(name, "Transfer-Encoding"):
		p.chunked = strings.EqualFold(value, "chunked")
	case strings.EqualFold(name, "Content-Type"):
		p.Type, _, _ = strings.Cut(value, ";")
	}
	return nil
}

// body parses bytes of the body of the answer and calls emit for complete frames. A line ends with
// LF, CR, or CR and LF.
func (p *parser) body(b []byte, emit func(frame)) error {
	for len(b) > 0 {
		if p.wasCR && b[0] == '\n' {
			b, p.wasCR = b[1:], false
			continue
		}
		p.wasCR = false
		end := bytes.IndexAny(b, "\r\n")
		if end < 0 {
			if p.line = append(p.line, b...); len(p.line) > longestLine {
				return fmt.Errorf("a line of the stream has more than %d bytes", longestLine)
			}
			return nil
		}
		p.wasCR = b[end] == '\r'
		line := b[:end]
		if len(p.line) > 0 {
			p.line = append(p.line, line...)
			line = p.line
		}
		p.bodyLine(line, emit)
		p.line, b = shrink(p.line), b[end+1:]
	}
	return nil
}

var byteOrderMark = []byte("\xef\xbb\xbf")

func (p *parser) bodyLine(line []byte, emit func(frame)) {
	if !p.begun {
		p.begun = true
		line = bytes.TrimPrefix(line, byteOrderMark)
	}
	if len(line) == 0 {
		if p.hasData { // a frame without data is dropped
			emit(frame{Event: p.event, ID: p.id, Data: p.data})
		}
		p.event, p.id, p.data, p.hasData = "", "", shrink(p.data), false
		return
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "":
		p.Comments++
	case "event":
		p.event = string(value)
	case "id":
		p.id = string(value)
	case "data":
		if p.hasData {
			p.data = append(p.data, '\n')
		}
		p.data, p.hasData = append(p.data, value...), true
	case "retry":
		if ms, err := strconv.ParseUint(string(value), 10, 31); err == nil {
			p.Retry = time.Duration(ms) * time.Millisecond
		}
	}
}

// shrink returns an empty buffer for the next line: the old one, or nil if a long line has made it
// large.
func shrink(b []byte) []byte {
	if cap(b) > readBuffer {
		return nil
	}
	return b[:0]
}
