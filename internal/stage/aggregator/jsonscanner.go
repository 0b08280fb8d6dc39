package aggregator

// scanner passes over JSON text and is as strict as encoding/json. What it refuses need not be
// wrong: its caller asks encoding/json then.
type jsonScanner struct {
	text []byte
	pos  int
}

// maxDepth bounds how deep arrays and objects lie in each other.
const maxDepth = 100

func (s *jsonScanner) skipLiteral(want string) bool {
	if len(s.text)-s.pos < len(want) || string(s.text[s.pos:s.pos+len(want)]) != want {
		return false
	}
	s.pos += len(want)
	return true
}

// number is the number behind a prefix; nil where there is none.
func (s *jsonScanner) numberAfter(prefix string) []byte {
	if !s.skipLiteral(prefix) {
		return nil
	}
	start := s.pos
	if !s.skipNumber() {
		return nil
	}
	return s.text[start:s.pos]
}

func (s *jsonScanner) nextIs(c byte) bool { return s.pos < len(s.text) && s.text[s.pos] == c }

// take passes over one byte, if it is this one.
func (s *jsonScanner) skipByte(c byte) bool {
	if !s.nextIs(c) {
		return false
	}
	s.pos++
	return true
}

func (s *jsonScanner) skipSpace() {
	for s.nextIs(' ') || s.nextIs('\t') || s.nextIs('\r') {
		s.pos++
	}
}

func (s *jsonScanner) skipValue(depth int) bool {
	if s.pos == len(s.text) || depth > maxDepth {
		return false
	}
	switch s.text[s.pos] {
	case '{':
		return s.skipContainer('}', true, depth)
	case '[':
		return s.skipContainer(']', false, depth)
	case '"':
		return s.skipString()
	case 't':
		return s.skipLiteral("true")
	case 'f':
		return s.skipLiteral("false")
	case 'n':
		return s.skipLiteral("null")
	}
	return s.skipNumber()
}

// container passes over an object, whose values have names, or an array.
func (s *jsonScanner) skipContainer(end byte, named bool, depth int) bool {
	s.pos++
	if s.skipSpace(); s.skipByte(end) {
		return true
	}
	for {
		s.skipSpace()
		if named {
			if !s.skipString() {
				return false
			}
			if s.skipSpace(); !s.skipByte(':') {
				return false
			}
			s.skipSpace()
		}
		if !s.skipValue(depth + 1) {
			return false
		}
		if s.skipSpace(); s.skipByte(end) {
			return true
		}
		if !s.skipByte(',') {
			return false
		}
	}
}

func (s *jsonScanner) skipString() bool {
	if !s.skipByte('"') {
		return false
	}
	for {
		rest := s.text[s.pos:]
		n := 0
		for n < len(rest) && rest[n] != '"' && rest[n] != '\\' && rest[n] >= ' ' {
			n++
		}
		s.pos += n
		if s.skipByte('"') {
			return true
		}
		if !s.skipByte('\\') || !s.skipEscape() {
			return false
		}
	}
}

// escape passes over what follows a backslash.
func (s *jsonScanner) skipEscape() bool {
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

func (s *jsonScanner) skipNumber() bool {
	s.skipByte('-')
	if !s.skipByte('0') && !s.skipDigits() {
		return false
	}
	if s.skipByte('.') && !s.skipDigits() {
		return false
	}
	if s.skipByte('e') || s.skipByte('E') {
		if !s.skipByte('+') {
			s.skipByte('-')
		}
		return s.skipDigits()
	}
	return true
}

// digits passes over one digit or more.
func (s *jsonScanner) skipDigits() bool {
	start := s.pos
	for s.pos < len(s.text) && s.text[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > start
}
