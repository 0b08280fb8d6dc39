package reducer

import "bytes"

// scanner reads JSON text once and stores the values that a tree of paths leads to. It validates
// only what it needs to find its way, stops as soon as everything is found or the text is
// malformed, and recurses only as deep as the paths.
type scanner struct {
	text    []byte
	pos     int
	values  []value
	missing int // values still to find
}

// root scans the whole text. The scanning methods return false to stop: every value is found, or
// the text is malformed.
func (s *scanner) root(n *node) {
	s.text = bytes.TrimSpace(s.text)
	if n.slot != noSlot {
		s.found(n.slot, s.text)
	}
	if s.missing > 0 && len(n.edges) > 0 {
		s.into(n)
	}
}

func (s *scanner) found(slot int, raw []byte) {
	if s.values[slot].raw == nil && len(raw) > 0 {
		s.values[slot].raw = raw
		s.missing--
	}
}

func (s *scanner) value(n *node) bool {
	start := s.pos
	if !s.into(n) {
		return false
	}
	if n.slot != noSlot {
		s.found(n.slot, s.text[start:s.pos])
	}
	return s.missing > 0
}

// into reads one value. It looks inside the value if paths of the node continue there.
func (s *scanner) into(n *node) bool {
	switch {
	case len(n.edges) > 0 && s.at('{'):
		return s.object(n)
	case n.maxIndex >= 0 && s.at('['):
		return s.array(n)
	}
	return s.skip()
}

func (s *scanner) object(n *node) bool {
	s.pos++
	if s.space(); s.at('}') {
		s.pos++
		return true
	}
	for {
		name, ok := s.name()
		if !ok {
			return false
		}
		next := n.named(name)
		if next != nil {
			ok = s.value(next)
		} else {
			ok = s.skip()
		}
		if !ok {
			return false
		}
		if more, ok := s.more('}'); !more {
			return ok
		}
	}
}

func (s *scanner) array(n *node) bool {
	s.pos++
	if s.space(); s.at(']') {
		s.pos++
		return true
	}
	for i := 0; i <= n.maxIndex; i++ {
		next, ok := n.indexed(i), false
		if next != nil {
			ok = s.value(next)
		} else {
			ok = s.skip()
		}
		if !ok {
			return false
		}
		if more, ok := s.more(']'); !more {
			return ok
		}
	}
	return s.close(1)
}

func (n *node) named(name []byte) *node {
	for i := range n.edges {
		if e := &n.edges[i]; e.name == string(name) {
			return e.to
		}
	}
	return nil
}

func (n *node) indexed(i int) *node {
	for _, e := range n.edges {
		if e.index == i {
			return e.to
		}
	}
	return nil
}

// name reads an object's key and the colon after it.
func (s *scanner) name() ([]byte, bool) {
	s.space()
	start := s.pos
	if !s.at('"') || !s.str() {
		return nil, false
	}
	raw := s.text[start:s.pos]
	if s.space(); !s.at(':') {
		return nil, false
	}
	s.pos++
	s.space()
	return unquote(raw)
}

// more reads a comma (more is true) or the end of the container (more is false, ok is true).
func (s *scanner) more(end byte) (more, ok bool) {
	s.space()
	more, ok = s.at(','), s.at(end)
	if more || ok {
		s.pos++
	}
	s.space()
	return more, ok
}

func (s *scanner) skip() bool {
	if s.pos == len(s.text) {
		return false
	}
	switch s.text[s.pos] {
	case '"':
		return s.str()
	case '{', '[':
		s.pos++
		return s.close(1)
	}
	start := s.pos
	for s.pos < len(s.text) && !delimits[s.text[s.pos]] {
		s.pos++
	}
	return s.pos > start
}

// delimits are the bytes that end a number or a literal.
var delimits = [256]bool{
	',':  true,
	':':  true,
	'"':  true,
	'{':  true,
	'}':  true,
	'[':  true,
	']':  true,
	' ':  true,
	'\t': true,
	'\n': true,
	'\r': true,
}

// close reads up to the end of the given number of open containers.
func (s *scanner) close(depth int) bool {
	for s.pos < len(s.text) {
		switch s.text[s.pos] {
		case '"':
			if !s.str() {
				return false
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		s.pos++
		if depth == 0 {
			return true
		}
	}
	return false
}

// str reads a string.
func (s *scanner) str() bool {
	for from := s.pos + 1; ; {
		length := bytes.IndexByte(s.text[from:], '"')
		if length < 0 {
			return false
		}
		end := from + length
		first := end
		for first > from && s.text[first-1] == '\\' {
			first--
		}
		from = end + 1
		if (end-first)%2 == 0 { // the quote isn't escaped
			s.pos = from
			return true
		}
	}
}

func (s *scanner) at(c byte) bool { return s.pos < len(s.text) && s.text[s.pos] == c }

func (s *scanner) space() {
	for s.pos < len(s.text) {
		switch s.text[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}
