// Package jsonscan finds the ends of JSON values in a text without decoding them; Decode says in
// words what does not fit. Packages that read large JSON fast are built on it. BenchmarkValue and BenchmarkSkip compare it with
// encoding/json.
//
// A function that skips something takes the offset at which it starts. It returns the offset after
// the skipped text, or -1 if the text is not as expected. Given -1, it returns -1, so that a caller
// needs only one check after several calls; only Plain does not accept -1. String, Number and Value
// check the text: they accept nothing that encoding/json refuses. Like encoding/json, they do not
// check UTF-8. SkipString, SkipRest and SkipValue expect valid text. In other text they return some
// offset or -1, and do not panic.
package jsonscan

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"unicode/utf8"
	"unsafe"
)

// Bytes returns the bytes of a string without copying them. The caller must not change them.
func Bytes(text string) []byte {
	return unsafe.Slice(unsafe.StringData(text), len(text)) // #nosec G103: callers only read the bytes
}

// Space skips white space. It fails only for -1.
func Space(b []byte, i int) int {
	for uint(i) < uint(len(b)) && isSpace(b[i]) {
		i++
	}
	return i
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

// Is reports whether the byte at i is c.
func Is(b []byte, i int, c byte) bool { return uint(i) < uint(len(b)) && b[i] == c }

// Token skips the byte c, and the white space around it.
func Token(b []byte, i int, c byte) int {
	if i = Space(b, i); !Is(b, i, c) {
		return -1
	}
	return Space(b, i+1)
}

// Next skips, after an element of an object or array, either a comma (more is true) or the closing
// byte end, and the white space around it.
func Next(b []byte, i int, end byte) (next int, more bool) {
	i = Space(b, i)
	switch {
	case Is(b, i, ','):
		return Space(b, i+1), true
	case Is(b, i, end):
		return Space(b, i+1), false
	}
	return -1, false
}

// Literal skips the text want, which must stand at i.
func Literal(b []byte, i int, want string) int {
	if end := i + len(want); i >= 0 && end <= len(b) && string(b[i:end]) == want {
		return end
	}
	return -1
}

// Value skips a valid value that begins at i, without white space before it. It returns -1 if
// arrays and objects are nested in more than depth levels. The value itself is the first level; an
// empty array or object does not count.
func Value(b []byte, i, depth int) int {
	if uint(i) >= uint(len(b)) {
		return -1
	}
	switch b[i] {
	case '"':
		return String(b, i)
	case '{':
		return container(b, i, depth, '}')
	case '[':
		return container(b, i, depth, ']')
	case 't':
		return Literal(b, i, "true")
	case 'f':
		return Literal(b, i, "false")
	case 'n':
		return Literal(b, i, "null")
	}
	return Number(b, i)
}

// container skips an object or array; end is the byte that closes it, } or ].
func container(b []byte, i, depth int, end byte) int {
	if i = Space(b, i+1); Is(b, i, end) {
		return i + 1
	}
	for depth > 0 {
		if end == '}' {
			if i = Token(b, String(b, i), ':'); i < 0 {
				return -1
			}
		}
		if i = Space(b, Value(b, i, depth-1)); i < 0 {
			return -1
		}
		if Is(b, i, end) {
			return i + 1
		}
		if !Is(b, i, ',') {
			return -1
		}
		i = Space(b, i+1)
	}
	return -1
}

// Number skips a valid number.
func Number(b []byte, i int) int {
	if Is(b, i, '-') {
		i++
	}
	if Is(b, i, '0') {
		i++
	} else {
		i = digits(b, i)
	}
	if Is(b, i, '.') {
		i = digits(b, i+1)
	}
	if Is(b, i, 'e') || Is(b, i, 'E') {
		if i++; Is(b, i, '+') || Is(b, i, '-') {
			i++
		}
		return digits(b, i)
	}
	return i
}

// digits skips at least one digit.
func digits(b []byte, i int) int {
	start := i
	for uint(i) < uint(len(b)) && b[i]-'0' <= 9 {
		i++
	}
	if i == start {
		return -1
	}
	return i
}

// String skips a valid string.
func String(b []byte, i int) int {
	if !Is(b, i, '"') {
		return -1
	}
	for i++; ; {
		i = Plain(b, i)
		if Is(b, i, '"') {
			return i + 1
		}
		if !Is(b, i, '\\') || i+1 >= len(b) {
			return -1
		}
		switch b[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i += 2
		case 'u':
			if i += 6; i > len(b) {
				return -1
			}
			for _, c := range b[i-4 : i] {
				if c-'0' > 9 && (c|0x20)-'a' > 5 {
					return -1
				}
			}
		default:
			return -1
		}
	}
}

// Plain skips the characters of a string before the next quote, backslash or control character. It
// tests eight bytes at a time: https://graphics.stanford.edu/~seander/bithacks.html#HasLessInWord
func Plain(b []byte, i int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x80 * ones
	)
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, slash := w^('"'*ones), w^('\\'*ones)
		// The lowest set bit of found marks the first such byte. Higher bits may be wrong.
		if found := ((w-' '*ones)&^w | (quote-ones)&^quote | (slash-ones)&^slash) & highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for i < len(b) && b[i] >= ' ' && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

// SkipString skips a string. It returns -1 if there is no quote at i, or no closing quote.
func SkipString(b []byte, i int) int {
	if !Is(b, i, '"') {
		return -1
	}
	// Try Plain first: it is faster for a short string without escapes. IndexByte is faster for a
	// long one.
	const short = 64
	from := Plain(b[:min(i+short, len(b))], i+1)
	if Is(b, from, '"') {
		return from + 1
	}
	for {
		length := bytes.IndexByte(b[from:], '"')
		if length < 0 {
			return -1
		}
		end := from + length
		escapes := end // where the backslashes before the quote begin
		for escapes > from && b[escapes-1] == '\\' {
			escapes--
		}
		from = end + 1
		if (end-escapes)%2 == 0 { // the quote isn't escaped
			return from
		}
	}
}

// SkipRest skips the rest of an object or array, from an offset between its elements. It returns -1
// if the object or array doesn't end.
func SkipRest(b []byte, i int) int {
	for depth := 1; uint(i) < uint(len(b)); i++ {
		switch b[i] {
		case '"':
			if i = SkipString(b, i) - 1; i < 0 {
				return -1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

// SkipValue skips a value that begins at i, without white space before it. It returns -1 if no
// value begins there, or if the value doesn't end.
func SkipValue(b []byte, i int) int {
	if uint(i) >= uint(len(b)) {
		return -1
	}
	switch b[i] {
	case '"':
		return SkipString(b, i)
	case '{', '[':
		return SkipRest(b, i+1)
	}
	start := i
	for i < len(b) && !delimits[b[i]] {
		i++
	}
	if i == start {
		return -1
	}
	return i
}

// delimits are the bytes that end a number or a literal.
var delimits = [256]bool{
	',': true, ':': true, '"': true, '{': true, '}': true, '[': true, ']': true,
	' ': true, '\t': true, '\n': true, '\r': true,
}

// Unquote decodes a string literal to its text, as encoding/json does. The result shares memory
// with the literal, unless that has escapes or invalid UTF-8.
func Unquote(literal []byte) (text []byte, ok bool) {
	end := len(literal) - 1
	if end < 1 || literal[0] != '"' || literal[end] != '"' {
		return nil, false
	}
	if text = literal[1:end]; Plain(literal, 1) == end && utf8.Valid(text) {
		return text, true
	}
	var s string
	if json.Unmarshal(literal, &s) != nil {
		return nil, false
	}
	return []byte(s), true
}
