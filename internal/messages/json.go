package messages

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jsonscan"
)

const whiteSpace = " \t\r\n"

// cursor steps over the keys and values of an object, or over the elements of an array. The text
// must be valid JSON. For other text it returns wrong values, but it ends and does not panic.
// BenchmarkDecodeSubmit and BenchmarkContentHash measure it.
type cursor struct{ rest []byte }

// openContainer returns a cursor at the start of an object or array. The text must not begin with
// white space.
func openContainer(container []byte) cursor { return cursor{container[min(1, len(container)):]} }

// next returns the next value as it is written; at the end, an empty one. If the value doesn't end,
// it is the whole rest of the text.
func (c *cursor) next() []byte {
	start := 0
	for start < len(c.rest) && isSeparator(c.rest[start]) {
		start++
	}
	end := start
	if end < len(c.rest) && c.rest[end] != '}' && c.rest[end] != ']' {
		if end = jsonscan.SkipValue(c.rest, start); end < 0 {
			end = len(c.rest)
		}
	}
	value := c.rest[start:end:end]
	c.rest = c.rest[end:]
	return value
}

func isSeparator(c byte) bool {
	return c == ' ' || c == ',' || c == ':' || c == '\n' || c == '\t' || c == '\r'
}

// member returns the next key, in quotes, and its value. An empty value marks the end of the
// object.
func (c *cursor) member() (key, value []byte) {
	if key = c.next(); len(key) < 2 || key[0] != '"' {
		return nil, nil
	}
	return key, c.next()
}

// members iterates over the members of an object. It yields each key without quotes, and its value.
func members(object []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(key, value []byte) bool) {
		c := openContainer(object)
		for {
			key, value := c.member()
			if len(value) == 0 || !yield(unquote(key), value) {
				return
			}
		}
	}
}

// elements iterates over the elements of an array.
func elements(array []byte) iter.Seq2[int, []byte] {
	return func(yield func(i int, value []byte) bool) {
		c := openContainer(array)
		for i := 0; ; i++ {
			value := c.next()
			if len(value) == 0 || !yield(i, value) {
				return
			}
		}
	}
}

func countElements(array []byte) (n int) {
	for range elements(array) {
		n++
	}
	return n
}

// unquote returns the text of a string literal. An invalid literal is returned unchanged, but one
// of less than 2 bytes as nil. The result shares the literal's memory if nothing is escaped.
func unquote(literal []byte) []byte {
	if text, ok := jsonscan.Unquote(literal); ok || len(literal) < 2 {
		return text
	}
	return literal
}

// jsonType names the JSON type of a value, for error messages.
func jsonType(value []byte) string {
	if len(value) == 0 {
		return "nothing"
	}
	switch value[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

// checkObject checks that data is a JSON object in UTF-8. It returns the object without surrounding
// white space, or an error with one field. root is what the error calls the whole text.
func checkObject(root string, data []byte) ([]byte, *ValidationError) {
	trimmed := bytes.Trim(data, whiteSpace)
	bad, malformed := FieldError{Field: root}, false
	switch {
	case len(trimmed) == 0:
		bad.Problem = "required; must be a JSON object"
	case !utf8.Valid(data):
		bad.Problem, malformed = "must be UTF-8; is not at byte "+strconv.Itoa(invalidUTF8(data)), true
	case !validJSON(trimmed):
		bad, malformed = syntaxError(root, data), true
	case trimmed[0] != '{':
		bad.Problem = "must be a JSON object, not " + jsonType(trimmed)
	default:
		return trimmed, nil
	}
	return nil, &ValidationError{Fields: []FieldError{bad}, Malformed: malformed}
}

// invalidUTF8 returns the offset of the first byte that is not part of a valid character.
func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return len(data)
}

// syntaxError returns the error for invalid JSON in data: at which byte it is invalid and, if
// possible, in which field.
func syntaxError(root string, data []byte) FieldError {
	err := json.Unmarshal(data, new(json.RawMessage))
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return FieldError{root, "must be valid JSON"}
	}
	if field := brokenField(data[:min(max(syntax.Offset-1, 0), int64(len(data)))]); field != "" {
		root = field
	}
	return FieldError{root, fmt.Sprintf("must be valid JSON; breaks at byte %d: %s", syntax.Offset, syntax.Error())}
}

