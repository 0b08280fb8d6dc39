package aggregator

// jsonScanner skips over JSON text without decoding it. It accepts nothing that encoding/json
// refuses. It refuses some text that encoding/json accepts, so its caller falls back to
// encoding/json.
type jsonScanner struct {
	text []byte
	pos  int // index of the next byte
}

// maxDepth bounds the nesting of arrays and objects.
const maxDepth = 100

// skipLiteral skips want, and reports whether it was there.
func (s *jsonScanner) skipLiteral(want string) bool {
	if len(s.text)-s.pos < len(want) || string(s.text[s.pos:s.pos+len(want)]) != want {
		return false
	}
	s.pos += len(want)
	return true
}

// numberAfter skips prefix and the number after it, and returns the number. It returns nil when one
// of both is missing.
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

// nextIs reports whether the next byte is c.
func (s *jsonScanner) nextIs(c byte) bool { return s.pos < len(s.text) && s.text[s.pos] == c }

// skipByte skips the next byte if it is c, and reports whether it was.
func (s *jsonScanner) skipByte(c byte) bool {
	if !s.nextIs(c) {
		return false
	}
	s.pos++
	return true
}

// skipSpace skips blanks, tabs and carriage returns. A line has no line feeds.
func (s *jsonScanner) skipSpace() {
	for s.nextIs(' ') || s.nextIs('\t') || s.nextIs('\r') {
		s.pos++
	}
}

// skipValue skips one JSON value, and reports whether it was valid. depth is the number of arrays
// and objects around it.
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

// skipContainer skips the object (named is true) or array that ends with the byte end, and reports
// whether it was valid.
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

// skipString skips a string in quotes, and reports whether it was valid.
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

// skipEscape skips the part of an escape sequence after its backslash, and reports whether it was
// valid.
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

// skipNumber skips a number, and reports whether it was valid.
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

// skipDigits skips digits, and reports whether there was at least one.
func (s *jsonScanner) skipDigits() bool {
	start := s.pos
	for s.pos < len(s.text) && s.text[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > start
}
