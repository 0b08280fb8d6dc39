package client

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// sseMessage is one message of a text/event-stream. id is empty when the message has none.
type sseMessage struct {
	id, event string
	data      []byte
}

const maxEventBytes = 16 << 20 // bytes of one line

// messageReader reads the messages of a text/event-stream (HTML standard, section 9.2.6).
type messageReader struct {
	s     *bufio.Scanner
	retry time.Duration // wait before the next connection, as the server asks; 0 when it does not say
}

func newMessageReader(r io.Reader) *messageReader {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 4<<10), maxEventBytes)
	return &messageReader{s: s}
}

// next returns the next message that has data, or io.EOF. It drops a message that the end of the
// stream cuts off.
func (m *messageReader) next() (sseMessage, error) {
	var msg sseMessage
	var data [][]byte
	for m.s.Scan() {
		line := m.s.Bytes()
		if len(line) == 0 {
			if data == nil {
				msg = sseMessage{}
				continue
			}
			msg.data = bytes.Join(data, []byte("\n"))
			return msg, nil
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "id":
			if !strings.ContainsRune(string(value), 0) {
				msg.id = string(value)
			}
		case "event":
			msg.event = string(value)
		case "data":
			data = append(data, bytes.Clone(value))
		case "retry":
			if ms, err := strconv.ParseInt(string(value), 10, 32); err == nil && ms >= 0 {
				m.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
	switch err := m.s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return sseMessage{}, fmt.Errorf("%w: a line of more than %d bytes", errFormat, maxEventBytes)
	case err != nil:
		return sseMessage{}, err
	}
	return sseMessage{}, io.EOF
}