// brokenField returns the path of the field in whose value a truncated object ends, such as type or
// jobs[1].payload; "" inside a key or after a comma. It names no field inside a payload.
func brokenField(broken []byte) string {
	key, value := lastMember(broken)
	if key == nil {
		return ""
	}
	at := fieldParent{index: -1}
	list := fieldName(unquote(key))
	if len(value) == 0 || value[0] != '[' || list == "payload" {
		return list
	}
	var last []byte
	for at.index, last = range elements(value) {
	}
	if at.index < 0 {
		return list
	}
	at.list = list
	if key, _ := lastMember(last); key != nil {
		return at.name(fieldName(unquote(key)))
	}
	return at.name("")
}

// lastMember returns the key and the value of the member in which a truncated object ends; nil if
// the text ends before or inside the key.
func lastMember(broken []byte) (key, value []byte) {
	broken = bytes.Trim(broken, whiteSpace)
	if len(broken) == 0 || broken[0] != '{' {
		return nil, nil
	}
	for c := openContainer(broken); len(c.rest) > 0; {
		if key, value = c.member(); !json.Valid(key) {
			return nil, nil
		}
	}
	return key, value
}

// fieldName returns a key as error messages show it: unchanged if it is a valid id of at most 64
// bytes, otherwise in quotes and cut to its first 64 bytes.
func fieldName(key []byte) string {
	const limit = 64
	name := string(key)
	if api.ValidID(name) && len(name) <= limit {
		return name
	}
	if len(name) > limit {
		return strconv.QuoteToASCII(name[:limit]) + "…"
	}
	return strconv.QuoteToASCII(name)
}

// The functions whose names begin with fast are the fast path of decoding, for valid and simple
// messages, as most are: they check and slice a message in one pass. BenchmarkAppend and
// BenchmarkDecodeJob measure them. If a function is not certain that a text is valid, it returns
// the offset -1, or nil, and its caller uses the complete decoder, which also reports what is
// wrong. FuzzFastPath checks that both give the same results.

const fastMaxDepth = 32 // nested levels that the fast path reads

// validJSON is a faster json.Valid.
func validJSON(text []byte) bool {
	end := jsonscan.Value(text, jsonscan.Space(text, 0), fastMaxDepth)
	return jsonscan.Space(text, end) == len(text) || json.Valid(text)
}

// fastString reads a string without escapes.
func fastString(b []byte, i int) (text []byte, end int) {
	if !jsonscan.Is(b, i, '"') {
		return nil, -1
	}
	end = jsonscan.Plain(b, i+1)
	if !jsonscan.Is(b, end, '"') {
		return nil, -1
	}
	return b[i+1 : end], end + 1
}

func fastID(b []byte, i int) (id string, end int) {
	text, end := fastString(b, i)
	if id = string(text); end < 0 || !api.ValidID(id) {
		return "", -1
	}
	return id, end
}

// fastKey reads a key of an object, and the colon.
func fastKey(b []byte, i int) (key []byte, value int) {
	key, i = fastString(b, i)
	return key, jsonscan.Token(b, i, ':')
}

var errDuration = errors.New(`must be a duration such as "1m30s" or a number of seconds, of at most 292 years`)

// Duration is a time.Duration. In JSON it is read from Go's notation ("1m30s") or a number of
// seconds, and written in Go's notation.
type Duration time.Duration

// String returns d in Go's notation, such as 1m30s.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON encodes d in Go's notation, such as "1m30s".
func (d Duration) MarshalJSON() ([]byte, error) {
	return strconv.AppendQuote(nil, d.String()), nil
}

// UnmarshalJSON decodes Go's notation, or a number of seconds, which it rounds to nanoseconds. null
// leaves d unchanged, as is usual in encoding/json.
func (d *Duration) UnmarshalJSON(data []byte) error {
	switch {
	case len(data) == 0:
		return errDuration
	case data[0] == 'n':
		return nil
	case data[0] == '"':
		parsed, err := time.ParseDuration(string(unquote(data)))
		if err != nil {
			return errDuration // the message omits the value, which may not be logged
		}
		*d = Duration(parsed)
		return nil
	}
	seconds, err := strconv.ParseFloat(string(data), 64)
	ns := math.Round(seconds * float64(time.Second))
	if err != nil || !(ns >= math.MinInt64 && ns < math.MaxInt64) { // in this form the condition refuses NaN too
		return errDuration
	}
	*d = Duration(ns)
	return nil
}
