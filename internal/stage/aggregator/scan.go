package aggregator

// scanner passes over JSON text and is as strict as encoding/json. What it refuses need not be
// wrong: its caller asks encoding/json then.
type scanner struct {
	text []byte
	pos  int
}

// maxDepth bounds how deep arrays and objects lie in each other.
const maxDepth = 100

func (s *scanner) literal(want string) bool {
	if len(s.text)-s.pos < len(want) || string(s.text[s.pos:s.pos+len(want)]) != want {
		return false
	}
	s.pos += len(want)
	return true
}

// number is the number behind a prefix; nil where there is none.
func (s *scanner) number(prefix string) []byte {
	if !s.literal(prefix) {
		return nil
	}
	start := s.pos
	if !s.passNumber() {
		return nil
	}
	return s.text[start:s.pos]
}

func (s *scanner) at(c byte) bool { return s.pos < len(s.text) && s.text[s.pos] == c }

// take passes over one byte, if it is this one.
func (s *scanner) take(c byte) bool {
	if !s.at(c) {
		return false
	}
	s.pos++
	return true
}

func (s *scanner) space() {
	for s.at(' ') || s.at('\t') || s.at('\r') {
		s.pos++
	}
}

func (s *scanner) value(depth int) bool {
	if s.pos == len(s.text) || depth > maxDepth {
		return false
	}
	switch s.text[s.pos] {
	case '{':
		return s.container('}', true, depth)
	case '[':
		return s.container(']', false, depth)
	case '"':
		return s.str()
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	}
	return s.passNumber()
}

// container passes over an object, whose values have names, or an array.
func (s *scanner) container(end byte, named bool, depth int) bool {
	s.pos++
	if s.space(); s.take(end) {
		return true
	}
	for {
		s.space()
		if named {
			if !s.str() {
				return false
			}
			if s.space(); !s.take(':') {
				return false
			}
			s.space()
		}
		if !s.value(depth + 1) {
			return false
		}
		if s.space(); s.take(end) {
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

func (s *scanner) str() bool {
	if !s.take('"') {
		return false
	}
	for {
		rest := s.text[s.pos:]
		n := 0
		for n < len(rest) && rest[n] != '"' && rest[n] != '\\' && rest[n] >= ' ' {
			n++
		}
		s.pos += n
		if s.take('"') {
			return true
		}
		if !s.take('\\') || !s.escape() {
			return false
		}
	}
}

// escape passes over what follows a backslash.
func (s *scanner) escape() bool {
	if s.pos == len(s.text) {
		return false
	}
	c := s.text[s.pos]
	s.pos++
	switch c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	case 'u':
		for range 4 {
			if s.pos == len(s.text) || !isHex(s.text[s.pos]) {
				return false
			}
			s.pos++
		}
		return true
	}
	return false
}

func isHex(c byte) bool { return c-'0' <= 9 || c|0x20 >= 'a' && c|0x20 <= 'f' }

func (s *scanner) passNumber() bool {
	s.take('-')
	if !s.take('0') && !s.digits() {
		return false
	}
	if s.take('.') && !s.digits() {
		return false
	}
	if s.take('e') || s.take('E') {
		if !s.take('+') {
			s.take('-')
		}
		return s.digits()
	}
	return true
}

// digits passes over one digit or more.
func (s *scanner) digits() bool {
	start := s.pos
	for s.pos < len(s.text) && s.text[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > start
}
