package proctest

import (
	"bytes"
	"encoding/json"
	"sync"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// output collects the output of a process. It searches the lines for the addresses on which the
// process listens, and for reports of data races.
type output struct {
	mu      sync.Mutex
	streams []*stream
	tail    childproc.Tail
	stdout  bytes.Buffer
	all     bytes.Buffer
	addrs   map[string]string // server → addr
	race    bool
	changed chan struct{} // closed and replaced when an address becomes known
}

func newOutput() *output {
	return &output{addrs: map[string]string{}, changed: make(chan struct{})}
}

// stream is stdout or stderr of the process.
type stream struct {
	out    *output
	stdout bool
	line   []byte // the beginning of a line whose end has not been read
}

func (o *output) stream(stdout bool) *stream {
	s := &stream{out: o, stdout: stdout}
	o.streams = append(o.streams, s)
	return s
}

// Write adds bytes of the process's output. It never fails.
func (s *stream) Write(p []byte) (int, error) {
	s.out.mu.Lock()
	defer s.out.mu.Unlock()
	s.out.all.Write(p)
	if s.stdout {
		s.out.stdout.Write(p)
	}
	s.line = append(s.line, p...)
	for {
		line, rest, ended := bytes.Cut(s.line, []byte("\n"))
		if !ended {
			return len(p), nil
		}
		_, _ = s.out.tail.Write(s.line[:len(line)+1]) // whole lines, so that no line contains parts of both streams
		s.out.read(line)
		s.line = rest
	}
}

func (o *output) read(line []byte) {
	if bytes.Contains(line, []byte("WARNING: DATA RACE")) {
		o.race = true
		return
	}
	var entry struct{ Msg, Server, Addr string }
	if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &entry) != nil {
		return
	}
	if entry.Msg != "listening" || entry.Addr == "" {
		return
	}
	o.addrs[entry.Server] = entry.Addr
	close(o.changed)
	o.changed = make(chan struct{})
}

func (o *output) listening(server string) (addr string, changed <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.addrs[server], o.changed
}

func (o *output) raced() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.race
}

// log returns the last lines, including incomplete ones.
func (o *output) log() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := o.tail.String()
	for _, s := range o.streams {
		text += string(s.line)
	}
	return text
}

func (o *output) allText() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all.String()
}

func (o *output) stdoutText() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stdout.String()
}
